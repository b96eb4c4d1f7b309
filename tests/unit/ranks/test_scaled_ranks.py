"""E4m3 weights with their scales in an engine over ranks (``tests/support/scaled_ranks.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.sweeps import some
from tests.unit.checkpoint.test_fp8_published import BLOCKS, by_block, publish

ROOT = Path(__file__).parents[3]
LAYOUTS = some(["2,1,1", "1,1,2", "1,2,1"], 2)
"""Tensor-parallel, pipeline-parallel and expert-parallel ranks."""


def write_experts(path: Path, seed: int) -> Path:
    """Experts of which one rank has a share, and blocks that ranks' shares cut."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=160, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
        head_dim=40, vocab_size=96, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=192, max_position_embeddings=96, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what all layouts gave."""
    made = tmp_path_factory.mktemp("scaled_ranks")
    for seed, name in enumerate(("old", "new")):
        plain = write_experts(made / f"plain-{name}", seed)
        publish(made / name, plain, BLOCKS, by_block, suffix="_scale_inv")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.scaled_ranks", str(made), *LAYOUTS],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_takes_its_share_of_numbers_and_scales(layout: str, folder: Path) -> None:
    """To the bit what each reads of a directory; what does not fit leaves the old ones on all."""
    found = json.loads((folder / f"{layout}.json").read_text())
    assert found["tensors"] == found["directory"] != found["old"] == found["back"]
    assert not found["differ"]
    lacking, zero = found["refused"]
    assert "o_proj.weight has dtype torch.float8_e4m3fn and no scales" in lacking
    assert "o_proj.weight_scale_inv has 4 of 4 scales that are no positive normal" in zero

"""The example of ranks that are all their user's, on GPUs: greedy tokens of one GPU's, and on each
layout the same at every depth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROOT = Path(__file__).parents[4]
TENSOR = ("--tensor-model-parallel-size", "2")
LAYOUTS = {
    "tensor": TENSOR,
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "expert": ("--expert-model-parallel-size", "2", "--num-experts", "4"),
    "shared experts": (*TENSOR, "--num-experts", "4"),
}


def rounds(ranks: int, *options: str) -> list[list[list[int]]]:
    """The tokens of each request, by round."""
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node",
        str(ranks), "--master-port", str(free_port()), "examples/megatron_ranks.py",
        "--num-tokens-to-generate", "40", *options,
    ]  # fmt: skip
    run = subprocess.run(
        command, env=child_environment(), cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")]


def test_tokens_are_those_of_one_gpu_before_and_after_a_step_of_training() -> None:
    """In float32; each rank's weights are drawn as the whole model's."""
    alone = rounds(1, "--learning-rate", "1")
    assert len(alone) == 2 and alone[0] != alone[1]
    assert rounds(2, *TENSOR, "--learning-rate", "1") == alone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_the_same_at_every_depth(layout: str) -> None:
    found = [rounds(2, *LAYOUTS[layout], "--bf16", "--depth", depth) for depth in ("0", "1", "2")]
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0][0]}) > 1

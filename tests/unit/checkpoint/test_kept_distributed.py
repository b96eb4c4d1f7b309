"""Directories of ``dist_checkpointing`` whose weights are kept as e4m3: what safetensors files of
the same weights give, bit for bit, and few matrices in 16 bits at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.checkpoint.megatron import parts
from megatron_async.checkpoint.native import write_config
from megatron_async.checkpoint.reading.distributed_metadata import read_metadata
from megatron_async.errors import CheckpointError
from megatron_async.megatron_compat import checkpoints
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.quantized.linear import quantized
from tests.support.fp8_models import kept_bytes
from tests.unit.checkpoint.test_checkpoint_distributed import (
    CONFIG,
    VARIANTS,
    build,
    rewrite_metadata,
)


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_dict({**CONFIG.to_dict(), **VARIANTS[name]})


def kept(path: Path) -> Any:
    return load_pretrained(path, quantization="fp8").model


def check_same(one: Any, other: Any) -> None:
    found, meant = kept_bytes(one), kept_bytes(other)
    assert found.keys() == meant.keys()
    assert not [name for name in meant if not found[name].equal(meant[name])]


def count_pending(patch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices were being put together, before and behind each piece from now on."""
    pending = [0]
    whole_put = parts.Matrix.put

    def put(matrix: Any, *args: Any) -> None:
        pending.append(pending[-1] + (matrix.lacking == matrix.size))
        whole_put(matrix, *args)
        pending.append(pending[-1] - matrix.is_whole)

    patch.setattr(parts.Matrix, "put", put)
    return pending


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", VARIANTS)
def test_they_are_quantized_as_from_safetensors(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = config_of(name)
    model = build(config).to(dtype)
    with torch.no_grad():
        for each in model.parameters():  # some are in float32, which safetensors files are not
            each.copy_(each.to(dtype))
    save_native(tmp_path / "native", model, config)
    save_distributed(tmp_path / "distributed", model, config)
    served = kept(tmp_path / "distributed")
    assert len(quantized(served)) >= 8
    check_same(served, kept(tmp_path / "native"))


@pytest.mark.parametrize("name", ("plain", "experts"))
def test_gate_and_up_by_themselves_make_one_matrix_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's two tensors are read one after the other, and at once become e4m3."""
    config = config_of(name)
    model = build(config)
    save_native(tmp_path / "native", model, config)
    save_distributed(tmp_path / "stacked", model, config)
    path = tmp_path / "single"
    path.mkdir()
    checkpoints.save(model.sharded_state_dict(metadata={"singleton_local_shards": True}), path)
    write_config(path, config)
    assert any(key.endswith("weight_w") for key in read_metadata(path))
    pending = count_pending(monkeypatch)
    for each in (path, tmp_path / "stacked"):
        check_same(kept(each), kept(tmp_path / "native"))
    assert max(pending) == 1 and pending[-1] == 0


def test_chunks_that_overlap_leave_no_gap_unsaid(tmp_path: Path) -> None:
    """One chunk takes another's place: as many elements are there, and not all."""
    save_distributed(tmp_path, build(CONFIG), CONFIG)
    name = "decoder.layers.mlp.linear_fc2.weight"

    def edit(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[name].chunks
        chunks[1] = chunks[0]

    rewrite_metadata(tmp_path, edit)
    with pytest.raises(CheckpointError, match=r"chunks of .*linear_fc2.weight overlap"):
        kept(tmp_path)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_weights_that_are_no_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    model = build(CONFIG)
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc2.weight[3, 5] = bad
    save_distributed(tmp_path, model, CONFIG)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.linear_fc2.weight has .* NaN or"):
        kept(tmp_path)

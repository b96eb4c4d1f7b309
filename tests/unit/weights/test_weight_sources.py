"""The ways in for new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.errors import CheckpointError
from megatron_async.weights import source as sources
from megatron_async.weights.shared_memory import SharedWeights
from megatron_async.weights.source import WeightSource, source_of
from megatron_async.weights.tensor_info import infos_of

STATE = {"decoder.final_layernorm.weight": torch.arange(4.0)}


class SentByTrainer:
    """A group whose trainer sends one state."""

    device = torch.device("cpu")

    def receive(self) -> dict[str, torch.Tensor]:
        return STATE

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(next(iter(STATE.values())))

    def close(self) -> None:
        pass


def test_every_way_is_a_source_and_brings_the_same() -> None:
    group: Any = SentByTrainer()
    with SharedWeights(STATE) as shared:
        for source in (
            source_of(STATE),
            sources.SharedMemory(shared.export()),
            sources.FromGroup(group),
            sources.Announced(group, infos_of(STATE)),
            sources.Announced(group, infos_of(STATE)),
        ):
            assert isinstance(source, WeightSource) and source_of(source) is source
            assert source.path is None and not source.each_rank_reads
            found = source.read(None)  # type: ignore[arg-type]
            assert found.keys() == STATE.keys()
            assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_a_path_is_a_directory_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new.safetensors"
    file.write_bytes(b"")
    for path, kind, each in (
        (tmp_path, sources.ModelDirectory, True),
        ("tiny", sources.ModelDirectory, True),
        (file, sources.WeightsFile, False),
    ):
        found = source_of(path)
        assert type(found) is kind and found.path == str(path)
        assert found.each_rank_reads is each
    with pytest.raises(CheckpointError, match="the new weights are a int; give a model directory"):
        source_of(3)

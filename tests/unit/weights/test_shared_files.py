"""A trainer's file in memory is read into the parameters, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.weights import shared_memory
from megatron_async.weights.place import read_weights
from megatron_async.weights.shared_memory import OpenedWeights, SharedWeights, open_weights

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64,
    ffn_hidden_size=64, max_sequence_length=32, num_moe_experts=4, moe_ffn_hidden_size=32,
)  # fmt: skip


def model(seed: int, dtype: torch.dtype) -> Any:
    return build_random_model(CONFIG, device=torch.device("cpu"), dtype=dtype, seed=seed)


def state_of(made: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in made.named_parameters()}


def of_each_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    apart: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".mlp.experts." not in name:
            apart[name] = tensor
            continue
        for expert, one in enumerate(tensor.unbind()):
            apart[name.replace(".experts.", f".experts.local_experts.{expert}.")] = one.contiguous()
    return apart


def forget_the_mapping(opened: OpenedWeights) -> None:
    """What a copy through the mapping would bring."""
    for tensor in opened.values():
        tensor.data = torch.full_like(tensor, 7)


@pytest.mark.parametrize("kind", ("stacked", "each expert", "float32"))
@pytest.mark.parametrize("threads", (1, 2))
def test_parameters_are_read_from_the_file(
    kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 1000)  # of a tensor, several
    monkeypatch.setattr(shared_memory, "MAX_THREADS", threads)
    served = model(1, torch.bfloat16)
    new = state_of(model(2, torch.bfloat16))
    given = {name: tensor.float() for name, tensor in new.items()} if kind == "float32" else new
    with SharedWeights(of_each_expert(given) if kind == "each expert" else given) as trainer:
        opened = open_weights(trainer.export())
        assert isinstance(opened, OpenedWeights)
        forget_the_mapping(opened)
        read_weights(served, opened, allow_non_finite_weights=True, all_parameters=True)()
    for name, parameter in served.named_parameters():
        assert parameter.equal(new[name]), name


@pytest.mark.parametrize("unchecked", (False, True))
def test_a_file_that_was_cut_short_leaves_the_old_weights(unchecked: bool) -> None:
    """A read behind its end ended the process."""
    served = model(1, torch.float32)
    old = state_of(served)
    with SharedWeights(state_of(model(2, torch.float32))) as trainer:
        handles = trainer.export()
        replace = read_weights(
            served, open_weights(handles), allow_non_finite_weights=unchecked, all_parameters=True
        )
        os.truncate(handles["path"], 4096)
        with pytest.raises(CheckpointError, match="cut short, and none of its weights was taken"):
            replace()
        with pytest.raises(CheckpointError, match="does not hold"):
            open_weights(handles)
    assert all(parameter.equal(old[name]) for name, parameter in served.named_parameters())


@pytest.mark.parametrize("end", (SharedWeights.close, lambda x: os.truncate(x.export()["path"], 9)))
def test_what_is_gone_is_not_written_to(end: Callable[[SharedWeights], None]) -> None:
    with SharedWeights({"a": torch.ones(3)}) as trainer:
        end(trainer)
        with pytest.raises(CheckpointError, match="closed, removed or cut short; make new"):
            trainer.export()


def test_a_file_that_was_cut_short_is_not_looked_at() -> None:
    served = model(1, torch.float32)
    with SharedWeights(state_of(model(2, torch.float32))) as trainer:
        handles = trainer.export()
        opened = open_weights(handles)
        os.truncate(handles["path"], 9)
        with pytest.raises(CheckpointError, match="cut short, and none of its weights was taken"):
            read_weights(served, opened)


def test_a_file_that_is_cut_short_in_the_midst_is_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that says that the old weights are there."""
    served = model(1, torch.float32)
    with SharedWeights(state_of(model(2, torch.float32))) as trainer:
        handles = trainer.export()
        opened = open_weights(handles)
        replace = read_weights(served, opened, allow_non_finite_weights=True)
        monkeypatch.setattr(OpenedWeights, "check", lambda self: os.truncate(handles["path"], 4096))
        with pytest.raises(RuntimeError, match="was cut short while its weights were read"):
            replace()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_mapping_is_kept_while_its_trainer_lives() -> None:
    """Later updates are copied from pages that are there; nothing is kept of a trainer that has
    closed its file."""
    served = model(1, torch.float32)
    with SharedWeights(state_of(model(2, torch.float32))) as trainer:
        first = open_weights(trainer.export())
        assert not first.has_pages, "a new mapping is read"
        ((mapping),) = shared_memory._kept.values()
        until(lambda: mapping.has_pages)
        del first
        for seed in (3, 4):
            new = state_of(model(seed, torch.float32))
            for name, tensor in trainer._tensors.items():
                tensor.copy_(new[name])
            opened = open_weights(trainer.export())
            assert opened.has_pages and list(shared_memory._kept.values()) == [mapping]
            read_weights(served, opened, allow_non_finite_weights=True, all_parameters=True)()
            assert all(each.equal(new[name]) for name, each in served.named_parameters())
    until(lambda: not shared_memory._kept)
    assert all(opened[name].equal(new[name]) for name in new), "who holds tensors has them still"


@pytest.mark.parametrize("end", ("killed", "closed"))
def test_a_trainer_that_has_died_leaves_no_mapping(end: str) -> None:
    """Its memory would be held for ever."""
    program = (
        "import json, sys, torch\n"
        "from megatron_async.weights import SharedWeights\n"
        "shared = SharedWeights({'a': torch.ones(3)})\n"
        "print(json.dumps(shared.export()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        handles = json.loads(trainer.stdout.readline())
        assert open_weights(handles)["a"].tolist() == [1, 1, 1]
        assert len(shared_memory._kept) == 1
        trainer.kill() if end == "killed" else trainer.stdin.close()
        until(lambda: not shared_memory._kept)


def test_a_process_ends_with_a_mapping_that_is_kept() -> None:
    """Its thread freed a tensor while the interpreter ended, and that ended the process."""
    with SharedWeights({"a": torch.ones(1 << 20)}) as trainer:
        program = (
            "import json, sys\n"
            "from megatron_async.weights import open_weights\n"
            "opened = open_weights(json.loads(sys.stdin.readline()))\n"
            "print('open', flush=True)\n"
            "sys.stdin.readline()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as engine:  # fmt: skip
            assert engine.stdin is not None and engine.stdout is not None
            engine.stdin.write(json.dumps(trainer.export()) + "\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "open\n"
            engine.stdin.write("\n")
            engine.stdin.flush()
            trainer.close()
            assert engine.wait(60) == 0


def test_a_host_without_room_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer's first write to a page that there was no memory for ended it."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shared_memory, "_IN_MEMORY", tmp_path)
    with pytest.raises(CheckpointError, match="no room for 64 bytes of shared weights: No space"):
        SharedWeights({"a": torch.ones(3)})
    assert not list(tmp_path.iterdir())

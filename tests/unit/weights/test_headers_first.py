"""New weights that do not fit are refused by what their files say, before a tensor is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.errors import (
    CheckpointError,
    EngineDeadError,
    EngineStoppedError,
    RankDiedError,
    RequestError,
)
from megatron_async.models import build
from megatron_async.serving.engine_side.control_threads import kind_of
from megatron_async.weights.header import LEAST_BYTES, most_header_bytes
from megatron_async.weights.place import read_weights
from tests.unit.checkpoint.test_checkpoint_security import CONFIG


def model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = dataclasses.replace(CONFIG, **changes)
    return build.build_model(config, device="cpu", dtype=torch.float32).eval()


@pytest.fixture
def served() -> Any:
    return model()


@pytest.fixture
def nothing_is_read(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is built from now on, and no tensor read."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr(build, "build_model", refuse)
    monkeypatch.setattr(build, "build_random_model", refuse)
    monkeypatch.setattr(safetensors.torch, "load_file", refuse)


def refused(served: Any, source: str | Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_weights(served, source)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("name", ("random:llama8b", "random:qwen0.6b", "random:tiny-llama"))
def test_a_shape_is_compared_before_it_is_built(served: Any, name: str) -> None:
    refused(served, name, "describes another model than the one that is served: num_layers")
    served.model_config = None
    refused(served, name, "describes a model of at least .* parameters, and the one that is served")


@pytest.fixture(params=("native", "distributed"))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save = save_native if request.param == "native" else save_distributed
    save(tmp_path, model(1), CONFIG)
    return tmp_path


def test_a_directory_of_another_shape_is_refused_unread(
    served: Any, directory: Path, request: pytest.FixtureRequest
) -> None:
    values = json.loads((directory / "config.json").read_text())
    values["model"]["ffn_hidden_size"] += 8
    (directory / "config.json").write_text(json.dumps(values))
    request.getfixturevalue("nothing_is_read")
    refused(served, directory, "ffn_hidden_size=.* .served: ")


def test_a_tensor_of_another_shape_is_refused_unread(
    served: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_native(tmp_path, model(1), CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "decoder.final_layernorm.weight"
    tensors[name] = torch.ones(7)
    save_file(tensors, tmp_path / "model.safetensors")
    request.getfixturevalue("nothing_is_read")
    refused(served, tmp_path, rf"{name} has shape \[7\], expected")
    refused(served, tmp_path / "model.safetensors", rf"{name} has shape \(7,\), the model's has")


@pytest.mark.parametrize(
    ("tensors", "said"),
    (
        ({"unknown": torch.ones(3)}, "unknown, which the model does not have"),
        ({"decoder.final_layernorm.weight": torch.ones(1, dtype=torch.int8)}, "has shape"),
    ),
)
@pytest.mark.usefixtures("nothing_is_read")
def test_a_file_is_compared_by_its_header(
    served: Any, tensors: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "new.safetensors")
    refused(served, tmp_path / "new.safetensors", said)


def with_entries(path: Path, count: int) -> Path:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{n}": entry for n in range(count)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_header_of_empty_tensors_is_not_parsed(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed")

    save_native(tmp_path, model(1), CONFIG)
    with_entries(tmp_path / "model.safetensors", 50_000)
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    said = f"the most for this model is {most_header_bytes(served):,}"
    refused(served, tmp_path / "model.safetensors", said)
    refused(served, tmp_path, said)


@pytest.mark.parametrize("file", ("config.json", "model.safetensors.index.json", ".metadata"))
def test_files_that_say_too_much_are_not_parsed(served: Any, tmp_path: Path, file: str) -> None:
    save_native(tmp_path, model(1), CONFIG)
    with open(tmp_path / file, "wb") as large:
        large.truncate(40 * LEAST_BYTES)
    refused(served, tmp_path, f"{file}: has 41,943,040 bytes; the most is")


@pytest.mark.parametrize("length", (2**63 - 1, 2**64 - 1))
def test_a_length_that_a_header_cannot_have_is_refused(
    served: Any, length: int, tmp_path: Path
) -> None:
    (tmp_path / "new.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    refused(served, tmp_path / "new.safetensors", "the most for this model is")


def test_a_directory_gives_its_weights_without_its_tokenizer(served: Any, tmp_path: Path) -> None:
    save_native(tmp_path, model(1), CONFIG)
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    read_weights(served, tmp_path)()
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        load_pretrained(tmp_path)
    for one, other in zip(served.parameters(), model(1).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("error", "kind"),
    (
        (RankDiedError("rank 1 of the model was killed"), "dead"),
        (EngineStoppedError("stopped"), "dead"),
        (EngineDeadError("dead"), "dead"),
        (CheckpointError("does not fit"), "invalid"),
        (RequestError("no"), "invalid"),
    ),
)
def test_a_death_is_not_the_clients_mistake(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind

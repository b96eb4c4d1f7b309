"""New weights of a directory go from its files into the served model, without another model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import load_pretrained, save_native
from megatron_async.errors import CheckpointError
from megatron_async.models import build
from megatron_async.weights.place import read_weights
from tests.unit.checkpoint.test_checkpoint_huggingface import MODELS, make

NAMES = ("llama_tied", "qwen2_tied", "qwen3_biased")
FILE = "model.safetensors"


def write(name: str, folder: Path, **options: Any) -> Path:
    """Twice the weights that :func:`make` gives."""
    model = make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder / "new", **options)
    return folder / "new"


@pytest.fixture
def no_other_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse() -> None:
        def built(*_: Any, **__: Any) -> None:
            raise AssertionError("a second model")

        monkeypatch.setattr(build, "build_model", built)

    return refuse


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("sharded", "native"))
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_a_model_that_was_loaded(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path, no_other_model: Any
) -> None:
    assert set(NAMES) <= MODELS.keys()
    make(name).save_pretrained(tmp_path / "old")
    new = write(name, tmp_path, max_shard_size="10KB")
    if kind == "native":
        loaded = load_pretrained(new)
        new = tmp_path / "native"
        new.mkdir()
        save_native(new, loaded.model, loaded.config)
    expected = parameters(load_pretrained(new, dtype=dtype).model)
    served = load_pretrained(tmp_path / "old", dtype=dtype).model
    at = {name: parameter.data_ptr() for name, parameter in served.named_parameters()}
    old = parameters(served)
    no_other_model()
    replace = read_weights(served, new)
    assert all(old[name].equal(parameter) for name, parameter in served.named_parameters())
    replace()
    for name, parameter in served.named_parameters():
        assert parameter.equal(expected[name]) and not parameter.equal(old[name])
        assert parameter.data_ptr() == at[name]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    (
        ("lm_head.weight", torch.ones(64, 32), "lm_head.weight differs from the tied"),
        ("model.norm.weight", torch.full((32,), torch.nan), "model.norm.weight has 32 of 32"),
        ("model.norm.weight", torch.full((32,), 1e39, dtype=torch.float64), "infinite as float32"),
        ("model.norm.weight", None, "tensor model.norm.weight is missing"),
    ),
)
def test_what_does_not_fit_leaves_the_old_ones(
    name: str, value: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    new = write("llama_tied", tmp_path)
    served = load_pretrained(new).model
    old, tensors = parameters(served), load_file(new / FILE)
    tensors = {each: tensor * 3 for each, tensor in tensors.items()}
    tensors = {k: v for k, v in {**tensors, name: value}.items() if v is not None}
    save_file(tensors, new / FILE)
    with pytest.raises(CheckpointError, match=said):
        read_weights(served, new)
    assert all(old[name].equal(parameter) for name, parameter in served.named_parameters())


def cut_short(file: Path) -> None:
    os.truncate(file, 100)


def overwritten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        opened.write(b"\xff" * 64)
    os.utime(file, ns=(1, 1))  # another time, whatever the file system's clock


@pytest.mark.parametrize("changed", (cut_short, overwritten))
@pytest.mark.parametrize("whole", (True, False))
def test_a_file_that_changes_before_the_copy_leaves_the_old_ones(
    changed: Any, whole: bool, tmp_path: Path
) -> None:
    """Files are read by their memory, where one that is cut short would end the process."""
    new = write("llama_tied", tmp_path)
    served = load_pretrained(new).model
    if not whole:
        save_file(load_file(new / FILE), tmp_path / "new.safetensors")
    file = new / FILE if whole else tmp_path / "new.safetensors"
    old, replace = parameters(served), read_weights(served, new if whole else file)
    changed(file)
    with pytest.raises(CheckpointError, match="was written to while its weights were read"):
        replace()
    assert all(old[name].equal(parameter) for name, parameter in served.named_parameters())


def test_a_directory_may_vanish_or_be_replaced_before_the_copy(tmp_path: Path) -> None:
    new = write("llama_tied", tmp_path)
    served = load_pretrained(new).model
    tensors = {name: tensor * 3 for name, tensor in load_file(new / FILE).items()}
    save_file(tensors, new / FILE)
    replace = read_weights(served, new)
    (new / FILE).unlink()
    save_file({"other": torch.ones(1)}, new / FILE)
    replace()
    assert served.embedding.word_embeddings.weight.equal(tensors["model.embed_tokens.weight"])


def test_an_equal_tied_head_is_taken(tmp_path: Path) -> None:
    new = write("llama_tied", tmp_path)
    served = load_pretrained(new).model
    tensors = {name: tensor * 3 for name, tensor in load_file(new / FILE).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, new / FILE)
    read_weights(served, new)()
    assert served.embedding.word_embeddings.weight.equal(tensors["lm_head.weight"])

"""No pickle in any directory is ever executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_async.checkpoint import load_pretrained, save_distributed
from megatron_async.checkpoint.native import write_config
from megatron_async.checkpoint.reading.pickle_reader import PickleReader, PickleReadError
from megatron_async.checkpoint.reading.torch_archive import FUNCTIONS
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig

CONFIG = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_hidden_size=24,
    vocab_size=32,
    max_sequence_length=64,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = build_model(CONFIG, device="cpu", dtype=torch.float32)
    save_distributed(tmp_path / "d", model, CONFIG)
    return tmp_path / "d"


class Evil:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def rewrite_metadata(path: Path, edit: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(edit(metadata) or metadata))


def test_the_planted_pickle_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["whole", "planner_data", "key"])
def test_pickle_in_metadata_does_not_run(saved: Path, tmp_path: Path, where: str) -> None:
    evil = Evil(tmp_path / "ran")

    def edit(metadata: Metadata) -> Any:
        if where == "whole":
            return evil
        if where == "planner_data":
            metadata.planner_data = {"x": evil}
        else:
            metadata.storage_data[evil] = 1
        return None

    rewrite_metadata(saved, edit)
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: posix\.system is not"):
        load_pretrained(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "attack",
    [
        b'cbuiltins\neval\n(S\'open("ran", "w")\'\ntR.',
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'touch ran'\ntR.",
        b"ctorch\nload\n(S'common.pt'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nI1\ntR.",
        # BUILD on a class, which sets attributes of it, then an instance.
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'field'\nctorch\nSize\nstb.",
        b"Pposix.system\n.",
        b"",
        b"\x80\x04]",
        pickle.dumps(3),
        pickle.dumps(Metadata(state_dict_metadata={})),
    ],
)
def test_hand_made_metadata_is_refused(
    saved: Path, attack: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent)
    (saved / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: ") as raised:
        load_pretrained(saved)
    assert "\n" not in str(raised.value)
    assert not (saved.parent / "ran").exists()


def test_getattr_in_a_pickle_names_a_member_and_reads_no_attribute() -> None:
    """As an enumeration's member is pickled by Python up to 3.11.3."""
    head = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.planner\nWriteItemType\n"

    def read(name: bytes) -> Any:
        return PickleReader(head + b"V" + name + b"\ntR.", lambda name: True, FUNCTIONS).load()

    assert (read(b"TENSOR").name.rpartition(".")[2], read(b"TENSOR").args) == (
        "WriteItemType",
        ("TENSOR",),
    )
    for name in (b"__class__", b"__init__"):
        with pytest.raises(PickleReadError, match="getattr is not allowed"):
            read(name)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("force", ["0", "1"])
def test_pickle_in_common_does_not_run(
    saved: Path, tmp_path: Path, archive: bool, force: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    evil = {"args": Evil(tmp_path / "ran")}
    torch.save(evil, saved / "common.pt", _use_new_zipfile_serialization=archive)
    with pytest.raises(CheckpointError, match=r"common\.pt: content refused: posix\.system is not"):
        load_pretrained(saved)
    assert not (tmp_path / "ran").exists()


def test_pickle_in_a_data_file_does_not_run(saved: Path, tmp_path: Path) -> None:
    shard = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil.pt")
    content = (tmp_path / "evil.pt").read_bytes()

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = shard.name, 0, len(content)

    rewrite_metadata(saved, edit)
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"refused: posix\.system is not allowed"):
        load_pretrained(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    torch.save(Evil(tmp_path / "ran"), tmp_path / name)
    match = f"{name} is a pickle, which is never loaded.* convert the weights to model.safetensors"
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(tmp_path)
    write_config(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()

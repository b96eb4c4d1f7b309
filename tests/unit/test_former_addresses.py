"""Modules that have moved: their former addresses have the same names, and warn."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from megatron_async import weights
from megatron_async.contrib import transformers as contrib


def imported_again(former: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as it is when somebody imports it first; it has to warn."""
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{former} is now megatron_async."):
        return importlib.import_module(former)


@pytest.mark.parametrize(
    ("former", "names"),
    [
        ("megatron_async.weight_transfer", ("SharedWeights", "WeightGroup", "open_weights")),
        ("megatron_async.weight_transfer.shared_weights", ("SharedWeights", "open_weights")),
        ("megatron_async.weight_transfer.weight_group", ("WeightGroup",)),
        (
            "megatron_async.checkpoint.parallel_layouts",
            ("join_shards", "relay", "shard_of"),
        ),
    ],
)
def test_new_weights(former: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported_again(former, monkeypatch)
    for name in names:
        assert getattr(module, name) is getattr(weights, name)


def test_names_can_be_imported_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    imported_again("megatron_async.weight_transfer.shared_weights", monkeypatch)
    from megatron_async.weight_transfer.shared_weights import SharedWeights

    assert SharedWeights is weights.SharedWeights


@pytest.mark.parametrize("name", ("verl", "openrlhf", "nemo_rl"))
def test_trainers_have_two_addresses(name: str) -> None:
    own = importlib.import_module(f"megatron_async.contrib.trainers.{name}")
    other = importlib.import_module(f"megatron_async.integrations.{name}")
    public = [each for each in vars(own) if not each.startswith("_")]
    assert public and all(getattr(other, each) is getattr(own, each) for each in public)


def test_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    former = imported_again("megatron_async.integrations.transformers", monkeypatch)
    assert former.__all__ == contrib.__all__
    pytest.importorskip("transformers")
    from megatron_async.integrations.transformers import async_generate

    assert async_generate is contrib.async_generate

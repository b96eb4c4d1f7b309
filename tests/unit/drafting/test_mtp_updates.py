"""Layers for multi-token prediction get new weights with the rest of the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoint import save_native
from megatron_async.checkpoint.targets import Target
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.request.request import DraftCounts
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

pytestmark = pytest.mark.sweep

PROMPTS = ["def fibonacci(n):", "x"]
PARAMS = SamplingParams(temperature=0.0, num_tokens_to_generate=18, termination_id=-1)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def tiny() -> DynamicInferenceEngine:
    return DynamicInferenceEngine.from_pretrained("tiny", config_at(0, device="cpu"))


@pytest.fixture
def engine(tiny: DynamicInferenceEngine, trained: State) -> Iterator[DynamicInferenceEngine]:
    config = config_at(1, device="cpu", num_speculative_tokens=2, max_requests=2)
    with tiny.with_config(config) as made:
        yield made
        made.update_weights(trained)


@pytest.fixture(scope="module")
def trained(tiny: DynamicInferenceEngine) -> State:
    owner = tiny.model.weights_owner
    return {name: each.detach().clone() for name, each in owner.named_parameters()}


@pytest.fixture(scope="module")
def fresh(tiny: DynamicInferenceEngine, trained: State) -> tuple[list[list[int]], DraftCounts]:
    """Tokens, and drafts by place, of an engine that never had other weights."""
    config = config_at(1, device="cpu", num_speculative_tokens=2, max_requests=2)
    with tiny.with_config(config) as made:
        return generate(made)


def generate(engine: DynamicInferenceEngine) -> tuple[list[list[int]], DraftCounts]:
    tokens = [request.generated_tokens for request in engine.generate(PROMPTS, PARAMS)]
    return tokens, engine.counters.drafts_by_version[engine.weight_version]


def untrained(trained: State, *begins: str) -> State:
    """Other weights where names begin so."""
    torch.manual_seed(0)
    return {
        name: torch.randn_like(each) * each.std() if name.startswith(begins) else each
        for name, each in trained.items()
    }


@pytest.mark.parametrize("kind", ("state dict", "directory"))
def test_acceptance_after_an_update_is_that_of_a_fresh_engine(
    engine: DynamicInferenceEngine, trained: State, fresh: Any, kind: str, tmp_path: Path
) -> None:
    source: State | Path = trained
    if kind == "directory":
        owner = engine.model.weights_owner
        save_native(tmp_path, owner, owner.model_config, dtype=torch.float32)
        source = tmp_path
    engine.update_weights(untrained(trained, "mtp."))
    tokens, worthless = generate(engine)
    # The decoder is the same, and drafts change no token.
    assert tokens == fresh[0] and sum(worthless.accepted) < sum(fresh[1].accepted) / 2
    engine.update_weights(source)
    assert generate(engine) == fresh


def test_a_layer_that_was_left_behind_would_show(
    engine: DynamicInferenceEngine, trained: State, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: an update that copies nothing into layers for multi-token prediction."""
    copy = Target.copy_from
    drafting = {
        each.data_ptr()
        for name, each in engine.model.weights_owner.named_parameters()
        if name.startswith("mtp.")
    }

    def copied(target: Target, tensor: Tensor) -> None:
        if target.view.data_ptr() not in drafting:
            copy(target, tensor)

    engine.update_weights(untrained(trained, "mtp."))
    monkeypatch.setattr(Target, "copy_from", copied)
    engine.update_weights(trained)
    tokens, worthless = generate(engine)
    assert tokens == fresh[0] and worthless != fresh[1]
    monkeypatch.undo()


def test_weights_without_them_are_refused_or_are_an_update_of_some(
    engine: DynamicInferenceEngine, trained: State, fresh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    new = untrained(trained, "decoder.layers.1.")
    without = {name: each for name, each in new.items() if not name.startswith("mtp.")}
    with pytest.raises(CheckpointError, match=r"lack mtp\..*partial_update=True"):
        engine.update_weights(without)
    assert generate(engine) == fresh
    with caplog.at_level(logging.WARNING):
        engine.update_weights(without, partial_update=True)
    left = sum(name.startswith("mtp.") for name in trained)
    said = f"lack {left} parameters of the layers for multi-token prediction, such as mtp."
    assert said in caplog.text
    _, of_old = generate(engine)
    engine.update_weights(new)
    assert generate(engine)[1] == of_old
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for name in ("decoder.layers.1.mlp.linear_fc1.weight", next(iter(without))):
            engine.update_weights({name: trained[name]}, partial_update=True)
        engine.update_weights(new, partial_update=True)
    assert caplog.text == ""

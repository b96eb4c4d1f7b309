"""Ctrl-C while the scales of an FP8 cache are chosen loses nothing: they are chosen again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.errors import EngineStoppedError
from megatron_async.runner.memory import cache_scales
from tests.support.child_environment import child_environment
from tests.support.cut_models import write_layers
from tests.support.programs import run_program
from tests.unit.runner.test_fp8_cache import changed, engine_at

PLACES = ("first layer", "last layer", "after")
RANKS = """
import sys
import pytest
from megatron_async import DynamicInferenceEngine, EngineConfig
from megatron_async.errors import EngineStoppedError
from tests.unit.runner.test_fp8_cache_interrupts import interrupted_at, params

if __name__ == "__main__":
    old, new, place = sys.argv[1:]
    config = EngineConfig(
        device="cpu", tensor_model_parallel_size=2, max_requests=2, max_sequence_length=96,
        block_size_tokens=8, block_count=40, kv_cache_dtype="fp8",
    )
    with DynamicInferenceEngine.from_pretrained(old, config) as engine:
        engine.update_weights(new)
        future = engine.add_request(0, [1, 2, 3], params(0))
        with interrupted_at(place, engine), pytest.raises(KeyboardInterrupt):
            engine.step_modern()
        with pytest.raises(EngineStoppedError, match="KeyboardInterrupt: at " + place):
            engine.step_modern()
        with pytest.raises(EngineStoppedError):
            future.result(0)
"""
TOKENS = 8


def params(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 0.8)[number % 2], seed=number, num_tokens_to_generate=TOKENS,
        termination_id=-1, return_log_probs=True, skip_prompt_log_probs=True,
    )  # fmt: skip


def layers_of(engine: DynamicInferenceEngine) -> Any:
    return engine.model.network.model.decoder.layers


@contextmanager
def interrupted_at(
    place: str, engine: DynamicInferenceEngine, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[list[str]]:
    """The next choice of scales is interrupted there, once; yields the choices that began."""
    choose, left = cache_scales.choose_scales, [error]
    began: list[str] = []

    def interrupt(*_: Any) -> None:
        if left:
            raise left.pop()("at " + place)

    def interrupted(*values: Any, **options: Any) -> None:
        began.append(place)
        layers = layers_of(engine)
        hooks = {
            "first layer": layers[0].register_forward_pre_hook,
            "last layer": layers[-1].register_forward_hook,
        }
        handle = hooks[place](interrupt) if place in hooks else None
        try:
            choose(*values, **options)
        finally:
            if handle is not None:
                handle.remove()
        if place == "after":
            interrupt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_scales, "choose_scales", interrupted)
        yield began


def begun(engine: DynamicInferenceEngine) -> list[Any]:
    """Requests that run when new weights come, one of them paused."""
    done = [engine.add_request(n, [9] * (5 + 12 * n), params(n)) for n in range(2)]
    for _ in range(4):
        engine.step_modern()
    engine.pause_request(1)
    engine.step_modern()
    engine.update_weights(changed(engine, 5))
    engine.resume_request(1)
    return done


def ended(engine: DynamicInferenceEngine, done: list[Any], step: Callable[[], Any]) -> list[Any]:
    """What comes of them, and of one more; then the scales."""
    done = [*done, engine.add_request(2, [9] * 17 + [50, 51], params(2))]
    while engine.has_unfinished_requests():
        step()
    found = [each.result(0) for each in done]
    tokens = [(each.generated_tokens, each.generated_log_probs) for each in found]
    return [tokens, engine.runner._program._batch.scales.tolist()]


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("error", (KeyboardInterrupt, TimeoutError))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", (0, 1, 2, 4))
def test_an_interrupted_choice_of_scales_loses_nothing(
    depth: int, place: str, error: type[BaseException]
) -> None:
    """The caller gets the interrupt, and the next step chooses them: those that it would have
    chosen, and so the same tokens. Another error of a signal's handler is an interrupt too."""
    with engine_at(depth) as engine:
        meant = ended(engine, begun(engine), engine.step_modern)
    with engine_at(depth) as engine:
        done, caught = begun(engine), []

        def step() -> None:
            try:
                engine.step_modern()
            except error as interrupt:
                assert engine.in_flight_count == 0
                caught.append(str(interrupt))

        with interrupted_at(place, engine, error) as began:
            found = ended(engine, done, step)
        assert caught == ["at " + place] and len(began) == 2
        assert found == meant


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_generation_leaves_an_engine_that_goes_on(place: str) -> None:
    """What was added is taken back; weights may come before the next step, and the engine may be
    reset."""
    prompts = [[9] * 17, [40, 41, 42]]
    with engine_at(1) as engine:
        before = engine.runner._program._batch.scales.clone()
        engine.update_weights(changed(engine, 5))
        with interrupted_at(place, engine), pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, params(0))
        while engine.has_unfinished_requests():
            engine.step_modern()
        engine.reset()
        engine.update_weights(changed(engine, 3))
        state = {k: v.clone() for k, v in engine.model.weights_owner.named_parameters()}
        found = [each.generated_tokens for each in engine.generate(prompts, params(0))]
        scales = engine.runner._program._batch.scales.clone()
    assert not scales.equal(before)
    with engine_at(1) as engine:
        with torch.no_grad():
            engine.update_weights(state)
        meant = [each.generated_tokens for each in engine.generate(prompts, params(0))]
        assert found == meant and scales.equal(engine.runner._program._batch.scales)


@pytest.mark.slow
def test_ranks_that_have_begun_together_end_cleanly(tmp_path: Path) -> None:
    """None of them can begin again where others are in the midst of a layer: the engine stops, and
    neither its requests nor the other ranks are left."""
    write_layers("tiny", tmp_path / "old", 2)
    write_layers("tiny", tmp_path / "new", 2, scale=1.3)
    program = tmp_path / "program.py"
    program.write_text(RANKS)
    run_program(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path / "old"),
         str(tmp_path / "new"), "last layer"],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
    )  # fmt: skip


def test_a_failure_of_the_device_stops_the_engine_still() -> None:
    with engine_at(1) as engine:
        done = begun(engine)
        with interrupted_at("last layer", engine, RuntimeError), pytest.raises(RuntimeError):
            engine.step_modern()
        with pytest.raises(EngineStoppedError, match="RuntimeError: at last layer"):
            engine.step_modern()
        assert all(each.done() for each in done)

"""Engines over one model's weights, and what an engine is put together from."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError, EngineStoppedError
from megatron_async.models.served import ServedModel
from tests.support.batches import new_batch
from tests.support.engines import drive, engine_at, greedy
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone
from tests.support.patience import PATIENCE_SECONDS


def alone(first: int, count: int) -> list[int]:
    return decode_alone(Ask((first,), count))[0]


def test_new_weights_reach_all_engines_over_them() -> None:
    prompts, several = ["def fibonacci(n):\n    if n < 2:\n"], greedy(20)
    config = EngineConfig(device="cpu", block_size_tokens=4, block_count=200)
    with (
        DynamicInferenceEngine.from_pretrained(
            "tiny", EngineConfig(device="cpu", block_count=100)
        ) as one,
        one.with_config(config) as other,
    ):
        other.generate(prompts, several)
        running = other.add_request(7, prompts[0], several)
        other.step_modern()
        generator = torch.Generator().manual_seed(0)
        state = one.model.network.model.state_dict()
        one.update_weights(
            {
                name: value + 0.05 * torch.randn(value.shape, generator=generator)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            }
        )
        assert (one.weight_version, other.weight_version) == (1, 1)
        drive(other)
        with one.with_config(config) as fresh:
            (wanted,) = fresh.generate(prompts, several)
        (again,) = other.generate(prompts, several)
        assert again.generated_tokens == wanted.generated_tokens
        assert running.result().weight_spans[-1].version == 1


class Failing(HashModel):
    """Replaces its weights and then fails, where it is told to."""

    def update_weights(self, source: Any) -> None:
        super().update_weights(source)
        if source.get("fails"):
            raise RuntimeError("no memory while copying")


def test_an_update_that_fails_on_the_way_stops_all_engines_before_anybody_is_told() -> None:
    model = Failing()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        raised: list[Any] = []

        def turn_to_the_other(_: Any) -> None:
            with pytest.raises(EngineStoppedError) as error:
                one.generate([[1]], greedy(8))
            raised.append(error)

        other.add_request(0, [1], greedy(20)).add_done_callback(turn_to_the_other)
        other.step_modern()
        with pytest.raises(RuntimeError, match="no memory"):
            one.update_weights({"salt": 1, "fails": True})
        assert len(raised) == 1
        with pytest.raises(ConfigError, match="some are new"):
            engine_at(1, model=model)


class Interrupted(HashModel):
    """Gets signals while its weights are replaced."""

    def update_weights(self, source: Any) -> None:
        for _ in range(source["interrupts"]):
            signal.raise_signal(signal.SIGINT)
        super().update_weights(source)


def test_an_interrupt_waits_for_weights_that_are_being_replaced() -> None:
    model, others = Interrupted(), signal.getsignal(signal.SIGINT)
    with engine_at(1, model=model) as one, engine_at(2, model=model) as other:
        running = other.add_request(0, [1], greedy(20))
        other.step_modern()
        for _ in range(2):
            version = one.weight_version
            with pytest.raises(KeyboardInterrupt):
                one.update_weights({"salt": 5, "interrupts": 1})
            assert one.weight_version == other.weight_version == version + 1
            assert signal.getsignal(signal.SIGINT) is others
        drive(other)
        assert running.result().weight_spans[-1].version == 2
        with pytest.raises(KeyboardInterrupt):
            one.update_weights({"salt": 6, "interrupts": 2})
        assert signal.getsignal(signal.SIGINT) is others
        with pytest.raises(EngineStoppedError, match="KeyboardInterrupt"):
            other.generate([[1]], greedy(8))


def test_a_handler_that_does_not_raise_is_called_once_behind_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as asyncio's, and on a thread that gets no signal nothing is changed."""
    model, called = Interrupted(), list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(int(model.salt)))
    try:
        with engine_at(1, model=model) as engine:
            engine.update_weights({"salt": 3, "interrupts": 1})
            assert called == [3]
            source = {"salt": 4, "interrupts": 0}
            thread = threading.Thread(target=engine.update_weights, args=(source,))
            thread.start()
            thread.join(PATIENCE_SECONDS)
            assert engine.weight_version == 2 and called == [3]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_an_update_ended_is_told_outside_of_all_locks() -> None:
    """A callback may wait for another thread, which needs a turn or builds an engine."""
    model = HashModel()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        results: list[Any] = []

        def wait_for_a_thread(_: Any) -> None:
            def generate() -> None:
                results.append(one.generate([[2]], greedy(3)))
                with engine_at(1, model=model) as third:
                    results.append(third.generate([[2]], greedy(3)))

            thread = threading.Thread(target=generate, daemon=True)
            thread.start()
            thread.join(PATIENCE_SECONDS)

        other.add_request(0, [1], greedy(2)).add_done_callback(wait_for_a_thread)
        other.step_modern()
        other.step_modern()
        one.update_weights({"salt": 0})
        assert [request.generated_tokens for (request,) in results] == [alone(2, 3)] * 2


def test_an_engine_whose_device_has_failed_stops_alone_at_an_update() -> None:
    model = HashModel()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        mine, others = (engine.add_request(0, [1], greedy(20)) for engine in (one, other))
        for engine in (one, other):
            engine.step_modern()
        other.device.enqueue(lambda: 1 / 0, "fails")  # type: ignore[arg-type, return-value]
        while other.device.failure is None:  # type: ignore[attr-defined]
            pass
        assert one.update_weights({"salt": 0}) == 1
        assert isinstance(others.exception(timeout=0), EngineStoppedError)
        drive(one)
        assert mine.result(timeout=0).generated_tokens == alone(1, 20)


def test_an_engine_that_is_built_during_an_update_waits_for_it() -> None:
    begun, end = threading.Event(), threading.Event()

    class Slow(HashModel):
        def update_weights(self, source: Any) -> None:
            begun.set()
            end.wait(PATIENCE_SECONDS)
            super().update_weights(source)

    model = Slow()
    with engine_at(1, model=model) as one:
        update = threading.Thread(target=one.update_weights, args=({"salt": 0},))
        update.start()
        begun.wait(PATIENCE_SECONDS)
        built: list[DynamicInferenceEngine] = []
        build = threading.Thread(target=lambda: built.append(engine_at(1, model=model)))
        build.start()
        build.join(0.3)
        assert not built
        end.set()
        build.join(PATIENCE_SECONDS)
        update.join(PATIENCE_SECONDS)
        with built[0] as other:
            assert (one.weight_version, other.weight_version) == (1, 0)
            assert other.update_weights({"salt": 0}) == 1 and one.weight_version == 2


def test_parameters_may_change_places() -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        state = engine.model.weights_owner.state_dict()
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        swap = {"decoder.layers.0.": "decoder.layers.1.", "decoder.layers.1.": "decoder.layers.0."}
        swapped = {
            swap[name[:17]] + name[17:]: tensor
            for name, tensor in tensors.items()
            if name[:17] in swap
        }
        wanted = {name: tensor.clone() for name, tensor in swapped.items()}
        assert len(wanted) > 8
        engine.update_weights(swapped, partial_update=True)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_a_context_serves_one_engine_alone_and_one_that_suits_it() -> None:
    with engine_at(1) as engine:
        config = engine.config
        with pytest.raises(ConfigError, match="new DynamicInferenceContext"):
            DynamicInferenceEngine(ServedModel(network=HashModel()), config, batch=engine.batch)
        model = HashModel()
        good = engine.cache.spec
        values = {
            "params_dtype": good.dtype,
            "num_layers": good.num_layers,
            "kv_channels": good.head_dim,
            "num_attention_heads": good.num_kv_heads,
            "max_sequence_length": engine.max_sequence_length,
            "block_count": 20,
            "device": "cpu",
        }
        for name, value in (
            ("params_dtype", torch.float64),
            ("num_layers", 7),
            ("kv_channels", 96),
            ("num_attention_heads", 11),
            ("max_sequence_length", 10**4),
        ):
            batch = new_batch(**{**values, name: value})
            with pytest.raises(ConfigError, match=f"{name}={value}"):
                DynamicInferenceEngine(ServedModel(network=model), config, batch=batch)


@pytest.mark.parametrize(
    ("values", "named"), [({"dtype": "bfloat16"}, "dtype='bfloat16'"), ({"device": "mps"}, "mps")]
)
def test_engines_over_the_same_weights_have_their_device_and_dtype(
    values: dict[str, Any], named: str
) -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with (
        DynamicInferenceEngine.from_pretrained("tiny", config) as engine,
        pytest.raises(ConfigError, match=named),
    ):
        engine.with_config(EngineConfig(block_count=100, **values))


def test_all_cpus_are_the_same_device() -> None:
    with DynamicInferenceEngine.from_pretrained(
        "tiny", EngineConfig(device="cpu:0", block_count=100)
    ) as engine:
        for device in ("cpu", "cpu:0"):
            engine.with_config(EngineConfig(device=device, block_count=100)).close()

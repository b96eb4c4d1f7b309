"""An engine that gives the memory of its weights and its KV cache back, and takes it again."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.releasable import CudaPages, Region
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CacheTooLargeError, CheckpointError, ConfigError, RequestError
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.releasable_weights import move_parameters
from megatron_async.request.request import WeightSpan
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.kv_cache import KVCache
from tests.support.engines import config_at, greedy

PROMPTS = [[100, 101, 102, 32], [40] * 70]


def sleepy(depth: int = 2, **values: Any) -> EngineConfig:
    values = {"block_count": 300, "max_sequence_length": 256, **values}
    return config_at(depth, dtype="float32", max_requests=2, enable_sleep_mode=True, **values)


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicInferenceEngine]:
    with DynamicInferenceEngine.from_pretrained("tiny", sleepy(debug=True)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: DynamicInferenceEngine) -> list[list[int]]:
    return [request.generated_tokens for request in engine.generate(PROMPTS, greedy(20))]


def parameters(engine: DynamicInferenceEngine) -> dict[str, torch.Tensor]:
    return dict(engine.model.network.model.named_parameters())


def resident_bytes() -> int:
    gc.collect()
    size: int = psutil.Process().memory_info().rss
    return size


def test_running_requests_go_on_after_a_sleep(
    engine: DynamicInferenceEngine, expected: list[list[int]]
) -> None:
    where = engine.cache.kv.data_ptr()
    futures = [engine.add_request(i, p, greedy(20)) for i, p in enumerate(PROMPTS)]
    for _ in range(9):
        engine.step_modern()
    assert engine.get_request(0).generated_tokens
    engine.cache.kv.add_(0.0)  # so that all of it takes memory
    before = resident_bytes()
    engine.sleep()
    given_back = before - resident_bytes()
    assert given_back > 0.9 * engine.cache.kv.nbytes > 50e6
    assert engine.is_sleeping and engine.suspended and not engine.in_flight_count
    engine.step_modern()  # does nothing
    late = engine.add_request(7, PROMPTS[0], greedy(20))
    for change in (engine.resume, engine.reset):
        with pytest.raises(RequestError, match="the engine sleeps; wake_up"):
            change()
    with pytest.raises(RequestError, match="sleeps"):
        engine.with_config(sleepy())
    engine.wake_up()
    assert not engine.is_sleeping and not engine.suspended
    assert engine.cache.kv.data_ptr() == where
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [future.result(0).generated_tokens for future in futures] == expected
    assert late.result(0).generated_tokens == expected[0]
    assert futures[0].result(0).counters.evictions == 1


class Door:
    """A lock that tells when another thread than its maker's stands before it."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.maker, self.somebody = lock, threading.get_ident(), threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() != self.maker:
            self.somebody.set()
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("call", ("resume", "reset"))
def test_a_call_that_waits_for_a_step_finds_the_engine_asleep(
    call: str, engine: DynamicInferenceEngine, expected: list[list[int]]
) -> None:
    """Whoever calls while it is awake, and comes between two steps when it sleeps, is refused."""
    future = engine.add_request(3, PROMPTS[0], greedy(20))
    engine.step_modern()
    gate = engine.lock.gate
    engine.lock.gate = door = Door(gate)  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(1) as pool:
            with door:
                refused = pool.submit(getattr(engine, call))
                door.somebody.wait()
                engine.sleep()
            with pytest.raises(RequestError, match="the engine sleeps; wake_up"):
                refused.result()
    finally:
        engine.lock.gate = gate
    assert engine.is_sleeping and engine.suspended
    engine.step_modern()
    assert not engine.in_flight_count
    engine.wake_up()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result(0).generated_tokens == expected[0]


def test_an_engine_is_not_sent_to_sleep_while_another_is_built_over_its_weights(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = DynamicInferenceEngine._over.__func__  # type: ignore[attr-defined]
    door = Door(engine._weights.lock)
    monkeypatch.setattr(engine._weights, "lock", door)
    with ThreadPoolExecutor(1) as pool:
        asked: list[Any] = []

        def build(kind: Any, *args: Any) -> DynamicInferenceEngine:
            asked.append(pool.submit(engine.sleep))
            door.somebody.wait()
            made: DynamicInferenceEngine = built(kind, *args)
            return made

        monkeypatch.setattr(DynamicInferenceEngine, "_over", classmethod(build))
        other = engine.with_config(sleepy())
        with pytest.raises(ConfigError, match="another engine is over the same weights"):
            asked[0].result()
        other.close()
    del other
    gc.collect()
    assert not engine.is_sleeping


def test_discarded_weights_are_waited_for(
    engine: DynamicInferenceEngine, expected: list[list[int]]
) -> None:
    state = {name: value.clone() for name, value in parameters(engine).items()}
    where = {name: value.data_ptr() for name, value in parameters(engine).items()}
    weights = sum(value.nbytes for value in state.values())
    engine.sleep(1)
    before, version = resident_bytes(), engine.weight_version
    engine.sleep(2)  # deeper
    assert before - resident_bytes() > 0.9 * weights > 10e6
    with pytest.raises(RequestError, match=r"wake_up\(\['weights'\]\) first"):
        engine.update_weights(state)
    engine.wake_up(["weights"])
    assert not any(value.any() for value in parameters(engine).values())
    future = engine.add_request(0, PROMPTS[0], greedy(20))
    lacking = {
        name: value for name, value in state.items() if "layers.3.mlp.linear_fc1" not in name
    }
    with pytest.raises(CheckpointError, match=r"lack decoder.layers.3.mlp.linear_fc1.weight"):
        engine.update_weights(lacking)
    engine.update_weights(state)
    assert engine.is_sleeping, "there is no cache yet"
    engine.wake_up("kv_cache")
    while engine.has_unfinished_requests():
        engine.step_modern()
    request = future.result(0)
    assert request.generated_tokens == expected[0]
    assert request.weight_spans == [WeightSpan(0, version + 1)]
    assert where == {name: value.data_ptr() for name, value in parameters(engine).items()}


def test_an_engine_that_is_awake_waits_for_discarded_weights_too(
    engine: DynamicInferenceEngine,
) -> None:
    state = {name: value.clone() for name, value in parameters(engine).items()}
    engine.suspend()
    engine.sleep(2)
    engine.wake_up()
    assert engine.is_sleeping
    with pytest.raises(RequestError, match="update_weights"):
        engine.resume()
    engine.update_weights(state)
    assert not engine.is_sleeping and engine.suspended, "as before its sleep"
    engine.resume()


def test_an_engine_suspended_in_its_sleep_stays_suspended(engine: DynamicInferenceEngine) -> None:
    engine.sleep()
    engine.suspend()
    engine.wake_up()
    assert not engine.is_sleeping and engine.suspended
    engine.resume()
    engine.sleep()
    engine.wake_up()
    assert not engine.suspended


def test_who_generates_meanwhile_waits_and_is_told(
    engine: DynamicInferenceEngine, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool:
        engine.sleep()
        asked = pool.submit(engine.generate, PROMPTS, greedy(20))
        while not caplog.text:  # the call has begun
            assert not asked.done()
            time.sleep(0.01)
        assert "generate() waits for another thread: the engine sleeps; wake_up()" in caplog.text
        engine.wake_up()
        assert [request.generated_tokens for request in asked.result()] == expected


def test_what_cannot_sleep_says_so(engine: DynamicInferenceEngine) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(RequestError, match="must be 1, weights are kept"):
            engine.sleep(level)  # type: ignore[arg-type]
    for tags in (["graphs"], 5, [["weights"]]):
        with pytest.raises(RequestError, match="tags="):
            engine.wake_up(tags)  # type: ignore[arg-type]
    with engine.with_config(sleepy(block_count=4)), pytest.raises(ConfigError, match="close it"):
        engine.sleep()
    gc.collect()
    plain = sleepy(block_count=4)
    with (
        DynamicInferenceEngine.from_pretrained(
            "tiny", EngineConfig(**{**vars_of(plain), "enable_sleep_mode": False})
        ) as other,
        pytest.raises(ConfigError, match="enable_sleep_mode=True"),
    ):
        other.sleep()


def test_recurrent_states_sleep_too() -> None:
    with DynamicInferenceEngine.from_pretrained("tiny-hybrid", sleepy(block_count=20)) as engine:
        states = engine.cache.states
        assert states is not None and len(engine.cache.regions) > 2
        expected = [request.generated_tokens for request in engine.generate(PROMPTS, greedy(12))]
        futures = [engine.add_request(i, p, greedy(12)) for i, p in enumerate(PROMPTS)]
        for _ in range(6):
            engine.step_modern()
        assert any(state.any() for state in states.layer(0).values())
        engine.sleep()
        assert not any(state.any() for state in states.layer(0).values())
        engine.wake_up()
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert [future.result(0).generated_tokens for future in futures] == expected


def vars_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


def test_parameters_that_share_memory_share_it_afterwards() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)]).half()
    model[1].weight = torch.nn.Parameter(model[0].weight.data[1:3])
    model[1].bias.data = torch.arange(10.0).half()[::2]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    region = move_parameters(model)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert (model[1].weight == 7).all() and model[1].bias.stride() == (2,)
    region.release(keep=False)
    assert not any(value.any() for value in model.parameters())


# --- CUDA's virtual memory, without a GPU -----------------------------------------------------


class FakeDriver:
    """Notes what it is asked; has ``room`` pieces of memory."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.room = 1

    def granularity(self) -> int:
        return 1 << 21

    def reserve(self, size: int) -> int:
        self.noted.append(("reserve", size))
        return 1 << 40

    def create(self, size: int) -> int:
        if not self.room:
            raise CacheTooLargeError("no room")
        self.room -= 1
        self.noted.append(("create", size))
        return 5

    def map(self, address: int, size: int, handle: int) -> None:
        self.noted.append(("map", address, size, handle))

    def unmap(self, address: int, size: int) -> None:
        self.noted.append(("unmap", address, size))

    def give_back(self, handle: int) -> None:
        self.room += 1
        self.noted.append(("give back", handle))

    def free(self, address: int, size: int) -> None:
        self.noted.append(("free", address, size))


def test_physical_memory_is_mapped_to_addresses_that_stay() -> None:
    driver, size, at = FakeDriver(), 1 << 21, 1 << 40
    pages = CudaPages(1000, 0, driver)
    assert driver.noted == [("reserve", size), ("create", size), ("map", at, size, 5)]
    shown = pages.__cuda_array_interface__
    assert shown["data"] == (at, False) and shown["shape"] == (size,)
    pages.release()
    pages.release()
    assert driver.noted[3:] == [("unmap", at, size), ("give back", 5)]
    driver.room = 0
    with pytest.raises(CacheTooLargeError):
        pages.restore()
    driver.room = 1
    pages.restore()
    assert driver.noted[5:] == [("create", size), ("map", at, size, 5)]
    del pages
    gc.collect()
    assert driver.noted[7:] == [("unmap", at, size), ("give back", 5), ("free", at, size)]


def test_addresses_without_memory_are_freed() -> None:
    driver = FakeDriver()
    driver.room = 0
    with pytest.raises(CacheTooLargeError):
        CudaPages(1, 0, driver)
    assert [name for name, *_ in driver.noted] == ["reserve", "free"]


def test_a_region_on_the_cpu_keeps_what_it_keeps() -> None:
    region = Region(5000, torch.device("cpu"))
    part = region.part(512, (3,), torch.float32).fill_(2.0)
    region.release(keep=True)
    assert not region.is_released and region.restore() and part.tolist() == [2.0] * 3
    region.release(keep=False)
    assert region.is_released and not region.restore(zeros=True) and part.tolist() == [0.0] * 3


def test_a_cache_on_the_cpu_takes_memory_when_it_is_used() -> None:
    spec = KVCacheSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)
    sizes = CacheSizes.of(
        spec.token_bytes, max_sequence_length=64, block_count=1000, block_size_tokens=16,
        releasable=True,
    )  # fmt: skip
    before = resident_bytes()
    cache = KVCache(sizes, spec, "cpu")
    (region,) = cache.regions
    assert region.size > 200 << 20
    for _ in range(2):
        assert resident_bytes() - before < region.size // 2
        assert not cache.kv[:, :, ::100].any()
        cache.kv[0, 0, :10] = 1.0
        region.release(keep=False)
        region.restore(zeros=True)

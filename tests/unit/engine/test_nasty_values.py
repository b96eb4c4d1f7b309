"""Values of any kind, given to the Python API: the package's own errors, on one line of a bounded
length, and no other request is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from megatron_async.checkpoint import load_pretrained
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.errors import ConfigError, MegatronAsyncError, RequestError, shown
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import drive, engine_at, greedy

pytestmark = pytest.mark.sweep

MOST_SAID = 3000
DIGITS = 10**5000


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("its class is wrong")


NASTY: tuple[Any, ...] = (
    True, False, -1, 2**31, 2**63, 2**64, DIGITS, -DIGITS, 1e308, float("nan"), float("inf"),
    "\ud800", b"a", [], (), {}, [None], [True], [1.5], ["a"], [DIGITS], [2**63], [-1], {1: 2},
    np.float32("nan"), np.float64(1), np.array(3), np.array([[1]]), np.bool_(True),
    torch.tensor(3), torch.tensor([1.5]), torch.tensor([]), torch.tensor([[1]]),
    torch.tensor([1 + 2j]), torch.empty(3, dtype=torch.int64, device="meta"),
    torch.eye(2).to_sparse(), Fraction(1, 3), Decimal("NaN"), object(), Unspeakable(),
    [Unspeakable()], 3 + 4j, range(3), [0] * 100_000, "x" * 100_000, memoryview(b"ab"), float,
)  # fmt: skip
values = st.one_of(
    st.sampled_from(range(len(NASTY))).map(NASTY.__getitem__),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
)
PARAMS = tuple(name for name in vars(SamplingParams()) if name != "num_tokens_to_generate")


def made(call: Callable[[], Any]) -> None:
    """Make a call, which may be refused by the package's own errors alone."""
    try:
        call()
    except MegatronAsyncError as error:
        assert len(str(error)) <= MOST_SAID


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicInferenceEngine]:
    with engine_at(1) as made:
        yield made


def few(examples: int) -> Callable[[Any], Any]:
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    options = settings(
        max_examples=examples, deadline=None, suppress_health_check=suppressed, database=None
    )
    return lambda test: seed(20)(options(test))


CALLS: dict[str, Callable[[DynamicInferenceEngine, Any], Any]] = {
    "prompt": lambda engine, value: engine.add_request(1, value, greedy(2)),
    "token": lambda engine, value: engine.add_request(1, [value], greedy(2)),
    "id": lambda engine, value: engine.add_request(value, [1], greedy(2)),
    "params": lambda engine, value: engine.add_request(1, [1], value),
    "priority": lambda engine, value: engine.add_request(1, [1], greedy(2), priority=value),
    "abort": lambda engine, value: engine.abort_request(value),
    "get": lambda engine, value: engine.get_request(value),
    "temperature": lambda engine, value: engine.update_sampling_params(0, temperature=value),
    "seed": lambda engine, value: engine.update_sampling_params(0, seed=value),
    "wake_up": lambda engine, value: engine.wake_up(value),
    "sleep": lambda engine, value: engine.sleep(value),
}


@pytest.mark.parametrize("name", CALLS)
@few(40)
@given(value=values)
def test_any_value_is_taken_or_refused_and_no_other_request_is_lost(
    name: str, engine: DynamicInferenceEngine, value: Any
) -> None:
    other = engine.add_request(0, [1, 2], greedy(3))
    made(lambda: CALLS[name](engine, value))
    drive(engine)
    assert len(other.result(timeout=0).generated_tokens) == 3


@few(300)
@given(name=st.sampled_from(PARAMS), value=values)
def test_any_value_of_a_parameter_is_taken_or_refused(
    engine: DynamicInferenceEngine, name: str, value: Any
) -> None:
    other = engine.add_request(0, [1, 2], greedy(3))
    made(
        lambda: engine.add_request(
            1, [1], SamplingParams(**{"num_tokens_to_generate": 2, name: value})
        )
    )
    drive(engine)
    assert len(other.result(timeout=0).generated_tokens) == 3


@few(300)
@given(name=st.sampled_from(sorted(EngineConfig.__dataclass_fields__)), value=values)
def test_any_value_of_a_configuration_is_taken_or_refused(name: str, value: Any) -> None:
    made(lambda: EngineConfig(**{name: value}))


@pytest.mark.parametrize("value", (torch.tensor(3), np.array(3), 5, None, {"a": 1}))
def test_what_is_no_list_of_prompts_is_refused(engine: DynamicInferenceEngine, value: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts (is a|cannot be listed)"):
        engine.generate(value, greedy(2))


@pytest.mark.parametrize(
    "value", (2**63, 2**64, -1, True, None, "", "a", "\ud800", b"cpu", 1.5, [])
)
def test_what_is_no_device_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="is not known; use cpu"):
        load_pretrained("tiny", device=value)
    if value is not None:
        with pytest.raises(ConfigError, match="is not known; use cpu"):
            DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device=value))


@pytest.mark.parametrize(
    "value", (True, 1, 0, b"a", [], DIGITS, torch.tensor(1), Unspeakable()), ids=range(8)
)
def test_what_is_no_path_is_refused(value: Any) -> None:
    """An integer, as a boolean is one, would be taken for a descriptor that is open."""
    for call in (
        lambda: load_pretrained(value),
        lambda: load_pretrained("tiny", tokenizer_model=value),
        lambda: load_pretrained("tiny", dtype=value),
        lambda: DynamicInferenceEngine.from_pretrained(value),
        lambda: EngineConfig(record=value),
        lambda: EngineConfig(tokenizer_model=value),
        lambda: read_run(value),
    ):
        with pytest.raises(MegatronAsyncError, match="must be"):
            call()


def test_what_cannot_be_shown_is_named_by_its_class() -> None:
    assert shown(Unspeakable()) == "a Unspeakable that cannot be shown"
    assert shown([DIGITS]) == "a number of too many digits"

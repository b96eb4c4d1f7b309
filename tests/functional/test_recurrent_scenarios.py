"""The scenario table on the hash model with recurrent layers and experts, where one wrong state
changes all later tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.verify.reference import Prepared, prepare_all
from megatron_async.verify.scenarios import TABLE
from tests.functional.test_scenarios import run_at
from tests.support.engines import DEPTHS, config_at, hash_engine
from tests.support.hybrid_hash_model import HybridHashModel

pytestmark = pytest.mark.sweep

NAMES = (
    "evict-while-paused",
    "shared-prefix-evicted",
    "shared-prefix-aborted",
    "memory-pressure",
    "suspend",
    "blocks-of-one-token",
    "everything",
)


class Loadable(HybridHashModel):
    """Its own weights can be given to it again."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self

    def state_dict(self) -> dict[str, int]:
        return {"salt": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicInferenceEngine]:
    with hash_engine(0, model=Loadable(), max_requests=1, block_count=64) as made:
        yield made


@pytest.fixture(scope="module")
def prepared(engine: DynamicInferenceEngine) -> dict[str, Prepared]:
    scenarios = [scenario for scenario in TABLE if scenario.name in NAMES]
    found = prepare_all(engine, scenarios, config_at(0), seed=0)
    return {each.scenario.name: each for each in found}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_each_request_gets_the_tokens_it_gets_alone(
    engine: DynamicInferenceEngine, prepared: dict[str, Prepared], name: str, depth: int
) -> None:
    report = run_at(engine, prepared[name], depth).report()
    assert report.differences == []
    assert report.missing == []

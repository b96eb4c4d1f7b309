"""Guided rows that sit launches out: the same tokens, and other rows keep their depth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.metrics import GuidedRow, NotOverlapped
from megatron_async.errors import ConfigError
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import Plan
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine
from tests.support.guided_rows import WINDOW, guide, play
from tests.support.hash_model import HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import decode_alone
from tests.unit.engine.test_guided_requests import EVENTS, run, serial, what_came

pytestmark = pytest.mark.sweep

WAYS: dict[str, dict[str, Any]] = {
    "no drafts": {"model": HashModel()},
    "drafts that know": {"model": DraftingHashModel(WINDOW - 1, 0.3, guide=guide)},
    "grammars alone": {
        "model": HashModel(), "num_speculative_tokens": WINDOW - 1, "speculative_method": "grammar",
    },
}  # fmt: skip


@pytest.mark.parametrize("micro_batches", (1, 2))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_are_those_of_the_oracle(depth: int, way: str, micro_batches: int) -> None:
    """With evictions, pauses and prefixes that are shared."""
    asks, requests, _ = play(
        depth, guided_rows="sit_out", pipeline_micro_batches=micro_batches, **WAYS[way]
    )
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask
    if way != "no drafts":
        accepted = [r.counters.accepted for a, r in zip(asks, requests, strict=True) if a.regex]
        assert sum(accepted) > 30


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_events_change_no_token(depth: int, event: str) -> None:
    requests, counters = run(depth, event, guided_rows="sit_out")
    for name, request in requests.items():
        assert what_came(request) == serial()[name], name
    assert (counters.guided_rows[GuidedRow.SAT_OUT] > 0) == (depth > 1)


class Plans:
    """The keys of the rows of each launch."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def on_launch(self, plan: Plan) -> None:
        self.rows.append(plan.rows.keys)


def decoded(depth: int, guided_rows: str, guided: int, others: int) -> tuple[Any, Any, Any]:
    """Requests, counters, and the keys of each launch. All are admitted in one step and have 24
    tokens."""
    outputs = [{"regex": "[a-f]{40}"}] * guided + [None] * others
    params = [
        SamplingParams(num_tokens_to_generate=24, ignore_eos=True, structured_outputs=each)
        for each in outputs
    ]
    plans = Plans()
    with hash_engine(
        depth, tokenizer=hash_tokenizer(), max_requests=4, block_count=100, guided_rows=guided_rows
    ) as engine:
        engine.observe(plans)
        requests = engine.generate([[number, 7] for number in range(len(outputs))], params)
        counters = engine.counters
    counts = Counter(key for keys in plans.rows for key in keys)
    assert set(counts.values()) == {24}
    return requests, counters, plans.rows


@pytest.mark.parametrize("depth", (1, 2, 4))
def test_rows_that_nothing_guides_keep_their_depth(depth: int) -> None:
    waits, waiting, _ = decoded(depth, "wait", 1, 2)
    sits, sitting, launches = decoded(depth, "sit_out", 1, 2)
    assert [r.generated_tokens for r in sits] == [r.generated_tokens for r in waits]
    assert {report.effective_depth for report in waits[1].steps[:-4]} == {1}
    assert {report.effective_depth for report in sits[1].steps[:-4]} == {depth}
    # Beside the others it is in each launch, in every second, or in every fourth.
    between = [b.ticket - a.ticket for a, b in zip(sits[0].steps, sits[0].steps[1:], strict=False)]
    others = max(report.ticket for report in sits[1].steps)
    beside = [
        b for b, report in zip(between, sits[0].steps, strict=False) if report.ticket + b < others
    ]
    assert beside and set(beside) == {depth}
    assert GuidedRow.SAT_OUT not in waiting.guided_rows
    without = sum(0 < len(keys) < 3 for keys in launches if launches[0][0] not in keys)
    assert sitting.guided_rows[GuidedRow.SAT_OUT] == without
    assert sitting.guided_rows[GuidedRow.TOKEN] == 24


@pytest.mark.parametrize("depth", (1, 2))
def test_where_all_rows_are_guided_none_sits_out(depth: int) -> None:
    requests, counters, _ = decoded(depth, "sit_out", 3, 0)
    assert counters.guided_rows == {GuidedRow.TOKEN: 72}
    assert counters.not_overlapped == {NotOverlapped.DRAINED: 1}
    assert {report.effective_depth for report in requests[0].steps[:-1]} == {1}


def test_other_words_are_refused() -> None:
    for wrong in ("sit", "", None, 1):
        with pytest.raises(ConfigError, match="guided_rows"):
            EngineConfig(guided_rows=wrong)  # type: ignore[arg-type]

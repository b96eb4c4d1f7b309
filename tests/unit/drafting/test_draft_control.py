"""Drafts by request and by step: who drafts how much changes no token, and is chosen alike in
each run.

The drafts are a fake model's (``tests/support/drafting_model.py``).
"""

from __future__ import annotations

import itertools
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig, draft_windows
from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError, RequestError
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.scheduler.draft_control import (
    FIRST_PAUSE,
    TRIAL_TICKETS,
    DraftControl,
    StepCosts,
    WindowReason,
)
from megatron_async.step.plan import Plan, RowMap
from megatron_async.step.records import ENDED, RUNNING, StepResult
from tests.support.cuda_rings import CudaRingsDevice
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, greedy, hash_engine, random_ask, sampling_params
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep

WINDOWS = (1, 2, 3, 5)
COSTS = tuple(
    (rows, window, 1.0 + share * (window - 1))
    for rows, share in ((8, 0.1), (16, 0.9))
    for window in WINDOWS
)
"""A draft costs a tenth of a step of 8 rows, and nine tenths of one of 16."""


def drafting_engine(
    depth: int, drafts: int, *, error_rate: float = 0.3, **values: Any
) -> DynamicInferenceEngine:
    values = {"max_requests": 4, "block_size_tokens": 3, "block_count": 60, **values}
    return hash_engine(depth, model=DraftingHashModel(drafts, error_rate), **values)


def check(asks: list[Ask], requests: list[DynamicInferenceRequest]) -> None:
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)


class Plans:
    """All plans of an engine."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.launched: list[Plan] = []
        engine.observe(self)

    def on_launch(self, plan: Plan) -> None:
        self.launched.append(plan)

    @property
    def windows(self) -> list[int]:
        return [plan.window for plan in self.launched]


# --- by request -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_with_and_without_drafts_in_one_step(depth: int) -> None:
    """And with other numbers of drafts, which change while they run."""
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=20, max_new=24) for _ in range(10)]
    drafts = [(0, 1, None, 3)[i % 4] for i in range(len(asks))]
    with drafting_engine(depth, 3, prefill_chunk_tokens=5, jitter_seed=depth) as engine:
        plans = Plans(engine)
        futures = [
            engine.add_request(
                i, list(ask.prompt), sampling_params(ask, num_speculative_tokens=drafts[i])
            )
            for i, ask in enumerate(asks)
        ]
        while engine.has_unfinished_requests():
            active = engine.step_modern()["active_request_ids"]
            if active and rng.random() < 0.2:
                victim, count = rng.choice(active), rng.choice((0, 2, None))
                engine.update_sampling_params(victim, num_speculative_tokens=count)
            if active and rng.random() < 0.1:
                engine.evict_request(rng.choice(active))
        counters = engine.counters
    check(asks, [future.result(0) for future in futures])
    in_steps = {tuple(sorted(set(p.rows.windows[: p.decode_rows]))) for p in plans.launched}
    assert any(len(windows) > 1 and windows[0] == 1 for windows in in_steps)
    assert {1, 4} == set(counters.steps_by_window)
    assert counters.tokens_accepted == sum(counters.accepted_by_position) > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_brings_no_more_than_its_request_wants(depth: int) -> None:
    with drafting_engine(depth, 4, error_rate=0.0) as engine:
        plans = Plans(engine)
        params = [greedy(21, num_speculative_tokens=count) for count in (0, 1, 4, None)]
        requests = engine.generate([[i] for i in range(4)], params)
        counters = engine.counters
    check([Ask(prompt=(i,), max_new=21) for i in range(4)], requests)
    # Of the last rows the length may take some.
    for request, least, most in zip(requests, (0, 10, 16, 16), (0, 10, 16, 16), strict=True):
        assert least <= request.counters.accepted <= most
    assert counters.tokens_drafted == counters.tokens_accepted == 42
    assert set(plans.windows) == {1, 5}  # 1 once only those without drafts are left
    assert plans.windows[-1] == 1


def test_steps_whose_rows_draft_nothing_are_plain() -> None:
    with drafting_engine(1, 3) as engine:
        plans = Plans(engine)
        asks = [Ask(prompt=(i, 1), max_new=9) for i in range(3)]
        params = [sampling_params(ask, num_speculative_tokens=0) for ask in asks]
        check(asks, engine.generate([list(ask.prompt) for ask in asks], params))
        assert {(p.window, p.drafts, p.reason) for p in plans.launched} == {
            (1, 0, WindowReason.NO_DRAFTS.value)
        }
        assert engine.counters.tokens_drafted == 0


def test_fewer_drafts_reserve_fewer_blocks() -> None:
    """With a block for each token: each row takes blocks for its own window alone."""
    granted = []
    for count in (0, 3):
        with drafting_engine(
            2, 3, error_rate=1.0, max_requests=1, block_size_tokens=1, block_count=60
        ) as engine:
            plans = Plans(engine)
            engine.generate([[1]], greedy(12, num_speculative_tokens=count))
            granted.append(sum(len(plan.assignments) for plan in plans.launched[:3]))
    assert granted == [3, 9]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4, "num_speculative_tokens=4 exceeds the engine's 3; lower it"),
        (-1, "num_speculative_tokens=-1"),
        ("x", "num_speculative_tokens='x'"),
    ],
)
def test_wrong_numbers_of_drafts_are_refused(value: Any, said: str) -> None:
    with drafting_engine(0, 3) as engine:
        with pytest.raises(RequestError, match=said):
            engine.add_request(0, [1], greedy(3, num_speculative_tokens=value))
        engine.add_request(0, [1], greedy(3))
        with pytest.raises(RequestError, match=said):
            engine.update_sampling_params(0, num_speculative_tokens=value)


# --- by step ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "fixed", "adaptive"),
    [(0, (1,), (1,)), (1, (1, 2), (1, 2)), (3, (1, 4), (1, 2, 3, 4)), (4, (1, 5), WINDOWS),
     (9, (1, 10), (1, 2, 3, 5, 9, 10))],
)  # fmt: skip
def test_windows_that_are_captured(
    drafts: int, fixed: tuple[int, ...], adaptive: tuple[int, ...]
) -> None:
    assert draft_windows(drafts, adaptive=False) == fixed
    assert draft_windows(drafts, adaptive=True) == adaptive


def control() -> DraftControl:
    return DraftControl(WINDOWS, StepCosts({(r, w): s for r, w, s in COSTS}, WINDOWS))


def bring(made: DraftControl, *counts: int, window: int = 5, status: int = RUNNING) -> None:
    rows = tuple(range(len(counts)))
    plan = Plan(0, RowMap(rows, rows, rows, (window,) * len(rows)), len(rows), (), window=window)
    tokens = [(0,) * window] * len(rows)
    made.committed(plan, StepResult(list(counts), [status] * len(rows), tokens))


def test_the_window_follows_acceptance_by_place() -> None:
    made = control()
    assert made.choose(0, [5]) == (5, WindowReason.ALL_DRAFTS)
    for _ in range(60):
        bring(made, 3)  # two drafts of four
    assert made.acceptance[:3] == [pytest.approx(1, abs=0.03)] * 2 + [pytest.approx(0, abs=0.1)]
    assert made.choose(1, [5]) == (3, WindowReason.FEWER_PAY)
    for _ in range(120):
        bring(made, 1)
    assert made.choose(2, [5]).window == 1
    for _ in range(120):
        bring(made, 5)
    assert made.choose(3, [5]) == (5, WindowReason.ALL_DRAFTS)


def test_the_window_follows_the_costs_of_so_many_rows() -> None:
    made = control()
    for _ in range(30):
        bring(made, 1, 4)
    assert made.choose(0, [5] * 8).window > made.choose(1, [5] * 9).window == 1
    # More rows than were measured cost as the most that were.
    assert made.choose(2, [5] * 40).window == 1


def test_no_window_is_larger_than_a_row_wants() -> None:
    made = control()
    assert made.choose(0, [2, 3, 1]).window == 3
    assert made.choose(1, [4]).window == 5  # the smallest that there is
    assert made.choose(2, [1, 1]) == (1, WindowReason.NO_DRAFTS)
    assert made.choose(3, []) == (1, WindowReason.NO_DRAFTS)


def test_rows_that_end_or_are_dead_say_nothing() -> None:
    made = control()
    before = made.acceptance
    bring(made, 1, 2, status=ENDED)
    bring(made, 0)
    assert made.acceptance == before


def test_trials_are_more_and_more_seldom() -> None:
    made = control()
    for _ in range(30):
        bring(made, 1)
    trials = []
    for number in range(2000):
        window, reason = made.choose(number, [5])
        if reason is WindowReason.TRIAL:
            trials.append(number)
            bring(made, 1)
        else:
            assert window == 1
    begins = [n for n in trials if n - 1 not in trials]
    pauses = [b - a for a, b in zip([0, *begins[:-1]], begins, strict=True)]
    assert begins[0] == FIRST_PAUSE and len(trials) == TRIAL_TICKETS * len(begins)
    assert all(2 * a <= b + TRIAL_TICKETS for a, b in itertools.pairwise(pauses))
    # One that finds better drafts is the last.
    number = begins[-1] + 1024
    while made.choose(number, [5]).window < 5:
        number += 1
    for later in range(1, 50):
        bring(made, 5)
        window, reason = made.choose(number + later, [5])
    assert (window, reason) == (5, WindowReason.ALL_DRAFTS)


def adaptive(depth: int, error_rate: float, **values: Any) -> DynamicInferenceEngine:
    values = {"speculative_step_costs": COSTS, **values}
    return drafting_engine(
        depth, 4, error_rate=error_rate, adaptive_speculation=True, block_count=200, **values
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_wrong_drafts_are_left_out_and_right_ones_kept(depth: int) -> None:
    asks = [Ask(prompt=(i, 3), max_new=60, seed=i, temperature=0.5) for i in range(3)]
    shares = []
    for error_rate in (0.0, 1.0):
        with adaptive(depth, error_rate) as engine:
            requests = engine.generate(
                [list(a.prompt) for a in asks], [*map(sampling_params, asks)]
            )
            check(asks, requests)
            counters = engine.counters
        reasons = counters.window_reasons
        shares.append(counters.steps_by_window[5] / counters.steps_launched)
        assert reasons.total() == counters.steps_by_window.total() == counters.steps_launched
        assert (reasons[WindowReason.FEWER_PAY.value] > 0) == (error_rate == 1.0)
    assert shares[0] > 0.7 and shares[1] < 0.5


def test_the_same_windows_in_each_run_whatever_the_timing() -> None:
    runs = []
    for seed in (None, 1, 2):
        rng = random.Random(8)
        asks = [random_ask(rng, max_prompt=20, max_new=24) for _ in range(8)]
        with adaptive(2, 0.6, jitter_seed=seed) as engine:
            plans = Plans(engine)
            check(
                asks, engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
            )
            runs.append(plans.launched)
    assert len({plan.window for plan in runs[0]}) > 2
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("device", (CpuDevice, CudaRingsDevice))
@pytest.mark.parametrize("depth", DEPTHS)
def test_nothing_is_left_of_the_steps_that_were_measured(
    depth: int, device: type[CpuDevice]
) -> None:
    """The first ticket is 0, for rings, masks and extras too."""
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=20, max_new=16) for _ in range(4)]
    asks += [Ask(prompt=(i,), max_new=9, regex="[a-d]{3,7}[0-9]*") for i in range(2)]
    made = device(poison=True)
    options: dict[str, Any] = {"tokenizer": hash_tokenizer(), "device": made}
    with adaptive(depth, 0.4, speculative_step_costs=None, **options) as engine:
        assert engine.runner.wait_ns == 0 and engine.scheduler.next_ticket == 0
        assert engine.cache.slots.finished.all() and not engine.cache.slots.kv_length.any()
        check(asks, engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)]))
        assert engine.counters.steps_with_extras
    made.close()


def test_costs_are_measured_and_a_replay_has_them(tmp_path: Path) -> None:
    path, rng = tmp_path / "run.jsonl", random.Random(3)
    asks = [random_ask(rng, max_prompt=20, max_new=24) for _ in range(6)]
    with adaptive(1, 0.8, speculative_step_costs=None, record=str(path)) as engine:
        measured = engine.config.testing.speculative_step_costs
        assert measured is not None
        assert [cost[:2] for cost in measured] == list(product((1, 2, 4, 8), WINDOWS))
        plans = Plans(engine)
        check(asks, engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)]))
    run = read_run(path)
    assert run.config.testing.speculative_step_costs == measured
    with adaptive(1, 0.8, speculative_step_costs=measured) as engine:
        again = Plans(engine)
        result = replay(run, engine)
    assert result.exact and result.differences == ()
    assert again.launched == plans.launched
    with adaptive(1, 0.8) as engine:
        result = replay(run, engine)
    assert not result.exact and result.differences == ()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"speculative_step_costs": ((8, 1, 1.0),)}, r"no seconds for 8 rows and windows \[2, 3\]"),
        ({"speculative_step_costs": ((8, 1, -1.0),)}, "finite seconds above 0"),
        ({"speculative_step_costs": ()}, "finite seconds above 0"),
        ({"speculative_step_costs": (1, 2)}, "must be .rows, window, seconds. tuples"),
    ],
)
def test_wrong_costs_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(adaptive_speculation=True, num_speculative_tokens=2, testing=values)  # type: ignore[arg-type]

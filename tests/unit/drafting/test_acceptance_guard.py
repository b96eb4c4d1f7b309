"""Drafts that new weights make worthless: they are counted by place and weight version, windows
shrink within so many tickets, and larger ones are tried again.

The drafts are a fake model's, right up to a place that its weights decide.
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine import metrics
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import KEPT_VERSIONS, EngineCounters
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import ConfigError, IntegrityError
from megatron_async.request import drafts
from megatron_async.request.request import (
    DraftCounts,
    DraftedRow,
    DynamicInferenceRequest,
    Rollout,
)
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.scheduler.draft_control import FIRST_PAUSE, TRIAL_TICKETS, DraftControl
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, greedy, hash_engine
from tests.support.hash_model import VOCAB_SIZE
from tests.support.oracle import Ask, decode_with_salts

RIGHT, NONE, TWO = 0, 1, 2
"""Weights: all drafts are right, none is, the first two are."""
ACCEPTED = {RIGHT: 4, NONE: 0, TWO: 2}
SHRUNK_WITHIN = 16
"""Tickets, beyond those in flight, until nothing is drafted that is never accepted."""
pytestmark = pytest.mark.sweep

PROMPTS = [[1, 2, 3], [9] * 7, [5]]
LENGTH = 200
SIZES: dict[str, Any] = {
    "max_requests": 3, "block_size_tokens": 4, "block_count": 200, "adaptive_speculation": True,
    "speculative_draft_cost": 0.1,
}  # fmt: skip


class WrongDraftsError(AssertionError):
    pass


class WindowsError(AssertionError):
    pass


class PartlyRight(DraftingHashModel):
    """Its weights come from folders too, whose names are salts."""

    def __init__(self) -> None:
        super().__init__(4, 0.0)

    def draft_row(self, context: ForwardBatch, slot: int) -> list[int]:
        right = ACCEPTED[int(self.salt)]
        made = super().draft_row(context, slot)
        return made[:right] + [(token + 1) % VOCAB_SIZE for token in made[right:]]

    def read_weights(self, source: Any, **checks: bool) -> Callable[[], None]:
        salt = source if isinstance(source, dict) else {"salt": int(Path(source).name)}
        return super().read_weights(salt)


class Watch:
    """The windows of all launched steps, with the weights that were there."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.windows: list[list[int]] = [[]]
        engine.observe(self)

    def on_launch(self, plan: Plan) -> None:
        """Steps of prefill chunks alone have none."""
        if plan.decode_rows:
            self.windows[-1].append(plan.window)

    def update(self, salt: int, folder: Path | None = None) -> None:
        self.engine.update_weights({"salt": salt} if folder is None else folder / str(salt))
        self.windows.append([])


def guarded(depth: int, **values: Any) -> DynamicInferenceEngine:
    return hash_engine(depth, model=PartlyRight(), **{**SIZES, **values})


def run(
    engine: DynamicInferenceEngine, folder: Path | None = None, **asked: Any
) -> tuple[Watch, list[DynamicInferenceRequest]]:
    """Three requests under weights whose drafts are right, then wrong, then right in part."""
    watch = Watch(engine)
    params = greedy(LENGTH, return_log_probs=True, skip_prompt_log_probs=True, **asked)
    futures = [engine.add_request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    for salt, steps in ((NONE, 10), (TWO, SHRUNK_WITHIN + FIRST_PAUSE + TRIAL_TICKETS + 12)):
        for _ in range(steps):
            engine.step_modern()
        watch.update(salt, folder)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return watch, [future.result(0) for future in futures]


def check_tokens(requests: list[DynamicInferenceRequest]) -> None:
    """They are what each request gets alone, without drafts."""
    for prompt, request in zip(PROMPTS, requests, strict=True):
        salts = [(span.start, span.version) for span in request.weight_spans]
        expected = decode_with_salts(Ask(prompt=tuple(prompt), max_new=LENGTH), salts)
        assert (request.generated_tokens, request.finish_reason) == expected
        assert [span.version for span in request.weight_spans] == [RIGHT, NONE, TWO]


def check(depth: int) -> None:
    """Tokens, windows and counts of a run."""
    with guarded(depth) as engine:
        watch, requests = run(engine)
    check_tokens(requests)
    check_windows(watch, depth)
    check_counts(engine.counters, requests)


def check_windows(watch: Watch, depth: int) -> None:
    """By weights: all that rows want; fewer and fewer, with one trial; as many as are right."""
    right, none, two = watch.windows
    late = SHRUNK_WITHIN + depth + 1
    # The S before the first step has made no drafts.
    if set(right[1:]) != {5}:
        raise WindowsError(f"right drafts: {right}")
    if none[1] != 5 or 1 not in none[:late]:
        raise WindowsError(f"new weights: {none}")
    small = next(index for index, window in enumerate(none) if index and window < 5)
    trial = none.index(5, small) if 5 in none[small:] else len(none)
    if trial != small + FIRST_PAUSE or set(none[small + late : trial]) != {1}:
        raise WindowsError(f"the first trial comes {trial - small} tickets later: {none}")
    if none[trial : trial + TRIAL_TICKETS] != [5] * TRIAL_TICKETS or none[-1] != 1:
        raise WindowsError(f"the trial: {none}")
    # The pause has doubled; new weights end it.
    if two[1] != 5 or 3 not in two[:late] or min(two[1:-3]) < 3:
        raise WindowsError(f"drafts that are right in part: {two}")


def check_counts(counters: EngineCounters, requests: list[DynamicInferenceRequest]) -> None:
    """By place and version, in the engine's counters and in rollouts."""
    rollouts = [request.rollout() for request in requests]
    of_rollouts: dict[int, list[DraftCounts]] = {}
    for rollout in rollouts:
        for version, counts in rollout.drafts_by_version.items():
            of_rollouts.setdefault(version, []).append(counts)
    engines = counters.drafts_by_version
    if list(engines) != [RIGHT, NONE, TWO] or engines.keys() != of_rollouts.keys():
        raise WrongDraftsError(f"{list(engines)}, {list(of_rollouts)}")
    for version, (drafted, accepted) in engines.items():
        right = ACCEPTED[version]
        # What stands behind the end of a request counts as drafted and is nobody's token.
        cut = 3 if version == TWO else 0
        if any(a < d - cut or not d for d, a in zip(drafted[:right], accepted, strict=False)):
            raise WrongDraftsError(f"version {version}: {accepted} of {drafted}")
        if any(accepted[right:]) or not drafted[3]:
            raise WrongDraftsError(f"version {version}: {accepted} of {drafted}")
        for place in range(4):
            for name, total in (("drafted", drafted), ("accepted", accepted)):
                each = [getattr(one, name) for one in of_rollouts[version]]
                if sum(one[place] for one in each if place < len(one)) != total[place]:
                    raise WrongDraftsError(f"version {version}: {name} of {each}, {total}")
    assert sum(map(sum, (of.accepted for of in engines.values()))) == counters.tokens_accepted
    assert sum(map(sum, (of.drafted for of in engines.values()))) == counters.tokens_drafted
    for request in requests:
        check_rows(request)


def check_rows(request: DynamicInferenceRequest) -> None:
    """Each row's tokens are those that one step brought."""
    assert request.drafted_rows is not None
    tickets = [report.ticket for report in request.steps]
    for row in request.drafted_rows:
        found = [n for n, ticket in enumerate(tickets) if ticket == tickets[row.start]]
        if found != [*range(row.start, row.start + row.accepted + 1)]:
            raise WrongDraftsError(f"{row} came with tokens {found}")
    rows = request.drafted_rows
    assert sum(row.drafted for row in rows) == request.counters.drafted
    assert sum(row.accepted for row in rows) == request.counters.accepted
    assert rows[-1:] == [rows[len(rows) - 1]] and len(rows) == len(list(rows))


@pytest.mark.parametrize("depth", DEPTHS)
def test_windows_shrink_and_are_tried_again_and_drafts_are_counted(depth: int) -> None:
    check(depth)


def test_the_same_windows_when_a_run_with_new_weights_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for salt in ACCEPTED:
        (tmp_path / str(salt)).mkdir()
    with guarded(2, record=str(path), jitter_seed=3) as engine:
        watch, _ = run(engine, tmp_path)
    recorded = read_run(path)
    assert recorded.config.speculative_draft_cost == 0.1
    with guarded(2, jitter_seed=4) as engine:
        again = Watch(engine)
        result = replay(recorded, engine)
    assert result.exact and result.differences == ()
    windows = [*itertools.chain(*watch.windows)]
    assert [*itertools.chain(*again.windows)] == windows and {1, 3, 5} <= set(windows)


def test_a_restarted_rollout_has_the_drafts_of_its_new_weights_alone() -> None:
    with guarded(1) as engine:
        params = greedy(40, return_log_probs=True, skip_prompt_log_probs=True)
        future = engine.add_request(0, [1, 2], params)
        for _ in range(5):
            engine.step_modern()
        assert engine.get_request(0).drafted_rows
        engine.update_weights({"salt": TWO}, partial_rollouts="restart")
        while engine.has_unfinished_requests():
            engine.step_modern()
        rollout = future.result(0).rollout()
        assert set(rollout.drafts_by_version) == {1} and rollout.drafted_rows[0].start == 1
        engine.reset()
        assert engine.counters.drafts_by_version == {}
        engine.generate([[3]], greedy(20))
        assert set(engine.counters.drafts_by_version) == {1}


def test_only_the_last_versions_are_counted() -> None:
    counters = EngineCounters()
    for version in range(1, 9):
        counters.verified([(1, 2, 3)] * version, [4] * version)
        counters.weights_changed(version)
        counters.weights_changed(version)
    counters.weights_changed(99)
    assert counters.drafts_by_version == {
        version: DraftCounts((version + 1,) * 3, (version + 1, version + 1, 0))
        for version in (5, 6, 7)
    }
    assert len(counters.weight_starts) == KEPT_VERSIONS
    shown = counters.to_dict(first_version=10)
    assert shown["drafts_by_version"]["17"] == {"drafted": [8, 8, 8], "accepted": [8, 8, 0]}


def test_rows_that_cannot_be_are_refused() -> None:
    with guarded(0) as engine:
        (request,) = engine.generate([[1]], greedy(20, return_log_probs=True))
    rollout = request.rollout()
    values = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    again = DynamicInferenceRequest.deserialize(request.serialize())
    assert again.rollout().drafted_rows == rollout.drafted_rows != ()
    for rows in (((0, 4, 20),), ((0, 1, 2),), ((5, 4, 4), (9, 4, 0)), ((-1, 1, 0),)):
        with pytest.raises(IntegrityError, match="tokens have DraftedRow"):
            Rollout(**{**values, "drafted_rows": tuple(DraftedRow(*row) for row in rows)})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"speculative_draft_cost": 0.01}, "speculative_draft_cost=0.01 must be from 0.05 to 1"),
        ({"speculative_draft_cost": True}, "speculative_draft_cost=True must be from"),
        ({"speculative_draft_cost": "x"}, "speculative_draft_cost='x' must be from"),
        ({"speculative_draft_cost": 0.1, "adaptive_speculation": False}, "add that"),
        ({"speculative_draft_cost": 0.1, "testing": {"speculative_step_costs": [
            (1, w, 1.0) for w in (1, 2, 3)]}}, "contradict"),
    ],
)  # fmt: skip
def test_wrong_costs_of_a_draft_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**{"adaptive_speculation": True, "num_speculative_tokens": 2, **values})


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``old`` in the source of a function of ``target`` is ``new``."""

    name: str
    target: Any
    function: str
    old: str
    new: str

    @contextmanager
    def active(self) -> Iterator[None]:
        original = getattr(self.target, self.function)
        original = original.fget if isinstance(original, property) else original
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, source.count(self.old)
        made: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), original.__globals__, made)
        with patch.object(self.target, self.function, made[self.function]):
            yield


FAULTS = (
    Fault("a draft is counted one place on", metrics, "count_drafts",
          "counts[place] += 1", "counts[min(place + 1, drafts - 1)] += 1"),
    Fault("a rollout's drafts one place on", drafts, "counts_of",
          "(accepted > place)", "(accepted >= place)"),
    Fault("a row one token on", OutputProcessor, "verified",
          "len(request.generated_tokens),", "len(request.generated_tokens) + 1,"),
    Fault("the engine's version one back", DecodeLoop, "adopt_weights",
          "weights_changed(self._outputs.weight_version)",
          "weights_changed(self._outputs.weight_version - 1)"),
    Fault("a rollout's version of two tokens before", drafts, "counts_by_version",
          "versions[row.start]", "versions[max(row.start - 2, 0)]"),
    Fault("larger windows are never tried again", DraftControl, "choose",
          "is None:\n        self._trial, self._has_faded = number + self._pause",
          "is None:\n        self._trial, self._has_faded = number + 10**9"),
    Fault("windows never shrink", DraftControl, "_best",
          "self._last = best if", "self._last = largest if"),
    Fault("nothing begins anew with new weights", Scheduler, "weights_changed",
          "self._drafts.begin_anew()", "pass"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(fault: Fault) -> None:
    with fault.active(), pytest.raises((WrongDraftsError, WindowsError, IntegrityError)):
        check(1)

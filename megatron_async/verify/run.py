"""Runs scenarios on engines and compares them with serial decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_async.request.request import DynamicInferenceRequest, FinishReason, Status, WeightSpan
from megatron_async.verify.decode import DepthReport, Outcome, Report, difference
from megatron_async.verify.reference import Prepared, prepare_all, scenario_config
from megatron_async.verify.scenarios import (
    ONLY_WHEN_OVERLAPPED,
    Action,
    Ask,
    Event,
    Scenario,
    W,
    Witness,
)
from megatron_async.verify.workload import crossed_blocks

if TYPE_CHECKING:
    from megatron_async.config.engine_config import EngineConfig
    from megatron_async.engine.engine import DynamicInferenceEngine

STANDSTILL_STEPS = 16
"""A run is given up after this many steps that launch and take nothing."""


class Run:
    """One run of a scenario at one depth: steps the engine, plays the script, sees witnesses."""

    def __init__(self, engine: DynamicInferenceEngine, prepared: Prepared) -> None:
        self.records: dict[str, DynamicInferenceRequest] = {}
        self.seconds = 0.0
        self._engine = engine
        self._prepared = prepared
        self._scenario = prepared.scenario
        self._ids = {ask.name: number for number, ask in enumerate(self._scenario.asks)}
        self._names = list(self._ids)
        self._script = list(self._scenario.events)
        self._refused: list[Event] = []
        self._started: list[str] = []
        self._cached: Counter[str] = Counter()
        self._spans: dict[str, list[WeightSpan]] = {}
        self._seen: Counter[Witness] = Counter()
        self._scripted_evictions = 0
        self._scripted_barriers = 0

    # --- the run ------------------------------------------------------------------------------

    def play(self) -> None:
        """Run to the end, or until nothing moves any more."""
        started = time.perf_counter()
        self._engine.reset()
        later = self._scenario.targets(Action.ADD)
        for ask in self._scenario.asks:
            if ask.name not in later:
                self._add(ask)
        still = 0
        while self._engine.has_unfinished_requests() and still < STANDSTILL_STEPS:
            before = self._progress
            self._step()
            # In the script's order: with drafts one step may bring the tokens of several events.
            while self._script and self._committed(self._script[0].request) >= (
                self._script[0].tokens
            ):
                self._act(self._script.pop(0))
            still = still + 1 if self._progress == before else 0
        self.seconds = time.perf_counter() - started

    @property
    def _progress(self) -> tuple[int, int, int]:
        counters = self._engine.counters
        return counters.steps_launched, counters.steps_committed, len(self._script)

    def _committed(self, name: str) -> int:
        return self.records[name].generated_length if name in self.records else 0

    def _goes_on(self, name: str) -> bool:
        return name in self.records and self.records[name].finish_reason is None

    def _step(self) -> None:
        for output in self._engine.step_modern()["tokens"]:
            name = self._names[output.request_id]
            if output.token_id is not None and name not in self._started:
                self._started.append(name)
                counters = self.records[name].counters
                self._cached[name] = 0 if counters.evictions else counters.cached
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._seen[Witness.FINISH] += any(map(self._goes_on, self.records))

    def _add(self, ask: Ask) -> None:
        engine, number, work = self._engine, self._ids[ask.name], self._prepared.works[ask.name]
        engine.add_request(number, work.prompt, work.params, priority=ask.priority)
        self.records[ask.name] = engine.get_request(number)
        self._spans[ask.name] = [WeightSpan(0, engine.weight_version)]

    def _act(self, event: Event) -> None:
        engine = self._engine
        number = self._ids.get(event.target, -1)
        done = True
        match event.action:
            case Action.ADD:
                self._seen[Witness.ADD] += any(map(self._goes_on, self._started))
                self._add(self._scenario.asks[number])
            case Action.PAUSE:
                done = engine.pause_request(number)
            case Action.RESUME:
                done = engine.resume_request(number)
            case Action.EVICT:
                done = engine.evict_request(number)
                self._scripted_evictions += done
            case Action.ABORT:
                self._seen[_stage(self.records[event.target])] += 1
                done = engine.abort_request(number)
            case Action.SUSPEND:
                engine.suspend()
                self._scripted_barriers += 1
            case Action.CONTINUE:
                self._stay_suspended()
                engine.resume()
            case Action.NEW_WEIGHTS:
                self._update_weights()
        if not done:
            self._refused.append(event)

    def _stay_suspended(self) -> None:
        launched = self._engine.counters.steps_launched
        for _ in range(2):
            self._step()
        self._seen[Witness.SUSPEND] += launched == self._engine.counters.steps_launched

    def _update_weights(self) -> None:
        """The same weights again, so that the tokens stay what they are."""
        engine = self._engine
        evictions = engine.counters.evictions
        model = engine.model.weights_owner
        group = engine.model.group
        path = None if group is None else group.model_path
        version = engine.update_weights(model.state_dict() if path is None else path)
        self._scripted_evictions += engine.counters.evictions - evictions
        self._scripted_barriers += 1
        for name in filter(self._goes_on, self.records):
            self._spans[name].append(WeightSpan(self._committed(name), version))

    # --- what came of it ----------------------------------------------------------------------

    def report(self) -> DepthReport:
        """Compare with the reference and look for the witnesses."""
        seen, depth, expected = self.witnesses(), self._engine.depth, self._scenario.witnesses
        lines = [f"{self._scenario.name}, depth {depth}, {line}" for line in self._differences()]
        counts = {w.name.lower(): seen[w] for w in Witness if w in expected or seen[w]}
        found = lines, counts, self._missing(seen)
        return DepthReport(depth, *found, self._engine.counters, self.seconds)

    def _differences(self) -> list[str]:
        found = {name: self._difference(name) for name in self._prepared.reference}
        return [f"request {name}: {line}" for name, line in found.items() if line is not None]

    def _difference(self, name: str) -> str | None:
        mine, reference = self.records.get(name), self._prepared.reference[name]
        if mine is None:
            return "was never added"
        aborted = name in self._scenario.targets(Action.ABORT)
        if mine.finish_reason is FinishReason.ABORT and aborted:
            reference = Outcome(reference.tokens[: mine.generated_length], FinishReason.ABORT)
        line = difference(Outcome.of(mine), reference, "decoded alone")
        return self._wrong_spans(name, mine) if line is None else line

    def _wrong_spans(self, name: str, mine: DynamicInferenceRequest) -> str | None:
        """Each token belongs to the weights that were there when it was sampled."""
        last = {span.start: span for span in self._spans[name]}
        expected = [span for span in last.values() if span.start < mine.generated_length]
        if mine.weight_spans == expected:
            return None
        return f"weight_spans are {mine.weight_spans}, not {expected}"

    def _missing(self, seen: Counter[Witness]) -> list[str]:
        lines = [f"the script's '{event}' never came" for event in self._script]
        lines += [f"the script's '{event}' came too late" for event in self._refused]
        cannot = frozenset() if self._engine.depth else ONLY_WHEN_OVERLAPPED
        expected = self._scenario.witnesses - cannot
        lines += [w.value for w in Witness if w in expected and not seen[w]]
        return [f"{self._scenario.name}: {line}" for line in lines]

    def witnesses(self) -> Counter[Witness]:
        """How often each thing happened."""
        counters, sizes = self._engine.counters, self._scenario.sizes
        records, cached = self.records.values(), self._cached
        aborted = [r for r in records if r.finish_reason is FinishReason.ABORT]
        stopped = [r for r in records if r.finish_reason is FinishReason.STOP]
        prefilled = [len(self.records[n].prompt_tokens) - cached[n] for n in self._started]
        evicted = [(n, r.counters) for n, r in self.records.items() if r.counters.evictions]
        seen = {
            W.PAUSE: counters.pauses,
            W.EVICT: counters.evictions,
            W.ABORT: len(aborted),
            W.BOUNDARY: sum(crossed_blocks(r, sizes.block) for r in records),
            W.PREFIX: cached.total(),
            W.STOP: len(stopped),
            W.LENGTH: sum(r.finish_reason is FinishReason.LENGTH for r in records),
            W.DISCARD: sum(r.counters.discarded for r in stopped),
            W.ABORT_IN_FLIGHT: sum(r.counters.discarded > 0 for r in aborted),
            W.CHUNKS: sum(tokens > sizes.chunk for tokens in prefilled),
            W.WAIT: counters.steps_with_waiting,
            W.STALL: counters.stalls,
            W.PRESSURE: max(counters.evictions - self._scripted_evictions, 0),
            W.RECALL: sum(of.cached - cached[name] for name, of in evicted),
            W.PRIORITY: self._overtakings(),
            W.WEIGHTS: sum(len(r.weight_spans) > 1 for r in records),
            W.LOGGED: counters.barriers - self._scripted_barriers,
        }
        return Counter({**self._seen, **seen})

    def _overtakings(self) -> int:
        """Pairs of which the later and more urgent one had its first token first."""
        priority = {ask.name: ask.priority for ask in self._scenario.asks}
        order = {name: place for place, name in enumerate(self._started)}
        added = list(self.records)
        return sum(
            priority[late] < priority[early] and order[late] < order.get(early, len(order))
            for place, late in enumerate(added)
            if late in order
            for early in added[:place]
        )


def _stage(record: DynamicInferenceRequest) -> Witness:
    """What aborting a request shows, by where it stands."""
    if record.status is Status.WAITING_IN_QUEUE:
        return Witness.ABORT_WAITING
    if record.status is Status.ACTIVE_BUT_NOT_GENERATING_TOKENS:
        return Witness.ABORT_PAUSED
    return Witness.ABORT if record.counters.launched else Witness.ABORT_PREFILLING


def run_scenarios(
    engine: DynamicInferenceEngine,
    scenarios: Sequence[Scenario],
    configs: Sequence[EngineConfig],
    seed: int,
    on_run: Callable[[], object] = lambda: None,
) -> list[Report]:
    """Run each scenario under each configuration, one of each depth, over the engine's weights.

    Args:
        seed: of the prompts and of the sampled requests.
        on_run: called after every run.
    """
    depths: dict[str, list[DepthReport]] = {scenario.name: [] for scenario in scenarios}
    prepared = prepare_all(engine, scenarios, configs[0], seed)
    for sizes in dict.fromkeys(scenario.sizes for scenario in scenarios):
        for config in configs:
            with engine.with_config(scenario_config(config, sizes)) as runner:
                for each in prepared:
                    if each.scenario.sizes == sizes:
                        run = Run(runner, each)
                        run.play()
                        depths[each.scenario.name].append(run.report())
                        on_run()
    return [Report(s.name, s.description, len(s.asks), depths[s.name]) for s in scenarios]

"""A recorded run, once more: exactly at the recorded depth, with equal tokens at any other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_async.codec import from_plain
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.commands import (
    AddRequest,
    Command,
    Reset,
    ResetPrefixCache,
    Resume,
    Suspend,
    UpdateSamplingParams,
    UpdateWeights,
)
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import Applied, Ending, Entry, Recorder, Run
from megatron_async.errors import ConfigError


class Replay(NamedTuple):
    """What a replay gave. ``exact`` says that it was at the recorded depth and with the recorded
    drafts, where each command, plan and ending must be the recorded one; ``differences`` are in
    words, none for a faithful replay."""

    exact: bool
    endings: tuple[Ending, ...]
    differences: tuple[str, ...]


def replay(run: Run, engine: DynamicInferenceEngine) -> Replay:
    """Give ``engine``, which has served no request, the commands of ``run`` at their points.

    At another depth than the recorded one, or with other drafts, a command comes when its ticket
    does, or when nothing else can go on; then all requests must get their tokens that were not
    aborted. Those that got new weights or new sampling parameters while they ran are not compared:
    the change comes behind another of their tokens. A command to a request that had ended in the
    recorded run is left out, and what a command to the whole engine did not concern has ended
    before it here too.

    Raises:
        ConfigError: the run got weights that are not in a file, or turns top-k or top-p on in a
            way that several GPUs cannot repeat.
        RequestError: a request of the run is none that this engine could have got.
    """
    engine.requests.check_replay(applied.command for applied in run.applied)
    exact = _pace(engine.config) == _pace(run.config)
    entries: list[Entry] = []
    engine.record(Recorder(lambda entry: entries.append(json.loads(json.dumps(entry)))))
    for applied in run.applied:
        if not (exact or applied.has_effect):
            continue
        while not _is_reached(engine, applied, exact=exact):
            if engine.loop.is_idle():  # so are all steps until the command
                engine.loop.steps_run = applied.step
            else:
                engine.step_modern()
        if isinstance(applied.command, AddRequest) and not exact:
            _free_id(engine, applied.command.request_id)
        if isinstance(applied.command, Reset | UpdateWeights) and not exact:
            _let_end(engine, run.endings[: applied.endings], entries)
        _apply(engine, applied.command)
    if not exact:
        _let_all_go_on(engine)
    _run_dry(engine)
    endings = tuple(from_plain(e["finished"], Ending) for e in entries if "finished" in e)
    differences = _parted(run.entries, entries) if exact else _other_tokens(run, endings)
    return Replay(exact, endings, tuple(differences))


def _pace(config: EngineConfig) -> tuple[Any, ...]:
    """What decides which step brings which token."""
    guided = config.guided_rows, config.guided_automata_bytes
    pace = config.effective_depth, config.pipeline_micro_batches or 1, *guided
    if not config.num_speculative_tokens:
        return pace
    costs = config.testing.speculative_step_costs if config.adaptive_speculation else None
    drafts = config.num_speculative_tokens, config.speculative_method, config.draft_model
    return (*pace, *drafts, config.adaptive_speculation, config.speculative_draft_cost, costs)


def _is_reached(engine: DynamicInferenceEngine, applied: Applied, *, exact: bool) -> bool:
    if exact:
        return engine.loop.steps_run >= applied.step
    return engine.scheduler.next_ticket >= applied.ticket or engine.loop.is_idle()


def _free_id(engine: DynamicInferenceEngine, request_id: int) -> None:
    """The run used an id again; here the request that had it may be later."""
    while engine.outputs.key_of(request_id) is not None:
        if engine.loop.is_idle():
            _let_all_go_on(engine)
        engine.step_modern()


def _let_end(
    engine: DynamicInferenceEngine, recorded: tuple[Ending, ...], entries: list[Entry]
) -> None:
    """Step until those have ended that had ended here in the recorded run."""
    wanted = Counter(ending.request_id for ending in recorded)
    while True:
        ended = Counter(e["finished"]["request_id"] for e in entries if "finished" in e)
        if wanted <= ended or not engine.has_unfinished_requests():
            return
        if engine.loop.is_idle():
            _let_all_go_on(engine)
        engine.step_modern()


def _let_all_go_on(engine: DynamicInferenceEngine) -> None:
    """A pause may have met a request that had ended when the run was recorded."""
    engine.resume()
    for request_id in list(engine.outputs.keys):
        engine.resume_request(request_id)


def _run_dry(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests() and not engine.loop.is_idle():
        engine.step_modern()


def _apply(engine: DynamicInferenceEngine, command: Command) -> None:
    whole: dict[type, Callable[[], None]] = {
        Suspend: engine.suspend,
        Resume: engine.resume,
        Reset: engine.reset,
        ResetPrefixCache: engine.reset_prefix_cache,
    }
    if isinstance(command, UpdateWeights):
        if command.source is None:
            raise ConfigError(
                "the run got new weights from memory, which its file does not hold; record a run "
                "that reads them from a file"
            )
        engine.update_weights(
            command.source,
            recompute_kv_cache=command.recompute_kv_cache,
            partial_rollouts="restart" if command.restart else "continue",
        )
    elif type(command) in whole:
        whole[type(command)]()
    else:
        engine.requests.replay(command)


def _parted(recorded: tuple[Entry, ...], replayed: list[Entry]) -> list[str]:
    """Where two runs at one depth part; the recorded one may have been cut short."""
    for number, (then, now) in enumerate(zip(recorded, replayed, strict=False)):
        if then != now:
            return [f"entry {number}: recorded {json.dumps(then)}, replayed {json.dumps(now)}"]
    if len(replayed) < len(recorded):
        return [f"entry {len(replayed)}: recorded {json.dumps(recorded[len(replayed)])}, no more"]
    return []


def _other_tokens(run: Run, replayed: tuple[Ending, ...]) -> list[str]:
    """Requests that ended by themselves and got other tokens. An id may have been used again."""
    differences = []
    again: dict[int, list[Ending]] = {}
    for ending in replayed:
        again.setdefault(ending.request_id, []).append(ending)
    changed = _changed_on_their_way(run)
    for number, then in enumerate(run.endings):
        endings = again.get(then.request_id, [])
        now = endings.pop(0) if endings else None
        if then.reason != "abort" and then != now and number not in changed:
            differences.append(f"request {then.request_id}: recorded {then}, replayed {now}")
    return differences


def _changed_on_their_way(run: Run) -> set[int]:
    """The endings of requests that had not ended when a command changed which tokens come."""
    found: set[int] = set()
    live: dict[int, int] = {}  # keys by request id
    changed: set[int] = set()
    commands = list(reversed(run.applied))
    for number, ending in enumerate(run.endings):
        while commands and commands[-1].endings <= number:
            command = commands.pop().command
            if isinstance(command, AddRequest):
                live[command.request_id] = command.key
            elif isinstance(command, UpdateWeights):
                changed.update(live.values())
            elif isinstance(command, UpdateSamplingParams) and (
                command.changes.keys() - {"num_speculative_tokens"}
            ):
                changed.add(command.key)
        if live.pop(ending.request_id, None) in changed:
            found.add(number)
    return found

"""What rank 0 tells the others, as frozen data; JSON on its way, and bytes behind it.

The calls that the loop makes on its runner, what an engine is built from, and new weights. Nothing
that arrives is executed, and nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_async.step.extras import Extras, SlotExtras
from megatron_async.step.plan import (
    Admission,
    BlockAssignment,
    Plan,
    PrefillChunk,
    RowMap,
    SlotUpdate,
    StateCopy,
)


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load this rank's share of a model. ``config`` are the fields of an ``EngineConfig``."""

    path: str
    config: dict[str, Any]
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BuildModel:
    """Make a model with random weights: the fields of a ``ModelConfig``, and torch's dtype."""

    model: dict[str, Any]
    dtype: str
    seed: int
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BuildEngine:
    """Make the runner of engine ``engine`` over the model, with the sizes that rank 0 has."""

    engine: int
    config: dict[str, Any]
    slot_count: int
    enable_chunked_prefill: bool
    state_snapshot_count: int | None
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Launch:
    """``ModelRunner.launch``."""

    engine: int
    plan: Plan
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Sample:
    """``ModelRunner.sample_until``."""

    engine: int
    number: int
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed-token masks of the pending ticket, ``rows`` of them: int32 words of ``masked`` and
    then of the masks that count are the bytes."""

    engine: int
    data: bytes
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class PoisonFreed:
    """``ModelRunner.poison_freed``."""

    engine: int
    blocks: list[int]
    slots: list[int]
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Restart:
    """``ModelRunner.restart``."""

    engine: int
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Release:
    """``ModelRunner.release``; nothing is in flight."""

    engine: int
    is_answered: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Read and check new weights."""

    source: str
    allow_non_finite_weights: bool
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AwaitTensors:
    """Check what is said of the new weights that rank 0 will send whole: name, dtype and shape of
    each. ``all_parameters``: none may be missing."""

    tensors: list[list[Any]]
    all_parameters: bool
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ReplaceWeights:
    """Take the weights that were read, or are sent now; nothing is in flight."""

    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back, of the KV caches of engine ``engine`` and of the weights, whose values are
    kept in the host's memory or not; nothing is in flight."""

    engine: int
    keep_weights: bool
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take memory back: a tag of ``engine/sleep_mode.py``."""

    engine: int
    tag: str
    is_answered: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""

    is_answered: ClassVar[bool] = False


Message = (
    LoadModel
    | BuildModel
    | BuildEngine
    | Launch
    | Sample
    | Masks
    | PoisonFreed
    | Restart
    | Release
    | ReadWeights
    | AwaitTensors
    | ReplaceWeights
    | Sleep
    | WakeUp
    | Stop
)

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}
SEPARATOR = b"\0"


def encode(message: Message) -> bytes:
    """A message as bytes. Named tuples become lists."""
    if type(message) is Launch:
        plan = message.plan
        rows = plan.rows
        parts = (rows.slots, rows.epochs, rows.keys, rows.windows)
        return _dump(["Launch", message.engine, parts, plan._replace(rows=None)])  # type: ignore[arg-type]
    if type(message) is Masks:
        return _dump(["Masks", message.engine]) + SEPARATOR + message.data
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    return _dump([type(message).__name__, *values])


def _dump(values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: it is no message.
    """
    text, _, rest = data.partition(SEPARATOR)
    name, *values = json.loads(text)
    if name == "Launch":
        engine, rows, plan = values
        return Launch(engine, _plan(rows, plan))
    if name == "Masks":
        return Masks(values[0], rest)
    if name not in KINDS:
        raise ValueError(f"{name!r} is not a message")
    message: Message = KINDS[name](*values)
    return message


def _plan(rows: list[list[int]], values: list[Any]) -> Plan:
    given: dict[str, Any] = dict(zip(Plan._fields, values, strict=True))
    given |= {
        "rows": RowMap(*map(tuple, rows)),
        "assignments": tuple(BlockAssignment(*each) for each in given["assignments"]),
        "prefills": tuple(_chunk(each) for each in given["prefills"]),
        "admissions": tuple(_admission(*each) for each in given["admissions"]),
        "control": tuple(_update(*each) for each in given["control"]),
        "restores": tuple(StateCopy(*each) for each in given["restores"]),
        "snapshots": tuple(StateCopy(*each) for each in given["snapshots"]),
    }
    return Plan(**given)


def _chunk(values: Any) -> PrefillChunk:
    chunk = PrefillChunk(*values)
    return chunk._replace(tokens=tuple(chunk.tokens), targets=tuple(chunk.targets))


def _values(values: list[Any]) -> tuple[Any, ...]:
    """Return the values of slot fields."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _admission(slot: int, values: list[Any], extras: Any, tokens: list[int]) -> Admission:
    return Admission(slot, _values(values), extras and _slot_extras(*extras), tuple(tokens))


def _slot_extras(values: list[Any], prompt_length: int, tokens: list[int]) -> SlotExtras:
    extras = Extras(*_values(values))
    extras = extras._replace(
        bias=tuple((token, bias) for token, bias in extras.bias),
        bad_words=tuple(map(tuple, extras.bad_words)),
    )
    return SlotExtras(extras, prompt_length, tuple(tokens))


def _update(slot: int, ends: bool, values: list[Any] | None) -> SlotUpdate:
    return SlotUpdate(slot, ends, None if values is None else _values(values))

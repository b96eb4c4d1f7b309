"""The state that a slot has on the device, declared once.

Allocation, reset, the words of packets, admission and control follow from the table. A new
per-request parameter is a line here, one in ``SamplingParams``, and one where it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

LEAST_TOP_P = 1e-37
"""Less would be 0 as float32, which is off; this too keeps the most likely token alone."""

Value = int | float | tuple[int, ...]
Values = tuple[Value, ...]


class Source(Enum):
    """Where a field's value comes from."""

    DEVICE = "device"
    """The device alone writes it."""
    ADMISSION = "admission"
    """The scheduler brings it when it admits the request."""
    REQUEST = "request"
    """The request's sampling parameters bring it: at admission, and by control when they change."""


class SlotField(NamedTuple):
    """One tensor ``[slots, *shape]`` of the device-resident state.

    Args:
        dtype: torch's name. An int64 travels as two words, anything else as one.
        default: of slots that hold no request; the null slot keeps it.
        columns: elements of a slot: a number, or the name of one of the context's sizes.
        of: a REQUEST field's value for checked sampling parameters; None takes the parameter of
            the same name.
    """

    name: str
    dtype: str
    source: Source
    default: float = 0
    columns: int | str | None = None
    of: Callable[[SamplingParams], Value] | None = None

    @property
    def words(self) -> int:
        """int32 words that its value takes in a packet."""
        elements = self.columns if isinstance(self.columns, int) else 1
        return elements * (2 if self.dtype == "int64" else 1)


SLOT_FIELDS: tuple[SlotField, ...] = (
    SlotField("last_token", "int64", Source.DEVICE),
    SlotField("finished", "bool", Source.DEVICE, default=True),
    SlotField("block_table", "int64", Source.DEVICE, NULL_BLOCK, "max_blocks_per_request"),
    SlotField("drafts", "int64", Source.DEVICE, 0, "num_drafts"),
    SlotField("computed_from", "int64", Source.DEVICE),
    SlotField("kv_length", "int64", Source.ADMISSION),
    SlotField("max_total", "int64", Source.ADMISSION),
    SlotField("long_rotation", "int32", Source.ADMISSION),
    SlotField("stop_ids", "int64", Source.ADMISSION, -1, MAX_STOP_TOKEN_IDS),
    SlotField(
        "inverse_temperature",
        "float32",
        Source.REQUEST,
        of=lambda params: 0.0 if params.greedy else 1.0 / params.temperature,
    ),
    SlotField("top_k", "int32", Source.REQUEST, of=lambda params: min(params.top_k, 2**31 - 1)),
    SlotField(
        "top_p",
        "float32",
        Source.REQUEST,
        of=lambda params: max(params.top_p, LEAST_TOP_P) if params.top_p else 0.0,
    ),
    SlotField("seed", "int64", Source.REQUEST),
)


def fields_from(*sources: Source) -> tuple[SlotField, ...]:
    """The fields of these sources, in the table's order: that of their values and words."""
    return tuple([field for field in SLOT_FIELDS if field.source in sources])


def request_values(params: SamplingParams, seed: int) -> Values:
    """The values of the REQUEST fields for checked sampling parameters and the request's seed."""
    values: list[Value] = []
    for field in SLOT_FIELDS:
        if field.source is not Source.REQUEST:
            continue
        if field.name == "seed":
            values.append(seed)
        else:
            values.append(getattr(params, field.name) if field.of is None else field.of(params))
    return tuple(values)


def seed_of(values: Values) -> int:
    """The seed among the values of the REQUEST fields."""
    names = [field.name for field in fields_from(Source.REQUEST)]
    return int(values[names.index("seed")])  # type: ignore[arg-type]


def words_of(fields: Sequence[SlotField], values: Values) -> list[int]:
    """int32 words of the values of ``fields``. Floats travel as their bits, int64 as two halves,
    the low one first; a tuple that is too short is filled up with the default."""
    words: list[int] = []
    for field, value in zip(fields, values, strict=True):
        elements: Any = value if isinstance(value, tuple) else (value,)
        count = field.columns if isinstance(field.columns, int) else 1
        elements += (field.default,) * (count - len(elements))
        code = {"float32": "f", "int64": "q"}.get(field.dtype, "i")
        packed = struct.pack(f"<{count}{code}", *elements)
        words += struct.unpack(f"<{field.words}i", packed)
    return words


def word_count(fields: Sequence[SlotField]) -> int:
    """How many words the values of ``fields`` take."""
    return sum(field.words for field in fields)

"""The packets of a step: what the host tells the device, as vectors of int32.

The front part of a step packet holds a record for each row and is all that a decode step copies;
the rest holds admissions, prefill chunks, block assignments and tokens of other steps. There all
sections are padded to a fixed length, with entries that go to the null slot, so that one graph
reads them all. A control packet holds what S must know before it samples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.step.plan import Plan, SlotUpdate
from megatron_async.step.slot_fields import Source, fields_from, word_count, words_of

# Columns of a row record. ``ROW_SAMPLES`` counts the positions that S samples: none, or one and the
# row's drafts.
ROW_SLOT, ROW_SAMPLES, ROW_ASSIGNED_SLOT, ROW_ASSIGNED_COLUMN, ROW_ASSIGNED_BLOCK = range(5)
ROW_QUERY_LENGTH, ROW_LAST_TOKEN = 5, 6
ROW_WIDTH = 8

# Columns of an admission and of a control record; the words of the slot fields follow.
ADMIT_SLOT = 0
ADMIT_HEAD = 1
CONTROL_SLOT, CONTROL_ENDS, CONTROL_HAS_VALUES = range(3)
CONTROL_HEAD = 3

# Columns of a prefill chunk: ``CHUNK_LENGTH`` tokens of the forward from ``CHUNK_FIRST`` on are the
# positions of the slot from ``CHUNK_START`` on.
CHUNK_SLOT, CHUNK_FIRST, CHUNK_LENGTH, CHUNK_START = range(4)
CHUNK_WIDTH = 4
ASSIGNMENT_WIDTH = 3

# Columns of a token. Position -1 means "the device knows": the slot's last token at its length;
# -1 - i is its draft i - 1, i positions further.
TOKEN_ID, TOKEN_SLOT, TOKEN_POSITION = range(3)
TOKEN_WIDTH = 3

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """Offsets, in int32 elements, of the sections of a step packet; sizes of a control packet.

    ``window`` is the most tokens that a decode row may bring: 1 without drafts. ``control_size``
    holds a control record for each slot.
    """

    max_rows: int
    max_tokens: int
    max_assignments: int
    slot_count: int
    window: int = 1

    admit_width: int = field(init=False)
    control_width: int = field(init=False)
    control_size: int = field(init=False)
    admissions: int = field(init=False)
    chunks: int = field(init=False)
    assignments: int = field(init=False)
    tokens: int = field(init=False)
    width: int = field(init=False)

    def __post_init__(self) -> None:
        admit_width = ADMIT_HEAD + word_count(fields_from(Source.ADMISSION, Source.REQUEST))
        control_width = CONTROL_HEAD + word_count(fields_from(Source.REQUEST))
        admissions = self.max_rows * ROW_WIDTH
        chunks = admissions + self.max_rows * admit_width
        assignments = chunks + self.max_rows * CHUNK_WIDTH
        tokens = assignments + self.max_assignments * ASSIGNMENT_WIDTH
        for name, value in (
            ("admit_width", admit_width),
            ("control_width", control_width),
            ("control_size", self.slot_count * control_width),
            ("admissions", admissions),
            ("chunks", chunks),
            ("assignments", assignments),
            ("tokens", tokens),
            ("width", tokens + self.max_tokens * TOKEN_WIDTH),
        ):
            object.__setattr__(self, name, value)


CPU_ROW_MULTIPLE = 8
"""Rows and tokens of a forward on the CPU are padded to a multiple of this: the matrix products
then give a row the same bits whatever the other rows are."""


def padded_tokens(count: int) -> int:
    """Tokens of a forward on the CPU that has to compute ``count``."""
    return -(-count // CPU_ROW_MULTIPLE) * CPU_ROW_MULTIPLE


class StepShape(NamedTuple):
    """Rows and tokens of a forward, padding included, and the window of its decode rows: all that
    distinguishes its graph. Row r has pending logits from ``r * window`` on."""

    rows: int
    tokens: int
    window: int = 1


def write_packet(
    packet: Ints, layout: PacketLayout, plan: Plan, rows: int, tokens: int | None, null_slot: int
) -> None:
    """Write ``plan`` into ``packet`` [layout.width] int32, padded to ``rows`` rows.

    Args:
        tokens: padded tokens of a forward that takes more than the row records, of which it has
            one for each token of a decode row; None for a plain decode step, which brings at most
            a block assignment for each padded row.
    """
    records = packet[: rows * ROW_WIDTH].reshape(rows, ROW_WIDTH)
    count, decode_rows = len(plan.rows.slots), plan.decode_rows
    records[:] = _empty_row(null_slot)
    records[:count, ROW_SLOT] = plan.rows.slots
    records[:decode_rows, ROW_SAMPLES] = plan.rows.windows[:decode_rows] or 1
    if tokens is not None:
        _write_sections(packet, layout, plan, records, tokens, null_slot)
    elif plan.assignments:
        assigned = records[: len(plan.assignments)]
        assigned[:, ROW_ASSIGNED_SLOT : ROW_ASSIGNED_BLOCK + 1] = plan.assignments


def write_control(
    packet: Ints, layout: PacketLayout, updates: tuple[SlotUpdate, ...], null_slot: int
) -> None:
    """Write ``updates``, at most one for each slot, into ``packet`` [layout.control_size] int32."""
    fields = fields_from(Source.REQUEST)
    records = packet.reshape(layout.slot_count, layout.control_width)
    records[:] = 0
    records[:, CONTROL_SLOT] = null_slot
    for record, (slot, ends, values) in zip(records, updates, strict=False):
        record[:CONTROL_HEAD] = (slot, ends, values is not None)
        if values is not None:
            record[CONTROL_HEAD:] = words_of(fields, values)


@functools.cache
def _empty_row(null_slot: int) -> Ints:
    """The record of a row that holds no request and brings no assignment."""
    row = np.zeros(ROW_WIDTH, dtype=np.int32)
    row[[ROW_SLOT, ROW_ASSIGNED_SLOT]] = null_slot
    row[ROW_ASSIGNED_BLOCK] = NULL_BLOCK
    row.flags.writeable = False
    return row


def _write_sections(
    packet: Ints, layout: PacketLayout, plan: Plan, records: Ints, size: int, null_slot: int
) -> None:
    rows, decode_rows, at = len(records), plan.decode_rows, plan.decode_tokens
    windows = records[:decode_rows, ROW_SAMPLES]
    firsts = np.cumsum(windows) - windows
    records[:decode_rows, ROW_QUERY_LENGTH] = 1
    records[:decode_rows, ROW_LAST_TOKEN] = firsts

    tokens = packet[layout.tokens :][: size * TOKEN_WIDTH].reshape(-1, TOKEN_WIDTH)
    tokens[:] = (-1, null_slot, -1)
    tokens[:at, TOKEN_SLOT] = np.repeat(plan.rows.slots[:decode_rows], windows)
    tokens[:at, TOKEN_POSITION] = np.repeat(firsts, windows) - np.arange(at) - 1
    chunks = packet[layout.chunks :][: rows * CHUNK_WIDTH].reshape(-1, CHUNK_WIDTH)
    chunks[:] = (null_slot, size, 0, 0)
    for index, chunk in enumerate(plan.prefills):
        length = len(chunk.tokens)
        chunks[index] = (chunk.slot, at, length, chunk.start)
        tokens[at : at + length, TOKEN_ID] = chunk.tokens
        tokens[at : at + length, TOKEN_SLOT] = chunk.slot
        tokens[at : at + length, TOKEN_POSITION] = np.arange(chunk.start, chunk.start + length)
        at += length
        records[chunk.row, ROW_SAMPLES] = chunk.samples
        records[chunk.row, ROW_QUERY_LENGTH] = length
        records[chunk.row, ROW_LAST_TOKEN] = at - 1

    assignments = packet[layout.assignments : layout.tokens].reshape(-1, ASSIGNMENT_WIDTH)
    assignments[len(plan.assignments) :] = (null_slot, 0, NULL_BLOCK)
    if plan.assignments:
        assignments[: len(plan.assignments)] = plan.assignments
    width = layout.admit_width
    admissions = packet[layout.admissions :][: rows * width].reshape(-1, width)
    admissions[len(plan.admissions) :] = 0
    admissions[len(plan.admissions) :, ADMIT_SLOT] = null_slot
    if not plan.admissions:
        return
    fields = fields_from(Source.ADMISSION, Source.REQUEST)
    for record, admission in zip(admissions, plan.admissions, strict=False):
        record[ADMIT_SLOT] = admission.slot
        record[ADMIT_HEAD:] = words_of(fields, admission.values)

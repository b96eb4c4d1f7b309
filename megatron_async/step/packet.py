"""The packet of a step: what the host tells the device, as one vector of int32.

The front part holds a record for each row and is all that a decode step copies; the rest holds
admissions, prefill chunks, block grants and tokens of steps with prefill. There all sections are
padded to a fixed length, with entries that go to the null slot, so that one graph reads them all.
Floats travel as their bits, seeds as two halves.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS
from megatron_async.step.plan import Admission, Plan

# Columns of a row record.
ROW_SLOT, ROW_SAMPLES, ROW_GRANT_SLOT, ROW_GRANT_COLUMN, ROW_GRANT_BLOCK = range(5)
ROW_QUERY_LENGTH, ROW_LAST_TOKEN = 5, 6
ROW_WIDTH = 8

# Columns of an admission; the stop ids follow.
ADMIT_SLOT, ADMIT_INVERSE_TEMPERATURE, ADMIT_TOP_K, ADMIT_TOP_P = range(4)
ADMIT_SEED_LOW, ADMIT_SEED_HIGH, ADMIT_MAX_TOTAL, ADMIT_CACHED = 4, 5, 6, 7
ADMIT_STOP_IDS = 8
ADMIT_WIDTH = ADMIT_STOP_IDS + MAX_STOP_TOKEN_IDS

# Columns of a prefill chunk: ``CHUNK_LENGTH`` tokens of the forward from ``CHUNK_FIRST`` on are the
# positions of the slot from ``CHUNK_START`` on.
CHUNK_SLOT, CHUNK_FIRST, CHUNK_LENGTH, CHUNK_START = range(4)
CHUNK_WIDTH = 4

GRANT_WIDTH = 3

# Columns of a token; id or position -1 means "the device knows": the slot's last token, its length.
TOKEN_ID, TOKEN_SLOT, TOKEN_POSITION = range(3)
TOKEN_WIDTH = 3

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """Offsets, in int32 elements, of the packet's sections."""

    max_rows: int
    max_tokens: int
    max_grants: int

    @property
    def admissions(self) -> int:
        return self.max_rows * ROW_WIDTH

    @property
    def chunks(self) -> int:
        return self.admissions + self.max_rows * ADMIT_WIDTH

    @property
    def grants(self) -> int:
        return self.chunks + self.max_rows * CHUNK_WIDTH

    @property
    def tokens(self) -> int:
        return self.grants + self.max_grants * GRANT_WIDTH

    @property
    def width(self) -> int:
        return self.tokens + self.max_tokens * TOKEN_WIDTH


class StepShape(NamedTuple):
    """Rows and tokens of a forward, padding included: all that distinguishes its graph."""

    rows: int
    tokens: int


def write_packet(
    packet: Ints, layout: PacketLayout, plan: Plan, shape: StepShape, null_slot: int
) -> None:
    """Write ``plan`` into ``packet`` [layout.width] int32, padded to ``shape``."""
    rows = packet[: shape.rows * ROW_WIDTH].reshape(shape.rows, ROW_WIDTH)
    count = len(plan.rows)
    rows[:] = _empty_row(null_slot)
    rows[:count, ROW_SLOT] = plan.rows.slots
    rows[:count, ROW_SAMPLES] = 1
    if plan.is_decode_only:
        if plan.grants:
            rows[: len(plan.grants), ROW_GRANT_SLOT : ROW_GRANT_BLOCK + 1] = plan.grants
        return
    _write_prefill(packet, layout, plan, shape, rows, null_slot)


@functools.cache
def _empty_row(null_slot: int) -> Ints:
    """The record of a row that holds no request and brings no grant."""
    row = np.zeros(ROW_WIDTH, dtype=np.int32)
    row[[ROW_SLOT, ROW_GRANT_SLOT]] = null_slot
    row[ROW_GRANT_BLOCK] = NULL_BLOCK
    row.flags.writeable = False
    return row


def _write_prefill(
    packet: Ints,
    layout: PacketLayout,
    plan: Plan,
    shape: StepShape,
    rows: Ints,
    null_slot: int,
) -> None:
    decode_rows = plan.decode_rows
    rows[:decode_rows, ROW_QUERY_LENGTH] = 1
    rows[:decode_rows, ROW_LAST_TOKEN] = np.arange(decode_rows)

    tokens = packet[layout.tokens :][: shape.tokens * TOKEN_WIDTH].reshape(-1, TOKEN_WIDTH)
    tokens[:, TOKEN_ID] = -1
    tokens[:, TOKEN_SLOT] = null_slot
    tokens[:, TOKEN_POSITION] = -1
    tokens[:decode_rows, TOKEN_SLOT] = plan.rows.slots[:decode_rows]
    chunks = packet[layout.chunks :][: shape.rows * CHUNK_WIDTH].reshape(-1, CHUNK_WIDTH)
    chunks[:] = (null_slot, shape.tokens, 0, 0)
    at = decode_rows
    for index, chunk in enumerate(plan.prefills):
        length = len(chunk.tokens)
        chunks[index] = (chunk.slot, at, length, chunk.start)
        tokens[at : at + length, TOKEN_ID] = chunk.tokens
        tokens[at : at + length, TOKEN_SLOT] = chunk.slot
        tokens[at : at + length, TOKEN_POSITION] = np.arange(chunk.start, chunk.start + length)
        at += length
        rows[chunk.row, ROW_SAMPLES] = chunk.samples
        rows[chunk.row, ROW_QUERY_LENGTH] = length
        rows[chunk.row, ROW_LAST_TOKEN] = at - 1

    grants = packet[layout.grants : layout.tokens].reshape(-1, GRANT_WIDTH)
    grants[len(plan.grants) :] = (null_slot, 0, NULL_BLOCK)
    if plan.grants:
        grants[: len(plan.grants)] = plan.grants
    admissions = packet[layout.admissions :][: shape.rows * ADMIT_WIDTH].reshape(-1, ADMIT_WIDTH)
    admissions[len(plan.admissions) :] = 0
    admissions[len(plan.admissions) :, ADMIT_SLOT] = null_slot
    for index, admission in enumerate(plan.admissions):
        admissions[index] = _admission_words(admission)


def _admission_words(admission: Admission) -> tuple[int, ...]:
    low, high = struct.unpack("<ii", struct.pack("<q", admission.seed))
    stops = admission.stop_ids + (-1,) * (MAX_STOP_TOKEN_IDS - len(admission.stop_ids))
    return (
        admission.slot,
        _float_bits(admission.inverse_temperature),
        admission.top_k,
        _float_bits(admission.top_p),
        low,
        high,
        admission.max_total,
        admission.cached,
        *stops,
    )


def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])

"""What S hands out for each row of a step, as int32: ``[RECORD_HEAD + window, rows]``.

Row r brings ``count`` tokens, 0 to ``window`` of them; the host reads counts from here and from
nowhere else. Without drafts the window is 1.
"""

from __future__ import annotations

from typing import NamedTuple

RECORD_COUNT, RECORD_STATUS, RECORD_TOKENS = 0, 1, 2
"""Rows of the record; the tokens follow."""
RECORD_HEAD = RECORD_TOKENS

RUNNING, ENDED, FAILED = 0, 1, 2
"""Status of a row after S. ENDED: by a stop id or the length, as the device can see it, or before.
FAILED: its logits hold NaN, and the tokens before are all there are."""


class StepResult(NamedTuple):
    """The records of a ticket's rows, padding left out. ``tokens[i]`` has the whole window of row
    i, of which the first ``counts[i]`` count; 0 for a row that had ended before or was not
    sampled."""

    counts: list[int]
    statuses: list[int]
    tokens: list[tuple[int, ...]]

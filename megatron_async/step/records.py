"""What S hands out for each row of a step, as int32: ``[RECORD_HEAD + window, rows]``; in the
extended S ``LOG_PROB_WORDS`` more for each position of the window.

Row r brings ``count`` tokens, 0 to ``window`` of them; the host reads counts from here and from
nowhere else. Without drafts the window is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from megatron_async.step.extras import LOG_PROB_WORDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RECORD_COUNT, RECORD_STATUS, RECORD_TOKENS = 0, 1, 2
"""Rows of the record; the tokens follow."""
RECORD_HEAD = RECORD_TOKENS

RUNNING, ENDED, FAILED = 0, 1, 2
"""Status of a row after S. ENDED: by a stop id or the length, as the device can see it, or before.
FAILED: its logits hold NaN, and the tokens before are all there are."""


LogProbs: TypeAlias = "npt.NDArray[np.int32]"
"""Log-probabilities of positions, ``[..., LOG_PROB_WORDS]``, as the device packs them."""


def record_width(window: int, *, extended: bool) -> int:
    """Words of a row's record."""
    return RECORD_HEAD + window * (1 + LOG_PROB_WORDS if extended else 1)


class StepResult(NamedTuple):
    """The records of a ticket's rows, padding left out. ``tokens[i]`` has the whole window of row
    i, of which the first ``counts[i]`` count; 0 for a row that had ended before or was not
    sampled. ``log_probs`` is [rows, window, LOG_PROB_WORDS] after an extended S. Those of the
    plan's prompt targets are ``prompt_log_probs`` [targets, PROMPT_LOG_PROB_WORDS], in the chunks'
    order.
    """

    counts: list[int]
    statuses: list[int]
    tokens: list[tuple[int, ...]]
    log_probs: LogProbs | None = None
    prompt_log_probs: LogProbs | None = None

"""What S hands out for each row of a step, as int32: ``[RECORD_HEAD + window, rows]``; in the
extended S ``LOG_PROB_WORDS`` more for each position of the window.

Row r brings ``count`` tokens, 0 to ``window`` of them; the host reads counts from here and from
nowhere else. Without drafts the window is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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


RoutedIds: TypeAlias = "npt.NDArray[np.integer[Any]]"
"""Numbers of experts, ``[tokens, layers, top_k]``."""


def record_width(window: int, *, extended: bool) -> int:
    """Words of a row's record."""
    return RECORD_HEAD + window * (1 + LOG_PROB_WORDS if extended else 1)


class Routes(NamedTuple):
    """The experts that a forward's tokens went to, by token, layer and place.

    Args:
        ids: uint8 or int16 [tokens, layers, top_k], padding of rows included.
        firsts: for each row of the plan the first of its tokens; its others lie behind it.
        prefixes: by row, [cached tokens, layers, top_k] of the cached prefix that a request begins
            with.
    """

    ids: RoutedIds
    firsts: tuple[int, ...]
    prefixes: dict[int, RoutedIds]


class HiddenStates(NamedTuple):
    """Hidden states of the tokens of a plan's chunks that have ``layers``, one chunk behind the
    other.

    Args:
        rows: a tensor [tokens, layers, hidden] on the CPU, in the model's dtype.
        layers: of all these chunks, ascending.
    """

    rows: Any
    layers: tuple[int, ...]


class StepResult(NamedTuple):
    """The records of a ticket's rows, padding left out. ``tokens[i]`` has the whole window of row
    i, of which the first ``counts[i]`` count; 0 for a row that had ended before or was not
    sampled. ``log_probs`` is [rows, window, LOG_PROB_WORDS] after an extended S. Those of the
    plan's prompt targets are ``prompt_log_probs`` [targets, PROMPT_LOG_PROB_WORDS], in the chunks'
    order. ``routes`` are there in engines that hand out the experts of tokens, and
    ``hidden_states`` where the plan asks for some.
    """

    counts: list[int]
    statuses: list[int]
    tokens: list[tuple[int, ...]]
    log_probs: LogProbs | None = None
    prompt_log_probs: LogProbs | None = None
    routes: Routes | None = None
    hidden_states: HiddenStates | None = None

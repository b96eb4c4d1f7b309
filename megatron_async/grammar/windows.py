"""Masks of the windows of many texts at once, by one call of the library, which runs without the
GIL and over several threads."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import llguidance
import numpy as np
import numpy.typing as npt

from megatron_async.grammar.matcher import Follows, Matcher, library_words

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.int32]

MOST_THREADS = 8
TRIED_EVERY = 32
"""Fills after which another number of threads is tried once."""
RECENT = 0.25
"""What the last figure of a number of threads counts beside all before it."""
NOT_REACHED = -1
"""In the last word of a mask that the library has not written: it has a bit for an end, and else
bits of the last bytes, which no text has, or of nothing."""

Runs = tuple[tuple[int, ...], ...]
"""By place of a window the tokens that have to come there, at least two, or none."""


class Window(NamedTuple):
    """A row of a step.

    Args:
        text: where it stands.
        drafts: what may follow.
        masks: int32 ``[1 + drafts or more, W]``: of the first token, and behind each draft.
        masked: int32, as many; 1 where the mask counts.
        guesses: what has to come is asked for.
    """

    text: Follows
    drafts: list[int]
    masks: Mask
    masked: Mask
    guesses: bool = False


class _Quick(NamedTuple):
    """A window of which the library says all: its number and matcher, what makes its masks, the
    drafts that are text, and its first mask."""

    number: int
    matcher: Matcher
    used: llguidance.LLMatcher
    drafts: list[int]
    at: int


class Threads:
    """How many threads make the masks of several grammars: those that took least a mask of late.

    Waking a thread may take longer than a small vocabulary's mask, and a large one's takes longer
    than that; so both are measured, and masks are the same.

    Args:
        most: threads.
        clock: ns.

    Attributes:
        counts: that are compared.
        executors: of each; None is the caller's own thread, which nobody has to wake.
    """

    def __init__(self, most: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.counts = sorted({1, (most + 1) // 2, most})
        self.executors = [
            llguidance.LLExecutor(count) if count > 1 else None for count in self.counts
        ]
        self._clock = clock
        self._costs: list[float | None] = [None] * len(self.counts)
        """ns a mask; None where it was not tried."""
        self._fills = self._tried = 0

    @property
    def best(self) -> int:
        """The place of the number that is taken but for trials."""
        known = [(cost, place) for place, cost in enumerate(self._costs) if cost is not None]
        return min(known)[1] if known else 0

    def run(self, masks: int, make: Callable[[llguidance.LLExecutor | None], None]) -> None:
        """Have an executor make some masks."""
        place = self._next()
        started = self._clock()
        make(self.executors[place])
        took, before = (self._clock() - started) / masks, self._costs[place]
        self._costs[place] = took if before is None else before + RECENT * (took - before)

    def _next(self) -> int:
        self._fills += 1
        if None in self._costs:
            return self._costs.index(None)
        if self._fills % TRIED_EVERY:
            return self.best
        self._tried = (self._tried + 1) % len(self._costs)
        return self._tried


class WindowMasks:
    """Makes the masks of all windows of a step. One thread at a time uses it.

    Args:
        vocab_size: of the model.
        threads: over which the texts of a step are divided at most. Those of one grammar would
            wait for each other: they stand together, and alone they get one thread.
    """

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        if threads is None:
            threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) - 1))
        self._one = llguidance.LLExecutor(1)
        self._threads = Threads(threads) if threads > 1 else None
        self._bytes_at, self._bytes_bit = divmod(vocab_size, 32)
        self._end_bit = (vocab_size + 256) % 32
        self._make_room(1, library_words(vocab_size))

    def _make_room(self, count: int, words: int) -> None:
        self._found: Mask = np.zeros((count, words), np.int32)
        self._pointer, self._size = self._found.ctypes.data, self._found.strides[0]

    def fill(self, windows: Sequence[Window]) -> list[Runs]:
        """Write the masks of each window: of its first token, and behind each draft of those
        before it that the grammar allows. What is behind another draft S never accepts, since the
        mask of its place forbids it. A grammar that cannot go on allows nothing, and the device
        ends its request for that.

        Returns:
            for each window by place what has to come there, if that is asked for.
        """
        runs: list[Runs] = [()] * len(windows)
        quick, count = self._opened(windows)
        failed = False
        try:
            found = self._find(quick, count)
        except Exception as error:  # of the library: by themselves others may go on
            _warn(f"{type(error).__name__}: {error}")
            failed, found = True, self._found[:0]
        last = found[:, -1].tolist()
        tails = b""
        if any([window.guesses for window in windows]):
            tails = found[:, self._bytes_at :].tobytes()
        done: set[int] = set()
        for each in quick:
            if each.matcher.close_window(each.used, each.drafts, failed=failed):
                runs[each.number] = self._written(windows[each.number], each, found, last, tails)
                done.add(each.number)
        for number, window in enumerate(windows):
            if number not in done:
                runs[number] = fill_masks(window)
        return runs

    def _opened(self, windows: Sequence[Window]) -> tuple[list[_Quick], int]:
        """Return the windows that the library can do at once, and how many masks they have."""
        quick, at = [], 0
        for number, window in enumerate(windows):
            matcher = window.text.plain
            if matcher is not None:
                used, drafts = matcher.open_window(window.drafts)
                quick.append(_Quick(number, matcher, used, drafts, at))
                at += 1 + len(drafts)
        return quick, at

    def _find(self, quick: Sequence[_Quick], count: int) -> Mask:
        """What the library allows, int32 ``[count, words]``."""
        if count > len(self._found):
            self._make_room(count, self._found.shape[1])
        found = self._found[:count]
        found[:, -1] = NOT_REACHED
        if self._threads is None or len({id(each.matcher.grammar) for each in quick}) < 2:
            self._make(quick, None)
        else:
            quick = sorted(quick, key=lambda each: id(each.matcher.grammar))
            self._threads.run(count, functools.partial(self._make, quick))
        return found

    def _make(self, quick: Sequence[_Quick], executor: llguidance.LLExecutor | None) -> None:
        """By an executor, or with None in this thread as far as the library can."""
        pointer, size, count = self._pointer, self._size, len(self._found)
        single = [(each.used, each.at) for each in quick if not each.drafts]
        if executor is None:
            for used, at in single:
                used.unsafe_compute_mask_ptr(pointer + at * size, size)
        elif single:
            executor.unsafe_compute_mask_ptr(single, pointer, size, count)
        drafted = [(each.used, each.at, each.drafts) for each in quick if each.drafts]
        if drafted:
            maker = executor or self._one
            maker.unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, size, count)

    def _written(
        self, window: Window, each: _Quick, found: Mask, last: list[int], tails: bytes
    ) -> Runs:
        at, most = each.at, 1 + len(each.drafts)
        ends = last[at : at + most]
        places = ends.index(NOT_REACHED) if NOT_REACHED in ends else most
        complete = [end >> self._end_bit & 1 for end in ends[:places]]
        each.matcher.write_window(found[at : at + places], complete, window.masks[:places])
        window.masked[:places] = 1
        rest = window.drafts[len(each.drafts) : len(each.drafts) + 1]
        if rest and complete[-1] and places == most and each.matcher.ends_with(rest[0]):
            window.masks[most], window.masked[most] = 0, 1
        if not window.guesses:
            return ()
        size = 4 * (found.shape[1] - self._bytes_at)
        following = []
        for place in range(at, at + places):
            bits = int.from_bytes(tails[place * size : (place + 1) * size], "little")
            following.append(bits >> self._bytes_bit)
        try:
            runs = each.matcher.forced_along(each.drafts, following)
        except Exception:  # they are guesses, and so is an error of them
            return ()
        return tuple(run if len(run) > 1 else () for run in runs)


@functools.cache
def _warn(error: str) -> None:
    logger.warning(
        "masks of a step were made one by one, which takes longer, since all at once failed (%s)",
        error,
    )


def fill_masks(window: Window) -> Runs:
    """As :meth:`WindowMasks.fill`, of one window, place by place."""
    runs: list[tuple[int, ...]] = []
    texts = window.text.along(window.drafts)
    masks, masked = window.masks, window.masked
    for place in range(1 + len(window.drafts)):
        try:
            text = next(texts, None)
            if text is None:
                break
            text.fill_mask(masks[place])
        except Exception:  # of the library: nobody knows what may come here
            masks[place], masked[place] = 0, 1
            break
        masked[place] = 1
        runs.append(_forced(text) if window.guesses else ())
    return tuple(runs)


def _forced(text: Follows) -> tuple[int, ...]:
    """At least two tokens, or none. They are guesses, and so is an error of them."""
    try:
        forced = text.forced_tokens()
    except Exception:
        return ()
    return forced if len(forced) > 1 else ()

"""Where a text stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt

from megatron_async.grammar.messages import explained

_NOTHING_CAN_COME = ("NoExtension", "NoExtensionBias")
"""The library's names."""
MOST_FORCED_BYTES = 256
"""More of what is forced is not looked at: it is for a few drafts."""
MOST_FORCED_WORDS = 64
"""With bits in more words of a mask than this hardly more than a character is forced. It is not
looked for, which takes longer than to count them."""


class Masks(NamedTuple):
    """Token masks of a request; W is the vocabulary's size / 32, rounded up.

    Args:
        text: int32 [W], tokens that stand for text and do not end it.
        stops: int32 [W], tokens that end it.
        stop_ids: the same.
        first_bytes: what each token makes of an empty text; None where it is what the token adds
            to any text.
        blank: int32 [W], tokens that make nothing of an empty text but add to others.
        byte_ids: the library's ids of the 256 bytes.
        later_bytes: what each token adds to a text that is not empty.
        breaks: int32 [W], tokens that are one line break or two.
        spell: tokens of bytes, as the tokenizer writes them; none where it would not.
    """

    text: npt.NDArray[np.int32]
    stops: npt.NDArray[np.int32]
    stop_ids: frozenset[int]
    first_bytes: Sequence[bytes] | None
    blank: npt.NDArray[np.int32]
    byte_ids: range
    later_bytes: Sequence[bytes]
    spell: Callable[[bytes], tuple[int, ...]]
    breaks: npt.NDArray[np.int32]


class Forced(NamedTuple):
    """The one way in which a text goes on: by ``data``, behind which it ``ends``, or is open."""

    data: bytes
    ends: bool

    def behind(self, data: bytes) -> Forced | None:
        """What is forced behind a token of these bytes, as far as it is known."""
        if not self.data.startswith(data) or self.data == data:
            return None
        return Forced(self.data[len(data) :], self.ends)


OPEN = Forced(b"", ends=False)
"""Several ways, or an end."""


def spelled(forced: Forced, masks: Masks) -> tuple[int, ...]:
    """What is forced as the tokenizer writes it, and the end if one token alone ends a text."""
    data, ends = forced
    tokens = masks.spell(data[:MOST_FORCED_BYTES]) if data else ()
    if len(data) > MOST_FORCED_BYTES:
        return tokens[:-1]  # it may go on behind the cut
    if ends and bool(tokens) == bool(data) and len(masks.stop_ids) == 1:
        tokens += tuple(masks.stop_ids)
    return tokens


class Follows(Protocol):
    """Follows a text token by token: the methods of :class:`Matcher`, which says what they do."""

    def accept(self, token_id: int, /) -> bool: ...

    def fill_mask(self, row: npt.NDArray[np.int32], /) -> None: ...

    def along(self, drafts: Sequence[int], /) -> Iterator[Self]: ...

    def forced_tokens(self) -> tuple[int, ...]: ...

    def copy(self) -> Self: ...

    @property
    def plain(self) -> Matcher | None: ...

    @property
    def must_end(self) -> bool: ...

    @property
    def error(self) -> str | None: ...


def library_words(vocab_size: int) -> int:
    """Words of the library's masks: behind the vocabulary are the 256 bytes, and an end."""
    return -(-(vocab_size + 257) // 32)


_Text = TypeVar("_Text", bound=Follows)


def along(text: _Text, drafts: Sequence[int]) -> Iterator[_Text]:
    """See :meth:`Matcher.along`."""
    yield text
    if not drafts:
        return
    ahead = text.copy()
    for draft in drafts:
        if not ahead.accept(draft):
            return
        yield ahead


class Matcher:
    """Follows one text token by token. One thread at a time uses it; masks are made without the
    GIL.

    Invariant: tokens of a mask are exactly those that :meth:`accept` takes.

    Args:
        later, first: the library's matchers, of this text alone.
        start: what ``later`` is a copy of; from there it is made again where drafts on trial have
            left an error. None: drafts are tried on a copy.

    Attributes:
        grammar: the same object for all texts of a grammar, of which the library follows one at a
            time.
    """

    def __init__(
        self,
        later: llguidance.LLMatcher,
        first: llguidance.LLMatcher | None,
        masks: Masks,
        *,
        ended: bool = False,
        forced: Forced | None = None,
        start: llguidance.LLMatcher | None = None,
    ) -> None:
        self._later = later
        self._first = first
        self._masks = masks
        self._ended = ended
        self._forced = forced
        """None where nobody has asked."""
        self._allowed: npt.NDArray[np.int32] | None = None
        self._start = self.grammar = start
        self._taken: list[int] = []
        """What the library's matcher has been given from its start on."""
        self._ways: list[tuple[int, Forced]] = []
        """Drafts of the last window that have not been accepted, each with what is forced behind
        it."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed, and then nothing has changed."""
        if self._ended:
            return False
        if token_id in self._masks.stop_ids:
            self._ended = self.is_complete
            return self._ended
        if self._first is None:
            later = self._masks.later_bytes
            if not 0 <= token_id < len(later) or not later[token_id]:
                return False
            accepted = self._later.try_consume_tokens([token_id]) == 1
            given = [token_id]
        elif accepted := _bit(self._masks.text, token_id) and _bit(self._text_mask(), token_id):
            assert self._masks.first_bytes is not None
            data = self._masks.first_bytes[token_id]
            given = [self._masks.byte_ids[byte] for byte in data]
            self._later.consume_tokens(given)
            self._first = None
        if accepted or self._later.is_error():
            self._allowed = None
            self._go_on(token_id)
        if accepted:
            self._taken += given
        return accepted

    def _go_on(self, token_id: int) -> None:
        """What is forced behind a token, as far as it is known."""
        if self._ways:
            (draft, forced), *self._ways = self._ways
            if draft == token_id:
                self._forced = forced
                return
            self._ways = []
        if self._forced is not None:
            self._forced = self._forced.behind(self._masks.later_bytes[token_id])

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the tokens that may come next; none after the end or an :attr:`error`.

        Args:
            row: int32 [W]; bit id % 32 of word id // 32 is set if the token may come.
        """
        if row.shape != self._masks.text.shape or row.dtype != np.int32:
            raise ValueError(f"row: {row.dtype} {row.shape}, not int32 {self._masks.text.shape}")
        if self._ended:
            row.fill(0)
            return
        row[:] = self._text_mask()
        if self.is_complete:
            row |= self._masks.stops

    def along(self, drafts: Sequence[int]) -> Iterator[Matcher]:
        """This text, and then those behind each draft in turn while it may come. They are copies,
        valid until the next: nothing of a draft stays, not even an error on its way."""
        return along(self, drafts)

    def forced_tokens(self) -> tuple[int, ...]:
        """What comes next where the grammar leaves one way to go on, as the tokenizer writes it:
        the first tokens of it, and its end if one token alone ends a text. The model may write the
        same text in other tokens. () where there are several ways, or at the start of a text that
        a decoder changes."""
        if self._ended or self._first is not None:
            return ()
        if self._forced is None:
            if np.count_nonzero(self._text_mask()) > MOST_FORCED_WORDS:
                return ()
            self._forced = self._find_forced()
        return spelled(self._forced, self._masks)

    def _find_forced(self, drafts: list[int] | None = None) -> Forced:
        """Behind these drafts. By a copy: to look for what is forced can exceed the library's
        limits where to go on token by token does not, and an error stays in what it came up in."""
        ahead = self._later.deep_copy()
        if drafts:
            ahead.consume_tokens(drafts)
        data: bytes = ahead.compute_ff_bytes()
        if len(data) <= MOST_FORCED_BYTES:
            ahead.consume_tokens([self._masks.byte_ids[byte] for byte in data])
        return Forced(data, ends=bool(ahead.is_stopped() and ahead.is_accepting()))

    @property
    def is_complete(self) -> bool:
        """The text conforms as it is: an end token may come."""
        return bool(self._later.is_accepting())

    @property
    def has_next(self) -> bool:
        """Some token of text may come."""
        return not self._ended and bool(self._text_mask().any())

    @property
    def must_end(self) -> bool:
        """The text is complete, and nothing but an end may come."""
        return self._ended or (self.is_complete and not self.has_next)

    @property
    def error(self) -> str | None:
        """Why no token may come though the text is not complete; None if one may, or it is.

        A grammar can be too expensive to follow, or lead where the vocabulary has no token.
        """
        if self.has_next or self.is_complete:
            return None
        source = self._later if self._first is None else self._first
        message = str(source.get_error()).removesuffix("<non-verbose/>").strip()
        if message in ("", *_NOTHING_CAN_COME):
            return "no token of the vocabulary can come next"
        return explained(message)

    def copy(self) -> Matcher:
        """Another one at the same place, for tokens that may be taken back."""
        first = None if self._first is None else self._first.deep_copy()
        return Matcher(
            self._later.deep_copy(), first, self._masks, ended=self._ended, forced=self._forced
        )

    def behind(self, data: bytes) -> Matcher:
        """Another one behind these bytes, however tokens spell them. Nothing may come if they may
        not. Not at the start of a text that a decoder changes."""
        later = self._later.deep_copy()
        later.consume_tokens([self._masks.byte_ids[byte] for byte in data])
        return Matcher(later, None, self._masks)

    # --- windows: see grammar/windows.py ------------------------------------------------------

    @property
    def plain(self) -> Matcher | None:
        """Itself where the library's masks say all: not behind an end, nor at a start that a
        decoder changes."""
        return None if self._ended or self._first is not None else self

    def open_window(self, drafts: list[int]) -> tuple[llguidance.LLMatcher, list[int]]:
        """What makes masks along drafts in one call, and brings itself back; and the drafts up to
        the first that is no text."""
        later, stops = self._masks.later_bytes, self._masks.stop_ids
        for count, draft in enumerate(drafts):
            if not 0 <= draft < len(later) or not later[draft] or draft in stops:
                drafts = drafts[:count]
                break
        on_trial = bool(drafts) and self._start is None
        return self._later.deep_copy() if on_trial else self._later, drafts

    def close_window(
        self, used: llguidance.LLMatcher, drafts: Sequence[int], *, failed: bool = False
    ) -> bool:
        """Behind the masks of a window; False if an error came up, of which drafts leave
        nothing."""
        if not failed and not used.is_error():
            return True
        if used is self._later and drafts:
            assert self._start is not None
            self._later = self._start.deep_copy()
            self._later.consume_tokens(self._taken)
            self._start = None
        return False

    def write_window(
        self, found: npt.NDArray[np.int32], complete: Sequence[int], masks: npt.NDArray[np.int32]
    ) -> None:
        """Make masks of what the library has found.

        Args:
            found: int32 ``[places, >= W]``.
            complete: by place, not 0 where the text may end.
            masks: int32 ``[places, W]``, written.
        """
        np.bitwise_and(found[:, : masks.shape[1]], self._masks.text, out=masks)
        for place, is_complete in enumerate(complete):
            if is_complete:
                masks[place] |= self._masks.stops

    def ends_with(self, token_id: int) -> bool:
        """The token ends texts that are complete."""
        return token_id in self._masks.stop_ids

    def forced_along(
        self, drafts: list[int], following: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """:meth:`forced_tokens` of each place of a window.

        Args:
            drafts: all of them may come.
            following: by place, a bit for each byte that may come next, and one for an end.
        """
        forced, runs, self._ways = self._forced, [], []
        for place, ways in enumerate(following):
            if place and forced is not None:
                forced = forced.behind(self._masks.later_bytes[drafts[place - 1]])
            if forced is None:
                is_one = ways and not ways & (ways - 1) and not ways >> 256
                forced = self._find_forced(drafts[:place]) if is_one else OPEN
            if place:
                self._ways.append((drafts[place - 1], forced))
            else:
                self._forced = forced
            runs.append(spelled(forced, self._masks) if forced.data else ())
        return tuple(runs)

    @property
    def text_mask(self) -> npt.NDArray[np.int32]:
        """As :meth:`fill_mask` writes it, without the tokens that end the text."""
        return self._text_mask()

    def _text_mask(self) -> npt.NDArray[np.int32]:
        if self._allowed is None:
            self._allowed = self._mask_of(self._later)
            if self._first is not None:
                blank = self._masks.blank if self._allowed.any() else 0
                self._allowed = self._mask_of(self._first) | blank
        return self._allowed

    def _mask_of(self, matcher: llguidance.LLMatcher) -> npt.NDArray[np.int32]:
        found = np.empty(library_words(self._masks.byte_ids.start), np.int32)
        matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        words = found[: len(self._masks.text)]
        # The library's mask after an error allows its end token.
        return np.zeros_like(words) if matcher.is_error() else words & self._masks.text


def _bit(words: npt.NDArray[np.int32], token_id: int) -> bool:
    return 0 <= token_id < 32 * len(words) and bool(words[token_id // 32] >> token_id % 32 & 1)

"""Stop words: where growing text ends, and what of it may be shown already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class TextStream(Protocol):
    """What a tokenizer's ``stream()`` gives."""

    def push(self, token_id: int, /) -> str:
        """Text that a token completes."""

    def flush(self) -> str:
        """Text held back; no token comes after it."""


class _Node:
    """A prefix of one or several stop words."""

    __slots__ = ("children", "depth", "fail", "found")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """Characters of the prefix."""
        self.children: dict[str, _Node] = {}
        self.fail: _Node | None = None
        """The longest prefix of any word that is a proper suffix of this one; None at the root."""
        self.found: int | None = None
        """The first of the words, in their order, that are suffixes of this prefix."""


def _automaton(words: Sequence[str]) -> _Node:
    """The root of the words' prefixes, with their failure links."""
    root = _Node(0)
    for index, word in enumerate(words):
        node = root
        for depth, character in enumerate(word, 1):
            node = node.children.setdefault(character, _Node(depth))
        if node.found is None:
            node.found = index
    queue = deque([root])
    while queue:  # shorter prefixes first: a node's link and what it finds are ready before its own
        node = queue.popleft()
        for character, child in node.children.items():
            child.fail = root if node is root else _next(node.fail, character, root)
            shorter = child.fail.found
            if shorter is not None and (child.found is None or shorter < child.found):
                child.found = shorter
            queue.append(child)
    return root


def _next(node: _Node | None, character: str, root: _Node) -> _Node:
    """The longest prefix that ends with ``character``, after ``node``."""
    while node is not None:
        child = node.children.get(character)
        if child is not None:
            return child
        node = node.fail
    return root


class StopWords:
    """Finds the first stop word in text that comes in pieces, and holds back what may become one.

    The rule is vLLM's (``check_stop_strings``): the word that completes first ends the text; of
    several that complete with the same character, the first in the order of ``words``. Since it
    goes by characters, it does not matter how the text is divided into pieces.

    The words are matched all at once by an automaton (Aho and Corasick, 1975), so the cost of a
    piece grows with its own length and with nothing else. What is held back is exactly the longest
    tail of the text that begins a word.

    Args:
        words: at least one character each.
        include: the text ends behind the word instead of before it.

    Attributes:
        matched: the word that ended the text; None while it goes on.

    Raises:
        ValueError: a word is empty.
    """

    def __init__(self, words: Sequence[str], *, include: bool = False) -> None:
        if not all(words):
            raise ValueError("a stop word is empty")
        self.matched: str | None = None
        self._words = words
        self._include = include
        self._root = self._node = _automaton(words)
        self._held = ""

    def push(self, text: str, *, searched: bool = True) -> str:
        """Append ``text``; returns what may be shown now, after all that was before.

        Args:
            searched: a word may end in ``text``. Else it only counts as the beginning of one.
        """
        if self.matched is not None:
            return ""
        node, root = self._node, self._root
        for end, character in enumerate(text, 1):
            node = _next(node, character, root)
            if searched and node.found is not None:
                return self._end(self._held + text[:end], self._words[node.found])
        while node.fail is not None and not node.children:  # a whole word that did not count
            node = node.fail
        self._node = node
        text = self._held + text
        shown = len(text) - node.depth
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What is held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, word: str) -> str:
        self.matched = word
        self._held = ""
        return text if self._include else text[: len(text) - len(word)]


class StoppingText:
    """Text of a request that has stop words.

    It is a watcher of the request's tokens: :meth:`take` detokenises a token before it is
    committed, so that the end is exact. At the commit it stands in for the tokenizer's stream:
    :meth:`push` hands out what :meth:`take` has released for the same token.

    Args:
        stream: the tokenizer's, which no one else pushes.
        words: the request's.
        stop_ids: tokens that end the request and add no text.
        min_tokens: a stop word counts when a later token than these completes it, wherever it
            begins, as in vLLM; what these have completed is never searched.
    """

    def __init__(
        self,
        stream: TextStream,
        words: StopWords,
        *,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._words = words
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._taken = 0
        self._released: deque[str] = deque()
        """Of tokens that were taken and are not committed."""
        self._error: Exception | None = None
        """Why there is no text any more."""

    @property
    def matched(self) -> str | None:
        """The stop word that ended the text."""
        return self._words.matched

    def take(self, token: int) -> bool:
        """Detokenise a token; True when it is the last."""
        if self._error is not None:
            return False
        if token in self._stop_ids:
            return True
        self._taken += 1
        try:
            text = self._stream.push(token)
        except Exception as error:
            self._error = error
            return False
        self._released.append(self._words.push(text, searched=self._counts()))
        return self.matched is not None

    def push(self, token: int) -> str:
        """What became final with a token that was taken; nothing with a stop token.

        Raises:
            Exception: the tokenizer's, when it failed with this token.
        """
        if self._released:
            return self._released.popleft()
        if self._error is not None:
            raise self._error
        return ""

    def flush(self) -> str:
        """What is held back, up to a stop word that is found only now that the end is known."""
        if self._error is not None:
            raise self._error
        if self.matched is not None:
            return ""
        return self._words.push(self._stream.flush(), searched=self._counts()) + self._words.flush()

    def _counts(self) -> bool:
        return self._taken > self._min_tokens


class WholeTextStream:
    """The stream of a tokenizer that only decodes whole sequences: a token costs a decoding of all
    tokens before it.

    Right for tokenizers whose text only grows with further tokens, but for U+FFFD at its end,
    which may stand for an incomplete character and is held back.
    """

    def __init__(self, detokenize: Callable[[list[int]], str]) -> None:
        self._detokenize = detokenize
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Text that ``token`` completes."""
        self._ids.append(token)
        return self._show(self._detokenize(self._ids).rstrip("\ufffd"))

    def flush(self) -> str:
        """Text held back."""
        return self._show(self._detokenize(self._ids))

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        return new

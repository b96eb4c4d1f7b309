"""Stop words: where growing text ends, and what of it may be shown already."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
        self.include = include
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
        return text if self.include else text[: len(text) - len(word)]

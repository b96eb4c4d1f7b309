"""Stop words in growing text: where it ends, and what may be shown before that."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_async.engine.requests.host_ends import HostEnds
from megatron_async.engine.requests.request_text import StoppingText, WholeTextStream
from megatron_async.engine.requests.stop_words import StopWords


def plain_end(text: str, words: list[str], ignored: int = 0) -> tuple[str, int] | None:
    """The rule, letter by letter: the first word that completes behind the first ``ignored``
    characters, and where its text begins; of several the first in the list."""
    for end in range(ignored + 1, len(text) + 1):
        for word in words:
            if text[:end].endswith(word):
                return word, end - len(word)
    return None


def plain_held(text: str, words: list[str]) -> int:
    """Length of the longest tail that begins a word and is not the whole of it."""
    return max(
        length
        for word in words
        for length in range(len(word))
        if text.endswith(word[:length]) or length == 0
    )


# Few letters, so that words overlap, contain each other and repeat.
letters = st.text("ab\N{COMBINING ACUTE ACCENT}\N{GRINNING FACE}", max_size=14)
words_of = st.lists(
    st.text("ab\N{COMBINING ACUTE ACCENT}\N{GRINNING FACE}", min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@st.composite
def pieces_of(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


@given(
    pieces=pieces_of(),
    words=words_of,
    include=st.booleans(),
    ignored=st.integers(0, 4),
)
@example(pieces=["aab"], words=["ab", "b"], include=False, ignored=0)
@example(pieces=["aab"], words=["b", "ab"], include=False, ignored=0)
@example(pieces=["ab", "a"], words=["ab"], include=False, ignored=1)
@example(pieces=["ab", "b"], words=["ab", "abb"], include=True, ignored=1)
@settings(max_examples=400, deadline=None)
def test_every_piece_shows_what_a_plain_search_would(
    pieces: list[str], words: list[str], include: bool, ignored: int
) -> None:
    """Of pieces, the first ``ignored`` are not searched."""
    matcher, text, shown = StopWords(words, include=include), "", ""
    unsearched = len("".join(pieces[:ignored]))
    for index, piece in enumerate(pieces):
        text += piece
        shown += matcher.push(piece, searched=index >= ignored)
        found = plain_end(text, words, unsearched) if index >= ignored else None
        if found is None:
            assert matcher.matched is None
            assert shown == text[: len(text) - plain_held(text, words)]
            continue
        word, start = found
        assert matcher.matched == word
        assert shown == text[: start + len(word) if include else start]
        assert matcher.push("more") == "" and matcher.flush() == ""
        return
    assert shown + matcher.flush() == text
    assert matcher.flush() == ""


def test_the_division_of_a_text_does_not_matter() -> None:
    words = ["is", " a", "user is"]
    text = " The user is a"
    for size in range(1, len(text) + 1):
        matcher = StopWords(words)
        pieces = [text[n : n + size] for n in range(0, len(text), size)]
        assert "".join(map(matcher.push, pieces)) == " The user "
        assert matcher.matched == "is"


def test_of_words_that_complete_together_the_first_of_the_list_counts() -> None:
    for words, shown in ((["User:", "\n\nUser:"], "Hi\n\n"), (["\n\nUser:", "User:"], "Hi")):
        matcher = StopWords(words)
        assert matcher.push("Hi\n\nUser: more") == shown
        assert matcher.matched == words[0]


def test_an_empty_word_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopWords(["a", ""])


class Counting(str):
    """A character of a text that counts how often it is looked up in a dictionary."""

    __slots__ = ()
    lookups = 0

    def __hash__(self) -> int:
        Counting.lookups += 1
        return super().__hash__()


class CountedText(str):
    """Text whose characters are :class:`Counting`."""

    __slots__ = ()

    def __iter__(self):  # type: ignore[no-untyped-def]
        return map(Counting, super().__iter__())


def test_cost_does_not_grow_with_the_text_nor_with_the_number_of_words() -> None:
    """At most two looks a character on average: one on the way up and one on the way back."""
    words = ["a" * n + "b" for n in range(1, 60)] + [f"<{n}>" for n in range(500)]
    matcher = StopWords(words)
    Counting.lookups = 0
    tracemalloc.start()
    for _ in range(100):
        matcher.push(CountedText("a" * 50 + "c<12"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < Counting.lookups <= 3 * 100 * 54
    assert kept < 10_000


# --- text of tokens ---------------------------------------------------------------------------


class Letters:
    """A stream whose tokens are characters' code points; those above 1000 stand for two, and 1 is
    held back until the next token or the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int, /) -> str:
        if token_id == 666:
            raise KeyError(token_id)
        if token_id == 1:
            self.held += "a"
            return ""
        text = chr(token_id) if token_id < 1000 else chr(token_id - 1000) * 2
        return self.flush() + text

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def stopping(*words: str, include: bool = False, **options: object) -> StoppingText:
    return StoppingText(Letters(), StopWords(words, include=include), **options)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_the_commit_gets_what_was_released_when_tokens_were_taken() -> None:
    text = stopping("cd")
    assert [text.take(token) for token in ids("abc")] == [False, False, False]
    assert [text.push(token) for token in ids("abc")] == ["a", "b", ""]
    assert [text.take(token) for token in ids("xcd")] == [False, False, True]
    assert [text.push(token) for token in ids("xcd")] == ["cx", "", ""]
    assert (text.matched, text.flush()) == ("cd", "")


def test_what_is_behind_a_word_in_its_token_is_cut() -> None:
    for include, last in ((False, ""), (True, "b")):
        text = stopping("b", include=include)
        assert text.take(1000 + ord("b"))
        assert (text.push(0), text.flush()) == (last, "")


def test_a_stop_token_is_the_last_and_adds_no_text() -> None:
    text = stopping("d", stop_ids={ord("d")})
    assert [text.take(token) for token in ids("cd")] == [False, True]
    assert [text.push(token) for token in ids("cd")] == ["c", ""]
    assert text.matched is None


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, 2), (1, 2), (2, 5), (4, 5), (5, None)])
def test_words_count_from_the_token_behind_min_tokens(min_tokens: int, ends: int | None) -> None:
    text, ended = stopping("ab", min_tokens=min_tokens), None
    for count, token in enumerate(ids("abxab"), 1):
        if text.take(token):
            ended = count
            break
    assert ended == ends


def test_a_word_may_begin_within_min_tokens() -> None:
    text = stopping("abc", min_tokens=2)
    assert [text.take(token) for token in ids("abc")] == [False, False, True]
    assert [text.push(token) for token in ids("abc")] == ["", "", ""]


@pytest.mark.parametrize(("min_tokens", "rest"), [(0, ""), (1, "a")])
def test_a_word_that_the_end_completes_is_cut_too(min_tokens: int, rest: str) -> None:
    text = stopping("a", min_tokens=min_tokens)
    assert not text.take(1)
    assert text.push(1) == ""
    assert text.flush() == rest
    assert text.matched == (None if rest else "a")


def test_a_tokenizers_error_reaches_the_commit_and_not_the_watcher() -> None:
    text = stopping("cd")
    assert [text.take(token) for token in (ord("a"), 666, ord("c"), ord("d"))] == [False] * 4
    assert text.push(ord("a")) == "a"
    with pytest.raises(KeyError, match="666"):
        text.push(666)
    with pytest.raises(KeyError, match="666"):
        text.flush()


# --- tokenizers that only decode whole sequences ----------------------------------------------


@given(text=st.text(max_size=12), end=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_whole_decodings_give_the_text_and_no_half_characters(text: str, end: int) -> None:
    """Bytes as tokens, also when the last character is incomplete."""
    data = text.encode()[: max(len(text.encode()) - end, 0)]
    stream = WholeTextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    parts = [stream.push(byte) for byte in data]
    assert text.startswith("".join(parts))
    assert "".join(parts) + stream.flush() == data.decode(errors="replace")
    assert stream.flush() == ""


# --- several watchers -------------------------------------------------------------------------


class EndsAt:
    def __init__(self, last: int | None) -> None:
        self.last = last
        self.seen: list[int] = []

    def take(self, token: int, /) -> bool:
        self.seen.append(token)
        return token == self.last


def test_the_first_token_that_any_watcher_ends_is_the_last_and_all_have_seen_it() -> None:
    ends, watchers = HostEnds(), [EndsAt(7), EndsAt(5), EndsAt(None)]
    for watcher in watchers:
        ends.watch(3, watcher)
    assert ends.keep(3, (1, 2)) is None
    assert ends.keep(3, (4, 5, 6, 7)) == 2
    assert [watcher.seen for watcher in watchers] == [[1, 2, 4, 5]] * 3


def test_requests_without_watchers_go_on() -> None:
    ends = HostEnds()
    ends.watch(3, EndsAt(5))
    assert ends.watches(3) and not ends.watches(4)
    assert ends.keep(4, (5,)) is None
    ends.forget(3)
    ends.forget(3)
    assert not ends.watches(3)
    assert ends.keep(3, (5,)) is None

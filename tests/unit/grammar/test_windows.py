"""Masks of the windows of many texts at once are those of each text, token by token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megatron_async.grammar.matcher import Forced, Matcher
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.windows import TRIED_EVERY, Runs, Threads, Window, WindowMasks
from tests.unit.grammar.test_grammar import COMPILERS, SCHEMA, TOKENIZERS, allowed

SPECS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"regex": "[ab]x{3}[cd]+"},
    {"choice": ["yes, sir", "yes, ma'am"]},
    {"grammar": 'root ::= "(" root ")" | "a1"'},
)
MOST = 4


def unread(windows: list[Window]) -> list[tuple[list[list[int]], list[int]]]:
    """What was written: masks that count, and which do."""
    return [(w.masks[w.masked > 0].tolist(), w.masked.tolist()) for w in windows]


def windows_of(texts: list[Any], drafts: list[list[int]], words: int) -> list[Window]:
    return [
        Window(text, each, np.full((1 + MOST, words), 7, np.int32), np.zeros(1 + MOST, np.int32))
        for text, each in zip(texts, drafts, strict=True)
    ]


def token_by_token(text: Matcher, drafts: list[int], words: int) -> tuple[Any, Any]:
    ahead, masks = text.copy(), []
    for draft in [*drafts, None]:
        mask = np.zeros(words, np.int32)
        ahead.fill_mask(mask)
        masks.append(mask.tolist())
        if draft is None or not ahead.accept(draft):
            break
    return masks, [int(place < len(masks)) for place in range(1 + MOST)]


def drawn(rng: random.Random, text: Matcher, vocab_size: int) -> list[int]:
    """Drafts of which most may come, ends and ids that are none among them."""
    ahead, drafts = text.copy(), []
    for _ in range(rng.randrange(1 + MOST)):
        may = sorted(allowed(ahead, vocab_size))
        odd = [rng.randrange(vocab_size), -1, vocab_size + 3, *TOKENIZERS["tiny"].eos_ids]
        drafts.append(rng.choice(may if may and rng.random() < 0.85 else odd))
        ahead.accept(drafts[-1])
    return drafts


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "tiny"])
def test_windows_of_many_texts_are_those_of_each(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random walks of eight texts, half of which end with a token that is text to others; nothing
    of drafts stays, what is forced may come, and it is looked for where there is some."""
    find_forced = Matcher._find_forced
    looked: list[Forced] = []

    def looks(self: Matcher, drafts: list[int] | None = None) -> Forced:
        looked.append(find_forced(self, drafts))
        return looked[-1]

    monkeypatch.setattr(Matcher, "_find_forced", looks)
    compiler, rng = COMPILERS[name], random.Random(threads)
    vocab_size, words = compiler.vocab_size, -(-compiler.vocab_size // 32)
    grammars = [compiler.compile(StructuredOutputs(**spec)) for spec in SPECS]
    maker, forced, reached = WindowMasks(vocab_size, threads), 0, [0] * (2 + MOST)
    texts: list[Any] = [grammars[number % 4].matcher() for number in range(8)]
    ends = [*TOKENIZERS[name].tokenize("d")[-1:], *TOKENIZERS[name].eos_ids]
    texts[4:] = [grammar.matcher(ends) for grammar in grammars]
    for _ in range(40):
        drafts = [drawn(rng, text, vocab_size) for text in texts]
        windows = windows_of(texts, drafts, words)
        guesses = [window._replace(guesses=True) for window in windows]
        wanted = [token_by_token(t, d, words) for t, d in zip(texts, drafts, strict=True)]
        looked.clear()
        found = maker.fill(guesses)
        plain = all(text.plain is text for text in texts)
        assert not plain or all(each.data for each in looked)
        for number, runs in enumerate(found):
            assert unread(windows)[number] == wanted[number], drafts[number]
            reached[sum(windows[number].masked)] += 1
            forced += check_forced(texts[number], drafts[number], runs)
        for number, text in enumerate(texts):
            may = sorted(allowed(text, vocab_size))
            agrees = [d for d in drafts[number] if text.accept(d)] if rng.random() < 0.5 else []
            if not agrees and may:
                assert text.accept(rng.choice(may))
            elif not may:
                texts[number] = grammars[number % 4].matcher(ends if number > 3 else None)
    assert all(reached[1:]) and forced > 20


def check_forced(text: Matcher, drafts: list[int], runs: Runs) -> int:
    """Each run can come where it is said to, and something else there cannot begin."""
    for place, run in enumerate(runs):
        ahead = text.copy()
        for draft in drafts[:place]:
            assert ahead.accept(draft)
        if run:
            assert len(run) > 1
            assert run == ahead.forced_tokens()
            assert all(ahead.accept(token) for token in run)
    return sum(map(bool, runs))


def test_drafts_that_leave_an_error_in_the_library_leave_none_in_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made again from its start, once; then drafts are tried on a copy. Others go on."""
    compiler = COMPILERS["tiny"]
    vocab_size, words = compiler.vocab_size, -(-compiler.vocab_size // 32)
    compiled, ids = compiler.compile(StructuredOutputs(**SPECS[1])), TOKENIZERS["tiny"].tokenize
    texts: list[Any] = [compiled.matcher() for _ in range(3)]
    for text in texts:
        assert all(text.accept(token) for token in ids("ax"))
    find = WindowMasks._find

    def breaks_one(self: WindowMasks, quick: Any, count: int) -> Any:
        found = find(self, quick, count)
        quick[1].used.consume_tokens(ids("!"))
        assert quick[1].used.is_error()
        return found

    maker = WindowMasks(vocab_size, 1)
    monkeypatch.setattr(WindowMasks, "_find", breaks_one)
    drafts = [ids("xxc"), ids("xxd"), ids("xx")]
    wanted = [token_by_token(t, d, words) for t, d in zip(texts, drafts, strict=True)]
    for _ in range(3):
        windows = windows_of(texts, drafts, words)
        maker.fill(windows)
        assert unread(windows) == wanted
    draft = ids("x")
    for text, is_copied in zip(texts, (False, True, False), strict=True):
        found = text.open_window(draft)[0], text.open_window(draft)[0]
        assert (found[0] is not found[1]) == is_copied
    assert [text.error for text in texts] == [None] * 3


def test_a_library_that_fails_as_a_whole_is_asked_for_each_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = COMPILERS["tiny"]
    vocab_size, words = compiler.vocab_size, -(-compiler.vocab_size // 32)
    text: Any = compiler.compile(StructuredOutputs(**SPECS[1])).matcher()
    drafts = TOKENIZERS["tiny"].tokenize("bxx")
    wanted = [token_by_token(text, drafts, words)]

    def fails(self: WindowMasks, quick: Any, count: int) -> Any:
        quick[0].used.consume_tokens(drafts)
        raise ValueError("of the library")

    monkeypatch.setattr(WindowMasks, "_find", fails)
    windows = windows_of([text], [drafts], words)
    WindowMasks(vocab_size, 1).fill(windows)
    assert unread(windows) == wanted


def test_masks_take_as_many_threads_as_are_quickest_of_late() -> None:
    """By a clock that stands still but for what each number of threads takes a mask."""
    now, cost = 0, {1: 20, 4: 60, 8: 90}
    threads = Threads(8, lambda: now)
    assert threads.counts == [1, 4, 8]
    places = {
        id(executor): n for n, executor in zip(threads.counts, threads.executors, strict=True)
    }
    taken: list[int] = []

    def make(executor: Any) -> None:
        nonlocal now
        taken.append(places[id(executor)])
        now += 32 * cost[taken[-1]]

    for _ in range(3 * TRIED_EVERY):
        threads.run(32, make)
    assert taken[:3] == [1, 4, 8] and set(taken) == {1, 4, 8}
    assert taken.count(1) > 3 * TRIED_EVERY - 6
    cost.update({1: 900, 4: 300, 8: 150})  # schemas whose masks take long
    taken.clear()
    for _ in range(12 * TRIED_EVERY):
        threads.run(32, make)
    assert taken[-TRIED_EVERY:].count(8) >= TRIED_EVERY - 1
    assert Threads(1, lambda: now).counts == [1] and Threads(2, lambda: now).counts == [1, 2]

"""What a grammar forces, spelled as the tokenizer writes it, and texts behind drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_async.grammar import matcher as matcher_module
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from tests.unit.grammar.test_grammar import COMPILERS, SCHEMA, TOKENIZERS, allowed

BYTE_LEVEL = ("byte_level", "tiny")


def matcher_of(name: str, text: str = "", stop_ids: Any = None, **spec: Any) -> Matcher:
    """Behind ``text``."""
    matcher = COMPILERS[name].compile(StructuredOutputs(**spec)).matcher(stop_ids)
    for token_id in TOKENIZERS[name].tokenize(text):
        assert matcher.accept(token_id), text
    return matcher


def spelled(name: str, tokens: tuple[int, ...]) -> bytes:
    return b"".join(TOKENIZERS[name].token_bytes(token_id) for token_id in tokens)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize(
    ("spec", "before", "forced", "ends"),
    [
        ({"regex": "[ab]x{3}[cd]"}, "", "", False),
        ({"regex": "[ab]x{3}[cd]"}, "a", "xxx", False),
        ({"regex": "[ab]x{3}[cd]"}, "axx", "x", False),
        ({"regex": "[ab]x{3}[cd]"}, "axxxd", "", True),
        ({"regex": "[ab]x{3}c?"}, "axxx", "", False),
        ({"choice": ["yes, sir", "yes, ma'am"]}, "", "yes, ", False),
        ({"choice": ["yes, sir", "yes, ma'am"]}, "ye", "s, ", False),
        ({"choice": ["yes, sir", "yes, ma'am"]}, "yes, s", "ir", True),
        ({"choice": ["ä", "ö"]}, "", "", False),  # half a character
        ({"choice": ["é日本x", "é日本y"]}, "", "é日本", False),
        ({"choice": ["one <|end|> two"]}, "", "", False),  # the tokenizer would end it
    ],
)
def test_forced_tokens(
    name: str, spec: dict[str, Any], before: str, forced: str, ends: bool
) -> None:
    if "<|end|>" in str(spec) and name == "tiny":
        pytest.skip("an ordinary text there")
    (stop,) = TOKENIZERS[name].eos_ids
    tokens = matcher_of(name, before, **spec).forced_tokens()
    assert (tokens[-1:] == (stop,)) == ends
    tokens = tokens[: len(tokens) - ends]
    assert spelled(name, tokens).decode() == forced
    assert list(tokens) == TOKENIZERS[name].tokenize(forced)


def test_an_end_is_forced_if_one_token_makes_it() -> None:
    spec = {"choice": ["ab"]}
    (stop,) = TOKENIZERS["tiny"].eos_ids
    assert matcher_of("tiny", **spec).forced_tokens()[-1] == stop
    assert matcher_of("tiny", stop_ids=(stop, 40), **spec).forced_tokens() == (97, 98)
    assert matcher_of("tiny", stop_ids=(), **spec).forced_tokens() == (97, 98)


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_a_tokenizer_that_puts_a_space_in_front_drafts_nothing_wrong(name: str) -> None:
    """At the start of a text, and behind it, tokens stand for what is forced or there are none."""
    matcher = matcher_of(name, regex="a(bc|bca)1")
    assert matcher.forced_tokens() == ()
    token_id = next(n for n in sorted(allowed(matcher, COMPILERS[name].vocab_size)))
    assert matcher.accept(token_id)
    assert spelled(name, matcher.forced_tokens()) in (b"", b"bc", b"abc")


def test_of_much_that_is_forced_a_beginning_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the last token, which may go on behind the cut; and the library is asked once."""
    asked: list[int] = []
    find = Matcher._find_forced
    monkeypatch.setattr(Matcher, "_find_forced", lambda self: asked.append(1) or find(self))
    text = "xy" * 400
    matcher = matcher_of("tiny", regex=text)
    most = matcher_module.MOST_FORCED_BYTES
    for place in range(0, len(text), 2):
        forced = spelled("tiny", matcher.forced_tokens()).decode()
        left = text[place:]
        assert forced == left[: most - 1] if len(left) > most else left
        for token_id in TOKENIZERS["tiny"].tokenize("xy"):
            assert matcher.accept(token_id)
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "tiny"])
def test_masks_are_the_same_whether_forced_tokens_were_asked_for_or_not(name: str) -> None:
    """Random walks; what is forced is allowed token by token, and its end alone may come there."""
    compiled = COMPILERS[name].compile(StructuredOutputs(json=SCHEMA))
    vocab_size, rng, forced_before = COMPILERS[name].vocab_size, random.Random(3), 0
    for _ in range(12):
        asking, silent = compiled.matcher(), compiled.matcher()
        for _ in range(120):
            forced = asking.forced_tokens()
            may = allowed(asking, vocab_size)
            assert may == allowed(silent, vocab_size)
            ahead = asking.copy()
            for token_id in forced:
                assert ahead.accept(token_id)
            forced_before += bool(forced)
            if not may:
                break
            token_id = rng.choice(sorted(may))
            if forced and rng.random() < 0.7:
                token_id = forced[0]
            assert asking.accept(token_id) and silent.accept(token_id)
    assert forced_before > 50


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "tiny"])
def test_texts_along_drafts_are_those_of_accepting_them_and_leave_nothing(name: str) -> None:
    compiled = COMPILERS[name].compile(StructuredOutputs(json=SCHEMA))
    vocab_size, rng, lengths = COMPILERS[name].vocab_size, random.Random(4), set()
    matcher = compiled.matcher()
    for turn in range(150):
        if turn % 10 == 0:
            matcher = compiled.matcher()
        drafts, plain = [], matcher.copy()
        masks = [allowed(plain, vocab_size)]
        while len(drafts) < 4:
            draft = rng.choice(sorted(masks[-1])) if masks[-1] and rng.random() < 0.8 else 5
            drafts.append(draft)
            if not plain.accept(draft):
                break
            masks.append(allowed(plain, vocab_size))
        found = [allowed(text, vocab_size) for text in matcher.along(drafts)]
        assert found == masks[: len(found)] and len(found) in (len(drafts), len(drafts) + 1)
        lengths.add(len(found))
        assert allowed(matcher, vocab_size) == masks[0]
        if not masks[0]:
            matcher = compiled.matcher()
        else:
            assert matcher.accept(rng.choice(sorted(masks[0])))
    assert lengths == {1, 2, 3, 4, 5}

"""Token by token equals the whole, for trained tokenizers of three kinds and any Unicode."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron_async.engine.requests.request_text import RequestText
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from megatron_async.tokenizer.tokenizer import Tokenizer

# Latin with combining marks, right to left, joined and skin-toned emoji, CJK, Indic clusters.
TEXTS = (
    "the quick brown fox, the lazy dog; the end of the story is the end",
    "cafe\N{COMBINING ACUTE ACCENT} e\N{COMBINING DIAERESIS}\N{COMBINING MACRON} naïve",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "日本語の文章 日本",
    "\u0915\u094d\u0937\u093f \u0928\u092e\u0938\u094d\u0924\u0947",
    "  two  spaces,\n\nlines\tand tabs  ",
)
SPECIAL = ["<s>", "</s>"]
META = "▁"


def byte_level_bpe() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            max_token_length=5,
            show_progress=False,
        ),
    )
    return made


def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma have it: pieces, and bytes for what they do not cover."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<s>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(META), normalizers.Replace(" ", META)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(META, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        TEXTS[:3] * 3,  # emoji and much else are left to the bytes
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[*SPECIAL, *byte_tokens],
            max_token_length=5,
            show_progress=False,
        ),
    )
    return plain_bytes(made)


def unigram() -> tokenizers.Tokenizer:
    """As T5 and XLM-R have it."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        TEXTS * 3,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="<s>", show_progress=False
        ),
    )
    return made


def plain_bytes(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Byte tokens were special for the trainer alone, which else would not give them ids."""
    state = json.loads(made.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    remade: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    return remade


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level_bpe": byte_level_bpe,
    "byte_fallback_bpe": byte_fallback_bpe,
    "unigram": unigram,
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def pushed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.flush()]


# What a tokenizer is asked to spell: its own text in pieces, and whatever else Unicode has.
known = st.sampled_from([piece for text in TEXTS for piece in (*text, text[:7], text[-5:])])
texts = st.lists(st.one_of(known, st.text(max_size=3)), max_size=12).map("".join)


@st.composite
def ids_of(draw: st.DrawFn, kind: str) -> list[int]:
    """Ids of a text, some of them lost, doubled, or put in from anywhere, beyond the vocabulary
    too: characters come apart."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.tokenize(draw(texts))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(ids)))
        some = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=3)
        ids[at : at + draw(st.integers(0, 2))] = draw(some)
    return ids


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_pushed_text_is_the_whole_for_any_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind))
    assert "".join(pushed(tokenizer, ids, skip=skip)) == tokenizer.detokenize(ids, skip)


@functools.cache
def stripping(count: int) -> Tokenizer:
    """Takes up to ``count`` spaces from the beginning of a text. Ids: a space, two, "a", the bytes
    of a space and of two letters, and pieces that look like bytes and are none."""
    pieces = [
        META,
        META * 2,
        "a",
        "<0x20>",
        "<0xC3>",
        "<0xA9>",
        "<0x",
        "<0x20>>",
        "<0x2>",
        "<0y20>",
    ]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(META, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", count, 0),
        ]
    )
    return Tokenizer(made)


@given(ids=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 10)), max_size=12))
@settings(max_examples=80, deadline=None)
def test_only_the_beginning_of_a_text_is_stripped(ids: list[int]) -> None:
    for count in (0, 1, 2, 3):
        tokenizer = stripping(count)
        assert "".join(pushed(tokenizer, ids)) == tokenizer.detokenize(ids)


@pytest.mark.parametrize(("ids", "most"), [([0], 4), ([1], 2), ([4, 5, 2], 3), ([4, 5, 2, 0], 3)])
def test_a_stream_keeps_no_more_the_longer_its_text_is(ids: list[int], most: int) -> None:
    """Spaces, of which it strips three, and runs of bytes. What it keeps it decodes again."""
    stream: Any = stripping(3).stream()
    kept = []
    for token_id in ids * 100:
        stream.push(token_id)
        kept.append(len(stream._context))
    assert max(kept) == most


def test_what_only_looks_like_a_byte_is_not_held_back() -> None:
    tokenizer = stripping(1)
    for piece in ("<0x", "<0x20>>", "<0x2>", "<0y20>"):
        token_id = tokenizer._tokenizer.token_to_id(piece)
        assert tokenizer.stream().push(token_id) == piece


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_shown_stays_and_little_is_held_back(kind: str, data: st.DataObject) -> None:
    """After each token: the beginning of the text so far, all of it but a character that is not
    complete (half a surrogate is two U+FFFD), or a run of byte tokens."""
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind))
    parts, run = pushed(tokenizer, ids)[:-1], 0
    for count, token_id in enumerate(ids, 1):
        shown, whole = "".join(parts[:count]), tokenizer.detokenize(ids[:count])
        assert whole.startswith(shown)
        token = tokenizer._tokenizer.id_to_token(token_id)
        if token is not None and token not in SPECIAL:
            run = run + 1 if token.startswith("<0x") else 0
        held = whole[len(shown) :]
        if kind == "byte_level_bpe":
            assert held in ("", "\ufffd", "\ufffd\ufffd")
        else:
            assert len(held) <= run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_in_pieces_as_it_was(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.tokenize(text)
    parts = pushed(tokenizer, ids)
    assert len(ids) >= 3
    # Metaspace stands for all spaces alike, and takes one from the beginning.
    expected = text.removeprefix(" ") if kind == "unigram" else text
    assert "".join(parts) == expected


@pytest.mark.parametrize("kind", ["byte_level_bpe", "byte_fallback_bpe"])
def test_characters_of_several_tokens_arrive_whole(kind: str) -> None:
    """Of a kind that the tokenizers have not seen: which the tests with random text rely on."""
    tokenizer = tokenizer_of(kind)
    parts = pushed(tokenizer, tokenizer.tokenize("the \N{FOX FACE} end"))
    assert parts.index("") < len(parts) - 2
    assert any("\N{FOX FACE}" in part for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), include=st.booleans())
@settings(max_examples=80, deadline=None)
def test_stop_words_are_found_across_tokens_and_characters(
    kind: str, data: st.DataObject, include: bool
) -> None:
    """Stop words are parts of the text that comes; what is shown is cut where a plain search of the
    whole text cuts it, and never holds a part of the word."""
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind))
    whole = tokenizer.detokenize(ids)
    words = []
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, max(len(whole) - 1, 0)))
        words.append(whole[at : at + data.draw(st.integers(1, 4))] or "none")
    request = DynamicInferenceRequest(
        request_id=0,
        sampling_params=SamplingParams(stop_words=words, include_stop_str_in_output=include),
    )
    text = RequestText(request, tokenizer, ())
    stopping = text.stopping
    assert stopping is not None
    shown = ""
    for token_id in ids:
        last = stopping.take(token_id)
        shown += stopping.push(token_id)
        if last:
            break
    shown += stopping.flush()
    ends = [whole.find(word) + len(word) if word in whole else len(whole) + 1 for word in words]
    end = min(ends)
    if end > len(whole):
        assert (shown, text.stop_word) == (whole, None)
    else:
        word = words[ends.index(end)]
        assert (shown, text.stop_word) == (whole[: end if include else end - len(word)], word)

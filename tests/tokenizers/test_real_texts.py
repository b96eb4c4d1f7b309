"""Ids and texts of real tokenizers, beside transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from megatron_async.engine.requests.request_text import StoppingText
from megatron_async.engine.requests.stop_words import StopWords
from megatron_async.serving.endpoints.log_prob_shapes import CompletionLogProbs, TokenNames
from tests.tokenizers.conftest import Real
from tests.tokenizers.generated import id_lists, texts

COUNT = 2000
TEXTS = texts(COUNT)


def sequences(real: Real, count: int = COUNT) -> Iterator[list[int]]:
    """Ids of texts, and ids that are none."""
    yield from (real.ours.tokenize(text) for text in TEXTS[:count])
    yield from id_lists(count, real.ours.vocab_size, sorted(real.ours.special_ids))


def followed(real: Real, ids: Sequence[int], start: int, skip: bool) -> list[str]:
    """What each token from ``start`` on adds, and what is left at the end."""
    stream = real.ours.stream_after(ids[:start], skip)
    return [*map(stream.push, ids[start:]), stream.flush()]


@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_transformers(real: Real, special: bool) -> None:
    theirs = real.theirs(TEXTS, add_special_tokens=special)["input_ids"]
    for text, ids in zip(TEXTS, theirs, strict=True):
        assert real.ours.tokenize(text, add_special_tokens=special) == ids, text
    assert real.ours.bos_id == real.theirs.bos_token_id
    assert real.ours.eos_ids == (real.theirs.eos_token_id,)


@pytest.mark.parametrize("skip", [False, True])
def test_texts_are_those_of_transformers(real: Real, skip: bool) -> None:
    for ids in sequences(real):
        whole = real.theirs.decode(ids, skip_special_tokens=skip)
        assert real.ours.detokenize(ids, skip) == whole, ids
        assert "".join(followed(real, ids, 0, skip)) == whole, ids


@pytest.mark.parametrize("skip", [False, True])
def test_prompt_and_stream_are_the_whole_wherever_it_is_split(real: Real, skip: bool) -> None:
    for ids in sequences(real, 250):
        whole = real.theirs.decode(ids, skip_special_tokens=skip)
        for start in range(len(ids)):
            before = real.theirs.decode(ids[:start], skip_special_tokens=skip)
            if before.endswith("\ufffd") or not whole.startswith(before):
                continue  # within a character
            assert before + "".join(followed(real, ids, start, skip)) == whole, (ids, start)


def test_text_ends_at_a_stop_string(real: Real) -> None:
    draw = random.Random(3)
    for ids in sequences(real, 1000):
        whole = real.theirs.decode(ids, skip_special_tokens=True)
        begin = draw.randrange(max(len(whole), 1))
        stop = whole[begin : begin + draw.randint(1, 6)]
        if not stop:
            continue
        text = StoppingText(real.ours.stream(), StopWords((stop,)))
        parts = []
        for token in ids:
            ended = text.take(token)
            parts.append(text.push(token))
            if ended:
                break
        parts.append("" if text.matched else text.flush())
        assert text.matched == stop and "".join(parts) == whole.partition(stop)[0], (ids, stop)


def test_names_of_tokens_are_what_they_add(real: Real) -> None:
    names, word = TokenNames(real.ours), real.ours.tokenize("word")
    start = len(real.theirs.decode(word))
    called: dict[str, bytes] = {}
    for token in range(real.ours.vocab_size):
        text, raw = names.text_and_bytes(token)
        added = real.theirs.decode([*word, token])[start:]
        assert text == added or "\ufffd" in added + text, (token, text, added)
        name = names.name(token)
        assert called.setdefault(name, bytes(raw)) == bytes(raw), (token, name)


def test_bytes_of_tokens_are_the_text(real: Real) -> None:
    names, word = TokenNames(real.ours), real.ours.tokenize("word")
    for text in TEXTS:
        ids = real.ours.tokenize(text)
        raw = b"".join(bytes(names.text_and_bytes(token)[1]) for token in ids)
        whole = real.theirs.decode([*word, *ids]).removeprefix("word")
        assert raw.decode(errors="replace") == whole, text


def test_offsets_are_where_the_text_of_a_token_begins(real: Real) -> None:
    names = TokenNames(real.ours)
    for ids in sequences(real, 250):
        shaper = CompletionLogProbs(real.ours, names, 0, skip_special_tokens=False)
        offsets = shaper.part(ids, [None] * len(ids))["text_offset"]
        for place, offset in enumerate(offsets):
            before = real.theirs.decode(ids[:place])
            if "\ufffd" not in before:
                assert offset == len(before), (ids, place)

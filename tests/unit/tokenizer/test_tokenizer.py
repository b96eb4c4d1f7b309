"""Token ids to text: whole, and token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megatron_async.errors import CheckpointError, RequestError
from megatron_async.serving.endpoints.log_prob_shapes import CompletionLogProbs, TokenNames
from megatron_async.tokenizer.calls import parse
from megatron_async.tokenizer.tokenizer import Tokenizer, _byte_of_character

BYTE_OF = _byte_of_character()
LEAD_BYTES = [0xC2, 0xE0, 0xE4, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x80, 0x9F, 0xBD, 0xA0]


def byte_level() -> tokenizers.Tokenizer:
    """Ids 0-255 are the bytes themselves; 256 and 257 are special, 258 and 259 added text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.add_tokens(["Ġdone", "日本 é"])
    return tokenizer


def sentence_piece(strip: int = 1) -> tokenizers.Tokenizer:
    """Ids 0-255 are byte tokens, then a few pieces; 261 is special."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "▁a", "▁▁", "日"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", strip, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = sentence_piece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def without_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(vocab={"": 0, "b": 1, "c": 2}, unk_token="b"))


KINDS = {
    "byte_level": byte_level,
    "sentence_piece": sentence_piece,
    "metaspace": metaspace,
    "without_decoder": without_decoder,
}
WRAPPED = {name: Tokenizer(make()) for name, make in KINDS.items()}

any_id = st.one_of(
    st.integers(0, 255), st.sampled_from(LEAD_BYTES), st.integers(250, 265), st.integers(0, 2)
)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(any_id, max_size=40), skip=st.booleans())
@settings(max_examples=500, deadline=None)
def test_stream_equals_detokenize_for_any_ids(kind: str, ids: list[int], skip: bool) -> None:
    stream = WRAPPED[kind].stream(skip_special_tokens=skip)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) + stream.flush() == WRAPPED[kind].detokenize(ids, skip)


@pytest.mark.parametrize("kind", ["sentence_piece", "metaspace"])
@given(
    prompt=st.lists(st.integers(256, 261), max_size=12),
    end=st.lists(st.sampled_from([257, 258, 260]), min_size=1, max_size=2),
    ids=st.lists(any_id, max_size=20),
    skip=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_prompt_and_stream_are_the_text_of_both(
    kind: str, prompt: list[int], end: list[int], ids: list[int], skip: bool
) -> None:
    tokenizer, prompt = WRAPPED[kind], prompt + end
    stream = tokenizer.stream_after(prompt, skip_special_tokens=skip)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert tokenizer.detokenize(prompt, skip) + text == tokenizer.detokenize(prompt + ids, skip)


def test_the_first_word_of_a_completion_keeps_its_space() -> None:
    tokenizer = WRAPPED["sentence_piece"]
    assert tokenizer.stream().push(258) == "a"
    assert tokenizer.stream_after([257]).push(258) == " a"
    # Special tokens are no words, and what is not shown is not before it.
    assert tokenizer.stream_after([261]).push(258) == "a"
    assert tokenizer.stream_after([261], skip_special_tokens=False).push(258) == " a"
    assert tokenizer.stream_after([257] + [261] * 20).push(258) == " a"
    # A long prompt costs no more than its last tokens.
    assert tokenizer.stream_after([257] * 100_000).push(256) == " "


def test_tokens_that_differ_by_a_space_have_names_of_their_own() -> None:
    names = TokenNames(WRAPPED["sentence_piece"])
    assert [names.name(token) for token in (257, 258, 256, 259)] == ["a", " a", " ", "  "]
    for token in (257, 258, 260, 261):
        text, raw = names.text_and_bytes(token)
        assert bytes(raw).decode() == text
    assert names.name(0xE6) == "bytes:\\xe6"


def test_no_token_is_left_out_where_two_have_one_name() -> None:
    pieces = {"a": 0, "b": 1, "Ġdone": 2}
    made = tokenizers.Tokenizer(models.WordLevel(vocab=pieces, unk_token="b"))
    made.add_tokens(["a "])
    made.decoder = decoders.Strip(" ", 0, 0)
    tokenizer = Tokenizer(made)

    class OneName(TokenNames):
        def name(self, token: int, *, as_id: bool = False) -> str:
            return "x" if token < 2 else super().name(token, as_id=as_id)

    shaper = CompletionLogProbs(tokenizer, OneName(tokenizer), 3)
    part = shaper.part([1], [(-2.0, {0: -1.0, 1: -2.0, 2: -3.0})])
    (top,) = part["top_logprobs"]
    assert sorted(top.values()) == [-3.0, -2.0, -1.0] and top["token_id:0"] == -1.0
    assert part["tokens"] == ["x"] and top["x"] == -2.0


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([257, 10, 10, 258], [0, 1, 2, 3]),  # "a", two line feeds that are bytes, " a"
        ([257, 0xE6, 0x97, 0xA5, 257], [0, 1, 1, 1, 2]),
        ([10, 0xC3, 0xA9, 257], [0, 1, 1, 2]),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_offset_of_a_token_is_behind_the_bytes_before_it(
    ids: list[int], offsets: list[int], together: bool
) -> None:
    tokenizer = WRAPPED["sentence_piece"]
    shaper = CompletionLogProbs(tokenizer, TokenNames(tokenizer), 0)
    parts = [ids] if together else [[token] for token in ids]
    found = [offset for p in parts for offset in shaper.part(p, [None] * len(p))["text_offset"]]
    assert found == offsets


def test_offset_of_a_token_is_behind_bytes_that_are_no_character() -> None:
    shaper = CompletionLogProbs(WRAPPED["byte_level"], TokenNames(WRAPPED["byte_level"]), 0)
    ids = [0xE6, 0x97, ord("a"), 0xFF, 0xF0, ord("b"), 0xC3, 0xA9, ord("c")]
    assert shaper.part(ids, [None] * len(ids))["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 5, 6]


def trimming() -> Tokenizer:
    """Of two words and special tokens; it composes characters, and leaves spaces out of offsets."""
    tokens = ["a", "Ã©", "Ġa", "Ġ", "Ã", "©", *(chr(n) for n in range(0x61, 0x7B))]
    vocab = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("Ã", "©"), ("Ġ", "a")]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", tokenizers.AddedToken("<eos>", lstrip=True, special=True)])
    template = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=[
        (token, made.token_to_id(token)) for token in ("<bos>", "<eos>")
    ])  # fmt: skip
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return Tokenizer(made)


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("b a", [0, 0, 1, 3]),
        ("e\u0301b a", [0, 0, 2, 3, 5]),  # one token of two characters
        ("b  <eos> a", [0, 0, 1, 8, 10]),
        ("<bos>b", [0, 0, 5, 6]),
        ("", [0, 0]),
    ],
)
@pytest.mark.parametrize("adds", [True, False])
def test_offsets_are_places_in_the_text(text: str, offsets: list[int], adds: bool) -> None:
    tokenizer = trimming()
    found = tokenizer.offsets(text, add_special_tokens=adds)
    assert found == (offsets if adds else offsets[1:-1])
    assert len(found) == len(tokenizer.tokenize(text, add_special_tokens=adds))


@given(text=st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_byte_level_text_survives_and_characters_arrive_whole(text: str) -> None:
    tokenizer = WRAPPED["byte_level"]
    ids = list(text.encode())
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    stream = tokenizer.stream()
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)
    assert stream.flush() == ""


def test_incomplete_bytes_are_held_back_and_flushed_as_replacement() -> None:
    stream = WRAPPED["byte_level"].stream()
    assert [stream.push(byte) for byte in "日".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    stream = WRAPPED["sentence_piece"].stream()
    assert [stream.push(byte) for byte in "日".encode()] == ["", "", ""]
    assert stream.push(257) == "日a"


class CountsIds:
    """A tokenizer that counts the ids it has decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        text: str = self.tokenizer.decode(ids, **options)
        return text


def test_cost_of_a_token_does_not_grow_with_the_sequence() -> None:
    stream: Any = WRAPPED["sentence_piece"].stream()
    counter = stream._tokenizer = CountsIds(stream._tokenizer)
    costs = []
    for n in range(2_000):
        before = counter.decoded
        assert stream.push(257 + n % 2)
        costs.append(counter.decoded - before)
    assert 0 < max(costs) <= 4


def test_byte_level_stream_keeps_no_more_than_a_character() -> None:
    """Its cost is that of an incremental decoder: what it keeps is all that it reads again."""
    stream: Any = WRAPPED["byte_level"].stream()
    kept = []
    for byte in ("日a" * 500).encode():
        stream.push(byte)
        kept.append(len(stream._utf8.getstate()[0]))
    assert max(kept) == 2


def write(path: Path, tokenizer: tokenizers.Tokenizer, config: object) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_directory_gives_megatron_attributes(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>"}
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(), config))
    assert (tokenizer.bos, tokenizer.bos_id) == (256, 256)
    assert (tokenizer.eod, tokenizer.eos_ids) == (257, (257,))
    assert tokenizer.vocab_size == 260
    assert tokenizer.tokenize("hi", add_bos=True) == [256, *b"hi"]
    assert tokenizer.detokenize([256, *b"hi", 257]) == "hi"
    assert tokenizer.detokenize([*b"hi", 257], skip_special_tokens=False) == "hi<|eos|>"


def test_tokenizer_without_config_has_no_special_ids(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.bos is None and tokenizer.eod is None and tokenizer.eos_ids == ()
    with pytest.raises(RequestError, match="add_bos=True"):
        tokenizer.tokenize("hi", add_bos=True)


POST_PROCESSORS: dict[str, Any] = {
    "none": None,
    "byte_level": processors.ByteLevel(trim_offsets=False),
    "begin": processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]),
    "begin_and_end": processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 256), ("<|eos|>", 257)]
    ),
}


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_special_tokens_are_added_as_transformers_does(
    tmp_path: Path, kind: str, add_bos_token: bool | None
) -> None:
    transformers = pytest.importorskip("transformers")
    stored = byte_level()
    if POST_PROCESSORS[kind] is not None:
        stored.post_processor = POST_PROCESSORS[kind]
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": add_bos_token}
    config = {name: value for name, value in config.items() if value is not None}
    path = write(tmp_path, stored, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    ours, theirs = Tokenizer.from_directory(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in ("", "hi é", "<|bos|>hi<|eos|>"):
        for adds in (True, False):
            expected = theirs.encode(text, add_special_tokens=adds)
            assert ours.tokenize(text, add_special_tokens=adds) == expected
    begins = ours.tokenize("hi", add_special_tokens=True)[0] == ours.bos_id
    assert begins is kind.startswith("begin")


@pytest.mark.parametrize("text", ["hi", "a prompt that is longer"])
def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path: Path, text: str) -> None:
    stored = byte_level()
    stored.enable_truncation(max_length=4)
    stored.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(write(tmp_path, stored, {}))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize(text)) == len(text)


@pytest.mark.parametrize("make", (byte_level, sentence_piece))
@pytest.mark.parametrize("becomes", ("itself", "another", "nothing"))
def test_a_tokenizer_is_made_again_of_what_it_writes(
    make: Any, becomes: str, tmp_path: Path
) -> None:
    """Of its file, or by the library where there is none or another by now."""
    file = tmp_path / "tokenizer.json"
    make().save(str(file))
    ours, data = Tokenizer.from_directory(tmp_path), file.read_bytes()
    if becomes == "another":
        file.write_bytes(data.replace(b"<|bos|>", b"<|xxx|>") + b" ")
    elif becomes == "nothing":
        file.unlink()
    for tokenizer in (ours, Tokenizer(make())):
        again = Tokenizer(parse(tokenizer.to_json()))
        for first in (False, True):
            found, due = (
                [each.token_bytes(n, first=first) for n in range(ours.vocab_size)]
                for each in (again, ours)
            )
            assert found == due
        assert again.tokenize("a日 a") == ours.tokenize("a日 a")
    assert (ours.to_json() == data) == (becomes == "itself")


def test_lone_surrogate_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="not a string of valid Unicode"):
        WRAPPED["byte_level"].tokenize("a\ud800b")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json: not a valid tokenizer file"),
        ("tokenizer.json", '{"model": 3}', "tokenizer.json: not a valid tokenizer file"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token=7 must be a string"),
        ("tokenizer_config.json", '{"bos_token": "<x>"}', "bos_token='<x>' is not in the voc"),
    ],
)
def test_corrupt_files_are_one_clear_error(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    write(tmp_path, byte_level(), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.Strip(" ", 0, 1)])
def test_decoder_that_cannot_stream_exactly_is_refused(
    tmp_path: Path, decoder: decoders.Decoder
) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(CheckpointError, match="is not supported; supported are ByteLevel"):
        Tokenizer.from_directory(write(tmp_path, tokenizer, {}))

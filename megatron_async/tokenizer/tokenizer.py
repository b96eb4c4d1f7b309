"""Text to token ids and back, whole or token by token."""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from megatron_async.checkpoint.reading.json_file import one_line, read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file, read_file
from megatron_async.errors import CheckpointError, RequestError, shown
from megatron_async.tokenizer.calls import guarded, parse, part_as_json

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MOST_TOKENIZER_BYTES = 2**28
EMBEDDED = Path(__file__).parents[1] / "assets" / "tiny" / TOKENIZER_FILE
"""A file that comes with the package is loaded as it is."""
MANY = 1_000
"""Characters or ids from which on other threads run meanwhile."""
MOST_CONTEXT = 64
"""Tokens of a prompt of which at least one has text of its own."""
_SUPPORTED_DECODERS = ("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in characters, one for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


def _token_to_bytes(token: str) -> bytes:
    byte_of = _byte_of_character()
    try:
        return bytes(map(byte_of.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    """Names of the decoding steps; a step that looks past the next token is an error."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [name for step in decoder["decoders"] for name in _decoder_types(step)]
    name = str(decoder.get("type"))
    if name not in _SUPPORTED_DECODERS or (name == "Strip" and decoder.get("stop")):
        raise ValueError(
            f"decoder {json.dumps(decoder)} is not supported; supported are "
            f"{', '.join(_SUPPORTED_DECODERS)} (Strip at the start alone)"
        )
    return [name]


def _check_unknown_token(model: tokenizers.models.Model) -> None:
    """With BPE, no text that needs the token for what is unknown could be tokenized."""
    if not isinstance(model, tokenizers.models.BPE) or model.unk_token is None:
        return
    if model.token_to_id(model.unk_token) is None:
        said = f"unk_token={shown(model.unk_token)} of its BPE model is not in the vocabulary"
        raise ValueError(said)


class DetokenizeStream(ABC):
    """Text of a growing sequence of token ids.

    Invariant: for any ids, the pushed texts and the flushed one, joined, are exactly
    ``Tokenizer.detokenize`` of all ids. The cost of a token does not grow with the sequence.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """Text held back, with U+FFFD for incomplete bytes. The stream ends here."""

    def held_characters(self) -> int:
        """Whole characters that are held back: a later token may still change them."""
        return 0


class _ByteLevelStream(DetokenizeStream):
    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _TokenBytes(dict[int, bytes]):
    """What each id of a byte-level tokenizer stands for, found at its first use."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        found = self[token_id] = b"" if token is None else _token_to_bytes(token)
        return found


class _WindowStream(DetokenizeStream):
    """For decoders that see a token's left neighbour, or the start of the text, and no more.

    Invariant: ``_context`` are the newest tokens, enough of them to have text, ``_before``, of
    their own, or all there are. So what is stripped from the beginning of a text has been stripped
    within them, and text of ``_context + _held`` beyond ``_before`` is what ``_held`` adds to the
    whole. A run of byte tokens is held to its end, since a later byte can turn the whole run into
    U+FFFD.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        skipped: frozenset[int],
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._before = ""
        self._held: list[int] = []
        for token_id in prompt[: -MOST_CONTEXT - 1 : -1]:
            if tokenizer.id_to_token(token_id) is None or token_id in skipped:
                continue
            self._context.insert(0, token_id)
            self._before = self._decode(self._context)
            if self._before and "\ufffd" not in self._before:
                break

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._held.append(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return ""
        return self.flush()

    def flush(self) -> str:
        if not self._held:
            return ""
        window = self._context + self._held
        whole = self._decode(window)
        text = whole[len(self._before) :]
        # One token less than the window is enough for a run of what may be stripped.
        for context in (self._held, window[1:]):
            before = self._decode(context)
            if before:
                break
        else:
            context, before = window, whole
        self._context, self._before, self._held = context, before, []
        return text

    def held_characters(self) -> int:
        if not self._held:
            return 0
        text = self._decode(self._context + self._held)[len(self._before) :]
        return len(text.rstrip("\ufffd"))

    def _decode(self, ids: list[int]) -> str:
        text: str = guarded(self._tokenizer.decode, ids, skip_special_tokens=False)
        return text


class Tokenizer:
    """A Hugging Face ``tokenizer.json`` under the attribute names megatron's tokenizers have.

    Args:
        source: the file that it was read from, and the SHA-256 of its content; None for none.

    Raises:
        CheckpointError: a file is missing or corrupt, or its decoder is not supported.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        source: tuple[Path, bytes] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        try:
            # Not all of it as JSON: that has a place for each id up to the largest.
            decoder_types = _decoder_types(json.loads(part_as_json(tokenizer.decoder)))
            _check_unknown_token(tokenizer.model)
            if "ByteLevel" in decoder_types and len(decoder_types) > 1:
                raise ValueError("decoder ByteLevel is supported alone, not in a longer Sequence")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"tokenizer: {error}") from error
        self._byte_level = bool(decoder_types) and decoder_types[0] == "ByteLevel"
        self._byte_fallback = "ByteFallback" in decoder_types
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._bytes = _TokenBytes(tokenizer)
        self._visible_bytes = _TokenBytes(tokenizer)
        self._visible_bytes.update(dict.fromkeys(self.special_ids, b""))
        self.bos_id = self._special_id("bos_token", bos_token)
        eos_id = self._special_id("eos_token", eos_token)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where there is one, ``tokenizer_config.json``."""
        file = Path(path) / TOKENIZER_FILE
        config_file = Path(path) / TOKENIZER_CONFIG_FILE
        if not is_regular_file(file):
            raise CheckpointError(f"{file}: no such file")
        # Parsed from bytes: a file that vanishes or is cut short is an ordinary OSError.
        data = read_file(file, MOST_TOKENIZER_BYTES)
        if data != EMBEDDED.read_bytes():
            from megatron_async.tokenizer.probing import check_tokenizer

            check_tokenizer(file, data)
        try:
            tokenizer = parse(data)
        except Exception as error:  # the library raises bare Exception for a corrupt file
            raise CheckpointError(
                f"{file}: not a valid tokenizer file: {one_line(error)}"
            ) from error
        config = read_json(config_file) if is_regular_file(config_file) else {}
        names: dict[str, str | None] = {}
        for field in ("bos_token", "eos_token"):
            value = config.get(field)
            value = value.get("content") if isinstance(value, dict) else value
            if value is not None and not isinstance(value, str):
                raise CheckpointError(f"{config_file}: {field}={shown(value)} must be a string")
            names[field] = value
        try:
            return cls(tokenizer, **names, source=(file, hashlib.sha256(data).digest()))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def tokenize(
        self, text: str, add_bos: bool = False, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of ``text``, without special tokens that it does not spell out.

        Args:
            add_bos: put the begin token first.
            add_special_tokens: add what the post-processor of ``tokenizer.json`` adds, as
                transformers does by default; often the begin token, and often nothing.

        Raises:
            RequestError: ``text`` is not valid Unicode, or ``add_bos`` is asked for and the
                tokenizer has no such token.
        """
        try:
            ids = self._encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            said = "text is not a string of valid Unicode; leave lone surrogates out"
            raise RequestError(said) from error
        except Exception as error:  # a panic, or a bare Exception of the library
            raise RequestError(f"text cannot be tokenized: {one_line(error)}") from error
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise RequestError("add_bos=True: this tokenizer has no bos_token")
        return [self.bos_id, *ids]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD, ids past the vocabulary give nothing."""
        if len(ids) < MANY:
            text: str = guarded(
                self._tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens
            )
            return text
        decode = self._tokenizer.decode_batch
        (text,) = guarded(decode, [list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The library keeps the GIL for one text, and gives it up for several."""
        if len(text) < MANY:
            encoding = guarded(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        else:
            encode = self._tokenizer.encode_batch_fast
            (encoding,) = guarded(encode, [text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def offsets(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Where each token of ``text`` begins in it, in characters, as :meth:`tokenize` divides it.
        The parts of a character begin together, with the character. What the post-processor adds
        is at no place of its own, but where the token before it ends.

        Raises:
            Exception: of the library, where :meth:`tokenize` raises.
        """
        encode = self._tokenizer.encode_batch  # the library gives up the GIL for several texts
        (encoding,) = guarded(encode, [text], add_special_tokens=add_special_tokens)
        found, behind = [], 0
        for (start, end), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # Some post-processors count the space in front of a word as no part of it.
            is_next = added or (start > behind and text[behind:start].isspace())
            found.append(behind if is_next else start)
            behind = behind if added else max(behind, end)
        return found

    def stream(self, skip_special_tokens: bool = True) -> DetokenizeStream:
        """A new stream, which agrees with :meth:`detokenize` for the same argument."""
        return self.stream_after((), skip_special_tokens)

    def stream_after(
        self,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> DetokenizeStream:
        """A stream of what continues ``prompt``: prompt and stream together are the text of all
        ids. A decoder drops the space in front of a text's first word, which is not the first word
        of what continues it.

        Args:
            kept: special tokens that are not skipped.
        """
        if self._byte_level and kept and skip_special_tokens:
            shown = {token_id: self._bytes[token_id] for token_id in kept}
            return _ByteLevelStream(ChainMap(shown, self._visible_bytes))
        if self._byte_level:
            return _ByteLevelStream(self._visible_bytes if skip_special_tokens else self._bytes)
        skipped = self.special_ids.difference(kept) if skip_special_tokens else frozenset()
        return _WindowStream(self._tokenizer, skipped, prompt)

    def special_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """The special tokens among ``texts``, by id."""
        named = {self._tokenizer.token_to_id(text): text for text in texts}
        return {token_id: text for token_id, text in named.items() if token_id in self.special_ids}

    def token_name(self, token_id: int) -> str | None:
        """The vocabulary's entry; None for an unknown id."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """What ``token_id`` adds to a text, or makes of an empty one (``first``), since a decoder
        may drop the space that a text begins with. Empty for special tokens and unknown ids.
        """
        if self._byte_level:
            return self._visible_bytes[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token) if self._byte_fallback else None
        if byte is not None and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        before = [] if first else self._ordinary_token
        start = len(self._tokenizer.decode(before, skip_special_tokens=False))
        text: str = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)[start:]
        return b"" if "\ufffd" in text and "\ufffd" not in token else text.encode()

    @functools.cached_property
    def _ordinary_token(self) -> list[int]:
        """A token of visible text, as what comes before another one; [] if there is none."""
        for token_id in range(self.vocab_size):
            text = self._tokenizer.decode([token_id], skip_special_tokens=True)
            if text.isascii() and text.isalnum():
                return [token_id]
        return []

    @functools.cached_property
    def longest_token(self) -> int:
        """Most characters that a token stands for, or more."""
        return max(map(len, self.vocabulary), default=1)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by token, added ones included."""
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def to_json(self) -> bytes:
        """The content of a ``tokenizer.json`` with the same vocabulary and rules: of the file that
        it was read from, if that is still as it was. Else the library writes it, and no other
        thread runs meanwhile, for 0.2 s with 128,000 tokens.

        Raises:
            TokenizerPanicError: it cannot be written.
            Exception: a rule of it is written in Python.
        """
        if self._source is not None:
            file, digest = self._source
            with contextlib.suppress(OSError, CheckpointError):
                data = read_file(file, MOST_TOKENIZER_BYTES)
                if hashlib.sha256(data).digest() == digest:
                    return data
        text: str = guarded(self._tokenizer.to_str)
        return text.encode()

    @property
    def bos(self) -> int | None:
        """Megatron's name of :attr:`bos_id`."""
        return self.bos_id

    @property
    def eod(self) -> int | None:
        """Megatron's name of the first of :attr:`eos_ids`."""
        return self.eos_ids[0] if self.eos_ids else None

    def _special_id(self, field: str, token: str | None) -> int | None:
        if token is None:
            return None
        try:
            token_id: int | None = self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair
            token_id = None
        if token_id is None:
            raise CheckpointError(f"{field}={shown(token)} is not in the vocabulary")
        return token_id

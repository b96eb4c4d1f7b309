"""What a ``tokenizer.json`` costs, found out in a process of its own, which may end at any line.

    python -m megatron_async.tokenizer.probe FD

The file comes through the connection ``FD``. The answer is one line, empty for a good tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from megatron_async.processes.limits import limit_memory, limit_work
from megatron_async.tokenizer.calls import TokenizerPanicError, guarded, part_as_json

MOST_ID = 2**24
"""No token has an id from here on: tables are as long as the largest id."""
MOST_PADDED = 2**24
MOST_GROWTH = 64
"""Tokens, and characters behind normalizers, that a character of a text may become."""
MOST_ADDED = 4096
"""The same for what is added to each text."""
MOST_CHARACTERS = 512
"""Most characters of the file's rules that are tried one by one."""
RUN = 64
"""A character is tried this often in a row: some patterns then take for ever."""

MEMORY_BYTES, MEMORY_PER_BYTE = 2**28, 32
"""The most memory, and more for each byte of the file. Large vocabularies take 10 for each."""
WORK_SECONDS, BYTES_PER_SECOND = 10, 2**20
"""The most time; a large file has a second more for each MiB."""

TEXTS = ("a", "Hello, world! 1 \u00e9\u4e2d\n  x", f"{'a' * 64}!")
PLANE = 2**16
_CHUNK = 64
_ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
"""In the text of a token the quotes would be escaped."""


class RefusedError(Exception):
    """A tokenizer that costs too much; says why."""


def check(data: bytes) -> None:
    """Check the content of a ``tokenizer.json``.

    Raises:
        RefusedError, TokenizerPanicError: it takes too much of a text, or is broken.
        Exception: it is no tokenizer.
    """
    tokenizer: tokenizers.Tokenizer = guarded(tokenizers.Tokenizer.from_buffer, data)
    _check_padding(tokenizer.padding)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    _check_ids(vocabulary.items())
    _check_ids(_added_tokens(data.decode()))
    for text in TEXTS:
        _check_text(tokenizer, text)
    named = sorted(set().union(*_rules(tokenizer)))[:MOST_CHARACTERS]
    for character in named:
        _check_text(tokenizer, character)
        _check_text(tokenizer, character * RUN + "!")
    for rule in _rules(tokenizer):
        _check_text(tokenizer, rule)
    _check_normalizer(tokenizer)


def _check_padding(padding: dict[str, Any] | None) -> None:
    for name in ("length", "pad_to_multiple_of"):
        number = (padding or {}).get(name)
        if number is not None and number > MOST_PADDED:
            raise RefusedError(f"padding has {name}={number}; the most is {MOST_PADDED}")


def _check_ids(tokens: Iterable[tuple[str, int]]) -> None:
    token, largest = max(tokens, key=lambda token: token[1], default=("", 0))
    if largest >= MOST_ID:
        shown = ascii(token[:40])
        raise RefusedError(f"token {shown} has id {largest}; the most is {MOST_ID - 1}")


def _added_tokens(text: str) -> Iterator[tuple[str, int]]:
    """The tokens that the file adds, by the ids that it says: the library may give them others."""
    for found in _ADDED.finditer(text):
        tokens, _ = json.JSONDecoder().raw_decode(text, found.end() - 1)
        for token in tokens:
            if isinstance(token, dict) and isinstance(token.get("id"), int):
                yield str(token.get("content")), token["id"]


def _rules(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """The texts that the rules around the vocabulary name, patterns among them."""
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    for part in parts:
        yield from _strings(json.loads(part_as_json(part)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        inner: Iterable[Any] = (v for k, v in value.items() if k != "precompiled_charsmap")
        for each in inner:
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _check_text(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    try:
        for adds in (False, True):
            ids = guarded(tokenizer.encode, text, add_special_tokens=adds).ids
            if len(ids) > MOST_GROWTH * len(text) + MOST_ADDED * adds:
                raise RefusedError(f"{len(text)} characters become {len(ids)} tokens")
        back = guarded(tokenizer.decode, ids)
        if len(back) > MOST_GROWTH * len(text) + MOST_ADDED:
            raise RefusedError(f"{len(text)} characters come back as {len(back)}")
    except (TokenizerPanicError, RefusedError):
        raise
    except Exception:  # what it has no token for is no reason to refuse the rest
        return


def _check_normalizer(tokenizer: tokenizers.Tokenizer) -> None:
    """Try the normalizer with all characters of the first two planes."""
    if tokenizer.normalizer is None:
        return
    for start in range(0, 2 * PLANE, _CHUNK):
        text = "".join(map(chr, range(start, start + _CHUNK)))
        if any("\ud800" <= character <= "\udfff" for character in text):
            continue
        found = guarded(tokenizer.normalizer.normalize_str, text)
        if len(found) > MOST_GROWTH * len(text):
            said = f"{len(text)} characters from U+{start:04X} on become {len(found)}"
            raise RefusedError(f"its normalizer: {said}")


def answer(data: bytes) -> str:
    """What is wrong with a tokenizer on one line; "" for nothing."""
    try:
        check(data)
    except MemoryError:
        raise
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def main() -> None:
    """Run the process."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # where the library reports panics
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        size = int.from_bytes(stream.read(8), "big")
        limit_memory(MEMORY_BYTES + MEMORY_PER_BYTE * size)
        limit_work(WORK_SECONDS + size // BYTES_PER_SECOND)
        said = answer(stream.read(size)).encode("utf-8", "backslashreplace")
        connection.sendall(said + b"\n")


if __name__ == "__main__":
    main()

"""Calls into the tokenizers library. Where its code panics, Python gets a ``BaseException``, which
no handler of errors takes, and the standard error two lines or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tokenizers

Result = TypeVar("Result")


class TokenizerPanicError(RuntimeError):
    """The library has panicked: a part of the tokenizer is broken, or is for this text."""


def guarded(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """What ``function`` of the library returns.

    Raises:
        TokenizerPanicError: it has panicked.
    """
    try:
        return function(*args, **options)
    except Exception:
        raise
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerPanicError(f"the tokenizers library panicked: {error}") from None


def parse(data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a ``tokenizer.json``, for prompts that are encoded whole: the file keeps the
    truncation and padding of its last use, often training.

    Raises:
        TokenizerPanicError: it is broken.
        Exception: ``data`` is no tokenizer.
    """
    tokenizer: tokenizers.Tokenizer = guarded(tokenizers.Tokenizer.from_buffer, data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def part_as_json(part: Any) -> bytes:
    """A normalizer, a decoder or the like, as the file has it; b"null" for None."""
    return b"null" if part is None else bytes(part.__getstate__())

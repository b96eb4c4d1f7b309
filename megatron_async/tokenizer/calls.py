"""Calls into the tokenizers library. Where its code panics, Python gets a ``BaseException``, which
no handler of errors takes, and the standard error two lines or more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tokenizers

Result = TypeVar("Result")

PROBES = ("a", "Hello, world! 1 \u00e9\u4e2d\n  x", f"{'a' * 64}!")
"""Texts that a tokenizer must take without a panic."""


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
    """The tokenizer of a ``tokenizer.json``, which has taken each of :data:`PROBES`.

    Raises:
        TokenizerPanicError: it is broken.
        Exception: ``data`` is no tokenizer.
    """
    with _silent_standard_error():
        tokenizer: tokenizers.Tokenizer = guarded(tokenizers.Tokenizer.from_buffer, data)
        for text in PROBES:
            try:
                guarded(tokenizer.decode, guarded(tokenizer.encode, text).ids)
            except TokenizerPanicError:
                raise
            except Exception:  # what it has no token for is no reason to refuse the rest
                continue
    return tokenizer


@contextlib.contextmanager
def _silent_standard_error() -> Iterator[None]:
    """The library reports a panic to the file descriptor itself. Models are loaded at start, by one
    thread."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)

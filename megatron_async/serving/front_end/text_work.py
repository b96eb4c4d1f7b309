"""Tokenizing and its like, which the event loop leaves to threads where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from megatron_async.errors import QueueFullError, RequestError
from megatron_async.serving.http.errors import TOO_LONG, ApiError

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import Tokenizer  # which imports torch

Result = TypeVar("Result")

SHORT = 1_000
"""Characters, or tokens, that take less than a millisecond."""
LONG = 200_000
"""From here on a text has threads of its own, so that others do not wait for it."""
THREADS = 2
MOST_WAITING = 64
"""Texts in threads and before them, of either length."""


class TextWork:
    """A bounded queue before few threads, for long texts and for the others.

    A thread cannot be stopped: what runs in one is bounded by its length, and the tokenizers
    library works without the GIL.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = {
            is_long: ThreadPoolExecutor(THREADS, "long texts" if is_long else "texts")
            for is_long in (False, True)
        }
        self._waiting = {False: 0, True: 0}

    def close(self) -> None:
        """Nothing is begun any more."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """What ``work`` on ``size`` characters or tokens gives and raises.

        Raises:
            QueueFullError: too much waits already.
        """
        if size <= SHORT:
            return work()
        is_long = size > LONG
        if self._waiting[is_long] >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} long texts wait to be read; try again later")
        self._waiting[is_long] += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads[is_long], work)
        finally:
            self._waiting[is_long] -= 1

    async def tokenize(
        self,
        text: str,
        max_tokens: int,
        *,
        add_bos: bool = False,
        add_special_tokens: bool = False,
        field: str = "prompt",
    ) -> list[int]:
        """See ``Tokenizer.tokenize``.

        Args:
            max_tokens: that the model takes: a text that is longer in any case is not looked at.

        Raises:
            ApiError: names the API's ``field``.
            QueueFullError: see :meth:`run`.
        """
        if len(text) > SHORT:
            longest = self._tokenizer.longest_token
            if len(text) > longest * max_tokens:
                said = f"{limit_of(max_tokens)} {field} has {len(text):,} characters; the most is "
                said += f"{longest * max_tokens:,}, since no token has more than {longest}"
                raise ApiError(400, said, param=field, code=TOO_LONG)

        def tokenize() -> list[int]:
            return self._tokenizer.tokenize(text, add_bos, add_special_tokens=add_special_tokens)

        try:
            return await self.run(len(text), tokenize)
        except RequestError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None

    async def offsets(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """See ``Tokenizer.offsets``, of what could be tokenized; raises QueueFullError."""

        def offsets() -> list[int]:
            return self._tokenizer.offsets(text, add_special_tokens=add_special_tokens)

        return await self.run(len(text), offsets)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer.detokenize``; raises QueueFullError."""
        return await self.run(
            len(ids), lambda: self._tokenizer.detokenize(ids, skip_special_tokens)
        )

    async def token_names(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entry of each; raises QueueFullError."""
        return await self.run(len(ids), lambda: list(map(self._tokenizer.token_name, ids)))


def limit_of(limit: int) -> str:
    """OpenAI's words, which clients look for to shorten what they send."""
    return f"this model's maximum context length is {limit} tokens. However,"

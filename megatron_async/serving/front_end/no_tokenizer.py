"""A server whose clients send token ids and get token ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_async.errors import RequestError
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.tokenizer.tokenizer import DetokenizeStream

SAID = (
    "cannot be served: this server runs without a tokenizer (--skip-tokenizer-init); send token "
    "ids to /v1/completions, with return_token_ids"
)


class NoTokenizer:
    """Stands in for a :class:`~megatron_async.tokenizer.tokenizer.Tokenizer`: tokens have no text,
    and texts are errors."""

    bos_id: int | None = None
    longest_token = 1

    @property
    def vocab_size(self) -> int:
        """Raises RequestError: none of its own."""
        raise RequestError(f"tokens {SAID}")

    def tokenize(
        self, text: str, add_bos: bool = False, *, add_special_tokens: bool = False
    ) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(f"text {SAID}")

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """No text."""
        return ""

    def stream(self, skip_special_tokens: bool = True) -> DetokenizeStream:
        """Return a stream of no text."""
        return _NoText()

    def stream_after(
        self,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> DetokenizeStream:
        """Return a stream of no text."""
        return _NoText()

    def special_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """None."""
        return {}

    def token_name(self, token_id: int) -> str | None:
        """None."""
        return None

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """None."""
        return b""


class _NoText(DetokenizeStream):
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class NoTemplates:
    """Stands in for the templates of a :class:`~megatron_async.serving.chat.chat.Chat`."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(f"messages {SAID}")

    def source(self, name: str | None = None, *, tools: bool = False) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(f"messages {SAID}")


class TokenIds(TokenNames):
    """Tokens are called by their ids."""

    def name(self, token: int, *, as_id: bool = False) -> str:
        """``token_id:N``."""
        return f"token_id:{token}"

    def text(self, token: int) -> str:
        """None."""
        return ""

    def text_and_bytes(self, token: int, *, as_id: bool = False) -> tuple[str, list[int]]:
        """``token_id:N``, and no bytes."""
        return f"token_id:{token}", []

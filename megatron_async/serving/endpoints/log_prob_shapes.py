"""Log-probabilities as the two APIs of OpenAI show them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.serving.front_end.job import Job, LogProbs

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import DetokenizeStream, Tokenizer

LEAST = -9999.0
"""Shown in place of minus infinity, which JSON does not have; OpenAI's API does the same."""


class TokenNames:
    """What tokens are called: by their text, or ``token_id:N``.

    The text is what a token adds to a text before it, with the space in front of a word. A token
    that is a part of a character has no text of its own. OpenAI's completions call it
    ``bytes:\\xe2\\x82``, so that two of them are never one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One entry for each token that was ever shown, at most the vocabulary.
        self._shown = functools.cache(self._show)

    def name(self, token: int, *, as_id: bool = False) -> str:
        """Unique among tokens of different bytes."""
        return f"token_id:{token}" if as_id else self._shown(token)[0]

    def text(self, token: int) -> str:
        """Return the text of the token by itself; U+FFFD for parts of characters."""
        return self._shown(token)[1]

    def text_and_bytes(self, token: int, *, as_id: bool = False) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token as chat has them."""
        _, text, raw = self._shown(token)
        return (f"token_id:{token}" if as_id else text), raw

    def _show(self, token: int) -> tuple[str, str, list[int]]:
        raw = self._tokenizer.token_bytes(token)
        if not raw:  # special, or unknown
            raw = self._tokenizer.detokenize([token], skip_special_tokens=False).encode()
        text = raw.decode(errors="replace")
        try:
            raw.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            return name, text, list(raw)
        return text, text, list(raw)


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST)


class CompletionLogProbs:
    """``logprobs`` of one text of ``/v1/completions``, in parts as they come.

    Args:
        top: most likely tokens to show at each position; the token itself is shown too, and with 0
            alone, as vLLM does it.
        prompt: what the text continues.
        skip_special_tokens: they are no part of the text, in which offsets count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: TokenNames,
        top: int,
        *,
        as_ids: bool = False,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._names = names
        self._top = top
        self._as_ids = as_ids
        self._stream_after = functools.partial(
            tokenizer.stream_after, skip_special_tokens=skip_special_tokens
        )
        self._places = _Places(self._stream_after(prompt), names)

    def part(
        self, ids: Sequence[int], log_probs: Sequence[tuple[float, dict[int, float]] | None]
    ) -> dict[str, Any]:
        """The next tokens; None stands for the first one of a prompt, which has none."""
        return self._shown(ids, log_probs, [self._places.next(token) for token in ids])

    def _shown(
        self,
        ids: Sequence[int],
        log_probs: Sequence[tuple[float, dict[int, float]] | None],
        offsets: list[int],
    ) -> dict[str, Any]:
        name = functools.partial(self._names.name, as_id=self._as_ids)
        tops: list[dict[str, float] | None] = []
        for token, known in zip(ids, log_probs, strict=True):
            if known is None:
                tops.append(None)
                continue
            own, top = known
            shown: dict[str, float] = {name(token): _finite(own)}
            for other, of in list(top.items())[: self._top]:
                if other != token:
                    # Two tokens may be written alike, and neither is left out.
                    called = name(other)
                    called = f"token_id:{other}" if called in shown else called
                    shown[called] = _finite(of)
            tops.append(dict(sorted(shown.items(), key=lambda item: -item[1])))
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [None if known is None else _finite(known[0]) for known in log_probs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def prompt(
        self,
        ids: Sequence[int],
        log_probs: LogProbs | None,
        text: str = "",
        offsets: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """The tokens of an echoed prompt, before all others; a request that ends before it is
        computed has none of the log-probabilities, or those of a part.

        Args:
            text: of the prompt, behind which the other tokens begin.
            offsets: of its tokens, where the client has sent it; None counts in the text of
                the tokens.
        """
        if offsets is None:
            places = _Places(self._stream_after(()), self._names)
            offsets = [places.next(token) for token in ids]
        self._places.begin(len(text))
        known = [None, *(log_probs or ())]
        known += [None] * (len(ids) - len(known))
        return self._shown(ids, known, list(offsets))


class _Places:
    """Where tokens begin in their text, in characters."""

    def __init__(self, stream: DetokenizeStream, names: TokenNames) -> None:
        self._stream = stream
        self._names = names
        self._length = self._offset = 0

    def begin(self, length: int) -> None:
        """Other text of ``length`` characters is before the first token."""
        self._length = self._offset = length

    def next(self, token: int) -> int:
        """The place of the next token."""
        offset, begun = self._offset, self._length
        text = self._stream.push(token)
        self._length += len(text)
        # Characters whose last byte is yet to come may hide those before them.
        self._offset = max(self._offset, self._length + self._stream.held_characters())
        if self._length - begun > 1 and "\ufffd" in text:
            # The bytes before it were no character, which is known only now.
            own = self._names.text(token)
            if own and text.endswith(own) and "\ufffd" not in own:
                return max(offset, self._length - len(own))
        return offset


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parts of one text as one."""
    first = parts[0]
    return {
        key: None if first[key] is None else [item for part in parts for item in part[key]]
        for key in first
    }


def chat_log_probs(
    names: TokenNames, ids: Sequence[int], log_probs: LogProbs, top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``."""

    def shown(token: int, log_prob: float) -> dict[str, Any]:
        text, raw = names.text_and_bytes(token, as_id=as_ids)
        return {"token": text, "logprob": _finite(log_prob), "bytes": raw}

    content = []
    for token, (own, others) in zip(ids, log_probs, strict=True):
        tops = [shown(other, of) for other, of in list(others.items())[:top]]
        content.append({**shown(token, own), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def prompt_log_probs(names: TokenNames, job: Job, top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: by token id, the most likely first; the prompt's own token is
    there too. Of a token that the model gave NaN for, nothing is known, and nothing of those that
    it had not computed when the request ended."""
    shown: list[dict[str, Any] | None] = [None]
    known = list(zip(job.prompt_log_probs or (), job.prompt_ranks, strict=True))
    for token, ((own, others), rank) in zip(job.prompt[1:], known, strict=False):
        ranked = list(enumerate(others.items(), start=1))[:top]
        each: dict[int, tuple[int | None, float]] = {
            other: (place, of) for place, (other, of) in ranked
        }
        each[token] = (rank or None, own)
        shown.append(
            {
                str(other): {
                    "logprob": _finite(of),
                    "rank": place,
                    "decoded_token": names.text_and_bytes(other)[0],
                }
                for other, (place, of) in each.items()
            }
        )
    return [*shown, *[None] * (len(job.prompt) - len(shown))]

"""Earlier turns that keep their token ids: a chat goes on behind what was sampled, and not behind
what a tokenizer makes of its text (Megatron's ``prevent_retokenization``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_async.serving.http.errors import ApiError

PROMPT, GENERATED = "prompt_token_ids", "generation_token_ids"
_MARK = "\ue000the last turn\ue000"


class KeptTurn(NamedTuple):
    """The last assistant's turn whose tokens are known.

    Attributes:
        place: of its message.
        ids: of the prompt that it answered, and its own.
    """

    place: int
    ids: list[int]

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``messages`` with a mark for the text of the turn."""
        turn = {"role": messages[self.place]["role"], "content": _MARK}
        return [*messages[: self.place], turn, *messages[self.place + 1 :]]


def kept_turn(messages: Sequence[Mapping[str, Any]]) -> KeptTurn | None:
    """The last assistant's message, if it says its tokens and those of its prompt.

    Raises:
        ApiError: they are no token ids.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        if message.get(PROMPT) is None or message.get(GENERATED) is None:
            return None
        ids: list[int] = []
        for name in (PROMPT, GENERATED):
            given = message[name]
            if not isinstance(given, list) or any(type(each) is not int for each in given):
                param = f"messages[{index}].{name}"
                said = f"{param} must be a list of token ids, as an answer has it; leave it out"
                raise ApiError(400, said, param=param)
            ids += given
        return KeptTurn(index, ids)
    return None


def text_behind(rendered: str) -> str | None:
    """What a template puts behind the turn, in what it made of marked messages; None where it does
    not show the mark once."""
    _, mark, behind = rendered.partition(_MARK)
    return behind if mark and _MARK not in behind else None


def joined(ids: Sequence[int], behind: Sequence[int]) -> list[int]:
    """The prompt. The token that ended the turn stands once."""
    is_ended = bool(ids) and ids[-1:] == list(behind[:1])
    return [*ids, *behind[1:]] if is_ended else [*ids, *behind]

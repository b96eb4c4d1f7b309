"""What an engine does in its users' way, where their ways differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiStyle:
    """Our own way, unless a field says another.

    Args:
        fails_long_requests: a request that is too long is handed out as a failed record; else
            adding it raises.
        raises_suspended: a step of a suspended engine with nothing to hand out raises; else it does
            nothing.
        top_by_text: ``top_n`` lists of requests have the texts of tokens where there is a
            tokenizer; else their ids.
        shows_prompts: a request that has ended has the text of a prompt that came as token ids;
            else only a text that came.
    """

    fails_long_requests: bool = False
    raises_suspended: bool = False
    top_by_text: bool = False
    shows_prompts: bool = False


OUR_STYLE = ApiStyle()

"""The embedded model's tokenizer, as transformers has it."""

from __future__ import annotations

from typing import Any

import transformers

from scripts.peer_suites.servers import ASSETS


def tokenizer(*arguments: Any, **named: Any) -> Any:
    """The embedded model's, whichever is asked for."""
    kind: Any = transformers.PreTrainedTokenizerFast
    made = kind.from_pretrained(str(ASSETS))
    made.chat_template = (ASSETS / "chat_template.jinja").read_text()
    return made

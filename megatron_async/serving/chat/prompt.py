"""The prompt of a chat, and whether the model sees the tools in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_async.errors import RequestError

Tool = Mapping[str, Any]
NO_PLACE = (
    "tools: the chat template of this model has no place for them, so the model does not see them; "
    "take a model, or start the server with a chat template, that has one"
)


class Templates(Protocol):
    """What is needed of ``ChatTemplates``."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; raises RequestError, which names the message and field."""

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        """The text of a template; raises RequestError if there is none."""


class Prompt(NamedTuple):
    """What a template made of a chat.

    Attributes:
        text: begin token included if the template writes one.
        hides_tools: tools were given, and the text is the same without them.
    """

    text: str
    hides_tools: bool = False

    @property
    def fields(self) -> dict[str, list[str]]:
        """The answer's ``warnings``, if there are any."""
        return {"warnings": [NO_PLACE]} if self.hides_tools else {}


class PromptMaker:
    """Renders chats. A chat with tools is rendered without them too, until a text has shown some:
    then the templates have a place for them."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._has_place = False

    def make(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] | None = None,
        **options: Any,
    ) -> Prompt:
        """The prompt; arguments and errors are those of ``Templates.render_chat``."""
        text = self._templates.render_chat(messages, tools, **options)
        if not tools or self._has_place:
            return Prompt(text)
        try:
            self._has_place = self._templates.render_chat(messages, None, **options) != text
        except RequestError:  # it cannot do without them
            self._has_place = True
        return Prompt(text, not self._has_place)

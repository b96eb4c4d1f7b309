"""Chats as the endpoints need them: the only user of chat templates and of tool-call parsers."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_async.errors import RequestError
from megatron_async.request import parameter_checks as checks
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.chat.answers.message import MessageParser
from megatron_async.serving.chat.answers.reasoning import (
    CLOSING,
    OPENING,
    ReasoningFormat,
    ThoughtParser,
    begins_inside,
    tags_behind,
)
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.chat.prompt import NO_PLACE, Prompt, PromptMaker, Templates, Tool
from megatron_async.serving.chat.thinking import Thinking
from megatron_async.serving.front_end.limited_worker import LimitedWorkers, TooMuchError
from megatron_async.serving.http.errors import renamed

if TYPE_CHECKING:
    from megatron_async.serving.chat.answers.harmony import HarmonyThought
    from megatron_async.tokenizer.tokenizer import Tokenizer  # which imports torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    Args:
        tools: offered to the model; none for a text and nothing else.
        required: the answer is calls and nothing else.
        named: the request has chosen the function that is called.
        structure: the structured output that an answer of calls conforms to, if it must be calls.
        calls: makes what a message with a format may be instead, as ``Calls.to_json``; None where
            no call is known from a text.
        parallel: there may be more calls than one.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    named: bool = False
    structure: dict[str, Any] | None = None
    calls: Callable[[], str] | None = None
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tools."""
        return tuple(tool["function"]["name"] for tool in self.tools)


def with_tools(params: SamplingParams, tools: ToolUse, *, has_format: bool) -> SamplingParams:
    """``params`` with the structure of an answer that is calls, or may be.

    Args:
        has_format: the structure is a ``response_format``, which is that of a message and says
            nothing of calls. Another one is that of the text, whatever it holds.

    Raises:
        ApiError: the tools have no JSON.
    """
    given = params.structured_outputs
    asked = tools.structure
    if asked is None and given is not None and has_format and tools.calls is not None:
        asked = {**given, "calls": tools.calls()}
    if asked is None:
        return params
    try:
        structure = checks.structure("structured_outputs", asked)
    except RequestError as error:
        raise renamed(error, {"structured_outputs": "tools"}) from None
    return dataclasses.replace(params, structured_outputs=structure)


class Renderer(Protocol):
    """Runs templates elsewhere."""

    async def call(self, **arguments: Any) -> Sequence[Any]:
        """The fields of what ``PromptMaker.make`` gives, and what it raises; or TooMuchError."""

    def close(self) -> None:
        """Nothing is rendered any more."""


class Chat:
    """Prompts of chats, and what the texts that answer them are.

    Args:
        templates: of the model.
        tool_format: how the model writes tool calls; None for what its template says.
        reasoning_format: how it writes its thoughts; None leaves them in the content.
        renderer: where the templates run, which are programs; None for here.
    """

    def __init__(
        self,
        templates: Templates,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        self._templates = templates
        self._tool_format = tool_format
        self._reasoning = None if reasoning_format is None else ReasoningFormat(reasoning_format)
        self._renderer = renderer
        self._maker = PromptMaker(templates)
        self._has_warned = False

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        chat_template: str | None = None,
        tokenizer_model: str | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> Chat:
        """The chat of a model directory; raises CheckpointError."""
        from megatron_async.serving.chat.chat_template import ChatTemplates
        from megatron_async.serving.chat.template_sandbox import MAX_SECONDS

        templates = ChatTemplates.from_directory(
            path, chat_template=chat_template, tokenizer_model=tokenizer_model
        )
        renderer = LimitedWorkers(
            ChatTemplates.__module__, templates.to_dict(), seconds=MAX_SECONDS
        )
        formats = {"tool_format": tool_format, "reasoning_format": reasoning_format}
        return cls(templates, **formats, renderer=renderer)  # type: ignore[arg-type]

    def close(self) -> None:
        """Make no prompt any more."""
        if self._renderer is not None:
            self._renderer.close()

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: ToolUse,
        *,
        names: Mapping[str, str] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt. The first one that hides tools is told in the log.

        Args:
            names: what the API calls ``messages`` and the rest.
            add_generation_prompt, continue_final_message, chat_template_kwargs: see ChatTemplates.

        Raises:
            ApiError: names the message and field.
        """
        arguments: dict[str, Any] = {
            "messages": messages,
            "tools": tools.tools or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        try:
            if self._renderer is None:
                made = self._maker.make(**arguments)
            else:
                made = Prompt(*await self._renderer.call(**arguments))
        except UnicodeEncodeError as error:  # what goes to the process of templates is encoded
            raise renamed(_of_its_field(error, arguments), names or {}) from None
        except TooMuchError as error:
            said = f"messages: chat template: {error}"
            raise renamed(RequestError(said), names or {}) from None
        except RequestError as error:
            raise renamed(error, names or {}) from None
        if made.hides_tools and not self._has_warned:
            self._has_warned = True
            logger.warning(NO_PLACE)
        return made

    def thinking(self, tokenizer: Tokenizer, prompt: str) -> Thinking:
        """The thought of the answer to ``prompt``, in token ids."""
        tags = None if self._reasoning is None else tags_behind(self._reasoning, prompt)
        return Thinking(tokenizer, tags, is_known=self._reasoning is not None)

    def markers(self, tools: ToolUse) -> tuple[str, ...]:
        """What marks calls and thoughts in an answer, and must be in the text that its parser
        gets."""
        format = self._format(tools)
        markers: tuple[str, ...] = ()
        if format is not None:
            from megatron_async.serving.chat.answers.tool_format import MARKERS, ToolFormat

            markers = MARKERS[ToolFormat(format)]
        if self._reasoning is None:
            return markers
        if self._reasoning is not ReasoningFormat.GPT_OSS:
            return (*markers, OPENING, CLOSING)
        from megatron_async.serving.chat.answers import harmony

        return (*markers, *harmony.MARKERS)

    def parser(
        self,
        tools: ToolUse,
        prompt: str,
        hidden: Collection[str] = (),
        *,
        shows_thought: bool = True,
    ) -> MessageParser:
        """A parser of one answer.

        Args:
            prompt: the text that it answers, whose end may open a thought.
            hidden: markers of calls that are special tokens, and so never content.
            shows_thought: the thought is part of the message.
        """
        format = self._format(tools)
        thought: ThoughtParser | HarmonyThought | None = None
        parser: Any = None
        if self._reasoning is ReasoningFormat.GPT_OSS:
            from megatron_async.serving.chat.answers.harmony import HarmonyParser, HarmonyThought

            if tools.required:
                thought = HarmonyThought()
            else:
                parser = HarmonyParser(tools.names)
        elif self._reasoning is not None:
            thought = ThoughtParser(inside=begins_inside(self._reasoning, prompt))
        if parser is None and format is not None:
            from megatron_async.serving.chat.answers.tool_calls import ToolCallParser

            parser = ToolCallParser(format, names=tools.names)
        return MessageParser(
            parser,
            hidden=hidden,
            parallel=tools.parallel,
            named=tools.named,
            thought=thought,
            shows_thought=shows_thought,
        )

    def _format(self, tools: ToolUse) -> str | None:
        """How an answer writes calls; None where it has none."""
        if not tools.tools:
            return None
        from megatron_async.serving.chat.answers.tool_format import ToolFormat, tool_format_of

        if tools.required:
            return ToolFormat.JSON
        return self._tool_format or tool_format_of(self._templates.source(tools=True))

    def tool_use(
        self,
        tools: Sequence[Any] | None,
        choice: Any,
        parallel: bool,
        *,
        place: str = "tools[{}].function.parameters",
    ) -> ToolUse:
        """What ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request ask.

        Args:
            place: where the parameters of tool ``{}`` are.

        Raises:
            ApiError: names the field.
        """
        if not tools and choice in (None, "none"):
            return ToolUse()
        from megatron_async.serving.chat.answers.tool_format import ToolFormat
        from megatron_async.serving.chat.tool_choice import (
            allowed_tools,
            calls_beside_format,
            checked_tool_choice,
            checked_tools,
            structured_outputs_for,
        )

        try:
            given = checked_tools(tools)
            places = {tool["function"]["name"]: place.format(n) for n, tool in enumerate(given)}
            checked, choice = allowed_tools(given, choice)
            chosen = checked_tool_choice(checked, choice)
            structure = structured_outputs_for(checked, choice, parallel=parallel, places=places)
        except RequestError as error:
            raise renamed(error, {}) from None
        if chosen.mode == "none":
            return ToolUse()
        use = ToolUse(
            tuple(checked),
            required=chosen.forced,
            named=chosen.name is not None,
            structure=structure,
            parallel=parallel,
        )
        format = None if chosen.forced else self._format(use)
        if format is None:
            return use
        calls = functools.partial(
            calls_beside_format, checked, ToolFormat(format), parallel=parallel, places=places
        )
        return dataclasses.replace(use, calls=calls)


def _of_its_field(error: UnicodeEncodeError, arguments: Mapping[str, Any]) -> RequestError:
    """The error of the first argument that is no valid Unicode, which names the place."""
    for name, value in arguments.items():
        try:
            plain(name, value)
        except RequestError as found:
            return found
    return RequestError(f"messages: {error.reason}")

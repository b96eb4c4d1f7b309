"""Chat templates as transformers has them: messages to prompt text, and to token ids."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.path import model_directory, random_shape, tokenizer_directory
from megatron_async.checkpoint.reading.json_file import one_line, read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file, read_file
from megatron_async.errors import CheckpointError, RequestError, shown
from megatron_async.serving.chat.chat_messages import checked_messages, fitted_messages, plain
from megatron_async.serving.chat.prompt import Prompt, PromptMaker
from megatron_async.serving.chat.template_sandbox import SandboxedTemplate
from megatron_async.tokenizer.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template of models with random weights."""
TEMPLATE_FOLDER = "chat_templates"
MOST_TEMPLATE_BYTES = 2**24
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of templates that are taken without being asked for, the second one where there are tools.
"""
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)

_END = "\ue000end of the final message\ue000"
"""Put behind a text to be continued, to find its end in what the template makes of it."""


class ChatTemplates:
    """The chat templates of one model, by name.

    A template runs in Jinja's sandbox, with what transformers gives it: special tokens,
    ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls, and
    ``{% generation %}``. Time and size of what it does are bounded.

    Args:
        templates: their sources by name.
        special_tokens: texts of :data:`SPECIAL_TOKENS`, as far as the model has them.

    Raises:
        CheckpointError: a template has a syntax error.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._templates = {
            name: SandboxedTemplate(source, name) for name, source in templates.items()
        }
        self._special_tokens = dict(special_tokens or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make such templates."""
        sources = {name: template.source for name, template in self._templates.items()}
        return {"templates": sources, "special_tokens": self._special_tokens}

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        chat_template: str | Path | None = None,
        tokenizer_model: str | Path | None = None,
    ) -> ChatTemplates:
        """The templates of a model directory, or of "tiny", as transformers finds them: files of
        their own go before ``tokenizer_config.json``. There may be none.

        Args:
            chat_template: a file whose template is taken instead.
            tokenizer_model: a ``tokenizer.json``, or its directory, instead of the model's own.

        Raises:
            CheckpointError: a file is corrupt, or a template has a syntax error.
        """
        if random_shape(path) is not None:
            given = None if chat_template is None else _read(Path(chat_template))
            return cls({DEFAULT: given or PLAIN_TEMPLATE})
        directory = model_directory(path)
        directory = tokenizer_directory(directory, tokenizer_model) or directory
        config_file = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_file) if is_regular_file(config_file) else {}
        if chat_template is not None:
            templates = {DEFAULT: _read(Path(chat_template))}
        else:
            templates = _template_files(directory) or _of_config(config_file, config)
        tokens_file = directory / SPECIAL_TOKENS_FILE
        tokens = (read_json(tokens_file) if is_regular_file(tokens_file) else {}) | config
        try:
            return cls(templates, _special_tokens(tokens))
        except CheckpointError as error:
            raise CheckpointError(f"{chat_template or directory}: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates; empty if the model has none."""
        return tuple(self._templates)

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        """The text of the template that is taken; raises :class:`RequestError` if there is none."""
        return self._choose(name, tools).source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, begin token included if the template writes one.

        Content parts are joined by newlines unless the template wants parts. Arguments of tool
        calls may be JSON text or objects; templates get objects, unless they join texts of them.

        Args:
            messages: in OpenAI's form; None values are left out. A message without content gets
                None if the template tests for None and can be rendered with it, else "".
            tools: functions in OpenAI's form; none at all is None.
            template: name of one of several.
            add_generation_prompt: open the assistant's next message. None does, unless the final
                message is continued.
            continue_final_message: leave the final message open, for the model to go on with.
            chat_template_kwargs: further variables of the template.

        Raises:
            RequestError: names the message or field.
        """
        tools = tools or None
        chosen = self._choose(template, tools is not None)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict each other; leave one "
                "of them out"
            )
        variables: dict[str, Any] = {
            "tools": _objects("tools", tools),
            "documents": _objects("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        checked = checked_messages(messages)
        more = plain("chat_template_kwargs", chat_template_kwargs or {})
        if not isinstance(more, dict) or not all(isinstance(name, str) for name in more):
            raise RequestError(f"chat_template_kwargs={shown(more)} must be an object")
        for name in ("chat_template", "continue_final_message", "messages", *variables):
            if name in more:
                raise RequestError(f"chat_template_kwargs.{name}: it is a field of the request")
        variables = self._special_tokens | more | variables
        if continue_final_message and checked[-1].get("content") in (None, []):
            raise RequestError(
                f"messages[{len(checked) - 1}]: continue_final_message needs a final message with "
                "text"
            )
        render = _continued if continue_final_message else _rendered
        if chosen.wants.none and any(not message.get("content") for message in checked):
            # A template may ask for None in one place, and fail on it in another.
            with contextlib.suppress(RequestError):
                return render(chosen, _fitted(copy.deepcopy(checked), chosen, None), variables)
        return render(chosen, _fitted(checked, chosen, ""), variables)

    def encode_chat(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Token ids of :meth:`render_chat`, which takes the same ``options``. Special tokens in the
        text become their ids and no others are added, so that a begin token is never doubled."""
        return tokenizer.tokenize(self.render_chat(messages, **options))

    def _choose(self, name: str | None, tools: bool) -> SandboxedTemplate:
        if not self._templates:
            raise RequestError(
                "messages: this model has no chat template; send it a prompt, or start the server "
                "with a chat template"
            )
        names = [name] if name is not None else [FOR_TOOLS] * tools + [DEFAULT]
        for known in names:
            if known in self._templates:
                return self._templates[known]
        raise RequestError(
            f"chat_template={shown(name)}: the model has the templates "
            f"{', '.join(self._templates)}; name one of them"
        )


def make_worker(**given: Any) -> Callable[..., Prompt]:
    """:meth:`PromptMaker.make`, for ``limited_worker``."""
    return PromptMaker(ChatTemplates(**given)).make


def _fitted(
    messages: list[dict[str, Any]], template: SandboxedTemplate, silent: str | None
) -> list[dict[str, Any]]:
    knows = "developer" in template.source
    return fitted_messages(messages, template.wants, knows_developer=knows, silent=silent)


def _rendered(
    template: SandboxedTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    return template.render({**variables, "messages": messages})


def _continued(
    template: SandboxedTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """The chat up to the end of its final message's text."""
    where = f"messages[{len(messages) - 1}]"
    content = messages[-1]["content"]
    holder, key = messages[-1], "content"
    if isinstance(content, list):
        holder, key = content[-1], "text"
    text = holder[key]
    # Whatever follows the space is the template's: one that trims takes the space away too.
    holder[key] = f"{text}{_END} "
    rendered = _rendered(template, messages, variables)
    before, found, after = rendered.rpartition(_END)
    if not found or text.strip() not in before:
        raise RequestError(
            f"{where}: continue_final_message: the chat template does not show the final message "
            "as it is"
        )
    return before if after.startswith(" ") else before.rstrip()


def _objects(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if values is None:
        return None
    made = plain(name, values)
    if not isinstance(made, list) or not all(isinstance(each, dict) for each in made):
        raise RequestError(f"{name} must be a list of objects")
    return made


# --- files --------------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {one_line(error)}") from error


def _read_own(file: Path) -> str:
    """Read the template of a model directory, a regular file. A user's own may be a pipe."""
    try:
        return read_file(file, MOST_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: cannot be read: {one_line(error)}") from error


def _template_files(directory: Path) -> dict[str, str]:
    file = directory / TEMPLATE_FILE
    found = {DEFAULT: _read_own(file)} if is_regular_file(file) else {}
    others = sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
    return found | {other.name.removesuffix(".jinja"): _read_own(other) for other in others}


def _of_config(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if value is None:
        return {}
    named = [{"name": DEFAULT, "template": value}] if isinstance(value, str) else value
    try:
        found = {each["name"]: each["template"] for each in named}
    except (TypeError, KeyError):
        found = {None: None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(f"{file}: chat_template must be a text or a list of named templates")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

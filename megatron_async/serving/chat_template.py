"""Chat templates as transformers has them: messages to prompt text, and to token ids."""

from __future__ import annotations

import contextvars
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from megatron_async.checkpoint.files import one_line, read_json
from megatron_async.checkpoint.load import model_directory
from megatron_async.errors import CheckpointError, RequestError
from megatron_async.parameter_checks import shown
from megatron_async.serving.chat_messages import checked_messages, fitted_messages, plain
from megatron_async.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "chat_templates"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of templates that are taken without being asked for, the second one where there are tools.
"""
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
MAX_EXPONENT = 64

_END = "\ue000end of the final message\ue000"
"""Put behind a text to be continued, to find its end in what the template makes of it."""


class ChatTemplates:
    """The chat templates of one model, by name.

    A template runs in Jinja's sandbox, with what transformers gives it: special tokens,
    ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls, and
    ``{% generation %}``. It may run for :data:`MAX_SECONDS` and make texts of
    :data:`MAX_CHARACTERS`: that stops mistakes and endless loops. A single filter over huge values
    is not bounded.

    Args:
        templates: their sources by name.
        special_tokens: texts of :data:`SPECIAL_TOKENS`, as far as the model has them.

    Raises:
        CheckpointError: a template has a syntax error.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._templates = {name: _Template(source, name) for name, source in templates.items()}
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(
        cls, path: str | Path, *, chat_template: str | Path | None = None
    ) -> ChatTemplates:
        """Those of a model directory, or of "tiny", as transformers finds them: files of their own
        go before ``tokenizer_config.json``. There may be none.

        Args:
            chat_template: a file whose template is taken instead.

        Raises:
            CheckpointError: a file is corrupt, or a template has a syntax error.
        """
        directory = model_directory(path)
        config_file = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_file) if config_file.is_file() else {}
        if chat_template is not None:
            templates = {DEFAULT: _read(Path(chat_template))}
        else:
            templates = _template_files(directory) or _of_config(config_file, config)
        tokens_file = directory / SPECIAL_TOKENS_FILE
        tokens = (read_json(tokens_file) if tokens_file.is_file() else {}) | config
        try:
            return cls(templates, _special_tokens(tokens))
        except CheckpointError as error:
            raise CheckpointError(f"{chat_template or directory}: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """Of the templates; empty if the model has none."""
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
        calls may be JSON text or objects; templates get objects.

        Args:
            messages: in OpenAI's form; None values are left out.
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
        made = fitted_messages(
            checked_messages(messages),
            wants_parts=chosen.wants_parts,
            wants_text=chosen.wants_text,
            knows_developer="developer" in chosen.source,
        )
        variables: dict[str, Any] = {
            "messages": made,
            "tools": _objects("tools", tools),
            "documents": _objects("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        more = plain("chat_template_kwargs", chat_template_kwargs or {})
        if not isinstance(more, dict) or not all(isinstance(name, str) for name in more):
            raise RequestError(f"chat_template_kwargs={shown(more)} must be an object")
        for name in ("chat_template", "continue_final_message", *variables):
            if name in more:
                raise RequestError(f"chat_template_kwargs.{name}: it is a field of the request")
        variables = self._special_tokens | more | variables
        if continue_final_message:
            return _continued(chosen, made, variables)
        return chosen.render(variables)

    def encode_chat(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Token ids of :meth:`render_chat`, which takes the same ``options``. Special tokens in the
        text become their ids and no others are added, so that a begin token is never doubled."""
        return tokenizer.tokenize(self.render_chat(messages, **options))

    def _choose(self, name: str | None, tools: bool) -> _Template:
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


def _continued(
    template: _Template, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """The chat up to the end of its final message's text."""
    where = f"messages[{len(messages) - 1}]"
    content = messages[-1].get("content")
    holder, key = messages[-1], "content"
    if isinstance(content, list) and content:
        holder, key = content[-1], "text"
    text = holder.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{where}: continue_final_message needs a final message with text")
    # Whatever follows the space is the template's: one that trims takes the space away too.
    holder[key] = f"{text}{_END} "
    rendered = template.render(variables)
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


def _template_files(directory: Path) -> dict[str, str]:
    file = directory / TEMPLATE_FILE
    found = {DEFAULT: _read(file)} if file.is_file() else {}
    others = sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
    return found | {other.name.removesuffix(".jinja"): _read(other) for other in others}


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


# --- one template -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One rendering: when it must be over, and the message that a loop over messages is at."""

    deadline: float
    index_of: dict[int, int]
    message: int | None = None

    def check(self, value: object = None) -> None:
        self.message = self.index_of.get(id(value), self.message)
        if time.monotonic() > self.deadline:
            raise _LimitError(f"it runs for more than {MAX_SECONDS:g} s")


class _LimitError(Exception):
    """A template takes too long or makes too much."""


_run: contextvars.ContextVar[_Run] = contextvars.ContextVar("_run")


class _Template:
    """A compiled template.

    Attributes:
        wants_parts: it loops over the parts of a message's content.
        wants_text: content may also be a text; a template that loops and never tests for strings
            takes parts alone.
    """

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source, name)
            self.wants_parts = _loops_over_content(tree)
            tests = {test.name for test in tree.find_all(nodes.Test)}
            self.wants_text = not self.wants_parts or "string" in tests
            checked = _InsertChecks(environment).visit(tree)
            code = environment.compile(checked, name)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"chat template {name!r}{line}: {one_line(error)}") from error
        self._template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )

    def render(self, variables: dict[str, Any]) -> str:
        """The text; raises :class:`RequestError`, which names the message if a loop was at one."""
        index_of = {id(message): n for n, message in enumerate(variables["messages"])}
        run = _Run(time.monotonic() + MAX_SECONDS, index_of)
        token = _run.set(run)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                _check_size(size)
                run.check()
        # A template is a program: whatever it raises, the request cannot be served.
        except Exception as error:
            where = "messages" if run.message is None else f"messages[{run.message}]"
            raise RequestError(f"{where}: chat template: {one_line(error)}") from error
        finally:
            _run.reset(token)
        return "".join(pieces)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise _LimitError(f"it makes more than {MAX_CHARACTERS:,} characters")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on what grows."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def check(self, value: object = None) -> str:
        """Called in each turn of a loop, with what it is at, and in each call of a macro."""
        _run.get().check(value)
        return ""

    def join_text(self, *values: object) -> str:
        """Jinja's ``~``."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_size(len(left) + len(right))
        elif operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > MAX_EXPONENT:
                raise _LimitError(f"exponents above {MAX_EXPONENT} are not supported")
        else:
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(many) * times)
        return super().call_binop(context, operator, left, right)


class _InsertChecks(NodeTransformer):
    """Calls of :class:`_Environment`'s checks where a template loops, calls and joins."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        target = node.target
        values = [nodes.Name(target.name, "load")] if isinstance(target, nodes.Name) else []
        node.body.insert(0, nodes.ExprStmt(self._call("check", values, node)))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("check", [], node)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("join_text", node.nodes, node)

    def _call(self, name: str, values: Sequence[nodes.Expr], at: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), list(values), [], None, None)
        call.set_lineno(at.lineno)
        call.set_environment(self._environment)
        return call


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training; nothing here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# --- what a template wants ----------------------------------------------------------------------


@dataclass(slots=True)
class _ContentNames:
    """Names under which a template holds the content of a message."""

    names: set[str] = field(default_factory=set)

    def holds(self, node: nodes.Node | None) -> bool:
        """An expression that is the content, a slice of it, or the content filtered."""
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            key = node.arg
            if isinstance(key, nodes.Slice):
                return self.holds(node.node)
            return isinstance(key, nodes.Const) and key.value == "content"
        if isinstance(node, nodes.Filter):
            return self.holds(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.holds(node.expr1) or self.holds(node.expr2)
        return isinstance(node, nodes.Name) and node.name in self.names


def _loops_over_content(tree: nodes.Template) -> bool:
    """A loop's subject is a message's content, through variables and arguments of macros too."""
    content = _ContentNames()
    arguments = {
        macro.name: [name.name for name in macro.args] for macro in tree.find_all(nodes.Macro)
    }
    known = -1
    while known < len(content.names):
        known = len(content.names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and content.holds(assign.node):
                content.names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in arguments:
                given = zip(arguments[call.node.name], call.args, strict=False)
                content.names.update(name for name, value in given if content.holds(value))
    return any(content.holds(loop.iter) for loop in tree.find_all(nodes.For))

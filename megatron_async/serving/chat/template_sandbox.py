"""One chat template, compiled and run in Jinja's sandbox within limits of time and size."""

from __future__ import annotations

import contextvars
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.errors import CheckpointError, RequestError
from megatron_async.serving.chat.template_wants import wants_of

MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
MAX_EXPONENT = 64
MAX_MESSAGE = 500
"""Characters of a template's own error message, which may quote what it is about."""


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


class SandboxedTemplate:
    """A compiled template.

    It may run for :data:`MAX_SECONDS`, and make texts of :data:`MAX_CHARACTERS`: that stops
    mistakes and endless loops. One filter over huge values is not stopped while it runs.

    Attributes:
        wants: the form in which it reads messages.

    Raises:
        CheckpointError: it has a syntax error.
    """

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source, name)
            self.wants = wants_of(tree)
            checked = _InsertChecks(environment).visit(tree)
            code = environment.compile(checked, name)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:
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
            said = one_line(error)[:MAX_MESSAGE]
            raise RequestError(f"{where}: chat template: {said}") from error
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

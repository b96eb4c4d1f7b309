"""The form in which a chat template reads messages, found in its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import jinja2.nodes as nodes


@dataclass(frozen=True, slots=True)
class Wants:
    """What a template reads.

    Args:
        parts: it loops over the parts of a message's content.
        text: content may also be a text; a template that loops and never tests for strings takes
            parts alone.
        none: it tests whether content is None, and so must see None where there is no content.
        arguments_text: it joins the arguments of calls to texts, and so takes JSON text.
        id_length: characters that an id of a call must have; None for any number.
    """

    parts: bool = False
    text: bool = True
    none: bool = False
    arguments_text: bool = False
    id_length: int | None = None


def wants_of(tree: nodes.Template) -> Wants:
    """What the template of ``tree`` reads; call it before the tree is rewritten."""
    content, arguments = _names_of(tree, "content"), _names_of(tree, "arguments")
    parts = any(content.holds(loop.iter) for loop in tree.find_all(nodes.For) if _of_parts(loop))
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return Wants(
        parts=parts,
        text=not parts or "string" in tests,
        none=_tests_for_none(tree, content),
        arguments_text=_joins(tree, arguments) and not _serializes(tree, arguments),
        id_length=_id_length(tree),
    )


@dataclass(slots=True)
class _FieldNames:
    """Names under which a template holds one field of a message or call."""

    name: str
    names: set[str] = field(default_factory=set)

    def holds(self, node: nodes.Node | None) -> bool:
        """An expression that is the field, a slice of it, or the field filtered."""
        if isinstance(node, nodes.Getattr):
            return node.attr == self.name
        if isinstance(node, nodes.Getitem):
            key = node.arg
            if isinstance(key, nodes.Slice):
                return self.holds(node.node)
            return isinstance(key, nodes.Const) and key.value == self.name
        if isinstance(node, nodes.Filter):
            return self.holds(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.holds(node.expr1) or self.holds(node.expr2)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.args:
            key = node.args[0]
            return (
                node.node.attr == "get" and isinstance(key, nodes.Const) and key.value == self.name
            )
        return isinstance(node, nodes.Name) and node.name in self.names


def _names_of(tree: nodes.Template, name: str) -> _FieldNames:
    """The field's names, through variables and arguments of macros."""
    found = _FieldNames(name)
    arguments = {
        macro.name: [name.name for name in macro.args] for macro in tree.find_all(nodes.Macro)
    }
    known = -1
    while known < len(found.names):
        known = len(found.names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and found.holds(assign.node):
                found.names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in arguments:
                given = zip(arguments[call.node.name], call.args, strict=False)
                found.names.update(name for name, value in given if found.holds(value))
    return found


def _of_parts(loop: nodes.For) -> bool:
    """The loop reads no functions: some templates take calls as the content of a message."""
    return "function" not in {
        *(each.attr for each in loop.find_all(nodes.Getattr)),
        *(each.value for each in loop.find_all(nodes.Const)),
    }


def _id_length(tree: nodes.Template) -> int | None:
    """What the template compares the length of a call's id with."""
    ids = [_names_of(tree, name) for name in ("id", "tool_call_id")]
    for compare in tree.find_all(nodes.Compare):
        length, other = compare.expr, compare.ops[0].expr
        if (
            isinstance(length, nodes.Filter)
            and length.name in ("length", "count")
            and any(each.holds(length.node) for each in ids)
            and isinstance(other, nodes.Const)
            and isinstance(other.value, int)
            and other.value > 0
            and compare.ops[0].op in ("ne", "eq")
        ):
            return other.value
    return None


def _tests_for_none(tree: nodes.Template, content: _FieldNames) -> bool:
    """``content is none``, or a comparison of the two."""
    for test in tree.find_all(nodes.Test):
        if test.name == "none" and content.holds(test.node):
            return True
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(map(content.holds, sides)) and any(map(_is_none, sides)):
            return True
    return False


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def _joins(tree: nodes.Template, arguments: _FieldNames) -> bool:
    """The arguments are an operand of ``+`` or ``~``, as they are."""
    return any(
        arguments.holds(operand) and not isinstance(operand, nodes.Filter)
        for operand in _joined(tree)
    )


def _joined(tree: nodes.Template) -> Iterator[nodes.Node]:
    for add in tree.find_all(nodes.Add):
        yield from (add.left, add.right)
    for concat in tree.find_all(nodes.Concat):
        yield from concat.nodes


def _serializes(tree: nodes.Template, arguments: _FieldNames) -> bool:
    """The template knows objects too: it writes the arguments as JSON, tells their type, or loops
    over their items."""
    filters = (each for each in tree.find_all(nodes.Filter) if each.name in ("tojson", "items"))
    tests = (each for each in tree.find_all(nodes.Test) if each.name in ("mapping", "string"))
    items = (each for each in tree.find_all(nodes.Getattr) if each.attr in ("items", "keys"))
    readers: list[nodes.Filter | nodes.Test | nodes.Getattr] = [*filters, *tests, *items]
    return any(arguments.holds(each.node) for each in readers)

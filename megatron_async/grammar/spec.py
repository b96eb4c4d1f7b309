"""What the text of a request must conform to, with the names of vLLM's parameters."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.grammar.calls import Calls
from megatron_async.grammar.thought import Thought

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_SPEC_CHARACTERS = 1 << 20
PLACES = "x-places"
"""A schema's list of what errors call its ``$defs``, which have numbers for names: where a request
has them."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the text of a request must conform to, from its first character to its last.

    Exactly one of the first five is set. docs/structured-output.md says what each of them may use.

    Args:
        json: a JSON schema, as a dict or as text, which is how it is held.
        json_object: any JSON object.
        regex: a regular expression, which the whole text matches.
        choice: texts, one of which it is.
        grammar: a grammar in GBNF, the EBNF of llama.cpp; its rule ``root`` is the text.
        disable_any_whitespace: JSON without whitespace between its tokens.
        whitespace_pattern: a regular expression of the whitespace that may stand between JSON's
            tokens; None for two blanks at most, or a line break and 40 blanks behind it.
        calls: calls of tools that the text may be instead: what
            :meth:`~megatron_async.grammar.calls.Calls.to_json` gives; None for none.
        thought: how the model writes the thought behind which the text begins, as
            :meth:`~megatron_async.grammar.thought.Thought.to_json` gives, or a dict of its fields;
            None for none. With it none of the five need be set.

    Raises:
        RequestError: names the field and what to change.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    calls: str | None = None
    thought: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, f"{getattr(self, name)!r} must be True or False")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if isinstance(self.thought, Mapping):
            object.__setattr__(self, "thought", json_module.dumps(dict(self.thought)))
        self._check_kinds()
        for name in ("json", "regex", "grammar", "whitespace_pattern", "calls", "thought"):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        if self.calls is not None:
            try:
                Calls.from_json(self.calls)
            except (ValueError, RecursionError):
                raise _error("calls", "they are of another form; leave them out") from None

        if self.thought is not None:
            try:
                Thought.from_json(str(self.thought))
            except (ValueError, RecursionError) as error:
                raise _error("thought", str(error)) from None

    @property
    def kind(self) -> str:
        """Which of the five is set; "thought" where none is."""
        return next(iter(self._set_kinds()), "thought")

    @classmethod
    def from_any(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """``value`` itself, or made of a dict with the same names, as :meth:`to_dict` gives.

        Raises:
            RequestError: names what is wrong.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs={value!r} must be a StructuredOutputs or a dict of its fields"
            )
        names = [item.name for item in dataclasses.fields(cls)]
        for name in value:
            if name not in names:
                raise _error(name, f"there is no such field; there are {', '.join(names)}")
        flags = ("json_object", "disable_any_whitespace")
        return cls(**{k: v for k, v in value.items() if not (v is None and k in flags)})

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as JSON has them."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and value is not False
        }

    def _set_kinds(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    def _check_kinds(self) -> None:
        kinds = self._set_kinds()
        if not kinds and self.thought is not None:
            kinds = ["thought"]
        if len(kinds) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(kinds) or 'none'} set; set exactly one of "
                f"{', '.join(KINDS)}"
            )
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) not in (None, False) and not kinds[0].startswith("json"):
                raise _error(name, f"only JSON has it; leave it out with {kinds[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _error("whitespace_pattern", "leave it out, or disable_any_whitespace")


def _error(field: str, message: str) -> RequestError:
    return RequestError(f"structured_outputs.{field}: {message}")


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _error(field, f"{value!r} must be a string")
    if len(value) > MAX_SPEC_CHARACTERS:
        raise _error(
            field, f"{len(value):,} characters are too many; use at most {MAX_SPEC_CHARACTERS:,}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        said = "not a string of valid Unicode; leave lone surrogates out"
        raise _error(field, said) from error


def _json_text(schema: Mapping[str, Any]) -> str:
    """The order of properties stays: it is the order in which they are generated."""
    try:
        return json_module.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error("json", f"the schema cannot be written as JSON: {error}") from error


def _choices(choice: Iterable[str]) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Iterable):
        raise _error("choice", f"{choice!r} must be a list of strings")
    texts = tuple(choice)
    if not texts:
        raise _error("choice", "give at least one text")
    for text in texts:
        _check_text("choice", text)
    if sum(map(len, texts)) > MAX_SPEC_CHARACTERS:
        raise _error("choice", f"use at most {MAX_SPEC_CHARACTERS:,} characters in all")
    return texts

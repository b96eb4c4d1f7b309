"""Calls of tools that a text may be instead of what it must conform to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megatron_async.grammar.ebnf import escaped

BLANKS = r"[ \n]{1,2}"
"""Between a call and what marks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """How a model writes calls.

    Args:
        schema: of one call, a JSON object.
        begin, end: what stands around each call; may be empty.
        between: what stands between two calls; may be empty.
        several: there may be more calls than one.
    """

    schema: dict[str, Any]
    begin: str = ""
    end: str = ""
    between: str = ""
    several: bool = True

    @classmethod
    def from_json(cls, text: str) -> Calls:
        """The inverse of :meth:`to_json`; raises ValueError for anything else."""
        values = json.loads(text)
        try:
            made = cls(**values)
        except TypeError:
            raise ValueError("calls are of another form") from None
        for name, kind in (("schema", dict), ("begin", str), ("end", str), ("between", str)):
            if not isinstance(getattr(made, name), kind):
                raise ValueError(f"{name} is of another type")
        return made

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    def rules(self, call: str) -> str:
        """Rules of the library's language, the first of which is ``calls``.

        Args:
            call: what stands for one call behind ``%json``.
        """
        blanks = "_blanks?"
        one = f"{_literal(self.begin)} {blanks} _object {blanks} {_literal(self.end)}"
        more = f" ({blanks} {_literal(self.between)} {blanks} _call)*" if self.several else ""
        lines = (f"calls: _call{more}", f"_call: {one}", f"_object: %json {call}")
        return "\n".join((*lines, f"_blanks: /{BLANKS}/"))


def _literal(text: str) -> str:
    return f"/{escaped(text)}/" if text else ""

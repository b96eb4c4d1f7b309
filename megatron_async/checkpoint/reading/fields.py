"""Typed reads of a Hugging Face ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron_async.config.engine_config import MAX_COUNT
from megatron_async.errors import CheckpointError, shown


class Fields:
    """What ``config.json`` says, and what transformers assumes where it is silent.

    Args:
        values: the content of the file, or of an object in it.
        defaults: transformers' values of fields that are absent.
        aliases: names that stand in the file for those that are read here.
        at: what precedes a name in errors.
        rope_kinds: other names of the kinds of rope scaling.
        also: further names for some of a file's own, which win where both are there, unless null.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        at: str = "",
        rope_kinds: Mapping[str, str] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self._defaults = defaults or {}
        self._aliases = aliases or {}
        self._at = at
        self.rope_kinds = rope_kinds or {}
        self._also = also or {}

    def name(self, name: str) -> str:
        """The name that stands in the file."""
        own = self._aliases.get(name, name)
        further = (x for x, known in self._also.items() if known == own and x in self.values)
        found = next(further, own)
        is_null = self.values.get(found) is None and own in self.values
        return own if is_null else found

    def unsupported(self, name: str, supported: str, value: Any = None) -> CheckpointError:
        """The error for a field that asks for what this package cannot do."""
        name = self.name(name)
        value = self.values.get(name) if value is None else value
        return CheckpointError(
            f"{self._at}{name}={shown(value)} is not supported; supported: {supported}"
        )

    def default(self, name: str) -> Any:
        """What transformers assumes where the file is silent; None if it assumes nothing."""
        return self._defaults.get(name)

    def get(self, name: str) -> Any:
        """A field of any type; None where there is none."""
        return self.values.get(self.name(name), self._defaults.get(name))

    def optional(self, name: str, kind: type, default: Any = None) -> Any:
        """A field that may be null; ``default`` is for one that is absent and has none here.

        Raises:
            CheckpointError: the value is of another type than ``kind`` (an int is a float), an int
                above ``MAX_COUNT``, or a float that is not finite and above 0.
        """
        at = self.name(name)
        if at not in self.values:
            return self._defaults.get(name, default)
        value = number = self.values[at]
        if value is None:
            return None
        wanted = None
        if type(value) is not kind and not (kind is float and type(value) is int):
            wanted = f"of type {kind.__name__}"
        elif kind is float and not 0 < number <= sys.float_info.max:
            wanted = "a finite number above 0"
        elif kind is int and abs(number) > MAX_COUNT:
            wanted = f"an integer of at most {MAX_COUNT}"
        if wanted is not None:
            raise CheckpointError(f"{self._at}{at}={value!r} must be {wanted}")
        return value

    def unless_zero(self, name: str, kind: type) -> Any:
        """A field that may be null or 0, which is off: None for both.

        Raises:
            CheckpointError: as :meth:`optional`.
        """
        value = self.get(name)
        is_off = value == 0 and not isinstance(value, bool)
        return None if is_off else self.optional(name, kind)

    def read(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of which a null counts as absent.

        Raises:
            CheckpointError: as :meth:`optional`; or the field is absent and there is no default.
        """
        value = self.optional(name, kind)
        if value is None:
            value = self._defaults.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self._at}{self.name(name)} is missing")
            return default
        return value

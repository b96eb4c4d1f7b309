"""The tables of ``docs/models.md``: what each type heeds beside what all do, and what a
``generation_config.json`` and a ``quantization_config`` say."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_async.checkpoint.huggingface.field_table import BASE, MXFP4, TABLE
from megatron_async.checkpoint.huggingface.generation_config import GREEDY, SAMPLED
from megatron_async.checkpoint.reading.field_uses import FieldUses
from megatron_async.errors import shown


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "-"


def _row(title: str, uses: FieldUses, without: FieldUses) -> str:
    only = {
        name: " or ".join(shown(one) for one in values) or "null"
        for name, values in uses.only.items()
        if without.only.get(name) != values
    }
    refused = ", ".join(f"`{name}` but {value}" for name, value in sorted(only.items())) or "-"
    heeded, neutral = uses.heeded - without.heeded, uses.neutral - without.neutral
    return f"| {title} | {_names(heeded)} | {refused} | {_names(neutral)} |"


def rows() -> list[str]:
    """A row for what types share, and one for each type."""
    shared = _row("all", BASE, FieldUses())
    return [shared, *(_row(kind, uses, BASE) for kind, uses in sorted(TABLE.items()))]


def rows_beside() -> list[str]:
    """A row for each way of sampling, and one for each kind of quantization."""
    return [
        _row("with `do_sample`", SAMPLED, FieldUses()),
        _row("without it, also", GREEDY, SAMPLED),
        _row("GPT-OSS's `quantization_config`", MXFP4, FieldUses()),
    ]

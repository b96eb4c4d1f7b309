"""Which blocks decode in fused kernels, and why the others run their modules: data, text, log."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

EMBEDDING, ATTENTION, MLP, HEAD = ("embedding", "attention", "mlp", "head")
MAMBA = "mamba"
"""A Mamba-2 mixer, in hybrid models."""
PROJECTION = "projection"
"""In front of the transformer layer of an MTP layer."""
_NAMES = {
    EMBEDDING: "the embedding", ATTENTION: "attention", MLP: "the MLP", HEAD: "the head",
    PROJECTION: "the projection", MAMBA: "the Mamba-2 mixer",
}  # fmt: skip


class Block(NamedTuple):
    """A block of a model: of which kind, in which layer (counted from 1; None outside of them), why
    it is not fused (None if it is), and in which steps, by padded rows (all if there are none)."""

    kind: str
    layer: int | None
    reason: str | None
    rows: tuple[int, ...] = ()

    @property
    def is_fused(self) -> bool:
        """Whether it is fused, in some steps at least."""
        return self.reason is None or bool(self.rows)


class Fallback(NamedTuple):
    """Blocks of one kind that run their modules for the same reason."""

    kind: str
    layers: tuple[int, ...]
    rows: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        where, when = _NAMES[self.kind], ""
        if self.layers:
            where += f" of layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}"
        if self.rows:
            when = f" at {', '.join(map(str, self.rows))} rows"
        return f"{where}{when}: {self.reason}"


@dataclass(frozen=True, slots=True)
class DecodeCoverage:
    """Which blocks of a model decode in fused kernels.

    Args:
        drafting: those of its MTP layers, which are counted behind the decoder's layers.
    """

    blocks: tuple[Block, ...]
    drafting: tuple[Block, ...] = ()

    def fused(self, kind: str) -> tuple[int | None, ...]:
        """Layers whose block of this kind is fused, counted from 1, in some steps at least;
        ``(None,)`` outside of layers, if it is."""
        return tuple(b.layer for b in self.blocks if b.kind == kind and b.is_fused)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The blocks that are not fused, by kind and reason."""
        found: dict[tuple[str, tuple[int, ...], str, bool], list[int]] = {}
        for kind, layer, reason, rows in (*self.blocks, *self.drafting):
            if reason is not None:
                # The decoder's head is in no layer, those of MTP layers are.
                layers = found.setdefault((kind, rows, reason, layer is None), [])
                layers += [] if layer is None else [layer]
        return tuple(
            Fallback(kind, tuple(layers), rows, reason)
            for (kind, rows, reason, _), layers in found.items()
        )

    @property
    def off(self) -> str | None:
        """Why no layer has a fused block, so that the model's own forward decodes; None if one
        has."""
        if any(self.fused(kind) for kind in (ATTENTION, MLP, MAMBA)):
            return None
        fallbacks = DecodeCoverage(self.blocks).fallbacks
        inside = [fallback for fallback in fallbacks if fallback.layers]
        reasons = dict.fromkeys(fallback.reason for fallback in inside)
        if len(reasons) <= 1:
            return next(iter(reasons), "it has no layers")
        return "; ".join(map(str, inside))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``mamba`` where there are such blocks; ``drafting``, where there are
        MTP layers, has the layers whose block of each kind is fused."""
        kinds = dict.fromkeys(block.kind for block in self.drafting)
        of_drafts = DecodeCoverage(self.drafting)
        mamba = {MAMBA: list(self.fused(MAMBA))}
        drafting = {"drafting": {kind: list(of_drafts.fused(kind)) for kind in kinds}}
        return {
            EMBEDDING: bool(self.fused(EMBEDDING)),
            ATTENTION: list(self.fused(ATTENTION)),
            MLP: list(self.fused(MLP)),
            HEAD: bool(self.fused(HEAD)),
            **(mamba if any(block.kind == MAMBA for block in self.blocks) else {}),
            **(drafting if kinds else {}),
            "fallbacks": [
                {"kind": kind, "layers": list(layers), "rows": list(rows), "reason": reason}
                for kind, layers, rows, reason in self.fallbacks
            ],
        }

    def log(self) -> None:
        """Warn of what is not fused, once for each reason in the life of the process."""
        if self.off is not None:
            warn_of_own_forward(self.off)
            return
        for fallback in self.fallbacks:
            warn_of_module(str(fallback))


@functools.cache
def warn_of_own_forward(reason: str) -> None:
    """Once for each reason."""
    logger.warning(
        "decode steps run the model's own forward, which is slower than the fused one: %s", reason
    )


@functools.cache
def warn_of_module(fallback: str) -> None:
    """Once for each fallback."""
    logger.warning("decode steps run megatron's modules in place of fused kernels for %s", fallback)


def lines(off: str | None, coverage: Mapping[str, Any]) -> list[str]:
    """What a person is told of a measurement; nothing where everything is fused.

    Args:
        off: why the model's own forward decoded, if it did.
        coverage: :meth:`DecodeCoverage.to_dict`.
    """
    if off is not None:
        return [f"decoded with the model's own forward: {off}"]
    return [
        f"decoded with megatron's modules: {Fallback(**entry)}" for entry in coverage["fallbacks"]
    ]


def ranges(numbers: Iterable[int]) -> str:
    """``3, 7-9``."""
    return ", ".join(_ranges(sorted(numbers)))


def _ranges(numbers: list[int]) -> Iterator[str]:
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"

"""The MTP layers of a model when they draft, block by block.

    projection -> attention -> MLP -> head

As in ``decoder``, each is fused where the kernels compute what its modules do, for the rows and the
context at hand, and runs its modules elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.drafting.mtp_input import DraftInput, NormParameters
from megatron_async.kernels.gemm.tile_config import FEW_ROWS, TileConfig, padded
from megatron_async.megatron_compat.specs import mtp_inner_layer
from megatron_async.models.fused import coverage
from megatron_async.models.fused.ahead import Refused, compile_ahead
from megatron_async.models.fused.blocks import mtp_blocks
from megatron_async.models.fused.blocks.attention_block import AttentionBlock
from megatron_async.models.fused.blocks.gemms import Gemm, SkinnyGemms, Work
from megatron_async.models.fused.blocks.mlp_block import MlpBlock
from megatron_async.models.fused.blocks.modules import AttentionModule, LayerModule, MlpModule
from megatron_async.models.fused.blocks.moe_block import ExpertKernels, MoeBlock, is_mixture
from megatron_async.models.fused.blocks.mtp_blocks import (
    DraftHeadBlock,
    DraftHeadModule,
    DraftStep,
    GemmHeadBlock,
    ProjectionBlock,
    ProjectionModule,
)
from megatron_async.models.fused.blocks.residual import Norm, Workspace
from megatron_async.models.fused.report import HEAD, Block
from megatron_async.models.fused.shared_experts import SharedExperts


class Runs(Protocol):
    """A block of an MTP layer, fused or not; see ``decoder.Runs``."""

    @property
    def norm(self) -> Norm | None: ...

    def __call__(
        self, step: DraftStep, given: Tensor | None, reader: Norm | None
    ) -> Tensor | None: ...


class Drafted(NamedTuple):
    """What a layer puts out for n tokens in each of R rows; all of it is overwritten later.

    Args:
        hidden: ``[R, n, hidden]``, bfloat16.
        logits: ``[R, vocab]`` of the last token of each row, bfloat16.
        norm: the layer's final norm, if ``hidden`` has not passed it.
    """

    hidden: Tensor
    logits: Tensor
    norm: NormParameters | None = None


class Place:
    """A block of a layer: the modules that always run, and the kernels that may."""

    def __init__(self, blocks: Sequence[Block], module: Any, fused: Any) -> None:
        self.blocks, self.module, self.fused = blocks, module, fused
        self.refused: dict[tuple[int, int], str] = {}
        """By rows and their tokens, why the GPU does not run the kernels after all."""

    def rows(self, rows: int, width: int) -> int:
        """Padded rows of its GEMMs, of ``width`` tokens in each of ``rows`` rows."""
        return padded(rows if self.blocks[0].kind == HEAD else rows * width)

    def work(self, rows: int, width: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for them."""
        if self.fused is None or (rows, width) in self.refused:
            return iter(())
        if isinstance(self.fused, AttentionBlock):
            return self.fused.work(rows * width, context, reader, width)
        work: Iterator[Work] = self.fused.work(self.rows(rows, width), context, reader)
        return work

    def why_not(self, rows: int, width: int, context: Any) -> str | None:
        """Why the modules run; None if the kernels do."""
        if self.fused is None:
            return self.blocks[0].reason
        if (rows, width) in self.refused:
            return self.refused[rows, width]
        reason: str | None = self.fused.why_not(self.rows(rows, width), context)
        return reason

    def refuse(self, of: tuple[int, int], refused: Refused) -> None:
        """The GPU does not run a kernel of these rows and their tokens."""
        if isinstance(self.fused, MoeBlock) and self.fused.has_another_way(refused):
            return
        self.refused[of] = refused.reason

    def choose(self, rows: int, width: int, context: Any) -> Runs:
        """What runs."""
        chosen = self.module if self.why_not(rows, width, context) else self.fused
        if isinstance(chosen, DraftHeadBlock):
            chosen = chosen.alone(rows, width) or chosen
        run: Runs = chosen
        return run


class FusedMtp:
    """The forward of one model's MTP layers. Buffers are static: one forward at a time, and its
    hidden states stay until the one after the next.

    Args:
        tilings: as of :class:`~.decoder.FusedDecoder`; the projection is "eh_proj".

    Raises:
        ValueError: the kernels take no block.
    """

    def __init__(self, model: Any, tilings: Mapping[str, TileConfig] | None = None) -> None:
        self.blocks = coverage.mtp_blocks(model)
        if all(block.reason is not None for block in self.blocks):
            raise ValueError(self.blocks[0].reason if self.blocks else "it has no MTP layers")
        device: torch.device = next(model.parameters()).device
        self._device = device
        self._gemms = SkinnyGemms(device, tilings)
        self._workspace = Workspace(model.config.hidden_size, device)
        self._vocab_size: int = model.vocab_size
        self._attentions = decode_attention.DecodeAttentions(device)
        self._experts = ExpertKernels(device, self._gemms.sm_count)
        each = len(self.blocks) // len(model.mtp.layers)
        self._layers = [
            self._places_of(layer, model, self.blocks[each * number : each * (number + 1)])
            for number, layer in enumerate(model.mtp.layers)
        ]
        self._chosen: dict[tuple[int, int, int, int], list[Runs] | None] = {}

    def _places_of(self, layer: Any, model: Any, blocks: Sequence[Block]) -> list[Place]:
        projection, attention, mlp, head = blocks
        gemms, inner = self._gemms, mtp_inner_layer(layer)
        number: int = inner.layer_number
        rotary = getattr(inner.self_attention, "rotary", None)
        cos_sin = None if rotary is None else rotary.cos_sin

        def place(block: Block, module: Any, make: Any, *args: Any) -> Place:
            return Place([block], module, make(*args) if block.reason is None else None)

        if coverage.layer_why_not(inner) is not None:
            middle = [Place([attention, mlp], LayerModule(inner), None)]
        else:
            middle = [
                place(attention, AttentionModule(inner), AttentionBlock, inner, cos_sin, gemms,
                      self._attentions),
                place(mlp, MlpModule(inner), self._mlp_of, inner, model.config),
            ]  # fmt: skip
        ends = layer, model
        begin = None
        if projection.reason is None:
            begin = ProjectionBlock(*ends, gemms, number)
        return [
            Place([projection], ProjectionModule(*ends, begin), begin),
            *middle,
            place(head, DraftHeadModule(*ends), DraftHeadBlock, *ends, gemms, number),
        ]

    def _mlp_of(self, layer: Any, config: Any) -> MlpBlock | MoeBlock:
        if not is_mixture(layer.mlp):
            return MlpBlock(layer, config, self._gemms)
        beside = partial(SharedExperts, config, self._gemms)
        return MoeBlock(layer, self._experts, beside=beside)

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The GEMMs of the fused blocks by name, see :class:`~.decoder.FusedDecoder`."""
        return self._gemms.declared

    def takes(self, layer: int, rows: int, width: int, context: Any) -> bool:
        """Whether :meth:`forward` may be called for ``width`` tokens in each of ``rows`` rows."""
        if not 0 < rows * width <= FEW_ROWS or context.batch_invariant:
            return False
        key = layer, rows, width, context.block_size_tokens
        if key not in self._chosen:
            chosen, places = self._choose(layer, rows, width, context), self._layers[layer]
            is_fused = any(
                run is not place.module for run, place in zip(chosen, places, strict=True)
            )
            self._chosen[key] = chosen if is_fused else None
        return self._chosen[key] is not None

    def begins(self, rows: int, width: int, context: Any) -> bool:
        """Whether the first layer's input may have ``begin``, if positions have no embeddings."""
        if not mtp_blocks.BEGIN_IN_INPUT or not self.takes(0, rows, width, context):
            return False
        plan = self._chosen[0, rows, width, context.block_size_tokens]
        return plan is not None and isinstance(plan[0], ProjectionBlock)

    def _choose(self, layer: int, rows: int, width: int, context: Any) -> list[Runs]:
        return [place.choose(rows, width, context) for place in self._layers[layer]]

    def compile(self, rows: Sequence[int], width: int, context: Any) -> None:
        """Compile and load what drafts in ``rows`` rows need, of ``width`` tokens and of one, side
        by side; later calls find it. Blocks with a kernel that the GPU does not run are left to
        their modules."""
        while refused := compile_ahead(self._needed(rows, width, context), self._device):
            for (place, of), kernel in refused:
                place.refuse(of, kernel)
            self._chosen.clear()

    def kernels_of(self, rows: Sequence[int], width: int, context: Any) -> Iterator[Work]:
        """What :meth:`compile` is going to compile."""
        return (work for _, work in self._needed(rows, width, context))

    def _needed(
        self, rows: Sequence[int], width: int, context: Any
    ) -> Iterator[tuple[tuple[Place, tuple[int, int]], Work]]:
        """Kernels, each with the place, and the rows and their tokens, that need it."""
        for each, tokens in {(r, n) for r in rows for n in (width, 1) if r * n <= FEW_ROWS}:
            for number, places in enumerate(self._layers):
                readers = [run.norm for run in self._choose(number, each, tokens, context)[1:]]
                for place, reader in zip(places, [*readers, None], strict=True):
                    for work in place.work(each, tokens, context, reader):
                        yield (place, (each, tokens)), work

    def covered(self, rows: Sequence[int], width: int, context: Any) -> tuple[Block, ...]:
        """Which blocks are fused when ``rows`` rows draft, over ``width`` tokens of each. Rows with
        more than :data:`FEW_ROWS` tokens have none, and are left aside where there are others."""
        sizes = sorted(each for each in set(rows) if 0 < each * width <= FEW_ROWS)
        if not sizes:
            many = f"more than {FEW_ROWS} tokens"
            return tuple(block._replace(reason=many) for block in self.blocks)
        every = {padded(each * width) for each in sizes}
        blocks: list[Block] = []
        for place in (place for places in self._layers for place in places):
            found = {each: place.why_not(each, width, context) for each in sizes}
            off = {each: why for each, why in found.items() if why is not None}
            tokens = {padded(each * width) for each in off}
            at = () if tokens == every else tuple(sorted(tokens))
            reason = "; ".join(dict.fromkeys(off.values())) or None
            blocks += [b if b.reason else b._replace(reason=reason, rows=at) for b in place.blocks]
        return tuple(blocks)

    @torch.no_grad()
    def forward(self, of: DraftInput, context: Any) -> Drafted:
        """Run the layer that gives a draft; :meth:`takes` must have said yes.

        Args:
            context: its metadata must be those of these tokens.
        """
        rows, width = of.tokens.shape
        plan = self._chosen[of.layer, rows, width, context.block_size_tokens]
        assert plan is not None
        residual = self._workspace.residual(of.token_count)
        # WAR: what the layer before has put out is read while this layer runs.
        hidden = self._workspace.buffer(f"drafted {of.draft % 2}", residual.hidden.shape[1])
        logits = self._workspace.buffer("draft logits", self._vocab_size)[:rows]
        # Keys stand at the context's positions; ``of`` has those of embeddings.
        positions: Tensor = context.position_ids
        step = DraftStep(
            residual, of.tokens, positions, context, logits, hidden[: of.token_count], of
        )
        statistics = None
        for number, block in enumerate(plan):
            reader = plan[number + 1].norm if number + 1 < len(plan) else None
            statistics = block(step, statistics, reader)
        head = plan[-1]
        if isinstance(head, GemmHeadBlock):
            return Drafted(residual.hidden.view(rows, width, -1), logits, head.parameters)
        return Drafted(hidden[: of.token_count].view(rows, width, -1), logits)

    @torch.no_grad()
    def project(self, of: DraftInput) -> Tensor:
        """The projection of a layer alone, whose block must be fused: bfloat16 ``[R * n, hidden]``,
        overwritten later."""
        residual = self._workspace.residual(of.token_count)
        nothing = residual.hidden[:0]
        step = DraftStep(residual, of.tokens, of.position_ids, None, nothing, None, of)
        projection, following = self._layers[of.layer][:2]
        projection.fused(step, None, None if following.fused is None else following.fused.norm)
        return residual.hidden

"""A GPTModel's forward over one token of each row, block by block.

    embedding -> (attention -> MLP) of each layer -> head

Each of them is fused where the kernels compute what its modules do (``coverage.py``), for the rows
and the context at hand, and runs its modules elsewhere. Between two blocks there is the residual
stream, and what the next norm needs of it (``residual.py``). Parameters are the model's own, so
weights updated in place are used at once.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm.tile_config import (
    ANY_SHAPE_ROWS,
    FEW_ROWS,
    MANY_ROWS_KERNEL,
    MAX_ROWS,
    NO_NORM,
    GemmProblem,
    TileConfig,
    padded,
)
from megatron_async.kernels.ranks.peer_sum import PeerWords
from megatron_async.models.fused import coverage
from megatron_async.models.fused.ahead import Refused, compile_ahead
from megatron_async.models.fused.blocks.attention_block import AttentionBlock, tokens_of_row
from megatron_async.models.fused.blocks.embedding import EmbeddingBlock, SharedEmbeddingBlock
from megatron_async.models.fused.blocks.gemms import Gemm, SkinnyGemms, Work, defines_of
from megatron_async.models.fused.blocks.head import HeadBlock
from megatron_async.models.fused.blocks.mamba_block import MambaBlock
from megatron_async.models.fused.blocks.mlp_block import MlpBlock
from megatron_async.models.fused.blocks.modules import (
    AttentionModule,
    EmbeddingModule,
    HeadModule,
    LayerModule,
    MambaModule,
    MlpModule,
)
from megatron_async.models.fused.blocks.moe_block import ExpertKernels, MoeBlock, is_mixture
from megatron_async.models.fused.blocks.rank_sums import Agree, RankSums
from megatron_async.models.fused.blocks.residual import AllReduce, Norm, Step, Workspace
from megatron_async.models.fused.report import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    Block,
    DecodeCoverage,
)
from megatron_async.models.fused.shared_experts import SharedExperts
from megatron_async.models.fused.stages import ReceivedBlock, SentBlock, Stages
from megatron_async.models.layers.alike import enough_of

FusedBlock = (
    EmbeddingBlock | SharedEmbeddingBlock | ReceivedBlock
    | AttentionBlock | MlpBlock | MoeBlock | MambaBlock
    | HeadBlock | SentBlock
)  # fmt: skip


class Runs(Protocol):
    """A block, fused or not."""

    @property
    def norm(self) -> Norm | None:
        """What it needs of the block that writes the residual stream before it."""

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A block of the model: the modules that always run, and the kernels that may."""

    blocks: tuple[Block, ...]
    module: Runs
    fused: FusedBlock | None
    refused: dict[int, str] = field(default_factory=dict)
    """By padded rows, why the GPU does not run the kernels after all."""

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why the modules run for padded ``rows``; None if the kernels do."""
        if self.fused is None:
            return self.blocks[0].reason
        return self.refused.get(rows) or self.fused.why_not(rows, context)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens."""
        if self.fused is None or padded(rows) in self.refused:
            return iter(())
        return self.fused.work(rows, context, reader)

    def kind(self, kinds: Mapping[int | None, Hashable]) -> Hashable:
        """Equal for blocks that launch the same, of layers of the same one of ``kinds``."""
        parts = tuple((block.kind, kinds.get(block.layer)) for block in self.blocks)
        return parts, self.fused is None, tuple(self.refused.items())

    def refuse(self, rows: int, refused: Refused) -> None:
        """The GPU does not run a kernel of ``rows`` tokens."""
        if isinstance(self.fused, MoeBlock) and self.fused.has_another_way(refused):
            return
        self.refused[padded(rows)] = refused.reason


class FusedDecoder:
    """The decode forward of one model. Buffers are static: one forward at a time.

    Args:
        tilings: tile configs of GEMMs by name, see :class:`~.gemms.SkinnyGemms`.
        all_reduce: adds partial sums up over the ranks of a tensor-parallel group, between the
            row-parallel GEMMs and the residual stream; None for one rank.
        words: of that group, with which one kernel does both; None without.
        stages: this process's place among the stages of the model; None for one stage.
        agree: whether something holds on all ranks of that group, see
            :class:`~.blocks.rank_sums.RankSums`; None for one rank.

    Raises:
        ValueError: no layer has a block that the kernels take.
    """

    def __init__(
        self,
        model: Any,
        tilings: Mapping[str, TileConfig] | None = None,
        all_reduce: AllReduce | None = None,
        words: PeerWords | None = None,
        stages: Stages | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.coverage = DecodeCoverage(
            coverage.blocks(model, parallel=all_reduce is not None, stages=stages is not None)
        )
        if self.coverage.off is not None:
            raise ValueError(self.coverage.off)
        device: torch.device = next(model.parameters()).device
        self._device = device
        self._gemms = SkinnyGemms(device, tilings)
        self._workspace = Workspace(model.config.hidden_size, device)
        self._vocab_size: int = model.vocab_size // model.config.tensor_model_parallel_size
        sums = None
        if all_reduce is not None:
            sums = RankSums(all_reduce, words, model.config.hidden_size, device, agree)
        self._sums = sums
        self._places = self._places_of(model, device, sums, stages)
        self._chosen: dict[tuple[int, int, int, bool], list[Runs] | None] = {}

    def _places_of(
        self, model: Any, device: torch.device, sums: RankSums | None, stages: Stages | None
    ) -> list[Place]:
        attentions = decode_attention.DecodeAttentions(device)
        experts = ExpertKernels(device, self._gemms.sm_count)
        beside = partial(SharedExperts, model.config, self._gemms)
        places: list[Place] = []
        for layer in model.decoder.layers:
            blocks = self._blocks_of(layer.layer_number)
            if coverage.layer_why_not(layer) is not None:
                places.append(Place(blocks, LayerModule(layer), None))
                continue
            for block in blocks:
                where = (len(places) + 1) % 2  # the embedding comes first
                fused: FusedBlock | None = None
                if block.kind == ATTENTION:
                    if block.reason is None:
                        rotary = layer.self_attention.rotary
                        cos_sin = None if rotary is None else rotary.cos_sin
                        fused = AttentionBlock(layer, cos_sin, self._gemms, attentions, sums, where)
                    places.append(Place((block,), AttentionModule(layer, where), fused))
                elif block.kind == MLP:
                    if block.reason is None and is_mixture(layer.mlp):
                        fused = MoeBlock(layer, experts, where, beside)
                    elif block.reason is None:
                        fused = MlpBlock(layer, model.config, self._gemms, sums, where)
                    places.append(Place((block,), MlpModule(layer, where), fused))
                else:
                    if block.reason is None:
                        fused = MambaBlock(layer, self._gemms, where)
                    places.append(Place((block,), MambaModule(layer, where), fused))
        like = next((p.fused for p in places if isinstance(p.fused, MlpBlock | MoeBlock)), None)
        begin, end = self._begin_of(model, device, sums, like), self._end_of(model)
        if stages is not None and not stages.is_first:
            received = ReceivedBlock(stages)
            begin = Place((), received, received)
        if stages is not None and not stages.is_last:
            sent = SentBlock(stages)
            end = Place((), sent, sent)
        assert begin is not None and end is not None
        return [begin, *places, end]

    def _blocks_of(self, layer: int | None, *kinds: str) -> tuple[Block, ...]:
        return tuple(
            block
            for block in self.coverage.blocks
            if block.layer == layer and (not kinds or block.kind in kinds)
        )

    def _begin_of(
        self,
        model: Any,
        device: torch.device,
        sums: RankSums | None,
        like: MlpBlock | MoeBlock | None,
    ) -> Place | None:
        """The embedding; None where another stage has it."""
        blocks = self._blocks_of(None, EMBEDDING)
        if not blocks:
            return None
        fused: FusedBlock | None = None
        if blocks[0].reason is None and model.config.tensor_model_parallel_size > 1:
            assert sums is not None
            fused = SharedEmbeddingBlock(model, device, sums)
        elif blocks[0].reason is None:
            fused = EmbeddingBlock(model, device, like)
        return Place(blocks, EmbeddingModule(model), fused)

    def _end_of(self, model: Any) -> Place | None:
        """The head; None where another stage has it."""
        blocks = self._blocks_of(None, HEAD)
        if not blocks:
            return None
        fused = HeadBlock(model, self._gemms) if blocks[0].reason is None else None
        return Place(blocks, HeadModule(model), fused)

    def shortened(self, kinds: Mapping[int | None, Hashable]) -> FusedDecoder:
        """One of few blocks that launch what all of them do (``models/layers/alike.py``), as they
        are now. It shares them.

        Args:
            kinds: of the layers by number, equal for those that are alike.
        """
        of_places = [place.kind(kinds) for place in self._places]
        few = copy.copy(self)
        places = [self._places[number] for number in enough_of(of_places)]
        vars(few).update(_places=places, _chosen={})
        return few

    @property
    def has_waiting_grids(self) -> bool:
        """A kernel's CTAs may wait for each other, see ``device/waiting_grids.py``."""
        if self._sums is not None and self._sums.reaches_peers:
            return True
        blocks = (place.fused for place in self._places)
        return any(isinstance(block, MoeBlock) and block.has_waiting_grid for block in blocks)

    @property
    def tuned(self) -> str:
        """The GPU's name, and what tells tables of tuned configs apart: ranks whose kernels wait
        for each other's have the same."""
        name = cuda.device_name(self._device.index or 0)
        return f"{name}, tile configs {self._gemms.digest}"

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The GEMMs of the fused blocks by name: "qkv", "projection", "fc1", "fc2",
        "in_proj", "out_proj" and "head", and of layers whose shapes differ from the first one's,
        such as "fc1 of layer 3"."""
        return self._gemms.declared

    @property
    def reader(self) -> int:
        """The norm that reads the residual stream in most layers."""
        norms = [place.fused.norm for place in self._places if place.fused is not None]
        return next((norm.kind for norm in norms if norm is not None), NO_NORM)

    def defines(self, gemm: Gemm, rows: int, tiling: TileConfig) -> dict[str, int]:
        """Macros of a GEMM's kernel for padded ``rows``, as most layers use it."""
        return defines_of(gemm, rows, self.reader, tiling)

    def adopt(self, found: Mapping[GemmProblem, TileConfig | None]) -> None:
        """Take these tile configs from now on, see :meth:`~.gemms.SkinnyGemms.adopt`."""
        self._gemms.adopt(found)
        self._chosen.clear()

    def compile(self, rows: list[int], context: Any) -> None:
        """Compile and load what forwards of ``rows`` tokens need, side by side; later calls find
        it. Blocks with a kernel that the GPU does not run are left to their modules."""
        while refused := compile_ahead(self._needed(rows, context), self._device):
            for (place, tokens), kernel in refused:
                place.refuse(tokens, kernel)
            self._chosen.clear()

    def kernels_of(self, rows: list[int], context: Any) -> Iterator[Work]:
        """What :meth:`compile` is going to compile."""
        return (work for _, work in self._needed(rows, context))

    def _needed(self, rows: list[int], context: Any) -> Iterator[tuple[tuple[Place, int], Work]]:
        """Kernels, each with the place and the tokens that need it."""
        most = decode_attention.MOST_ROWS * tokens_of_row(context)
        for tokens in {r for r in rows if r <= most}:
            readers = [block.norm for block in self._choose(padded(tokens), context)[1:]]
            has_gemms = padded(tokens) <= self.most_rows(context)
            for place, reader in zip(self._places, [*readers, None], strict=True):
                for work in place.work(tokens, context, reader):
                    if has_gemms or work[0] != MANY_ROWS_KERNEL:
                        yield (place, tokens), work

    def covered(self, rows: list[int], context: Any) -> DecodeCoverage:
        """Which blocks are fused in steps of ``rows`` rows in such a context. Steps of more rows
        than :meth:`most_rows` have none, and are left aside where there are others."""
        most = self.most_rows(context)
        sizes = tuple(sorted({padded(r) for r in rows if 0 < r <= most}))
        if not sizes:
            many = f"more than {most} rows"
            return DecodeCoverage(tuple(b._replace(reason=many) for b in self.coverage.blocks))
        blocks: list[Block] = []
        for place in self._places:
            found = {}
            if place.fused is not None:
                found = {size: why for size in sizes if (why := place.why_not(size, context))}
            at = () if len(found) == len(sizes) else tuple(found)
            reason = "; ".join(dict.fromkeys(found.values())) or None
            blocks += [b if b.reason else b._replace(reason=reason, rows=at) for b in place.blocks]
        return DecodeCoverage(tuple(blocks))

    def off(self, rows: list[int], context: Any) -> str | None:
        """Why decode steps in such a context have no fused block in any layer; None if one has.

        Steps of more rows than :data:`ANY_SHAPE_ROWS` count as steps of that many: whether there
        are tile configs for more is another question.
        """
        return self.covered([min(r, ANY_SHAPE_ROWS) for r in rows], context).off

    def takes(self, out: Tensor, context: Any) -> bool:
        """Whether :meth:`forward` may be called."""
        rows = out.shape[0]
        if not 0 < rows <= MAX_ROWS or context.batch_invariant:
            return False
        if out.dtype != torch.bfloat16 or out.shape[1] != self._vocab_size:
            return False
        return (
            context.is_decode_only()
            and context.last_token_index is None
            and self._plan(padded(rows), context) is not None
        )

    def _plan(self, most: int, context: Any) -> list[Runs] | None:
        """The blocks that run for padded rows; None if no layer has a fused one."""
        drafts, waits = context.num_speculative_tokens, context.grids_may_wait
        key = most, context.block_size_tokens, drafts, waits
        if key not in self._chosen:
            chosen = self._choose(most, context)
            kinds = AttentionBlock | MlpBlock | MoeBlock | MambaBlock
            inside = any(isinstance(block, kinds) for block in chosen)
            self._chosen[key] = chosen if inside and most <= self.most_rows(context) else None
        return self._chosen[key]

    def most_rows(self, context: Any) -> int:
        """Return the rows up to which steps in such a context have fused blocks.

        Of more than :data:`FEW_ROWS` all blocks have, or none; that only some have was not
        measured.
        """
        whole = all(place.why_not(MAX_ROWS, context) is None for place in self._places)
        return MAX_ROWS if whole else FEW_ROWS

    def _choose(self, most: int, context: Any) -> list[Runs]:
        return [
            place.module if place.fused is None or place.why_not(most, context) else place.fused
            for place in self._places
        ]

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Any,
        out: Tensor,
        hidden_states: Tensor | None = None,
    ) -> None:
        """Decode one token of each row; :meth:`takes` must have said yes.

        Args:
            token_ids, position_ids: int64 ``[R]``.
            context: its metadata must be those of these rows.
            out: bfloat16 ``[R, vocab]``, filled with the logits.
            hidden_states: bfloat16 ``[R, hidden]``, filled with the hidden states after the final
                norm; None leaves them out, and costs nothing.
        """
        rows = token_ids.shape[0]
        plan = self._plan(padded(rows), context)
        assert plan is not None
        step = Step(
            self._workspace.residual(rows), token_ids, position_ids, context, out, hidden_states
        )
        statistics = None
        for place, block in enumerate(plan):
            reader = plan[place + 1].norm if place + 1 < len(plan) else None
            statistics = block(step, statistics, reader)

"""A layer of experts in three kernels, or one (``kernels/moe/decode.py``).

norm and router -> first linear layers of the needed experts -> second ones (add to the residual
stream)

Where each rank has some of the experts, it computes what they add to all rows, and the partial sums
of the ranks are added up (``rank_sums.py``). Shared experts are computed by the first rank; where
tensor-parallel ranks share them, by each of these its share. Those of another format than the
routed ones are computed beside these (``shared_experts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm.tile_config import LAYER_NORM, SCALE_COLUMNS, padded
from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights, ScaleColumns
from megatron_async.kernels.moe.tiles import MAX_ROWS
from megatron_async.models.fused.ahead import Refused
from megatron_async.models.fused.blocks.gemms import Work
from megatron_async.models.fused.blocks.kernel_parameters import norm_of, scale_of
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Residual, Step
from megatron_async.models.fused.shared_experts import (
    SharedExperts,
    apart_why_not,
    linears_apart,
)
from megatron_async.models.moe.adapt import AdaptedMoELayer
from megatron_async.models.moe.layer import MoELayer, SharedExpertMLP, leaving
from megatron_async.models.moe.trainer_ranks import TrainerRanks
from megatron_async.models.quantized.values import E4M3, KEPT, is_packed, meant_shape

from megatron.core.transformer.moe.shared_experts import (  # isort: skip
    SharedExpertMLP as MegatronSharedExpertMLP,
)

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.skinny_gemm import Sending
    from megatron_async.kernels.moe.decode import MoeDecode

_ALIGNMENT = 16
"""Sizes are multiples of it."""
_MOST_EXPERTS, _MOST_CHOSEN = 512, 16
Beside = Callable[[Any, int], SharedExperts]


def is_mixture(mlp: Any) -> bool:
    """Whether it is a layer of experts of this package, or an adapted one."""
    return type(mlp) in (MoELayer, AdaptedMoELayer)


def experts_why_not(mlp: Any, config: Any) -> str | None:
    """Why what :func:`is_mixture` knows is not computed by kernels."""
    if not trial.MOE:
        return trial.REASON
    if mlp.fc1_latent_proj is not None:
        return "its experts have latent projections"
    is_split = max(config.tensor_model_parallel_size, config.expert_model_parallel_size) > 1
    if isinstance(mlp.ranks, TrainerRanks) or (is_split and mlp.ranks is None):
        return "its experts are split over ranks"
    settings = mlp.settings
    if settings.num_experts > _MOST_EXPERTS or settings.top_k > _MOST_CHOSEN:
        return f"{settings.top_k} of {settings.num_experts} experts are not covered"
    _, hidden, inner = meant_shape(mlp.kept_weights.w2)
    if hidden % _ALIGNMENT or inner % _ALIGNMENT:
        return f"experts of {inner} x {hidden} are not covered"
    return (
        _tensors_why_not(mlp)
        or _shared_why_not(mlp, config)
        or _scales_why_not(mlp)
        or _packed_why_not(mlp)
    )


def _tensors_why_not(mlp: Any) -> str | None:
    w1, w2, b1, b2, *_ = mlp.kept_weights
    if is_packed(w1) != is_packed(w2):
        return f"its experts have weights of {w1.dtype} and of {w2.dtype}"
    given = [mlp.router.weight, mlp.router.bias, b1, b2]
    given += [each for each in (w1, w2) if each.dtype not in KEPT]
    for tensor in (tensor for tensor in given if tensor is not None):
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return "its experts or its router are not contiguous bfloat16"
    expert_bias = mlp.router.expert_bias
    if expert_bias is not None and expert_bias.dtype != torch.float32:
        return f"its expert bias is {expert_bias.dtype}"
    return None


def _shared_why_not(mlp: Any, config: Any) -> str | None:
    """Why its shared experts are not computed as experts that each row has, nor beside these."""
    shared = mlp.shared_experts
    if shared is None:
        return None
    if type(shared) not in (SharedExpertMLP, MegatronSharedExpertMLP):
        return f"{type(shared).__name__} is not covered"
    if linears_apart(mlp):
        return apart_why_not(mlp, config)
    inner, dtype = meant_shape(mlp.kept_weights.w2)[2], mlp.kept_weights.w2.dtype
    if shared.linear_fc2.weight.shape[1] % inner:
        return f"shared experts of {shared.linear_fc2.weight.shape[1]} are no multiple of {inner}"
    if mlp.kept_weights.b1 is not None:
        return "shared experts have no bias, and the others do"
    if mlp.activation.limit is not None or mlp.activation.offset:
        return "shared experts have another activation"
    for linear in (shared.linear_fc1, shared.linear_fc2):
        if linear.bias is not None:
            return "shared experts have a bias"
        if not linear.weight.is_contiguous():
            return f"shared experts are not contiguous {dtype}, as the others are"
    return None


def _e4m3_weights(mlp: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights in e4m3 by their names in :class:`MoeWeights`, each with its scales; none where
    they are bfloat16."""
    kept, shared = mlp.kept_weights, mlp.shared_experts
    found = {"w1": (kept.w1, kept.w1_scale), "w2": (kept.w2, kept.w2_scale)}
    if _shares_among(mlp):
        for name, linear in (("shared_w1", shared.linear_fc1), ("shared_w2", shared.linear_fc2)):
            found[name] = linear.weight, getattr(linear, "weight_scale", None)
    return {name: pair for name, pair in found.items() if pair[0].dtype == E4M3}


def _scales_why_not(mlp: Any) -> str | None:
    """Why the kernels do not take e4m3 weights with their scales."""
    for name, (weight, scale) in _e4m3_weights(mlp).items():
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            return f"its e4m3 {name} is not contiguous, from a multiple of 16 bytes on"
        if not isinstance(scale, Tensor):
            return f"its e4m3 {name} has no scales"
        if scale.dtype != torch.float32 or not scale.is_contiguous() or scale.data_ptr() % 16:
            return f"the scales of its e4m3 {name} are not contiguous float32, aligned to 16 bytes"
        *rows, k = weight.shape
        *of_rows, groups = scale.shape
        if of_rows != rows or groups == 0 or k % groups:
            return f"scales {tuple(scale.shape)} of its e4m3 {name} are not covered"
        if k // groups not in (*SCALE_COLUMNS, k):
            return f"a scale for {k // groups} columns of its e4m3 {name} is not covered"
    return None


def _packed_why_not(mlp: Any) -> str | None:
    """Why the kernels do not take MXFP4 weights with their scales."""
    kept = mlp.kept_weights
    if not is_packed(kept.w1):
        return None
    for name, weight, scale in (("w1", kept.w1, kept.w1_scale), ("w2", kept.w2, kept.w2_scale)):
        for tensor in (weight, scale):
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                return f"its MXFP4 {name} is not contiguous, from a multiple of 16 bytes on"
    return None


class ExpertKernels:
    """The kernels of a model's layers of experts. Layers of one shape share theirs."""

    def __init__(self, device: torch.device, sm_count: int) -> None:
        self._device, self._sm_count = device, sm_count
        self._kernels: dict[MoeShape, MoeDecode] = {}
        self._sums: RankSums | None = None

    def get(self, shape: MoeShape) -> MoeDecode:
        """The kernels of a shape."""
        from megatron_async.kernels.moe.decode import MoeDecode

        if shape not in self._kernels:
            self._kernels[shape] = MoeDecode(shape, self._device, sm_count=self._sm_count)
        return self._kernels[shape]

    def sums(self, mlp: Any) -> RankSums | None:
        """The sums over ranks that have some of the experts each; None for one rank."""
        if mlp.ranks is None:
            return None
        if self._sums is None:
            ranks, hidden = mlp.ranks, mlp.kept_weights.w2.shape[1]
            self._sums = RankSums(ranks.sum_experts_, ranks.expert_words, hidden, self._device)
        return self._sums


class MoeBlock:
    """Norm, router, experts and residual addition of one layer.

    Args:
        layer: one that ``coverage.mlp_why_not`` has nothing against.
        where: it leaves statistics.
        beside: makes the GEMMs of shared experts, from the layer and ``where``; it is asked where
            these have another format than the others.
    """

    def __init__(
        self, layer: Any, kernels: ExpertKernels, where: int = LAYER, beside: Beside | None = None
    ) -> None:
        self._where = where
        self.norm: Norm = norm_of(layer.pre_mlp_layernorm)
        self._mlp = layer.mlp
        self._kernels = kernels.get(_shape_of(layer.mlp, self.norm))
        self._sums = kernels.sums(layer.mlp)
        self._shared: SharedExperts | None = None
        if linears_apart(layer.mlp):
            assert beside is not None
            self._shared = beside(layer, where)

    @property
    def has_waiting_grid(self) -> bool:
        """Whether a kernel's CTAs may wait for each other, as that for a few rows does."""
        return self._kernels.has_one_kernel

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if it does. All ranks say the same, also
        those without shared experts."""
        if rows > MAX_ROWS:
            return f"more than {MAX_ROWS} rows of experts"
        return None if self._shared is None else self._shared.why_not(rows)

    def has_another_way(self, refused: Refused) -> bool:
        """Whether other kernels take the place of one that the GPU does not run; from now on they
        do."""
        return self._kernels.without(refused.source, refused.reason)

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add the layer's experts to the residual stream, see
        :class:`~.attention_block.AttentionBlock` for the arguments."""
        assert given is not None
        if self._shared is not None:
            return self._beside(self._shared, step, given, reader)
        residual, hidden = step.residual, step.residual.hidden
        sums = self._summing(hidden.shape[0], step.context)
        if self._sums is not None and sums is None:
            partial = self._sums.partial(residual)
            self._run(step, given, partial)
            return self._sums.add(partial, None, residual, reader, self._where)
        statistics = None
        if reader is not None:
            covered = self._kernels.statistic_rows(hidden.shape[0])
            statistics = residual.statistics(self._where, covered)
        self._run(
            step, given, hidden, residual=hidden, statistics_out=statistics,
            scaled=residual.scaled_for(reader), sums=sums,
        )  # fmt: skip
        return statistics

    def _summing(self, rows: int, context: Any) -> Sending | None:
        """Over whose memory the kernel of a few rows sums ``rows``; None where it does not."""
        if self._sums is None or self._shared is not None:
            return None
        if not self._kernels.sums_over_ranks(rows):
            return None
        return self._sums.summing(padded(rows), context)

    def _beside(
        self, shared: SharedExperts, step: Step, given: Tensor, reader: Norm | None
    ) -> Tensor | None:
        """:meth:`__call__` with shared experts that are not among the others."""
        residual, hidden = step.residual, step.residual.hidden
        activated = None
        if _has_shared_experts(self._mlp):
            activated = shared.activated(residual, given)
        if self._sums is None:
            assert activated is not None
            self._run(step, given, hidden, residual=hidden)
            return shared.add(activated, residual, reader, step.context)
        partial = self._sums.partial(residual)
        self._run(step, given, partial)
        if activated is not None:
            shared.add(activated, Residual(residual.workspace, partial), None, step.context)
        return self._sums.add(partial, None, residual, reader, self._where)

    def _run(self, step: Step, given: Tensor, out: Tensor, **options: Any) -> None:
        """The kernels of experts, see :class:`~megatron_async.kernels.moe.decode.MoeDecode`."""
        context, hidden = step.context, step.residual.hidden
        # Keys and values of dead rows go to the null block, the first.
        live = Live(context.slot_mapping, context.block_size_tokens)
        self._kernels(
            self._weights(), hidden, given, self.norm.eps, out, live=live,
            one_launch=context.grids_may_wait, **options,
        )  # fmt: skip
        self._leave(hidden.shape[0])

    def _leave(self, rows: int) -> None:
        """Hand out the experts that the kernels have chosen, if somebody wants them."""
        if leaving.to is not None:
            leaving.to(self._mlp, self._kernels.routing(rows).ids)

    def _weights(self) -> MoeWeights:
        mlp, shared = self._mlp, self._mlp.shared_experts
        w1, w2, b1, b2, w1_scale, w2_scale = mlp.kept_weights
        router = mlp.router
        weights = MoeWeights(
            (self.norm.weight, self.norm.bias), router.weight, w1, w2, router.bias,
            router.expert_bias, b1, b2, w1_scale=w1_scale, w2_scale=w2_scale,
        )  # fmt: skip
        if not _shares_among(mlp):
            return weights
        return weights._replace(
            shared_w1=shared.linear_fc1.weight,
            shared_w2=shared.linear_fc2.weight,
            shared_gate=shared.gate_weight,
            shared_w1_scale=scale_of(shared.linear_fc1),
            shared_w2_scale=scale_of(shared.linear_fc2),
        )

    def statistic_rows(self, rows: int) -> int | None:
        """Elements that one partial statistic at the end of the block covers, if its kernels emit
        any."""
        if self._sums is not None or rows > MAX_ROWS:
            return None
        emits = self._kernels if self._shared is None else self._shared
        return emits.statistic_rows(rows)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled ahead; Triton compiles at the first call."""
        if rows > MAX_ROWS:
            return
        gate = _shares_among(self._mlp) and self._mlp.shared_experts.gate_weight is not None
        sums = self._summing(rows, context)
        yield from self._kernels.work(rows, gate=gate, one_launch=context.grids_may_wait, sums=sums)
        if self._shared is not None:
            of_shared = reader if self._sums is None else None
            yield from self._shared.work(padded(rows), of_shared, context)
        if self._sums is not None and sums is None:
            yield from self._sums.work(padded(rows), reader)


def _shape_of(mlp: Any, norm: Norm) -> MoeShape:
    held, hidden, inner = meant_shape(mlp.kept_weights.w2)
    shared, count = mlp.shared_experts, 0
    if _shares_among(mlp):
        count = shared.linear_fc2.weight.shape[1] // inner
    begin = 0 if mlp.ranks is None else mlp.ranks.expert_rank * held
    columns = {
        name: weight.shape[-1] // scale.shape[-1]
        for name, (weight, scale) in _e4m3_weights(mlp).items()
    }
    return MoeShape(
        hidden, inner, mlp.settings, mlp.activation, count, center=norm.kind == LAYER_NORM,
        expert_begin=begin, expert_end=begin + held,
        scale_columns=ScaleColumns(**{"w1": 0, "w2": 0, **columns}) if columns else None,
        is_packed=is_packed(mlp.kept_weights.w2),
    )  # fmt: skip


def _has_shared_experts(mlp: Any) -> bool:
    """Whether this rank computes shared experts, or its share of them: of ranks with copies of them
    the first one does."""
    if mlp.shared_experts is None:
        return False
    ranks = mlp.ranks
    return ranks is None or bool(ranks.expert_rank < ranks.layout.tensor)


def _shares_among(mlp: Any) -> bool:
    """Whether this rank's shared experts are computed as experts that each row has."""
    return _has_shared_experts(mlp) and not linears_apart(mlp)

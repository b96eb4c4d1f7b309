"""The router of more rows than a decode step's kernels take, in one Triton kernel: a program has
some rows, with all experts."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.moe.reference import Routing
from megatron_async.kernels.moe.routing.choice_triton import chosen, columns
from megatron_async.kernels.moe.settings import SIGMOID, RouterSettings
from megatron_async.kernels.pdl import pdl_enter, uses_pdl

_FEW_ROWS, _FEW_COLUMNS = 4096, 128
"""A program chooses for 32 rows if there are more rows than the first and no more columns than the
second, else for 16."""


@triton.jit(do_not_specialize=["rows"])
def wide_router_kernel(
    x_ptr, weight_ptr, bias_ptr, expert_bias_ptr, live_ptr, scaling, ids_ptr, weights_ptr, rows,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_EXPERT_BIAS: tl.constexpr,
    HAS_LIVE: tl.constexpr, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SUMMED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """:func:`~.reference.route` of ``BLOCK_T`` rows; ``live_ptr`` is to bytes."""
    pdl_enter(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = t < rows
    c, e, valid = columns(EXPERTS, GROUPS, GROUPS_PADDED, OF_GROUP_PADDED)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    w_ptrs = weight_ptr + e[:, None] * HIDDEN + k[None, :]
    logits = tl.zeros([BLOCK_T, GROUPS_PADDED * OF_GROUP_PADDED], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        in_k = (start + k < HIDDEN)[None, :]
        x = tl.load(x_ptrs + start, mask=in_rows[:, None] & in_k, other=0.0)
        w = tl.load(w_ptrs + start, mask=valid[:, None] & in_k, other=0.0)
        logits = tl.dot(x, tl.trans(w), logits, input_precision=PRECISION)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)[None, :]
    ranks, weights = chosen(
        logits, c, e, valid, expert_bias_ptr, scaling, BLOCK_T, HAS_EXPERT_BIAS, SIGMOID,
        PRE_SOFTMAX, NORMALIZE, TOP_K, GROUPS, KEPT, SUMMED, GROUPS_PADDED, OF_GROUP_PADDED,
    )  # fmt: skip
    ids = tl.broadcast_to(e[None, :], ranks.shape)
    if HAS_LIVE:
        live = tl.load(live_ptr + t, mask=in_rows, other=0) != 0
        ids = tl.where(live[:, None], ids, -1)
        weights = tl.where(live[:, None], weights, 0.0)
    slot = t[:, None] * TOP_K + ranks
    is_chosen = (ranks < TOP_K) & in_rows[:, None]
    tl.store(ids_ptr + slot, ids, mask=is_chosen)
    tl.store(weights_ptr + slot, weights, mask=is_chosen)


def route_many(
    hidden: Tensor,
    weight: Tensor,
    settings: RouterSettings,
    *,
    bias: Tensor | None = None,
    expert_bias: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    """:func:`~.reference.route` by the logits of ``hidden [T, H]``, which are not written.

    Args:
        weight: ``[experts, H]``, contiguous and of the dtype of ``hidden``.
        bias: ``[experts]``.
        expert_bias: fp32 ``[experts]``.
        live: bool ``[T]``.
    """
    (rows, size), top_k = hidden.shape, settings.top_k
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=hidden.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=hidden.device)
    groups, pdl = settings.num_groups, uses_pdl(hidden.device)
    of_group = triton.next_power_of_2(settings.num_experts // groups)
    width = triton.next_power_of_2(groups) * of_group
    block = 16 if rows <= _FEW_ROWS or width > _FEW_COLUMNS else 32
    is_live = ids if live is None else live.contiguous().view(torch.uint8)
    wide_router_kernel[(triton.cdiv(rows, block),)](
        hidden, weight, weight if bias is None else bias,
        weights if expert_bias is None else expert_bias, is_live, settings.scaling_factor, ids,
        weights, rows, HIDDEN=size, EXPERTS=settings.num_experts, TOP_K=top_k, BLOCK_T=block,
        BLOCK_K=64 if width <= 2 * _FEW_COLUMNS else 32, HAS_BIAS=bias is not None,
        HAS_EXPERT_BIAS=expert_bias is not None, HAS_LIVE=live is not None,
        SIGMOID=settings.score_function == SIGMOID, PRE_SOFTMAX=settings.pre_softmax,
        NORMALIZE=settings.normalize, GROUPS=groups, KEPT=settings.kept_groups,
        SUMMED=settings.group_score_experts, GROUPS_PADDED=width // of_group,
        OF_GROUP_PADDED=of_group, PDL=pdl, launch_pdl=pdl, num_warps=8, num_stages=3,
        PRECISION="ieee" if hidden.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    return Routing(ids, weights)

"""Router and experts in PyTorch, on the CPU and on a GPU.

Nothing is dropped, no shape depends on a value, and on a GPU no value reaches the host, so all of
it can be captured in a graph. On the CPU a row's bits do not depend on the other rows.

Router: megatron-core 0.16.1, ``topk_routing_with_score_function``, with scores in fp32 whatever the
dtype of the logits, and of two equal scores the expert of the lower index first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels.moe.settings import SIGMOID, ExpertActivation, RouterSettings

NO_EXPERT = -1
"""The expert of rows that are dead: nothing is read for them."""
_PADDED_ROWS = 8
"""GEMMs of the CPU give a row the same bits in any number of rows that is a multiple of it."""
_GROUPED_ALIGNMENT = 8
"""``grouped_mm`` takes strides that are multiples of this many bfloat16 elements."""


class Routing(NamedTuple):
    """Experts of each token: ``ids`` int32 ``[T, k]``, :data:`NO_EXPERT` in dead rows, and
    ``weights`` fp32 ``[T, k]``, 0 there."""

    ids: Tensor
    weights: Tensor


def router_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp32 ``[T, experts]``: ``hidden`` ``[T, H]`` times ``weight`` ``[experts, H]``, in fp32."""
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def route(
    logits: Tensor,
    settings: RouterSettings,
    *,
    expert_bias: Tensor | None = None,
    live: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routing:
    """Choose each token's experts and their weights.

    Args:
        logits: ``[T, experts]``, of any floating dtype.
        expert_bias: ``[experts]``, added to what experts are chosen by, and to nothing else.
        live: bool ``[T]``; the others are dead. None takes all for live.
        chosen: int32 ``[T, k]``, experts that were chosen before, which have the weights that they
            would have; the best where they are -1, and for None.

    Returns:
        The experts of each token, best first.
    """
    wide = logits.float()
    if settings.score_function == SIGMOID:
        scores = torch.sigmoid(wide)
    elif settings.pre_softmax:
        scores = torch.softmax(wide, dim=-1)
    else:
        scores = wide
    choice = scores if expert_bias is None else scores + expert_bias.float()
    ids = _best(_in_kept_groups(choice, settings), settings.top_k)[1]
    if chosen is not None:
        ids = torch.where(chosen < 0, ids, chosen.long())
    weights = scores.gather(1, ids)
    if not settings.chooses_scores:
        weights = torch.softmax(weights, dim=-1)
    if settings.normalize:
        weights = weights / (_added_up(weights) + 1e-20)
    weights = weights * settings.scaling_factor
    ids = ids.int()
    if live is not None:
        ids = ids.masked_fill(~live[:, None], NO_EXPERT)
        weights = weights.masked_fill(~live[:, None], 0.0)
    return Routing(ids, weights)


def _in_kept_groups(choice: Tensor, settings: RouterSettings) -> Tensor:
    """``choice`` with -inf for the experts of groups that are not kept."""
    if settings.kept_groups == settings.num_groups:
        return choice
    grouped = choice.view(choice.shape[0], settings.num_groups, -1)
    group_scores = _added_up(_best(grouped, settings.group_score_experts)[0])[..., 0]
    kept = _best(group_scores, settings.kept_groups)[1]
    mask = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(mask[..., None], float("-inf")).view_as(choice)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the highest scores; of equal ones the lower index comes first."""
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


def _added_up(values: Tensor) -> Tensor:
    """Sum over the last dimension, which stays, from left to right."""
    total = values[..., :1]
    for column in range(1, values.shape[-1]):
        total = total + values[..., column : column + 1]
    return total


def activate(x: Tensor, activation: ExpertActivation) -> Tensor:
    """``[..., 2I] -> [..., I]`` if it is gated, else ``[..., I] -> [..., I]``, computed in fp32."""
    wide, up = x.float(), None
    if activation.gated:
        wide, up = wide.chunk(2, dim=-1)
    if activation.limit is not None:
        wide = wide.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    out = _function(wide, activation.function)
    return (out if up is None else out * (up + activation.offset)).to(x.dtype)


def _function(x: Tensor, name: str) -> Tensor:
    """The activation, in operations that treat each element alike on the CPU
    (``models/layers/activation.py``)."""
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))
    if name == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)
        return x * 0.5 * (1 + torch.tanh(inner))
    positive = torch.relu(x)
    return positive if name == "relu" else positive * positive


def held_experts(routing: Routing, begin: int, count: int) -> Routing:
    """Route as a rank does that has ``count`` experts from ``begin`` on: by their numbers among
    these, and :data:`NO_EXPERT` for the others."""
    ids = routing.ids - begin
    return Routing(ids.masked_fill((ids < 0) | (ids >= count), NO_EXPERT), routing.weights)


def expert_mlp(
    hidden: Tensor,
    routing: Routing,
    w1: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """Each token's experts, weighted and added up in the order of ``routing.ids``, in fp32.

    Args:
        hidden: ``[T, H]``.
        w1: ``[experts, 2I, H]`` with a gated activation, else ``[experts, I, H]``.
        w2: ``[experts, H, I]``.
        b1, b2: ``[experts, 2I]`` or ``[experts, I]``, and ``[experts, H]``.

    Returns:
        ``[T, H]`` like ``hidden``; zeros in dead rows.
    """
    return weighted_sum(_of_each(hidden, routing.ids, w1, w2, activation, b1, b2), routing)


def weighted_sum(out: Tensor, routing: Routing) -> Tensor:
    """``[T, H]`` of ``out [T, k, H]``, what each of a token's experts gives: weighted and added up
    in their order, in fp32."""
    total = torch.zeros(len(out), out.shape[2], dtype=torch.float32, device=out.device)
    for place in range(routing.ids.shape[1]):
        weight = routing.weights[:, place, None]
        weighted = out[:, place].float() * weight
        total = total + weighted.masked_fill(routing.ids[:, place, None] < 0, 0.0)
    return total.to(out.dtype)


def _of_each(
    hidden: Tensor,
    ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    b1: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """``[T, k, H]``: what each of a token's experts gives; anything where there is none."""
    if hidden.device.type == "cpu":
        return _one_expert_after_another(hidden, ids, w1, w2, activation, b1, b2)
    if _grouped_mm_takes(hidden, w1, w2):
        return _in_groups(hidden, ids, w1, w2, activation, b1, b2)
    return _all_experts(hidden, ids, w1, w2, activation, b1, b2)


def _one_expert_after_another(
    hidden: Tensor,
    ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    b1: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """Run the experts on the CPU, where values may be read: one without tokens costs nothing."""

    def run(x: Tensor, expert: int) -> Tensor:
        x = activate(F.linear(x, w1[expert], None if b1 is None else b1[expert]), activation)
        return F.linear(x, w2[expert], None if b2 is None else b2[expert])

    return each_by_itself(hidden, ids, w2.shape[1], run)


def each_by_itself(
    hidden: Tensor, ids: Tensor, size: int, run: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """``[T, k, size]``: ``run`` of an expert's rows of ``hidden [T, H]``, padded to a multiple of
    8, and the expert; zeros where ``ids [T, k]`` have none. Reads values on the host."""
    tokens, places = ids.shape
    out = hidden.new_zeros(tokens * places, size)
    flat = ids.flatten()
    for expert in flat[flat >= 0].unique().tolist():
        chosen = (flat == expert).nonzero()[:, 0]
        count = chosen.shape[0]
        x = hidden.new_zeros(-(-count // _PADDED_ROWS) * _PADDED_ROWS, hidden.shape[1])
        x[:count] = hidden[chosen // places]
        out[chosen] = run(x, expert)[:count]
    return out.view(tokens, places, -1)


def _grouped_mm_takes(hidden: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Whether a grouped product takes these; not in training, where its alignment is unknown."""
    if torch.is_grad_enabled() and w1.requires_grad:
        return False
    sizes = (*w1.shape[1:], *w2.shape[1:])
    return hidden.dtype == torch.bfloat16 and all(size % _GROUPED_ALIGNMENT == 0 for size in sizes)


def _in_groups(
    hidden: Tensor,
    ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    b1: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """Tokens sorted by expert, and two grouped GEMMs, which read the experts that have tokens."""
    tokens, places = ids.shape
    experts = w1.shape[0]
    flat = ids.flatten().long()
    order = torch.where(flat < 0, experts, flat).argsort(stable=True)
    of_row = flat[order].clamp(min=0)  # dead rows come last, behind every group
    ends = (flat[:, None] == torch.arange(experts, device=flat.device)).sum(0).cumsum(0).int()
    x = F.grouped_mm(hidden[order // places], w1.transpose(1, 2), offs=ends)
    x = activate(x if b1 is None else x + b1[of_row], activation)
    x = F.grouped_mm(x, w2.transpose(1, 2), offs=ends)
    x = x if b2 is None else x + b2[of_row]
    return torch.empty_like(x).index_copy(0, order, x).view(tokens, places, -1)


def _all_experts(
    hidden: Tensor,
    ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    b1: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """Every expert for every token: what runs in a graph for any dtype and size."""
    out = hidden.new_zeros(*ids.shape, w2.shape[1])
    for expert in range(w1.shape[0]):
        x = F.linear(hidden, w1[expert], None if b1 is None else b1[expert])
        x = activate(x, activation)
        x = F.linear(x, w2[expert], None if b2 is None else b2[expert])
        out = torch.where((ids == expert)[..., None], x[:, None], out)
    return out

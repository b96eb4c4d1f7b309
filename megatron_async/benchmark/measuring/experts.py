"""How many experts of a layer the decode steps of a run had to read.

Which experts a token chooses depends on the text, and steps run in captured graphs, so this is
counted afterwards: the requests' own tokens go through the model's modules once more, whose routers
say what each position chooses, and positions that were decoded together are put together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_async.benchmark.measuring.loads import Request
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.build.runner import allocate, keep_states
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.kernels.moe.reference import route, router_logits
from megatron_async.models.fused.blocks.moe_block import is_mixture
from megatron_async.runner.memory.recurrent_states import RecurrentStates, StepStates

SAMPLED_STEPS = 32
"""Steps that are looked at, evenly spaced."""


def experts_read(
    model: BenchmarkModel, requests: Sequence[Request], generated: Sequence[list[int]], window: int
) -> float | None:
    """Experts of a layer that a step in which all requests decode reads: the mean over layers of
    experts and over :data:`SAMPLED_STEPS` steps. None without experts.

    Args:
        generated: the tokens of each request, as many of each.
        window: tokens that a row brings to a step; drafts count as what came in their place.
    """
    mlps = (getattr(layer, "mlp", None) for layer in model.network.model.decoder.layers)
    layers: list[Any] = [mlp for mlp in mlps if is_mixture(mlp)]
    if not layers or not requests:
        return None
    steps = max(min(map(len, generated)) - window, 0)
    sampled = sorted({n * steps // SAMPLED_STEPS for n in range(SAMPLED_STEPS)})
    offsets = torch.tensor(sampled)[:, None] + torch.arange(window)
    chosen = []
    for request, tokens in zip(requests, generated, strict=True):
        of_request = _chosen(model, layers, request.prompt + tokens)
        at = (len(request.prompt) + offsets).clamp(max=of_request.shape[1] - 1)
        chosen.append(of_request[:, at].flatten(2))
    together = torch.cat(chosen, 2)  # layers, steps, choices
    experts = max(layer.settings.num_experts for layer in layers)
    read = torch.zeros(*together.shape[:2], experts, dtype=torch.bool)
    return float(read.scatter(2, together, True).sum(2).double().mean())


def _chosen(model: BenchmarkModel, layers: Sequence[Any], tokens: list[int]) -> Tensor:
    """int64 ``[layers, tokens, k]``: what each token chooses, on the CPU."""
    count = len(tokens)
    config = EngineConfig(
        max_requests=1,
        max_sequence_length=count,
        enable_prefix_caching=False,
        device=str(model.device),
    )
    served = model.served()
    spec = EngineSpec.of(served, config, model.device.type)
    context = allocate(spec, served, model.device)
    keep_states(spec, model.network, context)
    model.network.reserve_positions(count)
    size, device = context.block_size_tokens, model.device
    blocks = -(-count // size)
    context.block_table[0, :blocks] = torch.arange(1, blocks + 1, device=device)
    context.slots.finished[0] = False
    positions = torch.arange(count, device=device)
    chunk = torch.tensor([[0, 0, count, 0]], dtype=torch.int32, device=device)
    context.begin_forward(
        torch.zeros_like(positions), positions, decode_rows=0, chunks=chunk,
        last_token_index=positions[-1:], read_lengths=device.type != "cuda",
    )  # fmt: skip
    if context.states is not None:
        _begin_states(context.states, count, context.slots.finished)
    found: list[Tensor] = []
    with torch.no_grad(), _routers_watched(layers, found):
        model.network.forward(torch.tensor(tokens, device=device), positions, context)
    context.release()
    return torch.stack(found).long().cpu()


def _begin_states(states: RecurrentStates, count: int, finished: Tensor) -> None:
    """Tell recurrent layers of a prompt of ``count`` tokens in slot 0, and of no decode row."""
    zero = torch.zeros(1, dtype=torch.int64, device=finished.device)
    decode = states.decode_rows(zero[:0], zero[:0], finished, 1, zero[:0, None])
    states.begin(StepStates(decode, states.chunks(zero, zero, zero, zero + count, finished)))


@contextmanager
def _routers_watched(layers: Sequence[Any], found: list[Tensor]) -> Iterator[None]:
    """What the routers of ``layers`` choose is appended to ``found``, one layer after the other."""

    def watch(layer: Any, given: tuple[Tensor, ...], _: Any) -> None:
        router = layer.router
        tokens = given[0].reshape(-1, given[0].shape[-1])
        logits = router_logits(tokens, router.weight, router.bias)
        found.append(route(logits, layer.settings, expert_bias=router.expert_bias).ids)

    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

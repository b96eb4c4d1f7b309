"""Two tensor-parallel ranks of a megatron-core trainer that are the engine's ranks too, for
``tests/unit/training/test_exact_ranks.py``.

``python -m tests.support.exact_own_ranks FOLDER`` forks both. Each trains over rollouts of its own
engine, in place, and writes what it found to ``FOLDER/RANK.json``. With ``RANKED_DEVICE=cuda`` each
has a GPU. The model with experts divides sequences, which megatron-core asks of tensor-parallel
ranks that train experts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_async.config.engine_config import EngineConfig
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    GPTInferenceWrapper,
    SamplingParams,
)
from megatron_async.request.rollouts import batch_of
from megatron_async.training import exact_numerics, forced_routing
from megatron_async.weights.parallel_layouts import join_shards
from tests.support.forks import run_together
from tests.support.ranked import ON_GPUS, Found
from tests.support.served_over_http import free_port
from tests.support.users_ranks import example

from megatron.core import parallel_state  # isort: skip
from megatron.core.fusions import fused_softmax  # isort: skip
from megatron.core.tensor_parallel import random  # isort: skip
from megatron.core.transformer import TransformerConfig, dot_product_attention  # isort: skip
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # isort: skip

RANKS = 2
UPDATES = 2
DRAFTS = 2
LENGTH = 16
MODELS: dict[str, list[str]] = {"dense": [], "experts": ["--num-experts=4"]}
EXPERTS: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
PROMPTS = ["def read(path):", "import os", "def read(pa", "x = [1, 2", "import sys"]
CONFIG = functools.partial(
    EngineConfig, batch_invariant=True, num_speculative_tokens=DRAFTS, speculative_method="ngram"
)  # fmt: skip
INVARIANT = {
    "EngineConfig": CONFIG,
    "GPTInferenceWrapper": functools.partial(GPTInferenceWrapper, batch_invariant=True),
    "DynamicInferenceContext": functools.partial(
        DynamicInferenceContext, batch_invariant=True, num_speculative_tokens=DRAFTS
    ),
}


class Step(NamedTuple):
    """Whole weights, tokens ``[B, S]``, experts that they were forced to take, ``[B, S, layers,
    k]``, and the gradients of their mean loss."""

    tokens: Tensor
    weights: dict[str, Tensor]
    routed: Tensor | None
    gradients: dict[str, Tensor]


def train_on_a_cpu() -> None:
    """megatron's attention reads the random state of a GPU, and its mask is made on one."""
    states: Any = mock.MagicMock()
    for module in (random, dot_product_attention.tensor_parallel):
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state", "get_cuda_rng_tracker"):
            if hasattr(module, name):
                setattr(module, name, states)

    def mask(size: int) -> Tensor:
        return torch.ones(size, size).triu(diagonal=1).bool()

    fused_softmax.get_default_causal_mask = mask
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def norm_of_a_part(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> Any:
    """torch's norm, which megatron-core builds for whole sequences alone."""
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def built(name: str, args: Any) -> Any:
    """The example's model, or one with experts of which ranks divide sequences."""
    if name == "dense":
        return example.build_model(args)

    def config(**fields: Any) -> TransformerConfig:
        divides = args.tensor_model_parallel_size > 1
        return TransformerConfig(**fields | EXPERTS | {"sequence_parallel": divides})

    with (
        mock.patch.object(example, "TransformerConfig", config),
        mock.patch.object(WrappedTorchNorm, "__new__", norm_of_a_part),
    ):
        return example.build_model(args)


def rollouts_of(engine: Any, first: int) -> Any:
    """A batch of rollouts of all prompts."""
    for number, prompt in enumerate(PROMPTS, first):
        params = SamplingParams(
            temperature=(1.0, 0.1)[number % 2], seed=number, num_tokens_to_generate=LENGTH,
            termination_id=-1, return_log_probs=True, skip_prompt_log_probs=True,
        )  # fmt: skip
        engine.add_request(number, prompt, params)
    ended = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            ended[record.request_id] = record.merge().rollout()
    return batch_of([ended[number] for number in sorted(ended)])


def losses_of(model: Any, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    losses: Tensor = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
    return losses


def different(losses: Tensor, batch: Any) -> int:
    """Tokens that have another log-probability than they were sampled with."""
    own = -losses.detach().cpu().roll(1, dims=1)[:, : batch.log_probs.shape[1]]
    return int((own != batch.log_probs)[batch.loss_mask].sum())


def add_up_parts(model: Any) -> None:
    """What megatron-core does behind a backward: gradients of a part of each sequence are added
    up."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def drawn_experts(config: Any, tokens: Tensor) -> Tensor:
    """Experts for ``[B, S]``, of which each token has two different ones in each layer."""
    drawn = torch.Generator().manual_seed(3)
    scores = torch.rand(*tokens.shape, config.num_layers, config.num_moe_experts, generator=drawn)
    return scores.argsort(-1)[..., : config.moe_router_topk]


def step_of(model: Any, tokens: Tensor, routed: Tensor | None = None) -> Step:
    """What both ranks have behind a backward."""
    add_up_parts(model)
    weights = joined({n: p.detach() for n, p in model.named_parameters()})
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(tokens, weights, routed, joined(gradients))


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors of both ranks' shares, on the CPU."""
    shares: list[dict[str, Tensor]] = [{}] * RANKS
    dist.all_gather_object(shares, {name: share.cpu() for name, share in state.items()})
    return {name: join_shards(name, [each[name] for each in shares], gated=True) for name in state}


def train(folder: Path, rank: int, port: int) -> None:
    """A rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if not ON_GPUS:
        train_on_a_cpu()
    found = {name: trained(name) for name in MODELS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def trained(name: str) -> Found:
    """What came of a model by dtype, and how far float32 gradients are from those of one rank."""
    found: Found = {}
    for dtype, options in {"float32": [], "bfloat16": ["--bf16"]}.items():
        args = example.parse_args(
            ["--tensor-model-parallel-size=2", "--depth=2", *MODELS[name], *options]
        )
        example.initialise(args)
        if ON_GPUS:
            random.model_parallel_cuda_manual_seed(1)
        model = built(name, args)
        with mock.patch.multiple(example, **INVARIANT):
            engine = example.build_engine(args, model)
        found[dtype], steps = updates(engine, model)
        engine.close()
        dist.barrier()
        parallel_state.destroy_model_parallel()
        if dtype == "float32":
            found["gradients"] = errors_of(steps, name)
    return found


def updates(engine: Any, model: Any) -> tuple[list[Found], list[Step]]:
    """By update how many tokens there are, and how many of them differ with exact numerics and
    without; and what was computed."""
    found, steps = [], []
    for number in range(UPDATES):
        batch = rollouts_of(engine, number * len(PROMPTS))
        tokens = batch.tokens.to(next(model.parameters()).device)
        tokens = pad(tokens, (0, tokens.shape[1] % RANKS))
        model.train().requires_grad_(True)
        plain = different(losses_of(model, tokens), batch)
        if model.config.num_moe_experts:
            routed = drawn_experts(model.config, tokens)
            with forced_routing(model, routed):
                losses_of(model, tokens).mean().backward()
            steps.append(step_of(model, tokens, routed))
            model.zero_grad()
        with exact_numerics(model):
            losses = losses_of(model, tokens)
            losses.mean().backward()
        steps.append(step_of(model, tokens))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.eval().requires_grad_(False)
        engine.reset_prefix_cache()
        found.append(
            {
                "tokens": int(batch.loss_mask.sum()),
                "plain": plain,
                "exact": different(losses, batch),
                "accepted": engine.counters.tokens_accepted,
                "sum": float(batch.log_probs[batch.loss_mask].sum()),
            }
        )
    return found, steps


def errors_of(steps: list[Step], name: str) -> dict[str, float]:
    """By parameter how far gradients of two ranks are at most from those of one, beside the largest
    of them."""
    args = example.parse_args(MODELS[name])
    example.initialise(args)
    if ON_GPUS:
        random.model_parallel_cuda_manual_seed(1)
    model = built(name, args).train()
    errors: dict[str, float] = {}
    for step in steps:
        model.zero_grad()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(step.weights[key])
        forced = nullcontext() if step.routed is None else forced_routing(model, step.routed)
        with forced:
            losses_of(model, step.tokens).mean().backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert expected.keys() == step.gradients.keys()
        for key, gradient in expected.items():
            difference = step.gradients[key].to(gradient.device) - gradient
            error = float(difference.abs().max() / gradient.abs().max())
            errors[key] = max(error, errors.get(key, 0.0))
    parallel_state.destroy_model_parallel()
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    root, meeting = Path(sys.argv[1]), free_port()
    run_together(
        "both ranks",
        [
            lambda rank=rank: train(root, rank, meeting)  # type: ignore[misc]
            for rank in range(RANKS)
        ],
    )

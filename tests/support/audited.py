"""Small models of each kind, and engines over them whose graphs are audited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.releasable_weights import move_parameters
from megatron_async.models.served import ServedModel
from tests.support.engines import config_at, greedy

DENSE = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=96, max_sequence_length=128,
)  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
HYBRID = {
    "num_layers": 4, "hybrid_override_pattern": "ME*-", "mamba_state_dim": 8,
    "mamba_head_dim": 16, "mamba_num_groups": 2,
}  # fmt: skip
MODELS: dict[str, ModelConfig] = {
    "dense": DENSE,
    "experts": replace(DENSE, **EXPERTS, moe_shared_expert_intermediate_size=48),
    "hybrid": replace(DENSE, **EXPERTS, **HYBRID),
    "MTP": replace(DENSE, mtp_num_layers=1),
}
PROMPTS = [[1, 2, 3, 4], [9] * 20]


def network(config: ModelConfig, device: torch.device, seed: int = 3) -> GPTNetwork:
    """A random model in float32."""
    return GPTNetwork(build_random_model(config, device=device, dtype=torch.float32, seed=seed))


def audited_engine(
    name: str, *, device: str = "cpu", draft: bool = False, **values: Any
) -> DynamicInferenceEngine:
    """An engine that can sleep, over one of :data:`MODELS`.

    Args:
        draft: a second model of the dense shape drafts.
    """
    on, config = torch.device(device), MODELS[name]
    made = build_random_model(config, device=on, dtype=torch.float32, seed=3)
    weights = move_parameters(made)
    drafts = 1 if draft or config.mtp_num_layers else 0
    values = {
        "audit_graphs": True, "enable_sleep_mode": True, "max_requests": 2, "block_count": 20,
        "block_size_tokens": 16, "max_sequence_length": 64, "device": device,
        "num_speculative_tokens": drafts, **values,
    }  # fmt: skip
    served = ServedModel(
        network=GPTNetwork(made),
        weights_region=weights,
        draft=network(DENSE, on, seed=4) if draft else None,
    )
    return DynamicInferenceEngine(served, config_at(1, **values))


def model_of(engine: DynamicInferenceEngine) -> Any:
    """The model whose weights are updated."""
    return engine.model.weights_owner


def state_of(engine: DynamicInferenceEngine, scale: float = 1.0) -> dict[str, Tensor]:
    """Its parameters, times a number."""
    return {
        name: value.detach() * scale for name, value in model_of(engine).state_dict().items()
        if value is not None
    }  # fmt: skip


def tokens(engine: DynamicInferenceEngine, count: int = 4) -> list[list[int]]:
    """What it generates now; its graphs are replayed, to their ends."""
    requests = engine.generate(PROMPTS, greedy(count))
    engine.device.synchronize()
    return [request.generated_tokens for request in requests]

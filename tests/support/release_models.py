"""One small model of each kind, with weights that depend on their names alone: the same on each
release of megatron-core."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

_SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, max_sequence_length=128, tie_word_embeddings=False,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2,
    moe_shared_expert_intermediate_size=16,
)  # fmt: skip
CONFIGS = {
    "dense": ModelConfig(**_SIZES),
    "mtp": ModelConfig(**_SIZES, mtp_num_layers=2),
    "moe": ModelConfig(**_SIZES, **_EXPERTS),
    "latents": ModelConfig.from_dict(
        {
            **_SIZES,
            "num_kv_heads": 4,
            "head_dim": 12,
            "latent_attention": {
                "q_lora_rank": None,
                "kv_lora_rank": 16,
                "qk_pos_emb_head_dim": 4,
                "v_head_dim": 8,
            },
        }
    ),
    "hybrid": ModelConfig(
        **{**_SIZES, "num_layers": 5}, **_EXPERTS, hybrid_override_pattern="M-*ME",
        mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2,
    ),
}  # fmt: skip
PROMPTS = [[(7 * n + 3 * i) % 64 for i in range(5 + 11 * n)] for n in range(3)]
PARAMS = [
    SamplingParams(num_tokens_to_generate=12, temperature=t, seed=9, termination_id=-1)
    for t in (0.0, 0.8, 0.0)
]


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Weights by their names, of a size that says something."""
    for name, parameter in model.named_parameters():
        name = name.replace("conv1d_", "conv1d.").replace("mtp_model_layer", "transformer_layer")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn * 0.3 if parameter.dim() > 1 else 1 + 0.1 * drawn)


def model_of(kind: str) -> Any:
    """A model that this package builds."""
    model = build_model(CONFIGS[kind], device="cpu", dtype=torch.float32).eval()
    fill(model)
    return model


def tokens_of(model: Any, depth: int, drafts: int = 0) -> list[list[int]]:
    """What an engine generates, with requests that come and go."""
    config = config_at(
        depth, max_requests=2, block_count=32, block_size_tokens=8, prefill_chunk_tokens=16,
        num_speculative_tokens=drafts, debug=True,
    )  # fmt: skip
    wrapper = GPTNetwork(model)
    with DynamicInferenceEngine(ServedModel(network=wrapper), config) as engine:
        return [request.generated_tokens for request in engine.generate(PROMPTS, PARAMS)]

"""megatron-core's own models with multi-latent attention or attention sinks, adapted in place."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.megatron_api.context import DynamicInferenceContext
from megatron_async.megatron_api.inference_config import InferenceConfig
from megatron_async.models.adapt import adapt_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from tests.support.engines import config_at, greedy
from tests.support.stock_model import no_gpu, stock_model  # noqa: F401

from megatron.core import tensor_parallel  # isort: skip

LATENTS: dict[str, Any] = dict(
    multi_latent_attention=True, kv_lora_rank=16, qk_head_dim=8,
    qk_pos_emb_head_dim=4, v_head_dim=16, qk_layernorm=True,
)  # fmt: skip
YARN: dict[str, Any] = dict(
    yarn_rotary_scaling_factor=8.0, yarn_original_max_position_embeddings=16, yarn_beta_fast=32.0,
    yarn_beta_slow=1.0, yarn_mscale=None, yarn_mscale_all_dim=None,
    yarn_correction_range_round_to_int=False,
)  # fmt: skip
STOCK: dict[str, dict[str, Any]] = {
    "latents-yarn": {
        **LATENTS, "q_lora_rank": 12, "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
    },
    "latents-rope": {**LATENTS, "q_lora_rank": None, "rope_type": "rope"},
    "latents-with-a-scale-of-their-own": {
        **LATENTS, "q_lora_rank": None, "rope_type": "rope", "softmax_scale": 0.9,
    },
    "latents-rotated-in-all-layers": {
        **LATENTS, "q_lora_rank": None, "rope_type": "rope", "no_rope_freq": [1, 0],
    },
    "yarn": {"position_embedding_type": "yarn", "attributes": YARN},
    "factor-of-yarn-alone": {"attributes": YARN},
    "sinks": {"softmax_type": "learnable"},
    "one-more-in-the-sum": {"softmax_type": "off-by-one"},
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_model_of_megatron_is_adapted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its dropout has a random state for each rank.
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    model = stock_model(**STOCK[name])
    ids = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(6))
    positions = torch.arange(40).expand(2, -1)
    mask = torch.ones(40, 40, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        if name == "sinks":
            for layer in model.decoder.layers:
                layer.self_attention.core_attention.softmax_offset.normal_(std=2.0)
        expected = model(ids, positions, mask)
        found = adapt_model(model)(ids, positions, mask)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        wrapper = GPTNetwork(model)
        config = config_at(1, max_requests=2, block_count=8, prefill_chunk_tokens=16)
        with DynamicInferenceEngine(ServedModel(network=wrapper), config) as ours:
            tokens = ours.generate([ids[0].tolist()], [greedy(6)])[0].generated_tokens
    assert tokens[0] == int(expected[0, -1].argmax())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**LATENTS, "softmax_type": "learnable"}, "softmax_type='learnable'.*use 'vanilla'$"),
        ({**LATENTS, "rope_type": "rope", "rotary_percent": 0.5}, "rotary_percent=0.5"),
        (
            {"position_embedding_type": "mrope", "mrope_section": [2, 3, 3]},
            "'mrope' is not supported: use 'rope', 'yarn', 'learned_absolute' or 'none'$",
        ),
        ({**LATENTS, "window_size": (5, 0)}, r"window_size=\(5, 0\) .* multi_latent_attention"),
    ],
)
def test_stock_model_that_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapt_model(stock_model(**changes))


@pytest.mark.parametrize("part", ("core_attention", "rotary_pos_emb"))
def test_parts_of_users_that_no_step_calls_are_refused(part: str) -> None:
    model = stock_model()
    of = model.decoder.layers[0].self_attention if part == "core_attention" else model
    module = getattr(of, part)
    module.__class__ = type("Own", (type(module),), {"forward": lambda self, *given: given[0]})
    with pytest.raises(
        ConfigError, match="by Own, which steps do not call: build it with megatron"
    ):
        adapt_model(model)


def test_adapters_around_the_weight_of_latents_are_refused() -> None:
    model = stock_model(**LATENTS, rope_type="rope", q_lora_rank=None)
    attention = model.decoder.layers[1].self_attention
    attention.linear_kv_up_proj = torch.nn.Sequential(attention.linear_kv_up_proj)
    with pytest.raises(ConfigError, match=r"layer 2 has latents with Sequential, .* merge"):
        adapt_model(model)


@torch.no_grad()
def served(**changes: Any) -> tuple[Any, list[int]]:
    """A stock model with biases, and what it says when it is served."""
    model = stock_model(**changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    config = config_at(2, max_requests=2, block_count=8, prefill_chunk_tokens=16)
    with DynamicInferenceEngine(ServedModel(network=GPTNetwork(model)), config) as engine:
        return model, engine.generate([list(range(3, 30))], [greedy(6)])[0].generated_tokens


SAVING: dict[str, tuple[dict[str, Any], list[str]]] = {
    "recomputation": (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        ["recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp"],
    ),
    "offloading": (
        {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "mlp_norm"]},
        ["offload_attn_norm", "offload_mlp_norm"],
    ),
}


@pytest.mark.parametrize("kind", SAVING)
def test_only_training_saves_memory(kind: str) -> None:
    """megatron-core's layers would read random states and make events in captured steps."""
    changes, names = SAVING[kind]
    model, tokens = served(**changes)
    assert tokens == served()[1]
    layer = model.decoder.layers[0]
    flags = [getattr(layer, name) for name in names]
    assert not any(flags)
    layer.train()
    assert all(flags)


def test_prefills_in_chunks_add_a_bias_once() -> None:
    model, tokens = served(mlp_chunks_for_prefill=2)
    assert tokens == served()[1]
    assert model.config.mlp_chunks_for_prefill == 1


def test_contexts_of_megatron_hold_latents() -> None:
    sizes: dict[str, Any] = dict(params_dtype=torch.float32, num_layers=2, kv_channels=16,
                                 num_attention_heads=4, max_sequence_length=64)  # fmt: skip
    with pytest.raises(ConfigError, match="kv_lora_rank=None must be"):
        DynamicInferenceContext(**sizes, block_count=4, cache_mla_latent=True)
    model = adapt_model(stock_model(**LATENTS, rope_type="rope", q_lora_rank=None))
    spec = GPTNetwork(model).kv_cache_spec
    config = InferenceConfig(buffer_size_gb=0.001, max_sequence_length=64, block_size_tokens=16)
    for context in (
        DynamicInferenceContext(model.config, config),
        DynamicInferenceContext(
            **sizes, buffer_size_gb=0.001, block_size_tokens=16, cache_mla_latent=True,
            kv_lora_rank=16, qk_pos_emb_head_dim=4,
        ),
    ):  # fmt: skip
        assert context.cache_mla_latent and context.kv_reduced_dim == spec.head_dim == 20
        assert context.block_size_bytes == 16 * spec.token_bytes == 16 * 2 * 20 * 4

"""Engines with multi-latent attention, and with attention sinks: the same tokens at any depth,
block size, and through pauses, evictions and prefix hits; and what they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.kernels import trial
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.description.memory_traffic import kv_bytes, weight_bytes
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers.latent_attention import by_head
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at, greedy

pytestmark = pytest.mark.sweep

SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=4, head_dim=12,
    ffn_hidden_size=48, vocab_size=96, max_sequence_length=128,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_moe_experts=6, moe_ffn_hidden_size=16, moe_router_topk=2)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)
CONFIGS = {
    "latents": ModelConfig(
        **SIZES,
        **EXPERTS,
        moe_layer_freq=(0, 1),
        rope_scaling=YARN,
        latent_attention=LatentAttention(
            kv_lora_rank=16, q_lora_rank=20, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
    ),
    "sinks": ModelConfig(
        **{**SIZES, "num_kv_heads": 2},
        **EXPERTS,
        rope_scaling=YARN,
        attention_sinks=True,
        sliding_window=9,
        sliding_layers=(0,),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        moe_router_bias=True,
        activation="clamped_swiglu",
        activation_limit=1.5,
    ),
}
START = list(range(3, 24))
PROMPTS = [START, [*START, 40, 41], [50, 51, 52], [*START[:12], 60], list(range(30, 71))]
NEW_TOKENS = 12


def wrapped(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Large weights, biases and sinks: all of them show in the tokens."""
    model = build_random_model(CONFIGS[name], device=torch.device("cpu"), dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=0.3, generator=generator)
    return GPTNetwork(model.to(device))


@pytest.fixture(scope="module", params=CONFIGS)
def wrapper(request: pytest.FixtureRequest) -> GPTNetwork:
    found: GPTNetwork = wrapped(request.param)
    return found


def engine(
    wrapper: GPTNetwork, depth: int, device: str = "cpu", **values: Any
) -> DynamicInferenceEngine:
    config = config_at(depth, device=device, **{"debug": True, **values})
    return DynamicInferenceEngine(ServedModel(network=wrapper), config)


def params() -> list[SamplingParams]:
    sampled = SamplingParams(
        temperature=1.0, seed=5, num_tokens_to_generate=NEW_TOKENS, termination_id=-1
    )
    return [greedy(NEW_TOKENS), sampled, sampled, greedy(NEW_TOKENS), sampled]


@pytest.fixture(scope="module")
def expected(wrapper: GPTNetwork) -> list[list[int]]:
    """Each alone, in one chunk, from the model's forward over the whole sequence where greedy."""
    found = []
    with engine(wrapper, 0, max_requests=1, block_size_tokens=16, block_count=8,
                enable_prefix_caching=False) as alone:  # fmt: skip
        for prompt, param in zip(PROMPTS, params(), strict=True):
            found.append(alone.generate([prompt], [param])[0].generated_tokens)
    ids = torch.tensor([PROMPTS[0] + found[0]])
    with torch.no_grad():
        logits = wrapper.model(
            ids, torch.arange(ids.shape[1])[None], None, runtime_gather_output=True
        )
    assert logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist() == found[0]
    assert len(set(found[0])) > 2, "degenerate text proves little"
    return found


@pytest.mark.parametrize(("depth", "block_size"), [(0, 4), (1, 1), (2, 2), (4, 3)])
def test_tokens_are_the_same_through_evictions_pauses_and_prefix_hits(
    wrapper: GPTNetwork, expected: list[list[int]], depth: int, block_size: int
) -> None:
    # The longest request and half a prompt more.
    blocks = -(-(len(PROMPTS[-1]) + NEW_TOKENS + 6) // block_size)
    with engine(
        wrapper, depth, max_requests=3, block_size_tokens=block_size, block_count=blocks,
        prefill_chunk_tokens=16,
    ) as crowded:  # fmt: skip
        futures = [
            crowded.add_request(n, prompt, param)
            for n, (prompt, param) in enumerate(zip(PROMPTS, params(), strict=True))
        ]
        for step in range(6):
            crowded.step_modern()
            if step == 3:
                crowded.pause_request(1)
        crowded.resume_request(1)
        while crowded.has_unfinished_requests():
            crowded.step_modern()
        counters = crowded.counters
    assert [future.result().generated_tokens for future in futures] == expected
    assert counters.evictions > 0 and counters.tokens_cached > 0
    assert counters.prefill_chunks > len(PROMPTS)


def test_tokens_and_steps_cost_what_is_said(wrapper: GPTNetwork) -> None:
    spec, config = wrapper.kv_cache_spec, wrapper.model.model_config
    latent = config.latent_attention
    of_layer = 2 * 2 * 12 if latent is None else 16 + 4
    assert spec.token_bytes == 2 * of_layer * 4
    assert kv_bytes(config, 4, 1, 1) == spec.token_bytes
    read = [p for name, p in wrapper.model.named_parameters() if "word_embeddings" not in name]
    assert weight_bytes(config, 4) == 4 * sum(parameter.numel() for parameter in read)
    with engine(wrapper, 0, block_count=3) as built:
        size = built.cache.sizes.block_size_tokens
        assert built.cache.kv.numel() * 4 == 4 * size * spec.token_bytes


def test_drafts_by_lookup_are_verified(wrapper: GPTNetwork, expected: list[list[int]]) -> None:
    with engine(
        wrapper, 1, max_requests=3, block_size_tokens=4, block_count=60, num_speculative_tokens=2,
        speculative_method="ngram",
    ) as drafting:  # fmt: skip
        requests = drafting.generate(PROMPTS, params())
    assert [request.generated_tokens for request in requests] == expected


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_products_by_head_do_not_depend_on_other_rows(rows: int) -> None:
    x = torch.randn(rows, 3, 24, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(2))
    out = torch.full((rows, 3, 50), 7.0)
    by_head(x, weights, out[..., 10:], one_by_one=True)
    assert (out[..., :10] == 7).all()
    few, batched = torch.empty(8, 3, 40), torch.empty(rows, 3, 50)
    by_head(x[:8], weights, few, one_by_one=True)
    assert torch.equal(few, out[:8, :, 10:])
    by_head(x, weights, batched[..., 10:], one_by_one=False)
    torch.testing.assert_close(batched[..., 10:], out[..., 10:])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("latents", {"num_kv_heads": 2}, "num_kv_heads=2 must be num_attention_heads=4"),
        ("latents", {"head_dim": 4}, "head_dim=4 must be above qk_pos_emb_head_dim=4"),
        ("latents", {"attention_sinks": True}, "attention_sinks=True does not go with latent"),
        ("latents", {"sliding_window": 4}, "sliding_window=4 does not go with latent"),
        ("latents", {"position_embedding": "learned_absolute"}, "needs position_embedding='rope'"),
        ("sinks", {"activation": "swiglu"}, "activation_limit need each other"),
        ("sinks", {"activation_limit": None}, "activation_limit need each other"),
    ],
)
def test_config_names_what_does_not_fit(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict({**CONFIGS[name].to_dict(), **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """With the kernels and without them, in captured graphs."""

    @pytest.fixture(autouse=True, params=(True, False), ids=("kernels", "torch"))
    def kernels(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial, "LATENT", request.param)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)

    @pytest.mark.parametrize("name", CONFIGS)
    @pytest.mark.parametrize(("depth", "block_size"), [(0, 16), (1, 4), (2, 16), (4, 1)])
    def test_tokens_in_fp32_are_the_cpus(self, name: str, depth: int, block_size: int) -> None:
        with engine(wrapped(name), 0, max_requests=3, block_count=30) as on_cpu:
            expected = [r.generated_tokens for r in on_cpu.generate(PROMPTS, params())]
        with engine(
            wrapped(name, "cuda"), depth, "cuda", max_requests=3, block_size_tokens=block_size,
            block_count=-(-60 // block_size), prefill_chunk_tokens=16,
        ) as crowded:  # fmt: skip
            requests = crowded.generate(PROMPTS, params())
            assert crowded.counters.tokens_cached > 0
        assert [request.generated_tokens for request in requests] == expected

    @pytest.mark.parametrize("name", CONFIGS)
    def test_steady_steps_in_bf16_do_not_wait(self, name: str) -> None:
        wrapper = wrapped(name, "cuda", torch.bfloat16)
        with engine(
            wrapper, 2, "cuda", debug=False, max_requests=8, block_size_tokens=16, block_count=80
        ) as steady:
            for number in range(8):
                steady.add_request(number, [3 + number], greedy(100))
            for _ in range(10):
                steady.step_modern()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(60):
                    steady.step_modern()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            steady.reset()

    @pytest.mark.parametrize("name", CONFIGS)
    def test_batch_invariant_tokens_in_bf16_survive_evictions(self, name: str) -> None:
        if not trial.LATENT:
            pytest.skip("products of PyTorch's attention depend on the batch")
        found = []
        for depth, blocks in ((0, 60), (2, 16)):
            with engine(
                wrapped(name, "cuda", torch.bfloat16), depth, "cuda", max_requests=3,
                block_size_tokens=4, block_count=blocks, prefill_chunk_tokens=16,
                batch_invariant=True,
            ) as invariant:  # fmt: skip
                requests = invariant.generate(PROMPTS, params())
                assert (invariant.counters.evictions > 0) == (blocks == 16)
            found.append([request.generated_tokens for request in requests])
        assert found[0] == found[1]

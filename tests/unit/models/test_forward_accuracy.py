"""Logits of the engine's own steps against a plain float64 forward, written here.

Whatever path the engine takes, captured, fused or padded, is what is measured: the logits are read
from the buffer that S samples, after each step at depth 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.models.fused import decoder as fused_decode
from megatron_async.models.fused import where
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import Plan
from tests.support import emulator
from tests.support.engines import config_at

pytestmark = pytest.mark.sweep

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
PROMPT_TOKENS = 40
DECODE_STEPS = 6
QUERIES_AT_ONCE = 512
BATCH_SIZES = (1, 3, 8, 20, 32, 50)

MODELS = {
    "llama": ModelConfig(
        num_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        num_kv_heads=2,
        head_dim=64,
        ffn_hidden_size=1408,
        vocab_size=2048,
        max_sequence_length=256,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "qwen3": ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=128,
        ffn_hidden_size=768,
        vocab_size=1536,
        max_sequence_length=256,
        norm_epsilon=1e-6,
        qk_norm=True,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
    ),
    "gpt2": ModelConfig(
        num_layers=4,
        hidden_size=768,
        num_attention_heads=12,
        num_kv_heads=12,
        head_dim=64,
        ffn_hidden_size=3072,
        vocab_size=1537,  # odd, as GPT-2's
        max_sequence_length=256,
        normalization="LayerNorm",
        activation="gelu_tanh",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        position_embedding="learned_absolute",
    ),
}


def tiny(config: ModelConfig) -> ModelConfig:
    """The same architecture in a size for a CPU."""
    shared = config.num_attention_heads // config.num_kv_heads
    return replace(
        config,
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=4 // min(shared, 2),
        head_dim=16,
        ffn_hidden_size=96,
        vocab_size=131,
    )


# --- the reference ----------------------------------------------------------------------------


class Float64Model:
    """A decoder over whole sequences in float64: no cache, no batch, one line for each formula.

    ``table`` [positions, 2, pairs] takes the place of its own cosines and sines: at a position of
    100,000 an angle in fp32 is off by a hundredth, which is not what a test of kernels is about.
    """

    def __init__(self, config: ModelConfig, state: dict[str, Tensor]) -> None:
        self.config = config
        self.state = {name: value.double() for name, value in state.items()}
        self.table: Tensor | None = None

    def logits(self, token_ids: Tensor) -> Tensor:
        """``[T]`` token ids of one sequence to ``[T, vocab]``."""
        words = self.state["embedding.word_embeddings.weight"]
        output = words if self.config.tie_word_embeddings else self.state["output_layer.weight"]
        return self.hidden_states(token_ids) @ output.T

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """``[T]`` token ids of one sequence to ``[T, hidden]`` after the final norm."""
        state, config = self.state, self.config
        words = state["embedding.word_embeddings.weight"]
        hidden = words[token_ids]
        if config.position_embedding == "learned_absolute":
            hidden = hidden + state["embedding.position_embeddings.weight"][: len(token_ids)]
        for layer in range(config.num_layers):
            at = f"decoder.layers.{layer}."
            normed = self.norm(hidden, at + "input_layernorm")
            window = config.attention_window(layer)
            hidden = hidden + self.attention(normed, at + "self_attention.", window)
            normed = self.norm(hidden, at + "pre_mlp_layernorm")
            hidden = hidden + self.mlp(normed, at + "mlp.")
        return self.norm(hidden, "decoder.final_layernorm")

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.state.get(name + ".bias")
        product = x @ self.state[name + ".weight"].T
        return product if bias is None else product + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        bias = self.state.get(name + ".bias")
        if self.config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.config.norm_epsilon).sqrt()
        x = x * self.state[name + ".weight"]
        return x if bias is None else x + bias

    def attention(self, x: Tensor, at: str, window: int | None = None) -> Tensor:
        config = self.config
        tokens, kv_heads, dim = len(x), config.num_kv_heads, config.head_dim
        group = config.num_attention_heads // kv_heads
        # megatron's order: of each group its query heads, its key, its value.
        packed = self.linear(x, at + "linear_qkv").view(tokens, kv_heads, group + 2, dim)
        query, key, value = packed[:, :, :group], packed[:, :, group:-1], packed[:, :, -1:]
        if config.qk_norm:
            query = self.norm(query, at + "q_layernorm")
            key = self.norm(key, at + "k_layernorm")
        if config.position_embedding == "rope":
            query, key = self.rotate(query), self.rotate(key)
        key, value = self.kept(key, value, at)
        sinks = self.state.get(at + "core_attention.softmax_offset")
        mixed = torch.empty_like(query)
        place = torch.arange(tokens, device=x.device)
        for some in place.split(QUERIES_AT_ONCE):
            seen = slice(int(some[-1]) + 1)
            scores = torch.einsum("tkgd,skd->kgts", query[some], key[seen, :, 0]) / math.sqrt(dim)
            if config.attention_soft_cap is not None:
                scores = (scores / config.attention_soft_cap).tanh() * config.attention_soft_cap
            scores.masked_fill_(place[seen] > some[:, None], -math.inf)
            if window is not None:
                scores.masked_fill_(place[seen] <= some[:, None] - window, -math.inf)
            if sinks is not None:  # in front of the tokens, as one without a value
                column = sinks.view(kv_heads, group, 1, 1).expand(-1, -1, len(some), 1)
                scores = torch.cat((column, scores), -1)
            weights = scores.softmax(-1)[..., -len(key[seen]) :]
            mixed[some] = torch.einsum("kgts,skd->tkgd", weights, value[seen, :, 0])
        return self.linear(mixed.reshape(tokens, -1), at + "linear_proj")

    def kept(self, key: Tensor, value: Tensor, at: str) -> tuple[Tensor, Tensor]:
        """``[T, kv heads, 1, dim]`` as a cache has them."""
        return key, value

    def rotate(self, x: Tensor) -> Tensor:
        """Positions 0, 1, ... of ``[T, kv heads, heads, dim]``; pairs are half a head apart."""
        half = self.config.head_dim // 2
        cos, sin = self.turns(len(x), half) if self.table is None else self.table.unbind(1)
        cos, sin = cos[: len(x), None, None].to(x), sin[: len(x), None, None].to(x)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def turns(self, tokens: int, half: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[tokens, half]``."""
        index = torch.arange(half, dtype=torch.float64)
        frequencies = self.config.rope_theta ** (-index / half)
        scaling = self.config.rope_scaling
        if scaling is not None:
            turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
            frequencies = frequencies * (keep + (1 - keep) / scaling.factor)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
        return angles.cos(), angles.sin()

    def mlp(self, x: Tensor, at: str) -> Tensor:
        inner = self.linear(x, at + "linear_fc1")
        if self.config.activation == "swiglu":
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        return self.linear(inner, at + "linear_fc2")


# --- the engine -------------------------------------------------------------------------------


class Rig:
    """An engine at depth 0, and the float64 model of its weights."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: str,
        rows: int,
        *,
        norm_scale: float = 1.0,
        change: Callable[[Any], object] | None = None,
        kept: torch.dtype | None = None,
        **values: Any,
    ) -> None:
        model = build_model(config, device=device, dtype=dtype, initialize=False)
        draw_weights(model, norm_scale)
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
        if change is not None:  # of modules, not of what they compute
            change(model)
        self.reference = Float64Model(config, state)
        self.device = device
        self.vocab_size = config.vocab_size
        wrapper = GPTNetwork(model, kv_cache_dtype=kept)
        self.model = wrapper.model
        values.setdefault("prefill_chunk_tokens", PROMPT_TOKENS)
        values.setdefault("max_tokens", rows * (PROMPT_TOKENS + 1))
        engine_config = config_at(0, device=device, max_requests=rows, **values)
        self.engine = DynamicInferenceEngine(
            ServedModel(network=wrapper),
            engine_config,
        )
        self._plans: list[Plan] = []
        self.engine.observe(SimpleNamespace(on_launch=self._plans.append))

    def worst_errors(
        self, batch_size: int, prompt_tokens: int = PROMPT_TOKENS
    ) -> tuple[float, float]:
        """Decode ``batch_size`` greedy requests together; the largest relative error, norm of the
        difference by norm, of the logits of a row: of a prefill, and of a decode step."""
        generator = torch.Generator().manual_seed(batch_size)
        params = SamplingParams(
            temperature=0, num_tokens_to_generate=1 + DECODE_STEPS, termination_id=-1
        )
        self.engine.reset()
        prompts = {}
        for request_id in range(batch_size):
            length = prompt_tokens - request_id % 5
            prompt = torch.randint(0, self.vocab_size, (length,), generator=generator)
            self.engine.add_request(request_id, prompt, params)
            prompts[self.engine.outputs.key_of(request_id)] = prompt.tolist()
        logits: dict[int, list[Tensor]] = {key: [] for key in prompts if key is not None}
        tokens: dict[int, list[int]] = {}
        self._plans.clear()
        full = 0
        while self.engine.has_unfinished_requests():
            finished = self.engine.step_modern()["finished_request_records"]
            for request in finished:
                tokens[request.request_id] = request.generated_tokens
            plan = self._plans.pop()
            self.engine.device.synchronize()
            pending = self.engine.runner._program._pending_logits
            for row, key in plan.sampled(enumerate(plan.rows.keys)):
                logits[key].append(pending[row].to(self.device, torch.float64, copy=True))
            # The copies are on another stream than the next forward, which overwrites the logits.
            self.engine.device.synchronize()
            full += plan.is_decode_only and len(plan.rows) == batch_size
        assert full >= 1, "no step decoded the whole batch"
        return self._worst(prompts, logits, tokens)

    def _worst(
        self,
        prompts: dict[int | None, list[int]],
        logits: dict[int, list[Tensor]],
        tokens: dict[int, list[int]],
    ) -> tuple[float, float]:
        prefill = decode = 0.0
        for request_id, (key, found) in enumerate(logits.items()):
            prompt, generated = prompts[key], tokens[request_id]
            assert len(found) == len(generated) == 1 + DECODE_STEPS
            sequence = torch.tensor(prompt + generated[:-1], device=self.device)
            expected = self.reference.logits(sequence)[len(prompt) - 1 :]
            got = torch.stack(found)
            assert got.isfinite().all()
            sampled = got[range(len(generated)), generated]
            assert torch.equal(sampled, got.amax(1)), "S sampled other logits"
            errors = ((got - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
            prefill, decode = max(prefill, errors[0]), max(decode, *errors[1:])
        return prefill, decode


@torch.no_grad()
def draw_weights(model: torch.nn.Module, norm_scale: float = 1.0) -> None:
    """Weights with which every part of a layer matters: all branches are as large as the residual
    stream, norms are not ones, biases are not zeros. ``norm_scale`` is of the norms of queries and
    keys: attention scores are wider by its square."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            noise = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
            if "q_layernorm" in name or "k_layernorm" in name:
                noise *= norm_scale
        elif "embedding" not in name:
            noise = noise / math.sqrt(parameter.shape[1]) if noise.dim() == 2 else 0.3 * noise
        parameter.copy_(noise)


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def gpu_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(MODELS[request.param], torch.bfloat16, "cuda", max(BATCH_SIZES))
    yield rig
    rig.engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_bf16_logits_on_a_gpu_are_those_of_a_float64_forward(gpu_rig: Rig, batch_size: int) -> None:
    prefill, decode = gpu_rig.worst_errors(batch_size)
    print(f"batch {batch_size}: prefill {prefill:.4f}, decode {decode:.4f}")
    assert prefill < TOLERANCE[torch.bfloat16]
    assert decode < TOLERANCE[torch.bfloat16]


# --- on a CPU ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(name, dtype) for name in MODELS for dtype in TOLERANCE])
def cpu_rig(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, torch.dtype]]:
    name, dtype = request.param
    rig = Rig(tiny(MODELS[name]), dtype, "cpu", 9)
    yield rig, dtype
    rig.engine.close()


@pytest.mark.parametrize("batch_size", (1, 3, 9))
def test_logits_on_a_cpu_are_those_of_a_float64_forward(
    cpu_rig: tuple[Rig, torch.dtype], batch_size: int
) -> None:
    rig, dtype = cpu_rig
    assert max(rig.worst_errors(batch_size)) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_logits_of_emulated_kernels_are_those_of_a_float64_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused decode forward as a whole, where there is no GPU."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    config = replace(tiny(MODELS[name]), hidden_size=128, head_dim=32, ffn_hidden_size=256)
    rig = Rig(config, torch.bfloat16, "cpu", 3, num_cuda_graphs=1)
    forwards = []
    forward = fused_decode.FusedDecoder.forward
    monkeypatch.setattr(
        fused_decode.FusedDecoder,
        "forward",
        lambda self, *values: [forwards.append(1), forward(self, *values)],
    )
    with rig.engine:
        assert max(rig.worst_errors(3)) < TOLERANCE[torch.bfloat16]
    assert len(forwards) >= DECODE_STEPS


@pytest.mark.parametrize("part", ("attention", "rotate", "mlp", "norm"))
def test_an_error_in_any_part_would_be_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are such that no part's contribution drowns in the tolerance."""
    rig = Rig(tiny(MODELS["qwen3"]), torch.float32, "cpu", 8)
    with rig.engine:
        right = getattr(Float64Model, part)

        def scaled(self: Float64Model, x: Tensor, *names: str) -> Tensor:
            wrong: Tensor = right(self, x, *names)
            # A twentieth off; rotated vectors are turned back half way.
            return 0.5 * (wrong + x) if part == "rotate" else 0.95 * wrong

        monkeypatch.setattr(Float64Model, part, scaled)
        assert min(rig.worst_errors(2)) > TOLERANCE[torch.bfloat16]

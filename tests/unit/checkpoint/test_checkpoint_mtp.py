"""MiMo's dense layers for multi-token prediction against a plain forward written here, and decoding
with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.huggingface.huggingface_weights import Targets
from megatron_async.checkpoint.huggingface.mtp_weights import mtp_layers, mtp_targets
from megatron_async.checkpoint.targets import TensorParallel
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.sampling_params import SamplingParams
from megatron_async.weights.place import read_weights
from tests.support.engines import config_at

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, THETA, EPSILON = 32, 4, 2, 16, 48, 64, 640000, 1e-5
CONFIG = transformers.Qwen2Config(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=FFN,
    num_hidden_layers=2,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    rms_norm_eps=EPSILON,
    rope_parameters={"rope_type": "default", "rope_theta": float(THETA)},
    tie_word_embeddings=False,
    initializer_range=0.2,
)
LAYERS = 2


def mtp_weights(layer: int) -> dict[str, Tensor]:
    """The tensors of one of MiMo's layers under their names in a checkpoint."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_proj.weight": (HIDDEN, 2 * HIDDEN),
        "self_attn.q_proj.weight": (query, HIDDEN),
        "self_attn.k_proj.weight": (key, HIDDEN),
        "self_attn.v_proj.weight": (key, HIDDEN),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.bias": (key,),
        "self_attn.v_proj.bias": (key,),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    for norm in ("token", "hidden", "input", "post_attention", "final"):
        shapes[f"{norm}_layernorm.weight"] = (HIDDEN,)
    return {
        f"model.mtp_layers.{layer}.{name}": 1 + 0.3 * torch.randn(shape)
        if "layernorm" in name
        else 0.2 * torch.randn(shape)
        for name, shape in shapes.items()
    }


def write_mimo(path: Path, seed: int) -> Any:
    """A random MiMo directory; returns transformers' Qwen2 with the weights of its decoder."""
    torch.manual_seed(seed)
    qwen2 = transformers.Qwen2ForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for parameter in qwen2.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    qwen2.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(LAYERS):
        tensors |= mtp_weights(layer)
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    values |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": LAYERS,
        "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(values))
    return qwen2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("mimo")
    return path, write_mimo(path, 0)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [S, heads, head_dim], by complex numbers."""
    half = HEAD_DIM // 2
    frequencies = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)[:, None]
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).float()


def mtp_layer(w: dict[str, Tensor], hidden: Tensor, embedded: Tensor) -> Tensor:
    """One of MiMo's layers over [S, HIDDEN], as its authors' model code has it."""
    normed = (
        norm(hidden, w["hidden_layernorm.weight"]),
        norm(embedded, w["token_layernorm.weight"]),
    )
    x = linear(torch.cat(normed, dim=-1), w["input_proj.weight"])
    y = norm(x, w["input_layernorm.weight"])
    heads = {}
    for name in "qkv":
        projected = linear(y, w[f"self_attn.{name}_proj.weight"], w[f"self_attn.{name}_proj.bias"])
        heads[name] = projected.view(len(x), -1, HEAD_DIM)
    q, k = rotate(heads["q"]), rotate(heads["k"])
    attended = torch.empty_like(q)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, kv_head].T / HEAD_DIM**0.5
        later = torch.ones(len(x), len(x)).triu(1).bool()
        attended[:, head] = (
            scores.masked_fill(later, -torch.inf).softmax(-1) @ heads["v"][:, kv_head]
        )
    x = x + linear(attended.flatten(1), w["self_attn.o_proj.weight"])
    y = norm(x, w["post_attention_layernorm.weight"])
    gated = silu(linear(y, w["mlp.gate_proj.weight"])) * linear(y, w["mlp.up_proj.weight"])
    return norm(x + linear(gated, w["mlp.down_proj.weight"]), w["final_layernorm.weight"])


@torch.no_grad()
def test_logits_of_target_and_drafts_equal_plain_forwards(saved: tuple[Path, Any]) -> None:
    path, theirs = saved
    ours: Any = load_pretrained(path).model
    ids = torch.randint(0, VOCAB, (1, 90))
    logits = ours(ids, torch.arange(90)[None], None, runtime_gather_output=True)
    torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    stored = load_file(path / "model.safetensors")
    hidden, expected = ours.decoder_hidden_states, theirs.model(ids).last_hidden_state[0]
    for layer in range(LAYERS):
        prefix = f"model.mtp_layers.{layer}."
        weights = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        hidden, expected = hidden[:-1], expected[:-1]
        tokens = ids[:, layer + 1 :]
        positions = torch.arange(layer + 1, 90)[None]
        hidden = ours.mtp_hidden_states(layer, hidden, tokens, positions)
        expected = mtp_layer(weights, expected, stored["model.embed_tokens.weight"][tokens[0]])
        drafts = linear(expected, stored["lm_head.weight"])
        torch.testing.assert_close(ours.logits(hidden)[0], drafts, atol=2e-5, rtol=1e-5)
        assert drafts.std() > 0.1


@pytest.mark.parametrize("rank", (0, 1))
def test_each_tensor_parallel_rank_takes_its_rows_of_the_projection(
    saved: tuple[Path, Any], rank: int
) -> None:
    path, _ = saved
    whole = dict(load_pretrained(path).model.named_parameters())
    name = "mtp.layers.1.eh_proj.weight"
    share = torch.empty(HIDDEN // 2, 2 * HIDDEN)
    targets = Targets({**whole, name: share}, TensorParallel(rank, 2))
    mtp_targets(targets, list(mtp_layers(LAYERS))[1])
    stored = load_file(path / "model.safetensors")["model.mtp_layers.1.input_proj.weight"]
    targets["model.mtp_layers.1.input_proj.weight"].copy_from(stored)
    assert torch.equal(share, whole[name].chunk(2)[rank])


def test_new_weights_of_a_directory_come_in_the_same_order(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    write_mimo(tmp_path, 1)
    model: Any = load_pretrained(saved[0]).model
    read_weights(model, tmp_path)()
    for name, parameter in load_pretrained(tmp_path).model.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_missing_layer_is_named(saved: tuple[Path, Any], tmp_path: Path) -> None:
    values = json.loads((saved[0] / "config.json").read_text()) | {"num_nextn_predict_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor model\.mtp_layers\.2\.\S+ and 15 more"):
        load_pretrained(tmp_path)


def test_drafted_equals_undrafted(saved: tuple[Path, Any]) -> None:
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [11]]
    params = [
        SamplingParams(num_tokens_to_generate=24, temperature=t, seed=3, termination_id=-1)
        for t in (0.0, 0.7, 1.0)
    ]
    found = {}
    with DynamicInferenceEngine.from_pretrained(saved[0], config_at(0, device="cpu")) as plain:
        for depth, drafts in ((0, 0), (1, 2), (2, 3)):
            config = config_at(depth, device="cpu", num_speculative_tokens=drafts, max_requests=4)
            with plain.with_config(config) as engine:
                requests = engine.generate(prompts, params)
                assert (engine.counters.tokens_drafted > 0) == (drafts > 0)
            found[depth] = [request.generated_tokens for request in requests]
    assert found[0] == found[1] == found[2]

"""The model side: the context path equals plain causal attention for every architecture flag."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat
from megatron_async.errors import ConfigError
from megatron_async.models.adapt import adapt_model
from megatron_async.models.batch import Batch
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.gpt import GPTModel
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers.activation import gelu, gelu_tanh, silu
from megatron_async.models.layers.norm import LayerNorm, RMSNorm
from megatron_async.models.layers.rope import RotaryTable, apply_rope

from megatron.core.transformer.identity_op import IdentityOp  # isort: skip

CPU = torch.device("cpu")
BASE = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=101,
    max_sequence_length=128,
)
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
GPT2: dict[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "position_embedding": "learned_absolute",
    "num_kv_heads": 4,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3_scaled_tied": {"rope_scaling": SCALING, "tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 32, "norm_epsilon": 1e-6},
    "attention_bias_only": {"qkv_bias": True, "attention_output_bias": True},
    "mlp_bias_only": {"mlp_bias": True},
    "layernorm_gelu_mha": {"normalization": "LayerNorm", "activation": "gelu", "num_kv_heads": 4},
    "one_kv_head": {"num_kv_heads": 1, "head_dim": 24},
    "gpt2": GPT2,
    "mtp": {"mtp_num_layers": 2},
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> GPTModel:
    config = dataclasses.replace(BASE, **VARIANTS[name], **changes)
    torch.manual_seed(1)
    model = build_model(config, device=CPU, dtype=dtype)
    model.eval()
    with torch.no_grad():  # norms and biases must matter
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    return model


class ListContext(Batch):
    """Keeps keys and values of each sequence in growing tensors; only the last tokens get logits.

    ``chunks`` maps a sequence's name to the number of its tokens in this forward.
    """

    materialize_only_last_token_logits = True

    def __init__(self) -> None:
        self.cache: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self.layers_seen: set[int] = set()

    def begin(self, chunks: dict[str, int], position_ids: Tensor) -> None:
        self.chunks, self.position_ids = chunks, position_ids

    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def last_token_logits(self, hidden_states: Tensor) -> Tensor:
        assert hidden_states.shape[0] == 1
        ends = torch.tensor(list(self.chunks.values())).cumsum(0) - 1
        return hidden_states[0, ends]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self.layers_seen.add(layer)
        outputs, start = [], 0
        for name, count in self.chunks.items():
            rows = slice(start, start + count)
            old_k, old_v = self.cache.get((layer, name), (k[:0], v[:0]))
            all_k, all_v = torch.cat((old_k, k[rows])), torch.cat((old_v, v[rows]))
            self.cache[layer, name] = (all_k, all_v)
            outputs.append(attend_by_definition(q[rows], all_k, all_v, scale, window))
            start += count
        return torch.cat(outputs)


def attend_by_definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    first = k.shape[0] - q.shape[0]
    own, keys = first + torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
    hidden = (keys > own) | (keys <= own - (window or len(keys)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def causal_logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """[T] -> [T, vocab], one sequence, no context."""
    with torch.no_grad():
        logits: Tensor = model(tokens[None], torch.arange(len(tokens))[None], None)
    return logits[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_chunked_mixed_batches_equal_one_causal_forward(name: str) -> None:
    model = make(name)
    sequences = {key: torch.randint(0, 101, (n,)) for key, n in (("a", 23), ("b", 11), ("c", 7))}
    wrapper, context = GPTNetwork(model), ListContext()
    steps: list[dict[str, int]] = [
        {"a": 5},
        {"b": 1, "a": 9},
        {"a": 1, "c": 4, "b": 6},
        {"c": 3, "a": 8, "b": 4},
    ]
    done = dict.fromkeys(sequences, 0)
    for chunks in steps:
        ids, positions = [], []
        for key, count in chunks.items():
            ids.append(sequences[key][done[key] : done[key] + count])
            positions.append(torch.arange(done[key], done[key] + count))
            done[key] += count
        context.begin(chunks, torch.cat(positions))
        logits = wrapper.forward(torch.cat(ids), context.position_ids, context)
        assert logits.shape == (len(chunks), 101)
        for row, key in enumerate(chunks):
            expected = causal_logits(model, sequences[key][: done[key]])[-1]
            torch.testing.assert_close(logits[row], expected, atol=2e-5, rtol=1e-5)
    assert done == {key: len(value) for key, value in sequences.items()}
    assert context.layers_seen == {0, 1}


def reference_logits(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The architecture written out with plain tensor algebra, fp64, one sequence."""
    w = {key: value.double() for key, value in weights.items() if isinstance(value, Tensor)}
    heads, kv, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim

    def norm(x: Tensor, key: str) -> Tensor:
        if config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x * w[key + ".weight"] + w.get(key + ".bias", torch.zeros(()))

    def linear(x: Tensor, key: str) -> Tensor:
        return x @ w[key + ".weight"].T + w.get(key + ".bias", torch.zeros(()))

    def rope(x: Tensor) -> Tensor:
        if config.position_embedding != "rope":
            return x
        out = x.clone()
        for i in range(dim // 2):
            rate = config.rope_theta ** (-2 * i / dim)
            if config.rope_scaling is not None:
                s = config.rope_scaling
                turns = s.original_max_position_embeddings * rate / (2 * math.pi)
                share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                share = min(max(share, 0.0), 1.0)
                rate = share * rate + (1 - share) * rate / s.factor
            angle = (torch.arange(len(x)).double() * rate)[:, None]
            a, b = x[..., i], x[..., i + dim // 2]
            out[..., i] = a * angle.cos() - b * angle.sin()
            out[..., i + dim // 2] = b * angle.cos() + a * angle.sin()
        return out

    x = w["embedding.word_embeddings.weight"][tokens]
    if config.position_embedding == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(config.num_layers):
        p = f"decoder.layers.{layer}."
        qkv = linear(norm(x, p + "input_layernorm"), p + "self_attention.linear_qkv")
        qkv = qkv.view(len(x), kv, -1, dim)
        q, k, v = qkv[:, :, :-2].reshape(len(x), heads, dim), qkv[:, :, -2], qkv[:, :, -1]
        if config.qk_norm:
            q = norm(q, p + "self_attention.q_layernorm")
            k = norm(k, p + "self_attention.k_layernorm")
        attended = attend_by_definition(rope(q), rope(k), v, dim**-0.5)
        x = x + linear(attended.flatten(1), p + "self_attention.linear_proj")
        h = linear(norm(x, p + "pre_mlp_layernorm"), p + "mlp.linear_fc1")
        if config.activation == "swiglu":
            gate, up = h.chunk(2, -1)
            h = gate * torch.sigmoid(gate) * up
        else:
            h = F.gelu(h, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        x = x + linear(h, p + "mlp.linear_fc2")
    x = norm(x, "decoder.final_layernorm")
    tied = config.tie_word_embeddings
    return x @ w["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T


@pytest.mark.parametrize("name", VARIANTS)
def test_causal_forward_equals_plain_algebra(name: str) -> None:
    model = make(name)
    config = dataclasses.replace(BASE, **VARIANTS[name])
    tokens = torch.randint(0, 101, (40,))
    expected = reference_logits(config, model.state_dict(), tokens).float()
    assert expected.std() > 0.1
    torch.testing.assert_close(causal_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "attention_bias_only", "mlp_bias_only"])
def test_only_the_biases_asked_for_exist(name: str) -> None:
    config = dataclasses.replace(BASE, **VARIANTS[name])
    keys = [k for k in make(name).state_dict() if k.startswith("decoder.layers.0.")]
    found = {k.split(".")[-2] for k in keys if k.endswith("bias") and "linear" in k}
    wanted = {"linear_qkv"} if config.qkv_bias else set()
    wanted |= {"linear_proj"} if config.attention_output_bias else set()
    wanted |= {"linear_fc1", "linear_fc2"} if config.mlp_bias else set()
    assert found == wanted


def test_wrapper_describes_the_cache_with_mtp_layers() -> None:
    wrapper = GPTNetwork(make("mtp", torch.bfloat16))
    assert wrapper.kv_cache_spec == KVCacheSpec(
        num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, num_mtp_layers=2
    )
    assert wrapper.kv_cache_spec.decoder.num_layers == 2
    assert (wrapper.vocab_size, wrapper.max_sequence_length) == (101, 128)


def test_the_cache_is_described_by_the_layers_that_attend() -> None:
    model = make("mtp")
    model.decoder.layers[0].self_attention = IdentityOp()
    spec = GPTNetwork(model).kv_cache_spec
    assert spec == KVCacheSpec(
        num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, num_mtp_layers=2
    )


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (
            1,
            {"head_dim": 32},
            "layer 1 has 2 KV heads of 16 elements, layer 2 has 2 ",
        ),
        (1, {"num_kv_heads": 1}, "layer 2 has 1 KV heads of 16 elements"),
        (2, {"head_dim": 32}, "MTP layer 1 has 2 KV heads of 32 elements"),
    ],
)
def test_attention_layers_that_differ_in_what_they_cache_are_named(
    layer: int, changes: dict[str, Any], message: str
) -> None:
    model, other = make("mtp"), make("mtp", **changes)

    def of(one: GPTModel) -> Any:
        return [*one.decoder.layers, *(mtp.transformer_layer for mtp in one.mtp.layers)][layer]

    of(model).self_attention = of(other).self_attention
    with pytest.raises(ConfigError, match=message):
        GPTNetwork(model)


def test_a_model_without_attention_is_refused() -> None:
    model = make("llama")
    for layer in model.decoder.layers:
        layer.self_attention = IdentityOp()
    with pytest.raises(ConfigError, match="no attention layer"):
        GPTNetwork(model)


def test_everything_is_bfloat16_but_the_rotary_table() -> None:
    model = make("qwen3", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary is not None and model.rotary.cos_sin.dtype == torch.float32
    assert not any("rotary" in key for key in model.state_dict())


def test_mtp_through_the_context_equals_the_training_pass() -> None:
    model = make("mtp")
    tokens = torch.randint(0, 101, (20,))
    positions = torch.arange(20)
    captured: list[Tensor] = []
    model.mtp.register_forward_hook(lambda _m, _i, output: captured.append(output))
    with torch.no_grad():
        model(tokens[None], positions[None], None, labels=tokens[None])
    _, *expected = captured[0].chunk(3)

    wrapper, context = GPTNetwork(model), ListContext()
    for rows in (slice(0, 12), slice(12, 18)):
        context.begin({"a": rows.stop - rows.start}, positions[rows])
        wrapper.forward(tokens[rows], positions[rows], context)
        # An engine over the same weights may run in another thread.
        other = ListContext()
        other.begin({"a": 3}, positions[:3])
        GPTNetwork(model).forward(tokens[:3], positions[:3], other)
        hidden = wrapper.hidden_states[:, None]
        for depth in range(2):
            ahead = slice(rows.start + depth + 1, rows.stop + depth + 1)
            with torch.inference_mode():
                hidden = model.mtp_hidden_states(
                    depth, hidden, tokens[ahead][None], positions[ahead][None], context
                )
            torch.testing.assert_close(hidden, expected[depth][rows], atol=2e-5, rtol=1e-5)
    assert context.layers_seen == {0, 1, 2, 3}


@pytest.mark.parametrize("tied", [False, True])
def test_training_lowers_main_and_mtp_loss(tied: bool) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(BASE, mtp_num_layers=2, tie_word_embeddings=tied)
    model = build_model(config, device=CPU, dtype=torch.float32).train()
    model.config.mtp_loss_scaling_factor = 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 101, (4, 33))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(32).expand(4, -1)
    mask = torch.ones(labels.shape)

    def losses() -> list[float]:
        captured: list[Tensor] = []
        with torch.no_grad():
            hook = model.mtp.register_forward_hook(lambda _m, _i, out: captured.append(out))
            main = model(inputs, positions, None, labels=labels, loss_mask=mask).mean().item()
            hook.remove()
            values = [main]
            for depth, hidden in enumerate(captured[0].chunk(3)[1:], start=1):
                logits = model.logits(hidden)[:, :-depth].flatten(0, 1)
                values.append(F.cross_entropy(logits, labels[:, depth:].flatten()).item())
        return values

    before = losses()
    for _ in range(12):
        optimizer.zero_grad()
        model(inputs, positions, None, labels=labels, loss_mask=mask).mean().backward()
        optimizer.step()
    after = losses()
    for old, new in zip(before, after, strict=True):
        assert new < old - 0.3, (before, after)


def stock_model(**changes: Any) -> Any:
    compat.ensure_parallel_state()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel as Stock
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_changes = {
        key: changes.pop(key)
        for key in ("position_embedding_type", "rotary_percent", "rope_scaling")
        if key in changes
    }
    options: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "init_method_std": 0.1,
    }
    options.update(changes)
    torch.manual_seed(3)
    return Stock(
        config=TransformerConfig(**options),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=101,
        max_sequence_length=128,
        **({"position_embedding_type": "rope", "rotary_base": 5000} | model_changes),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_percent": 0.5},
        {"rope_scaling": True},
        {"position_embedding_type": "learned_absolute"},
        {"position_embedding_type": "none", "add_bias_linear": False},
        {"window_size": (4, 0)},
        {"window_size": (6, 0), "window_attn_skip_freq": 2},
        {"no_rope_freq": 2},
    ],
)
def test_adapted_stock_model_keeps_its_logits(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stock rotary embedding moves its frequencies to the "current device".
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    model = stock_model(**changes).eval()
    from megatron.core import tensor_parallel

    class NoTracker:
        def fork(self) -> Any:
            return contextlib.nullcontext()

    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", NoTracker)
    if "window_size" in changes:
        from megatron.core.fusions import fused_softmax

        # The stock function makes its mask on a GPU.
        def window_mask(rows: int, columns: int, window: tuple[int, int]) -> torch.Tensor:
            seen = torch.ones(rows, columns, dtype=torch.bool)
            seen = seen.triu(columns - rows - window[0]).tril(columns - rows + window[1])
            return ~seen

        monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", window_mask)
    tokens, positions = torch.randint(0, 101, (1, 30)), torch.arange(30)
    mask = torch.ones(30, 30, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        expected = model(tokens, positions[None], mask)[0]
    adapted = adapt_model(model)
    assert adapted is model and adapted.model_config is None
    torch.testing.assert_close(causal_logits(adapted, tokens[0]), expected, atol=2e-5, rtol=1e-5)
    wrapper, context = GPTNetwork(adapted), ListContext()
    for rows in (slice(0, 13), slice(13, 30)):
        context.begin({"a": rows.stop - rows.start}, positions[rows])
        logits = wrapper.forward(tokens[0, rows], positions[rows], context)
        torch.testing.assert_close(logits[0], expected[rows.stop - 1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_size": (4, 4)}, "window_size"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
    ],
)
def test_unsupported_stock_model_is_refused_unchanged(changes: dict[str, Any], named: str) -> None:
    model = stock_model(**changes)
    before = type(model), type(model.decoder.layers[0].self_attention)
    with pytest.raises(ConfigError, match=named):
        adapt_model(model)
    assert before == (type(model), type(model.decoder.layers[0].self_attention))


def test_something_else_than_a_gpt_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        adapt_model(torch.nn.Linear(2, 2))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 104, 4096])
def test_rows_of_pointwise_parts_do_not_depend_on_their_number(
    width: int, dtype: torch.dtype, threads: int
) -> None:
    x = (2 * torch.randn(264, width)).to(dtype)
    config = type("Config", (), {"params_dtype": dtype, "sequence_parallel": False})
    table = RotaryTable(torch.linspace(1.0, 0.01, width // 2), 264)

    def rotate(rows: Tensor, first: int) -> Tensor:
        cos, sin = table.lookup(torch.arange(first, first + len(rows)))
        return apply_rope(rows[:, None], cos, sin)[:, 0]

    parts = {
        "silu": lambda rows, _: silu(rows),
        "gelu": lambda rows, _: gelu(rows),
        "gelu_tanh": lambda rows, _: gelu_tanh(rows),
        "rms_norm": lambda rows, _: RMSNorm(config, width)(rows),
        "layer_norm": lambda rows, _: LayerNorm(config, width)(rows),
        "rope": rotate,
    }
    with torch.no_grad():
        for name, part in parts.items():
            whole = part(x, 0)
            for first, count in ((0, 8), (3, 8), (7, 24), (16, 56), (1, 136), (64, 200)):
                few = part(x[first : first + count].clone(), first)
                assert torch.equal(few, whole[first : first + count]), (name, first, count)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_row_are_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype, threads: int
) -> None:
    wrapper = GPTNetwork(make(name, dtype))
    tokens = torch.randint(0, 101, (72,))

    def run(count: int) -> Tensor:
        context = ListContext()
        context.begin({str(i): 1 for i in range(count)}, torch.zeros(count, dtype=torch.long))
        return wrapper.forward(tokens[:count], context.position_ids, context)

    whole = run(72)
    for count in (8, 16, 24, 40, 64):
        assert torch.equal(run(count), whole[:count]), count

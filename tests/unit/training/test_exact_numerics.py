"""A trainer's forward has the log-probabilities of rollouts, bit for bit, whatever happened to them
in the engine: drafts, prefix hits, evictions, chunks, new weights in between."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_async import megatron_compat as compat
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.kernels.attention import paged_decode
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.request.request import Rollout
from megatron_async.request.rollouts import RolloutBatch, batch_of
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.sampling_params import SamplingParams
from megatron_async.training import ExactNumerics, exact_numerics, forced_routing
from megatron_async.training.routing import expert_layers, noted_experts
from tests.support.engines import config_at
from tests.support.stock_model import stock_model
from tests.unit.models import test_moe

from megatron.core.fusions import fused_softmax  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.tensor_parallel import random  # isort: skip
from megatron.core.transformer import dot_product_attention  # isort: skip

DENSE = ModelConfig(
    num_layers=2, hidden_size=48, num_attention_heads=6, num_kv_heads=2, head_dim=16,
    ffn_hidden_size=80, vocab_size=97, max_sequence_length=150, qk_norm=True, qkv_bias=True,
)  # fmt: skip
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
CONFIGS = {
    "dense": DENSE,
    "gpt2": dataclasses.replace(
        DENSE, qk_norm=False, normalization="LayerNorm", activation="gelu_tanh", mlp_bias=True,
        position_embedding="learned_absolute", attention_output_bias=True, tie_word_embeddings=True,
    ),
    "experts": dataclasses.replace(
        DENSE, **EXPERTS, moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True
    ),
    "sinks": dataclasses.replace(
        DENSE, qk_norm=False, **EXPERTS, attention_sinks=True, sliding_window=9,
        sliding_layers=(0,), activation="clamped_swiglu", activation_limit=1.5,
        moe_router_bias=True,
    ),
    "latents": dataclasses.replace(
        DENSE, qk_norm=False, qkv_bias=False, num_kv_heads=6,
        latent_attention=LatentAttention(
            kv_lora_rank=16, q_lora_rank=20, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
    ),
    "hybrid": dataclasses.replace(
        DENSE, num_layers=6, qk_norm=False, qkv_bias=False, hybrid_override_pattern="ME-*M-",
        mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, activation="squared_relu",
        num_moe_experts=4, moe_ffn_hidden_size=32,
    ),
}  # fmt: skip
STOCK = ("stock", "stock experts")
START = [(5 * i) % 90 for i in range(21)]
PROMPTS = [START, [*START, 40, 41], [50, 51, 52, 53] * 3, [*START[:12], 60], [7] * 33, [3, 4]]
PROMPTS += [[*prompt, 8] for prompt in PROMPTS]
LENGTH = 24


def model_of(name: str, dtype: torch.dtype, seed: int = 3, device: str = "cpu") -> Any:
    """A random model that says something."""
    if name == "stock":
        return stock_model(hidden_dropout=0.0, attention_dropout=0.0).to(device, dtype)
    if name == "stock experts":
        compat.ensure_parallel_state()
        return test_moe.stock_model(test_moe.CONFIG).to(device, dtype)
    model = build_random_model(CONFIGS[name], device=torch.device("cpu"), dtype=dtype, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.to(device)


@pytest.fixture
def megatron_trains_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention and its recomputation read the random state of a GPU."""
    names = ("_get_cuda_rng_state", "_set_cuda_rng_state", "get_cuda_rng_tracker")
    states = mock.MagicMock()
    for module in (random, dot_product_attention.tensor_parallel):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, states)

    def mask(size: int) -> Tensor:
        return torch.ones(size, size).triu(diagonal=1).bool()

    monkeypatch.setattr(fused_softmax, "get_default_causal_mask", mask)


def trained(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.train()


def rollouts_of(
    served: Any, depth: int, *, update: Callable[[int], dict[str, Tensor]] | None = None,
    sampled: dict[str, Any] | None = None, **values: Any,
) -> list[Rollout]:  # fmt: skip
    """Rollouts of all prompts in a cache that is too small for them, with evictions and prefixes
    that were known; ``update`` gives new weights after some steps, by how many there were."""
    config = config_at(
        depth, batch_invariant=True, block_size_tokens=4, block_count=36, prefill_chunk_tokens=16,
        max_requests=5, max_sequence_length=64, audit_graphs=True, **values,
    )  # fmt: skip
    params = [
        SamplingParams(
            **(sampled or {"temperature": 1.0}), seed=number, num_tokens_to_generate=LENGTH,
            termination_id=-1, return_log_probs=True, skip_prompt_log_probs=True,
        )
        for number in range(len(PROMPTS))
    ]  # fmt: skip
    network = GPTNetwork(served, batch_invariant=True)
    with DynamicInferenceEngine(ServedModel(network=network), config) as engine:
        pairs = zip(PROMPTS, params, strict=True)
        futures = [engine.add_request(n, *pair) for n, pair in enumerate(pairs)]
        steps, updates = 0, 0
        while engine.has_unfinished_requests():
            engine.step_modern()
            steps += 1
            if update is not None and steps % 12 == 0 and updates < 3:
                updates += 1
                engine.update_weights(update(updates))
        requests = [future.result() for future in futures]
        assert engine.counters.evictions and any(request.num_cached_tokens for request in requests)
        return [request.rollout() for request in requests]


def log_probs_of(exact: ExactNumerics, model: Any, tokens: Tensor, **options: Any) -> Tensor:
    """``[B, S]``, each at its token's place."""
    tokens = tokens.to(next(model.parameters()).device)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits = model(tokens, positions, None)
    found = exact.log_probs(logits[:, :-1], tokens[:, 1:], **options)
    return torch.nn.functional.pad(found, (1, 0)).cpu()


def different(found: Tensor, batch: RolloutBatch, version: int = 0) -> int:
    mask = batch.weight_versions == version
    assert mask.any()
    return int((found.detach() != batch.log_probs)[mask].sum())


@pytest.mark.sweep(of=16)
@pytest.mark.parametrize("drafts", (0, 2))
@pytest.mark.parametrize("depth", (0, 1, 2, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", (*CONFIGS, *STOCK))
def test_log_probs_are_those_of_rollouts(
    name: str, dtype: torch.dtype, depth: int, drafts: int, megatron_trains_on_a_cpu: None
) -> None:
    model = trained(model_of(name, dtype))
    served = model_of(name, dtype)
    served = adapt_model(served) if name in STOCK else served
    rollouts = rollouts_of(served, depth, num_speculative_tokens=drafts, speculative_method="ngram")
    batch = batch_of(rollouts)
    with exact_numerics(model) as exact:
        found = log_probs_of(exact, model, batch.tokens)
        assert different(found, batch) == 0
        found.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "expert_bias" not in n)


def test_layers_that_draft_may_have_experts_of_their_own() -> None:
    """The engine's forward of whole sequences leaves them out, and the trainer's runs them."""
    config = dataclasses.replace(CONFIGS["experts"], mtp_num_layers=1)
    model, served = (
        build_random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=3)
        for _ in range(2)
    )
    batch = batch_of(rollouts_of(served, 1, num_speculative_tokens=1, speculative_method="mtp"))
    with exact_numerics(trained(model)) as exact:
        found = log_probs_of(exact, model, batch.tokens)
        assert different(found, batch) == 0
        labels = batch.tokens.roll(-1, 1)
        positions = torch.arange(labels.shape[1]).expand_as(labels)
        losses = model(batch.tokens, positions, None, labels=labels)
        mask = batch.loss_mask[:, 1:]
        assert torch.equal(-losses[:, :-1].detach()[mask], batch.log_probs[:, 1:][mask])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("depth", (0, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", (*CONFIGS, *STOCK))
def test_log_probs_on_a_gpu_are_those_of_rollouts(
    name: str, dtype: torch.dtype, depth: int
) -> None:
    """In captured graphs, with drafts, evictions and chunks."""
    random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)  # as trainers do
    model, served = (model_of(name, dtype, device="cuda") for _ in range(2))
    served = adapt_model(served) if name in STOCK else served
    rollouts = rollouts_of(
        served, depth, device="cuda", num_speculative_tokens=2, speculative_method="ngram"
    )
    batch = batch_of(rollouts)
    with exact_numerics(trained(model)) as exact:
        found = log_probs_of(exact, model, batch.tokens)
        wrong = (found.detach() != batch.log_probs) & (batch.weight_versions == 0)
        by = (found.detach() - batch.log_probs)[wrong]
        assert not wrong.any(), f"at {wrong.nonzero().tolist()} by {by.tolist()}"
        found.sum().backward()


def check_each_weights_tokens(name: str, dtype: torch.dtype, depth: int, **values: Any) -> None:
    """New weights come while requests run, and what these have is computed again."""
    device = values.get("device", "cpu")
    models = [model_of(name, dtype, seed, device) for seed in range(4)]
    served = model_of(name, dtype, 0, device)
    rollouts = rollouts_of(
        served, depth, update=lambda number: models[number].state_dict(), **values
    )
    batch = batch_of(rollouts)
    assert sum(len(rollout.weight_spans) > 1 for rollout in rollouts) > 2
    for version, model in enumerate(models):
        with exact_numerics(trained(model)) as exact:
            found = log_probs_of(exact, model, batch.tokens)
            assert different(found, batch, version) == 0
            # Of an optimizer that writes to its parameters.
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)
            assert different(log_probs_of(exact, model, batch.tokens), batch, version)


@pytest.mark.parametrize("name", ("dense", "experts"))
def test_each_weights_tokens_are_exact_beside_those_weights(name: str) -> None:
    check_each_weights_tokens(name, torch.bfloat16, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("depth", (1, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("dense", "experts", "hybrid"))
def test_each_weights_tokens_are_exact_on_a_gpu(name: str, dtype: torch.dtype, depth: int) -> None:
    """In captured graphs, with drafts, evictions and chunks."""
    drafts = {"num_speculative_tokens": 2, "speculative_method": "ngram"}
    check_each_weights_tokens(name, dtype, depth, device="cuda", **drafts)


@pytest.fixture(scope="module")
def rolled_out() -> RolloutBatch:
    return batch_of(rollouts_of(model_of("experts", torch.bfloat16), 1))


@pytest.fixture(scope="module")
def rolled_out_in_float32() -> RolloutBatch:
    return batch_of(rollouts_of(model_of("experts", torch.float32), 1))


@pytest.mark.parametrize(
    "options", ({"temperature": 0.7}, {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
                {"temperature": 0.0}),
)  # fmt: skip
def test_processed_log_probs_are_those_of_rollouts(options: dict[str, Any]) -> None:
    model = trained(model_of("dense", torch.bfloat16))
    sampled = {**options, "log_probs_mode": "processed"}
    rollouts = rollouts_of(model_of("dense", torch.bfloat16), 1, sampled=sampled)
    batch = batch_of(rollouts)
    with exact_numerics(model) as exact:
        assert different(log_probs_of(exact, model, batch.tokens, **options), batch) == 0
        assert different(log_probs_of(exact, model, batch.tokens, temperature=0.9), batch)


def packed(batch: RolloutBatch) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a forward over all sequences in one row, and the places of their tokens."""
    lengths = batch.attention_mask.sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    said = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    tokens = batch.tokens[batch.attention_mask][None]
    arguments = {"input_ids": tokens, "position_ids": positions[None], "attention_mask": None}
    return {**arguments, "packed_seq_params": said}, batch.attention_mask


@pytest.mark.parametrize("way", ("padded", "some rows", "longer rows", "packed", "few tokens"))
def test_any_batch_has_the_same_values(way: str, rolled_out: RolloutBatch) -> None:
    model, batch = trained(model_of("experts", torch.bfloat16)), rolled_out
    with exact_numerics(model, max_tokens=50 if way == "few tokens" else 10**6) as exact:
        if way == "packed":
            arguments, mask = packed(batch)
            labels = arguments["input_ids"].roll(-1, dims=1)
            found = torch.zeros_like(batch.log_probs)
            found[mask] = -model(**arguments, labels=labels)[0].roll(1)
        elif way == "some rows":
            batch = RolloutBatch(*(each[3:6, :41] for each in batch))
            found = log_probs_of(exact, model, batch.tokens)
        elif way == "longer rows":
            batch = RolloutBatch(*(torch.nn.functional.pad(x, (0, 30)) for x in batch[:4]),
                                 torch.nn.functional.pad(batch[4], (0, 30), value=-1))  # fmt: skip
            found = log_probs_of(exact, model, batch.tokens)
        else:
            found = log_probs_of(exact, model, batch.tokens)
        assert different(found, batch) == 0
        found.sum().backward()


def test_gradients_go_through_the_engines_experts(
    rolled_out: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than the model's own router chooses, as at near-ties; it chooses again without it."""
    model, tokens = trained(model_of("experts", torch.bfloat16)), rolled_out.tokens
    arguments = tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None
    layers, chosen = expert_layers(model), []

    def ids() -> list[Tensor]:
        with noted_experts(layers) as found:
            model(*arguments)
        return [each.view(-1, len(tokens), 2).transpose(0, 1) for each in found]

    own = ids()
    with exact_numerics(model, max_tokens=64) as exact:
        logits = exact._whole.logits

        def with_others(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
            values, experts = logits(*arguments)
            chosen.append((values, [(each + 1) % EXPERTS["num_moe_experts"] for each in experts]))
            return chosen[-1]

        monkeypatch.setattr(exact._whole, "logits", with_others)
        forced = ids()
        with torch.no_grad():
            unforced = ids()
        with pytest.raises(IndexError):
            model(tokens + 200, *arguments[1:])
    assert all(map(torch.equal, ids(), own)) and not all(map(torch.equal, forced, own))
    assert all(map(torch.equal, unforced, own))
    for found, theirs in zip(forced, chosen[0][1], strict=True):
        assert torch.equal(found.flatten(0, 1), theirs)


def test_megatrons_experts_have_gradients_in_each_mode(megatron_trains_on_a_cpu: None) -> None:
    """In evaluation, in which an engine leaves its model, stacked weights were computed with, and
    the parameters, which are views of them, had no gradients."""
    model, ids, found = model_of("stock experts", torch.float32), torch.arange(12)[None], []
    adapt_model(trained(model))
    with exact_numerics(model):
        for is_training in (True, False):
            model.train(is_training).zero_grad()
            model(ids, ids, None, labels=ids.roll(-1, dims=1)).mean().backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
    assert any(".experts." in name for name in found[0])
    for name, gradient in found[0].items():
        close = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=close, msg=name)


def test_losses_and_gradients_are_the_models(rolled_out: RolloutBatch) -> None:
    """Within rounding: values that differ by as much go through the model's own activations."""
    model, tokens = trained(model_of("experts", torch.float32)), rolled_out.tokens
    arguments = tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None
    labels = tokens.roll(-1, dims=1)
    found = []
    for is_exact in (False, True):
        model.zero_grad(set_to_none=True)
        with exact_numerics(model) as exact:
            if not is_exact:
                exact.close()
            loss = model(*arguments, labels=labels)
            loss.mean().backward()
        found.append((loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (exact_loss, exact_gradients) = found
    assert not torch.equal(loss, exact_loss) and torch.allclose(loss, exact_loss, atol=1e-4)
    assert gradients.keys() == exact_gradients.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        most = float(gradient.abs().max())
        assert torch.allclose(gradient, exact_gradients[name], atol=1e-4 * most), name


@pytest.mark.parametrize("name", ("dense", "stock"))
def test_recomputed_activations_have_the_same_values_and_gradients(
    name: str, rolled_out: RolloutBatch, megatron_trains_on_a_cpu: None
) -> None:
    tokens, found = rolled_out.tokens[:4, :40].clamp(max=95), []
    arguments = tokens, torch.arange(40).expand_as(tokens), None
    for granularity in (None, "full"):
        model = trained(model_of(name, torch.float32))
        model.config.recompute_granularity = granularity
        model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
        with exact_numerics(model) as exact:
            logits = model(*arguments)
            exact.log_probs(logits[:, :-1], tokens[:, 1:]).mean().backward()
        found.append((logits, [p.grad for p in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    for own, recomputed in zip(*(gradients for _, gradients in found), strict=True):
        assert torch.allclose(own, recomputed, atol=1e-5 * float(own.abs().max()))


# --- faults that must show ---------------------------------------------------------------------


def _whole_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheAttention, "_each_token_is_a_row", lambda self, query, limits: False)


def _another_width(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paged_decode, "LENGTH_MULTIPLE", 1)


def _ordinary_softmax(patch: pytest.MonkeyPatch) -> None:
    def log_probs(self: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    patch.setattr(ExactNumerics, "log_probs", log_probs)


def _ordinary_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactNumerics, "_compute", lambda *_: None)


def _ordinary_activation(patch: pytest.MonkeyPatch) -> None:
    from megatron_async.kernels.moe import reference

    def activate(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.silu(x.bfloat16()).float()

    patch.setattr(reference, "_function", activate)


@pytest.mark.parametrize(
    "fault",
    (_whole_chunks, _another_width, _ordinary_softmax, _ordinary_forward, _ordinary_activation),
)
def test_one_operation_that_is_not_the_engines_shows(
    fault: Callable[[pytest.MonkeyPatch], None],
    rolled_out_in_float32: RolloutBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32: some CPUs round the same bfloat16 from either order of a sum."""
    model = trained(model_of("experts", torch.float32))
    batch = rolled_out_in_float32
    fault(monkeypatch)
    with exact_numerics(model) as exact:
        assert different(log_probs_of(exact, model, batch.tokens), batch)


# --- what is refused ---------------------------------------------------------------------------


def test_what_has_no_exact_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden_dropout=0\.1 must be 0"):
        exact_numerics(stock_model())
    model = model_of("dense", torch.float32)
    with exact_numerics(model), pytest.raises(ConfigError, match="pad behind the last token"):
        model(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0, 0, 1, 2]]), None)
    model.post_process = False
    with pytest.raises(ConfigError, match="one of several pipeline stages"):
        exact_numerics(model)
    model.config.expert_model_parallel_size = 2
    with pytest.raises(ConfigError, match="train without expert_model_parallel_size"):
        exact_numerics(model)


@pytest.mark.parametrize("name", ("moe_expert_capacity_factor", "moe_input_jitter_eps"))
def test_experts_that_train_with_other_tokens_are_refused(name: str) -> None:
    model = model_of("stock experts", torch.float32)
    setattr(model.config, name, 0.5)
    with pytest.raises(ConfigError, match=f"{name}=0.5 trains experts with other tokens"):
        exact_numerics(model)


@pytest.mark.parametrize("model", [None, "tiny", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="is no model that an engine serves: give one"):
        exact_numerics(model)


@pytest.mark.parametrize(
    "wrong", ({"max_tokens": 0}, {"max_tokens": "x"}, {"recurrent_state_dtype": "float15"})
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be"):
        exact_numerics(model_of("dense", torch.float32), **wrong)


def test_learned_positions_of_packed_sequences_are_the_engines() -> None:
    """Its values would be of other embeddings than its gradients."""
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    model, ids = model_of("gpt2", torch.float32), torch.arange(8)[None]
    with exact_numerics(model):
        counted = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
        model(ids, counted, None, packed_seq_params=packed)
        with pytest.raises(ConfigError, match="must count from 0 in each of them"):
            model(ids, ids, None, packed_seq_params=packed)


def test_a_model_has_exact_numerics_once() -> None:
    model = model_of("dense", torch.float32)
    with exact_numerics(model), pytest.raises(ConfigError, match="already; close them first"):
        exact_numerics(model)
    exact_numerics(model).close()


@pytest.mark.parametrize("dtype", (torch.bool, torch.int64, torch.float32))
def test_masks_of_tokens_are_taken_where_padding_is_behind_them(dtype: torch.dtype) -> None:
    """Without position ids nothing else would say that padding is in front; the model reads no
    mask."""
    model, ids = model_of("dense", torch.float32), torch.arange(12).view(3, 4)
    behind = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    with exact_numerics(model):
        expected = model(ids, None, None)
        assert torch.equal(model(ids, None, behind), expected)
        for row in ([0, 0, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]):
            wrong = behind.clone()
            wrong[2] = torch.tensor(row, dtype=dtype)
            with pytest.raises(ConfigError, match="tokens behind padding"):
                model(ids, None, wrong)
        causal = torch.ones(4, 4, dtype=dtype).triu(1)  # of another shape, as megatron's
        assert torch.equal(model(ids, None, causal), expected)


def test_forwards_that_would_not_be_exact_are_refused() -> None:
    model, tokens = model_of("dense", torch.float32), torch.arange(6)[None]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32))
    with exact_numerics(model):
        for wrong, said in (
            ((tokens[0], None, None), "at least one row and one token"),
            ((tokens[:0], None, None), "at least one row and one token"),
            ((tokens, torch.arange(3)[None], None), "position_ids do not count"),
        ):
            with pytest.raises(ConfigError, match=said):
                model(*wrong)
        with pytest.raises(ConfigError, match="sequences of 4 tokens, and input_ids has 6"):
            model(tokens, None, None, packed_seq_params=packed)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
            model(tokens, None, None)
        model(tokens, None, None)
        layer = model.decoder.layers[0].mlp
        layer.linear_fc1 = torch.nn.Sequential(layer.linear_fc1)
        with pytest.raises(ConfigError, match=r"modules, .* of the model have changed"):
            model(tokens, None, None)


@pytest.mark.parametrize("name", ("dense", "experts"))
def test_threads_have_values_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's forward runs between the two hooks of this one's, and in the middle of each
    forward of the engine."""
    model, tokens = model_of(name, torch.float32), torch.arange(12).view(2, 1, 6)
    found: list[Tensor] = []

    @torch.no_grad()
    def forward(ids: Tensor) -> None:
        found.append(model(ids, None, None))

    def in_another_thread(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=forward, args=(tokens[1],))
            other.start()
            other.join()

    with exact_numerics(model) as exact:
        forward(tokens[1])
        forward(tokens[0])
        model.decoder.register_forward_hook(in_another_thread)
        forward(tokens[0])
        assert found[2].equal(found[0]) and found[3].equal(found[1])
        of_prompts = exact._whole._forward

        def with_another(*arguments: Any) -> Tensor:
            in_another_thread()
            return of_prompts(*arguments)

        monkeypatch.setattr(exact._whole, "_forward", with_another)
        forward(tokens[0])
    assert found[4].equal(found[0]) and found[-1].equal(found[1])


def test_experts_are_stacked_once(
    megatron_trains_on_a_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Opened for each update, it leaves parameters where an optimizer or a graph has them."""
    model, places = model_of("stock experts", torch.float32), []
    for _ in range(2):
        with exact_numerics(model):
            places.append([parameter.data_ptr() for parameter in model.parameters()])
            model(torch.arange(8)[None], torch.arange(8)[None], None)
    assert places[0] == places[1] and not caplog.records


@pytest.mark.parametrize("name", ("experts", "stock experts"))
@pytest.mark.parametrize("recomputed", (None, "full"))
def test_forced_routing_at_the_same_time_is_refused(
    name: str, recomputed: str | None, megatron_trains_on_a_cpu: None
) -> None:
    model, ids = trained(model_of(name, torch.float32)), torch.arange(8)[None]
    model.config.recompute_granularity = recomputed
    model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
    routed = torch.tensor([0, 1], dtype=torch.int16).expand(1, 8, 2, 2)
    with exact_numerics(model):
        values = model(ids, ids, None)
        with forced_routing(model, routed), pytest.raises(ConfigError, match="close one of them"):
            model(ids, ids, None)
        assert torch.equal(model(ids, ids, None), values)


def test_masks_that_engines_do_not_have_are_refused(megatron_trains_on_a_cpu: None) -> None:
    """megatron's masks are true where a token is not seen."""
    model, ids = model_of("stock", torch.float32), torch.arange(8).expand(2, 8)
    causal = torch.ones(2, 1, 8, 8, dtype=torch.bool).triu(1)
    padded, in_front, blocks, ahead = (causal.clone() for _ in range(4))
    padded[1, ..., 5:] = True
    in_front[1, ..., :3] = True
    blocks[:, :, 4:, :4] = True
    ahead[1, 0, 2, 3] = False
    with exact_numerics(model):
        values = model(ids, ids, None)
        assert torch.equal(model(ids, ids, causal), values)
        assert torch.equal(model(ids, ids, padded), values)
        for wrong in (in_front, blocks, ahead):
            with pytest.raises(ConfigError, match="attention_mask is not causal"):
                model(ids, ids, wrong)
        with pytest.raises(ConfigError, match="give input_ids alone"):
            model(ids, ids, None, decoder_input=torch.zeros(8, 2, 64))


def test_experts_whose_parameters_have_moved_are_refused(megatron_trains_on_a_cpu: None) -> None:
    """What is computed with would have the old values."""
    model = model_of("stock experts", torch.float32)
    with exact_numerics(model), pytest.raises(ConfigError, match="were moved to other memory"):
        weight = next(p for n, p in model.named_parameters() if ".experts." in n)
        weight.data = weight.data.clone()
        model(torch.arange(8)[None], torch.arange(8)[None], None)


def test_the_model_itself_stays_as_it_is(megatron_trains_on_a_cpu: None) -> None:
    """Modes, classes and configs; a parameter in another's place is seen."""
    model = trained(stock_model(hidden_dropout=0.0, attention_dropout=0.0))
    before = [(type(module), module.training) for module in model.modules()]
    config = dict(vars(model.config))
    tokens = torch.arange(8)[None]
    with exact_numerics(model) as exact:
        assert [(type(module), module.training) for module in model.modules()] == before
        assert vars(model.config) == config
        logits = exact._whole.logits(tokens[0], [8])[0]
        model.decoder.final_layernorm.weight = torch.nn.Parameter(torch.zeros(64))
        assert not torch.equal(exact._whole.logits(tokens[0], [8])[0], logits)
    model.eval()
    assert torch.equal(model(tokens, tokens, None), model(tokens, tokens, None))

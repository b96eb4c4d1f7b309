"""Hybrid models that a megatron-core user has built, adapted in place."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.megatron_compat import classes
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from tests.support.engines import config_at, greedy
from tests.support.stock_hybrid import EXPERTS, VOCAB, stock_hybrid

from megatron.core import tensor_parallel  # isort: skip

KINDS = {"HybridModel": classes.HYBRID_MODEL, "MambaModel": classes.MAMBA_MODEL}
IDS = torch.arange(40)[None] * 7 % VOCAB
POSITIONS = torch.arange(40)[None]
HAS_MTP = hasattr(classes.HYBRID_MODEL, "_setup_mtp_cuda_graphs") or "mtp" in str(
    classes.HYBRID_MODEL.__init__.__code__.co_names
)
"""Hybrid models of 0.16 have no multi-token prediction."""


@pytest.fixture(autouse=True)
def no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's dropout has a random state for each rank, on a GPU."""
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)


def ours_with_weights_of(model: Any, pattern: str) -> Any:
    """The model that this package builds itself, with the weights of megatron-core's."""
    config = ModelConfig(
        num_layers=len(pattern), hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16,
        ffn_hidden_size=96, vocab_size=VOCAB, max_sequence_length=128, position_embedding="none",
        hybrid_override_pattern=pattern, mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    ours = build_model(config, device="cpu", dtype=torch.float32).eval()
    state = {
        name.replace("conv1d_", "conv1d.").replace("final_norm", "final_layernorm"): value
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    ours.load_state_dict(state)
    return ours


def generated(model: Any, depth: int, drafts: int = 0) -> list[list[int]]:
    config = config_at(
        depth, max_requests=2, block_count=16, prefill_chunk_tokens=16, block_size_tokens=4,
        num_speculative_tokens=drafts, debug=True,
    )  # fmt: skip
    wrapper = GPTNetwork(model)
    with DynamicInferenceEngine(ServedModel(network=wrapper), config) as engine:
        requests = engine.generate([IDS[0].tolist(), [5, 6, 7]], [greedy(8)] * 2)
        assert (engine.counters.tokens_drafted > 0) == (drafts > 0)
    return [request.generated_tokens for request in requests]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_attention_and_mlp_layers_keep_their_logits(kind: str) -> None:
    model = stock_hybrid("*-**-", KINDS[kind])
    expected = model(IDS, POSITIONS, torch.ones(1, 1, 40, 40).triu(1).bool())
    adapted = adapt_model(model)
    assert isinstance(adapted, KINDS[kind]) and adapt_model(adapted) is adapted
    torch.testing.assert_close(adapted(IDS, POSITIONS, None), expected, atol=2e-5, rtol=1e-4)
    assert generated(model, 0)[0][0] == int(expected[0, -1].argmax())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_mixers_are_computed_as_those_that_we_build(kind: str) -> None:
    model = stock_hybrid("M-*M", KINDS[kind])
    for name, parameter in model.named_parameters():
        if "conv1d" in name:
            parameter.normal_(std=0.5)
    expected = ours_with_weights_of(model, "M-*M")
    adapted = adapt_model(model)
    given = (IDS, POSITIONS, None)
    torch.testing.assert_close(adapted(*given), expected(*given), atol=1e-4, rtol=1e-4)
    assert generated(model, 0) == generated(expected, 0)


@pytest.mark.parametrize("depth", [1, 4])
@torch.no_grad()
def test_tokens_are_the_same_at_each_depth(depth: int) -> None:
    model = stock_hybrid("ME*-M", **EXPERTS)
    assert generated(model, depth) == generated(model, 0)


@torch.no_grad()
def test_layers_of_multi_token_prediction_draft() -> None:
    if not HAS_MTP:
        pytest.skip("hybrid models of this release have no multi-token prediction")
    model = stock_hybrid("M*-/*-/*-")
    assert generated(model, 1, drafts=2) == generated(model, 0)
    with pytest.raises(ConfigError, match="one attention layer and no Mamba layer"):
        adapt_model(stock_hybrid("M*-/M*"))


def test_what_cannot_be_served_is_named_and_left_as_it_is() -> None:
    model = stock_hybrid("M*")
    model.decoder.layers[0].mixer.rmsnorm = False
    with pytest.raises(ConfigError, match="layer 1 has MambaMixer with rmsnorm=False"):
        adapt_model(model)
    assert type(model) is classes.HYBRID_MODEL
    assert type(model.decoder) is classes.HYBRID_STACK


def test_a_layer_that_attends_in_another_way_is_named() -> None:
    model = stock_hybrid("*-")
    attention = model.decoder.layers[0].self_attention
    attention.__class__ = type("GatedDeltaNet", (type(attention),), {})
    with pytest.raises(ConfigError, match="layer 1 has GatedDeltaNet"):
        adapt_model(model)


def test_sizes_come_from_the_config_of_the_model() -> None:
    model = adapt_model(stock_hybrid("M", mamba_num_heads=4))
    assert GPTNetwork(model).recurrent_state_spec is not None
    sizes: Any = model.decoder.layers[0].mixer.sizes
    assert tuple(sizes) == (4, 16, 2, 8, 4)

"""On a GPU the experts that tokens went to leave captured graphs with them, at every depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.routed import decoder_layers
from megatron_async.models.served import ServedModel
from megatron_async.request.rollouts import batch_of, routed_experts_of
from megatron_async.training import exact_numerics, forced_routing
from megatron_async.training.routing import noted_experts
from tests.support.engines import DEPTHS, config_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
START = list(b"import os\nimport sys\n\n\ndef ")
TEXTS = (b"a(", b"b(x", b"read(path", b"a(b", b"c(", b"write(path, x", b"d(", b"a(")
PROMPTS = [[*START, *text] for text in TEXTS] + [list(text) for text in TEXTS]
LENGTH = 24
TIGHT: dict[str, Any] = {
    "batch_invariant": True, "block_size_tokens": 8, "block_count": 26, "max_requests": 6,
    "prefill_chunk_tokens": 16, "num_speculative_tokens": 2, "speculative_method": "ngram",
}  # fmt: skip
"""Of a cache that is too small for all rows, with drafts."""
WIDE: dict[str, Any] = {"max_requests": len(PROMPTS), "enable_prefix_caching": False}
"""All requests run from the first step to the last, so that each step has the same rows."""


def model_of(dtype: torch.dtype) -> Any:
    return load_pretrained("tiny-moe", device=DEVICE, dtype=dtype).model


def played(model: Any, depth: int, **values: Any) -> tuple[list[DynamicInferenceRequest], Any]:
    config = config_at(
        depth, device=DEVICE, max_sequence_length=96, return_routed_experts=True, debug=True,
        **values,
    )  # fmt: skip
    params = [
        SamplingParams(
            temperature=0.7, seed=number, num_tokens_to_generate=LENGTH, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True, return_routed_experts=True,
        )
        for number in range(len(PROMPTS))
    ]  # fmt: skip
    network = GPTNetwork(model, batch_invariant=config.batch_invariant)
    with DynamicInferenceEngine(ServedModel(network=network), config) as engine:
        return engine.generate(PROMPTS, params), engine.counters


def taken(model: Any, tokens: Tensor) -> Tensor:
    """``[B, S, layers, top_k]``: the experts of a trainer's forward, with gradients."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with noted_experts(decoder_layers(model)) as noted:
        model(tokens, positions, None).float().logsumexp(-1).sum().backward()
    shape = (tokens.shape[1], tokens.shape[0], -1)
    return torch.stack([each.view(shape).transpose(0, 1) for each in noted], dim=2).cpu()


def trained(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.train()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_they_are_those_of_the_trainers_forward(dtype: torch.dtype) -> None:
    """With exact numerics: with rejected drafts, prefix hits, chunks and evictions."""
    served, model = model_of(dtype), trained(model_of(dtype))
    for depth in DEPTHS:
        requests, counters = played(served, depth, **TIGHT)
        assert counters.evictions and counters.tokens_cached
        assert 0 < counters.tokens_accepted < counters.tokens_drafted
        rollouts = [request.rollout() for request in requests]
        batch, routed = batch_of(rollouts), routed_experts_of(rollouts)
        is_known = routed >= 0
        assert int(is_known[:, :, 0, 0].sum()) == sum(len(each.tokens) - 1 for each in rollouts)
        tokens = batch.tokens.to(DEVICE)
        with exact_numerics(model):
            found = taken(model, tokens)
        assert torch.equal(found[is_known], routed[is_known].int()), depth
        with forced_routing(model, torch.where(is_known, (routed + 1) % 8, routed)):
            others = taken(model, tokens)
        assert torch.equal(others[is_known], (routed[is_known].int() + 1) % 8), depth


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_kernels_of_decode_steps_leave_the_same_ones_at_every_depth(dtype: torch.dtype) -> None:
    """Not batch-invariant, by the kernels that an engine has by default."""
    served = model_of(dtype)
    serial, counters = played(served, 0, **WIDE)
    assert not counters.evictions
    for depth in DEPTHS[1:]:
        requests, counters = played(served, depth, **WIDE)
        assert counters.steps_overlapped > LENGTH / 2
        for request, alone in zip(requests, serial, strict=True):
            assert request.generated_tokens == alone.generated_tokens, depth
            np.testing.assert_array_equal(request.routed_experts, alone.routed_experts)
    assert len({tuple(request.generated_tokens) for request in serial}) > len(PROMPTS) / 2

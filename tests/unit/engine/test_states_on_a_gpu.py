"""What leaves an engine on a GPU beside its tokens: the experts that tokens went to, and hidden
states of prompts. Each is that of one forward over the whole sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.models.build import build_random_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.training.whole_sequences import WholeSequences
from tests.support.engines import config_at
from tests.unit.engine import test_hidden_states as hidden
from tests.unit.engine import test_routed_experts as routed
from tests.unit.training.test_exact_numerics import model_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS = dataclasses.replace(
    routed.CONFIG, hidden_size=64, head_dim=16, ffn_hidden_size=96, moe_ffn_hidden_size=32
)
SIZES: dict[str, Any] = {
    "device": "cuda", "batch_invariant": True, "block_size_tokens": 16, "max_requests": 4,
    "prefill_chunk_tokens": 16, "max_sequence_length": 80, "debug": True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("depth", "drafts"), ((0, "none"), (1, "mtp"), (2, "ngram"), (4, "mtp")))
def test_experts_are_those_of_one_forward(depth: int, drafts: str, dtype: torch.dtype) -> None:
    """With chunks, prefix hits, evictions and rejected drafts, in captured graphs."""
    model = build_random_model(EXPERTS, device=torch.device("cuda"), dtype=dtype, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    network = GPTNetwork(model, batch_invariant=True)
    sizes = SIZES | {"block_count": 11, "return_routed_experts": True} | routed.DRAFTS[drafts]
    prompts = routed.PROMPTS
    params = [routed.params_of(n, num_tokens_to_generate=44) for n in range(len(prompts))]
    with DynamicInferenceEngine(ServedModel(network=network), config_at(depth, **sizes)) as engine:
        requests = engine.generate(prompts, params)
        counters = engine.counters
    assert counters.evictions and any(request.counters.cached for request in requests)
    assert drafts == "none" or 0 < counters.tokens_accepted < counters.tokens_drafted
    whole = WholeSequences(network, max_tokens=512, recurrent_state_dtype=None)
    for request in requests:
        tokens = [*request.prompt_tokens, *request.generated_tokens]
        _, experts = whole.logits(torch.tensor(tokens, device="cuda"), [len(tokens)])
        chosen = torch.stack(experts, dim=1)[: len(tokens) - 1].cpu().numpy()
        np.testing.assert_array_equal(request.routed_experts, chosen)


@pytest.mark.parametrize(("kind", "depth"), (("dense", 0), ("dense", 2), ("experts", 1)))
def test_hidden_states_are_those_of_one_forward(kind: str, depth: int) -> None:
    """Bit for bit, with others that decode beside, chunks and prefixes that are known."""
    network = GPTNetwork(model_of(kind, torch.bfloat16, device="cuda"), batch_invariant=True)
    prompts = [[(5 * i) % 90 for i in range(40)], [(5 * i) % 90 for i in range(52)], [7] * 33, [3]]
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=1, termination_id=-1, return_log_probs=True,
        prompt_hidden_states=(0, 1, -1),
    )  # fmt: skip
    config = config_at(depth, **SIZES, block_count=24)
    with DynamicInferenceEngine(ServedModel(network=network), config) as engine:
        engine.generate(prompts[:1], SamplingParams(num_tokens_to_generate=1))
        engine.add_request(900, [5, 6], hidden.sampled(1))
        for _ in range(4):
            engine.step_modern()
        requests = engine.generate(prompts, params)
    whole = WholeSequences(network, max_tokens=512, recurrent_state_dtype=None)
    for request, prompt in zip(requests, prompts, strict=True):
        seen = layers_of(network, whole, prompt)
        found = request.prompt_hidden_states
        assert found.shape == (len(prompt), 3, seen.shape[2])
        assert torch.equal(found.cpu(), seen[:, [0, 1, -1]].cpu())


def layers_of(network: GPTNetwork, whole: WholeSequences, prompt: list[int]) -> torch.Tensor:
    """``[tokens, layers + 1, hidden]`` by hooks of the model's modules."""
    seen: list[torch.Tensor] = []
    decoder: Any = network.model.decoder
    hooks = [
        decoder.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["hidden_states"].clone()),
            with_kwargs=True,
        ),
        *(
            layer.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
            for layer in decoder.layers
        ),
    ]
    try:
        whole.logits(torch.tensor(prompt, device="cuda"), [len(prompt)])
    finally:
        for hook in hooks:
            hook.remove()
    assert network.hidden_states is not None
    behind = [*(each.squeeze(1) for each in seen[:-1]), network.hidden_states]
    return torch.stack(behind, dim=1)[: len(prompt)]

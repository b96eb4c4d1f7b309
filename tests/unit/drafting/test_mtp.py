"""Drafts of the model's own layers for multi-token prediction, on the embedded model.

Tokens are those of decoding without drafts at every depth. That would hold for any drafts; so the
drafts themselves are compared with a plain forward that has no cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.build.runner import allocate
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.models.gpt import GPTModel
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, config_at, hash_engine

pytestmark = pytest.mark.sweep

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self", "import os\n\n", "x"]
TEMPERATURES = (0.0, 0.3, 0.8, 1.0)


def config_of(depth: int, drafts: int, **values: object) -> EngineConfig:
    config = config_at(depth, device="cpu", num_speculative_tokens=drafts, debug=True)
    return dataclasses.replace(config, **{"max_requests": 8, **values})


@pytest.fixture(scope="module")
def tiny() -> DynamicInferenceEngine:
    """The weights that all engines of this file share."""
    return DynamicInferenceEngine.from_pretrained("tiny", config_of(0, 0))


def generate(
    engine: DynamicInferenceEngine, new_tokens: int = 60, prompts: list[str] = PROMPTS
) -> list[DynamicInferenceRequest]:
    params = [
        SamplingParams(
            num_tokens_to_generate=new_tokens + 3 * i, temperature=t, seed=i, termination_id=-1
        )
        for i, t in enumerate(TEMPERATURES)
    ]
    return engine.generate([prompt for prompt in prompts for _ in params], [*params] * len(prompts))


def tokens_of(requests: list[DynamicInferenceRequest]) -> list[list[int]]:
    return [request.generated_tokens for request in requests]


@pytest.fixture(scope="module")
def undrafted(tiny: DynamicInferenceEngine) -> list[list[int]]:
    return tokens_of(generate(tiny, 40))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "drafts"), ((0, 4), (1, 1), (1, 4), (2, 2), (4, 4)))
def test_drafted_equals_undrafted(
    tiny: DynamicInferenceEngine, undrafted: list[list[int]], depth: int, drafts: int
) -> None:
    with tiny.with_config(config_of(depth, drafts)) as engine:
        requests = generate(engine, 40)
        counters = engine.counters
    assert tokens_of(requests) == undrafted
    # Not a tenth of the rows drafts in vain: coupled noise makes samples agree too.
    assert counters.tokens_accepted > 0.35 * counters.tokens_committed


CHUNKED = {"block_size_tokens": 4, "prefill_chunk_tokens": 24, "batch_invariant": True}
ALIKE = [PROMPTS[1] * 3 + ending for ending in ("", " x", "\n        return", "foo")]


@pytest.fixture(scope="module")
def undrafted_chunked(tiny: DynamicInferenceEngine) -> list[list[int]]:
    with tiny.with_config(config_of(0, 0, **CHUNKED)) as engine:
        return tokens_of(generate(engine, 24, ALIKE))


@pytest.mark.slow
@pytest.mark.parametrize("depth", (0, 2))
def test_drafted_equals_undrafted_through_evictions_prefix_hits_and_chunks(
    tiny: DynamicInferenceEngine, undrafted_chunked: list[list[int]], depth: int
) -> None:
    with tiny.with_config(config_of(depth, 3, block_count=100, **CHUNKED)) as engine:
        requests = generate(engine, 24, ALIKE)
        counters = engine.counters
    assert tokens_of(requests) == undrafted_chunked
    assert counters.evictions > 0 and counters.tokens_cached > 0
    assert counters.tokens_accepted > 0.3 * counters.tokens_committed


class Plain:
    """What the layers draft by forwards over whole sequences."""

    def __init__(self, model: GPTModel) -> None:
        self._model = model

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts of what follows ``tokens``."""
        return [int(row.argmax()) for row in self.logits(tokens, count)]

    @torch.inference_mode()
    def logits(self, tokens: list[int], count: int) -> list[torch.Tensor]:
        """Logits [vocabulary] of each greedy draft of what follows ``tokens``."""
        model, layers = self._model, len(self._model.mtp.layers)
        ids = torch.tensor([tokens[:-1]])
        model(ids, torch.arange(ids.shape[1])[None], None)
        hidden = model.decoder_hidden_states
        assert hidden is not None
        found: list[torch.Tensor] = []
        before, known = hidden, tokens[1:]
        for draft in range(count):
            layer = min(draft, layers - 1)
            if draft >= layers:
                # The layer's own output takes the place of a further position's hidden state.
                before = torch.cat([before, hidden[-1:]])
            else:
                before, known = hidden, known[1:] if draft else known
            row = torch.tensor([known])
            hidden = model.mtp_hidden_states(layer, before, row, torch.arange(len(known))[None])
            found.append(model.logits(hidden)[0, -1, : model.vocab_size])
            known = [*known, int(found[-1].argmax())]
        return found


@pytest.mark.parametrize(("prompt", "chunk"), ((PROMPTS[0], 64), (PROMPTS[1] * 4, 16), ("x", 64)))
@pytest.mark.parametrize("drafts", (1, 2, 4))
def test_drafts_are_those_of_a_forward_without_a_cache(
    tiny: DynamicInferenceEngine, drafts: int, prompt: str, chunk: int
) -> None:
    plain = Plain(tiny.model.network.model)
    config = config_of(
        0, drafts, max_requests=2, prefill_chunk_tokens=chunk, block_size_tokens=8, debug=False
    )
    params = SamplingParams(num_tokens_to_generate=24, temperature=0.0, termination_id=-1)
    compared = 0
    with tiny.with_config(config) as engine:
        # Another one beside it: rows do not mix.
        engine.add_request(0, "import sys", params)
        engine.add_request(1, prompt, params)
        tokens = engine.model.tokenize_prompt(prompt)
        total = len(tokens) + 24
        while engine.has_unfinished_requests():
            outputs = engine.step_modern()["tokens"]
            new = [output.token_id for output in outputs if output.request_id == 1]
            tokens += new
            if new and len(tokens) < total:
                engine.device.synchronize()
                slots = engine.cache.slots
                ((slot,),) = ((slots.max_total == total) & ~slots.finished).nonzero().T.tolist()
                # Behind the end there is no cache: those drafts never count.
                room = min(drafts, total - len(tokens))
                found = slots.drafts[slot].tolist()
                assert found[:room] == plain.drafts(tokens, drafts)[:room]
                compared += 1
    assert compared >= 24 // (drafts + 1) - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("drafts", (1, 2, 4))
    @pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
    def test_drafted_equals_undrafted(self, dtype: str, drafts: int) -> None:
        values = {"device": "cuda", "dtype": dtype, "batch_invariant": dtype == "bfloat16"}
        with DynamicInferenceEngine.from_pretrained("tiny", config_of(0, 0, **values)) as plain:
            expected = tokens_of(generate(plain))
            for depth in DEPTHS:
                with plain.with_config(config_of(depth, drafts, **values)) as engine:
                    requests = generate(engine)
                    counters = engine.counters
                assert tokens_of(requests) == expected
                assert counters.tokens_accepted > 0.35 * counters.tokens_committed

    @pytest.mark.parametrize("extras", (False, True), ids=("plain", "extended"))
    @pytest.mark.parametrize(
        "who",
        (
            {"speculative_method": "mtp"},
            {"speculative_method": "ngram"},
            {"draft_model": "tiny"},
        ),
        ids=("mtp", "ngram", "model"),
    )
    def test_steady_steps_neither_synchronise_nor_allocate(
        self, who: dict[str, str], extras: bool
    ) -> None:
        config = config_of(1, 2, device="cuda", dtype="bfloat16", debug=False, **who)
        penalties = {"presence_penalty": 0.3, "return_log_probs": True} if extras else {}
        params = SamplingParams(
            num_tokens_to_generate=400, temperature=0.8, termination_id=-1, **penalties
        )
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            for request_id in range(8):
                engine.add_request(request_id, PROMPTS[request_id % 4], params)
            for _ in range(12):
                engine.step_modern()
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(80):
                    engine.step_modern()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
            assert engine.counters.tokens_accepted > 0
            engine.reset()


@pytest.mark.parametrize("method", ("mtp", "ngram"))
def test_a_request_that_no_token_is_left_for_leaves_the_others_alone(
    tiny: DynamicInferenceEngine, method: str
) -> None:
    """Its last row, which brings no token, is launched once more before its end is known."""
    prompt = PROMPTS[0]
    with tiny.with_config(config_of(0, 0)) as engine:
        expected = tokens_of(generate(engine, 20, [prompt]))
    impossible = SamplingParams(structured_outputs={"choice": ["yes"]}, allowed_token_ids=[97])
    with tiny.with_config(config_of(2, 2, speculative_method=method)) as engine:
        (request,) = engine.generate([prompt], [impossible])
        assert request.finish_reason is FinishReason.ERROR
        assert tokens_of(generate(engine, 20, [prompt])) == expected


def test_a_model_without_layers_for_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layers for multi-token prediction"):
        hash_engine(1, num_speculative_tokens=1)


def test_layers_that_do_not_draft_have_no_cache(tiny: DynamicInferenceEngine) -> None:
    wrapper: Any = tiny.model.network
    spec = wrapper.kv_cache_spec
    layers = spec.num_layers - spec.num_mtp_layers
    assert (spec.num_mtp_layers, spec.decoder.num_layers) == (len(wrapper.model.mtp.layers), layers)
    configs = [config_of(0, 2), config_of(0, 0), config_of(0, 2, speculative_method="ngram")]
    served = ServedModel(network=wrapper)

    def batch_of(config: EngineConfig) -> ForwardBatch:
        return allocate(EngineSpec.of(served, config, "cpu"), served, torch.device("cpu"))

    batches = [batch_of(config) for config in configs]
    assert [len(each.kv_cache) for each in batches] == [spec.num_layers, layers, layers]
    # GiB buy more blocks then.
    sized = [
        batch_of(config_of(0, drafts, buffer_size_gb=0.01, block_size_tokens=16))
        for drafts in (2, 0)
    ]
    block_bytes = [16 * each.token_bytes for each in (spec, spec.decoder)]
    found = [batch.cache.sizes.block_count + 1 for batch in sized]
    assert found == [int(0.01 * 2**30) // size for size in block_bytes]
    with pytest.raises(ConfigError, match="drafts by multi-token prediction need"):
        DynamicInferenceEngine(
            ServedModel(network=GPTNetwork(wrapper.model)), config_of(0, 2), batch=batches[2]
        )


def test_the_output_layer_reads_its_weight_once_for_the_last_tokens_of_rows(
    tiny: DynamicInferenceEngine,
) -> None:
    """Of the strided hidden states of last tokens, ``[R, w, hidden][:, -1]``, as of others."""
    wrapper: Any = tiny.model.network
    size = wrapper.model.config.hidden_size
    hidden = torch.randn(4, 3, size, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(next(wrapper.model.parameters()).dtype)
    called: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            called.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Noted():
        logits = wrapper.logits(hidden[:, -1])
    assert "mm" in called and "bmm" not in called
    torch.testing.assert_close(logits, wrapper.logits(hidden[:, -1].clone()))

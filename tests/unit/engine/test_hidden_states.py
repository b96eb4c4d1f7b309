"""Hidden states of prompts behind chosen layers, computed in the engine's own steps."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import IntegrityError, RequestError
from megatron_async.models import hidden_states as of_models
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.request import hidden_states as of_requests
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.request.scores import Score
from megatron_async.runner.prompt_log_probs import PromptTargets
from megatron_async.scheduler.admission import PromptPlanner
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan, PrefillChunk, RowMap
from megatron_async.training.whole_sequences import WholeSequences
from tests.support.engines import DEPTHS, config_at, hash_engine
from tests.support.huggingface_models import random_model
from tests.unit.training.test_exact_numerics import model_of

pytestmark = pytest.mark.sweep

START = [(5 * i) % 90 for i in range(20)]
PROMPTS = [START, [*START, 40, 41], [*START[:12], 60], [7] * 33, [3], [9] * 9]
"""Prefixes are shared, and some prompts end where a chunk of one token is left."""
CASES = [("dense", depth) for depth in DEPTHS]
CASES += [("gpt2", 2), ("experts", 1), ("sinks", 4), ("latents", 2), ("hybrid", 0), ("hybrid", 2)]
SIZES: dict[str, Any] = {
    "batch_invariant": True, "block_size_tokens": 4, "block_count": 20, "max_requests": 4,
    "prefill_chunk_tokens": 8, "debug": True, "max_sequence_length": 80,
}  # fmt: skip


class WrongStatesError(AssertionError):
    pass


def engine_of(kind: str, depth: int, **values: Any) -> DynamicInferenceEngine:
    network = GPTNetwork(model_of(kind, torch.bfloat16), batch_invariant=True)
    return DynamicInferenceEngine(ServedModel(network=network), config_at(depth, **SIZES | values))


def expected_of(kind: str, prompts: list[list[int]]) -> list[Tensor]:
    """All hidden states ``[tokens, layers + 1, hidden]`` by hooks of the model's own modules, in
    one forward over each whole prompt."""
    model = model_of(kind, torch.bfloat16)
    network = GPTNetwork(model, batch_invariant=True)
    seen: list[Tensor] = []
    model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"].clone()), with_kwargs=True
    )
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    whole = WholeSequences(network, max_tokens=512, recurrent_state_dtype=None)
    expected = []
    for prompt in prompts:
        seen.clear()
        whole.logits(torch.tensor(prompt), [len(prompt)])
        assert network.hidden_states is not None
        behind = [*(each.squeeze(1) for each in seen[:-1]), network.hidden_states]
        expected.append(torch.stack(behind, dim=1)[: len(prompt)])
    return expected


def same(found: Any, expected: Tensor) -> None:
    if found is None or found.shape != expected.shape or not torch.equal(found, expected):
        raise WrongStatesError(f"{found} is not {expected}")


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, num_tokens_to_generate=30, termination_id=-1)


def check(kind: str = "dense", depth: int = 1, **values: Any) -> None:
    """Bit for bit, with others that generate beside, prefixes that are known, chunks and
    evictions; each request gets its own layers, and some get none."""
    expected = expected_of(kind, PROMPTS)
    count = expected[0].shape[1]
    layers = [(0, 1, -1), (count - 1, 1), None, (-2,), (0,), (-1, 0, -count)]
    with engine_of(kind, depth, **values) as engine:
        engine.generate(PROMPTS[:2], SamplingParams(num_tokens_to_generate=1))
        futures = [engine.add_request(900 + n, [n, n + 1], sampled(n)) for n in range(3)]
        for _ in range(6):
            engine.step_modern()
        asked = [params_of(each) for each in layers]
        requests = engine.generate(PROMPTS, asked)
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert engine.counters.evictions and all(each.result(0).succeeded() for each in futures)
        assert not engine.model.network.model.decoder.layers[0]._forward_hooks
    for request, wanted, states in zip(requests, layers, expected, strict=True):
        if wanted is None:
            assert request.prompt_hidden_states is None
            continue
        score = Score.of(request)
        same(score.hidden_states, states[:, list(wanted)])
        assert score.hidden_states.dtype == torch.bfloat16
        assert not score.hidden_states.is_inference()


def params_of(layers: Any, **values: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, num_tokens_to_generate=1, termination_id=-1, return_log_probs=True,
        prompt_hidden_states=layers, **values,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_they_are_those_of_the_models_own_forward(kind: str, depth: int) -> None:
    check(kind, depth)


def test_rows_with_drafts_beside_change_nothing() -> None:
    check("dense", 1, num_speculative_tokens=2, speculative_method="ngram")


def test_a_forward_without_an_engine_is_close() -> None:
    """Plain attention over the whole prompt, in float32."""
    model = model_of("dense", torch.float32)
    with DynamicInferenceEngine(ServedModel(network=GPTNetwork(model)), config_at(1)) as engine:
        (score,) = engine.score([START], hidden_states=(0, 1, 2))
    behind: list[Tensor] = []
    hook = model.decoder.layers[0].register_forward_hook(lambda m, a, out: behind.append(out[0]))
    with torch.no_grad():
        model(torch.tensor([START]), torch.arange(len(START))[None], None)
    hook.remove()
    embedded = model.embedding(torch.tensor([START]), torch.arange(len(START))[None])
    expected = [embedded, behind[0], model.decoder_hidden_states]
    for layer, each in enumerate(expected):
        assert torch.allclose(score.hidden_states[:, layer], each.squeeze(1), atol=2e-4), layer
    assert len({float(each.abs().sum()) for each in expected}) == 3


@pytest.mark.slow
def test_their_numbers_are_those_of_hugging_face(tmp_path: Path) -> None:
    theirs = random_model("llama").float().eval()
    theirs.save_pretrained(tmp_path)
    config = config_at(1, dtype="float32", max_requests=2)
    with DynamicInferenceEngine.from_pretrained(tmp_path, config) as engine:
        (score,) = engine.score([START], hidden_states=(0, 1, 2))
    with torch.no_grad():
        expected = theirs(torch.tensor([START]), output_hidden_states=True).hidden_states
    assert len(expected) == 3
    for layer, each in enumerate(expected):
        assert torch.allclose(score.hidden_states[:, layer], each[0], atol=1e-3), layer


@pytest.mark.parametrize("depth", (0, 2))
def test_a_prompt_that_is_evicted_under_way_has_each_position_once(depth: int) -> None:
    """What is known is not computed again where the prefix cache has it."""
    (expected,) = expected_of("dense", [[7] * 33])
    with engine_of("dense", depth) as engine:
        future = engine.add_request(1, [7] * 33, params_of((1,)))
        for _ in range(3 + depth // 2):
            engine.step_modern()
        engine.evict_request(1)
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result(0)
    assert request.counters.evictions == 1 and request.counters.cached > 0
    same(request.prompt_hidden_states, expected[:, [1]])


def test_a_restarted_request_has_those_of_the_new_weights() -> None:
    model = model_of("dense", torch.bfloat16, seed=4)
    with engine_of("dense", 1) as engine:
        future = engine.add_request(1, [7] * 33, params_of((1,)))
        for _ in range(4):
            engine.step_modern()
        engine.update_weights(model.state_dict(), partial_rollouts="restart")
        while engine.has_unfinished_requests():
            engine.step_modern()
        (again,) = engine.score([[7] * 33], hidden_states=(1,))
    assert future.result(0).counters.restarts == 1
    same(future.result(0).prompt_hidden_states, again.hidden_states)
    (old,) = expected_of("dense", [[7] * 33])
    assert not torch.equal(again.hidden_states, old[:, [1]])


def test_a_request_with_them_is_recorded_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with engine_of("dense", 1, record=str(path)) as engine:
        scores = engine.score(PROMPTS[:3], hidden_states=[-1, 0])
        (request,) = engine.generate([START], params_of((2,)))
    with engine_of("dense", 1) as engine:
        result = replay(read_run(path), engine)
    assert result.exact and result.differences == () and len(result.endings) == 4
    data = json.loads(json.dumps(request.serialize()))
    again = DynamicInferenceRequest.deserialize(data)
    same(again.prompt_hidden_states, request.prompt_hidden_states)
    same(again.prompt_hidden_states, scores[0].hidden_states[:, :1])
    for wrong in ({"shape": [1], "bfloat16": "AA=="}, {"shape": [2], "int64": ""}, {"shape": [1]}):
        with pytest.raises(RequestError, match="prompt_hidden_states"):
            DynamicInferenceRequest.deserialize(data | {"prompt_hidden_states": wrong})


def test_an_engine_that_nobody_asks_keeps_nothing() -> None:
    with engine_of("dense", 1) as engine, patch.object(of_models, "handing_out") as hooks:
        engine.score(PROMPTS[:2])
        assert not hooks.called and engine.runner._hidden_states is None


def test_plans_without_them_have_the_checksums_of_earlier_versions() -> None:
    chunk = PrefillChunk(0, 1, 0, (5,), True)
    plan = Plan(3, RowMap((1,), (0,), (2,)), 0, (), (chunk,))
    assert "layers" not in repr(plan) and repr(chunk) in repr(plan)
    head = "PrefillChunk(row=0, slot=1, start=0, tokens=(5,), samples=True, targets=()"
    assert repr(chunk) == head + ")"
    assert repr(chunk._replace(layers=(2,))) == head + ", layers=(2,))"


def test_what_cannot_be_handed_out_is_refused() -> None:
    with engine_of("dense", 1) as engine:
        for wrong, said in (
            ((3,), "has 3; the model has hidden states 0 to 2, or from -3 to -1"),
            ((-4,), "has -4; the model has"), ("x", "list of at most"), ((1.5,), "list of at most"),
            ([0] * 1025, "list of at most"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=said):
                engine.score([[1, 2]], hidden_states=wrong)  # type: ignore[arg-type]
        for values, said in (
            ({"return_log_probs": False}, "come with log-probabilities"),
            ({"skip_prompt_log_probs": True}, "come with log-probabilities"),
            ({"n": 2}, "does not go together with n=2"),
            ({"forced_token_ids": [1]}, "does not go together with forced_token_ids"),
        ):
            asked = {"return_log_probs": True, "prompt_hidden_states": (0,), **values}
            with pytest.raises(RequestError, match=said):
                engine.add_request(0, [1], SamplingParams(**asked))
        assert not engine.has_unfinished_requests()
    with hash_engine(1) as engine, pytest.raises(RequestError, match="needs a GPT or hybrid model"):
        engine.add_request(0, [1], params_of((0,)))


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``old`` in the source of a function of ``target`` is ``new``."""

    name: str
    target: Any
    function: str
    old: str
    new: str
    depth: int = 1

    @contextmanager
    def active(self) -> Iterator[None]:
        original = getattr(self.target, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, source.count(self.old)
        made: dict[str, Any] = {}
        names = getattr(original, "__func__", original)
        names = inspect.unwrap(names).__globals__
        exec(source.replace(self.old, self.new), names, made)
        with patch.object(self.target, self.function, made[self.function]):
            yield


FAULTS = (
    Fault("the layer before", of_models, "handing_out", "layers[layer - 1]", "layers[layer - 2]"),
    Fault("the token behind", PromptTargets, "of",
          "hidden += range(at, at + len(chunk.tokens))",
          "hidden += range(at + 1, at + 1 + len(chunk.tokens))"),
    Fault("layers of the first request for all", of_requests, "rows_of_chunks",
          "found.layers.index(layer)", "min(found.layers.index(layer), 0)"),
    Fault("rows of the chunk before", of_requests, "rows_of_chunks",
          "at += len(chunk.tokens)", "at += 0"),
    Fault("complete without the last token", Scheduler, "_take_prompt_log_probs",
          "(not chunk.layers)", "1", 0),
    Fault("a prefix that is known is taken", PromptPlanner, "_admit_next",
          "min(len(sequence.tokens) - 1, sequence.prompt_log_probs)", "len(sequence.tokens) - 1"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(fault: Fault) -> None:
    with fault.active(), pytest.raises((WrongStatesError, IntegrityError, IndexError)):
        check("dense", fault.depth)

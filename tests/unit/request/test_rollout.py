"""Rollouts for reinforcement learning: tokens, log-probabilities and weight versions in one record.

The reference is a plain forward of the same model over the whole sequence, without engine or cache.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import IntegrityError, RequestError
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.request.request import (
    DynamicInferenceRequest,
    FinishReason,
    Rollout,
    StepReport,
    WeightSpan,
)
from megatron_async.request.rollouts import batch_of
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.sweep

TOLERANCE = 1e-4
DEPTHS = (0, 1, 2)
BLOCK = 16
LENGTH = 28
NEW_WEIGHTS_AT = 12

SHARED = [random.Random(7).randrange(256) for _ in range(2 * BLOCK + 5)]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
# Who asks for log-probabilities of the prompt has no use for a cached one.
PROCESSED = {"log_probs_mode": "processed", "skip_prompt_log_probs": True}
ASKS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([65, 66, 67], {"temperature": 0.0}),
    "sampled": (SHARED, {"temperature": 1.1}),
    "top-k": (SHARED[:-1], {"temperature": 0.9, "top_k": 12}),
    "penalties": (SHARED, {"temperature": 1.0, **PENALTIES}),
    "processed": (SHARED, {"temperature": 0.7, **PROCESSED}),
    "processed greedy": ([70] * 20, {"temperature": 0.0, **PENALTIES, **PROCESSED}),
    "processed, all": (
        SHARED[:-2],
        {"temperature": 1.4, "top_k": 40, **PENALTIES, **PROCESSED},
    ),
}


def params(**values: Any) -> SamplingParams:
    values = {"num_tokens_to_generate": LENGTH, "seed": 3, "termination_id": -1, **values}
    return SamplingParams(return_log_probs=True, **values)


@functools.cache
def plain_model(version: int) -> GPTNetwork:
    """The embedded model with the weights of a version, in fp32."""
    model = load_pretrained("tiny", dtype=torch.float32, device="cpu").model
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.02 * version)
    return GPTNetwork(model)


def plain_logits(tokens: tuple[int, ...], version: int) -> Tensor:
    """float64 ``[tokens, vocabulary]``: row i is about token i + 1."""
    ids = torch.tensor(tokens)
    return plain_model(version).forward(ids, torch.arange(len(tokens))).double()


def processed(row: Tensor, asked: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """The logits that the token behind ``prompt`` and ``output`` is sampled from."""
    row = row.clone()
    for token in {*prompt, *output}:
        factor = asked.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in collections.Counter(output).items():
        row[token] -= count * asked.frequency_penalty + asked.presence_penalty
    if asked.greedy:
        return row
    row = row / asked.temperature
    if asked.top_k:
        row[row < row.topk(asked.top_k).values[-1]] = -math.inf
    return row


def check(request: DynamicInferenceRequest) -> Rollout:
    """The record's log-probabilities are those of a plain forward with the weights of its spans."""
    rollout = request.rollout()
    asked = request.sampling_params
    assert len(rollout.log_probs) == len(rollout.generated_tokens) == LENGTH
    assert rollout.generated_tokens == tuple(request.generated_tokens)
    assert rollout.prompt_tokens == tuple(request.prompt_tokens)
    assert rollout.log_probs_mode == asked.log_probs_mode and rollout.seed == 3
    assert all(map(math.isfinite, rollout.log_probs))
    tokens = rollout.prompt_tokens + rollout.generated_tokens
    prompt, output = list(rollout.prompt_tokens), list(rollout.generated_tokens)
    ends = [*[span.start for span in rollout.weight_spans[1:]], LENGTH]
    for (start, version), end in zip(rollout.weight_spans, ends, strict=True):
        logits = plain_logits(tokens, version)[len(prompt) - 1 :]
        for at in range(start, end):
            row = logits[at]
            if asked.log_probs_mode == "processed":
                row = processed(row, asked, prompt, output[:at])
            expected = float(row.log_softmax(0)[output[at]])
            assert rollout.log_probs[at] == pytest.approx(expected, abs=TOLERANCE), (start, at)
    return rollout


Event = Callable[[DynamicInferenceEngine, int], None]


def evictions(engine: DynamicInferenceEngine, step: int) -> None:
    if step % 5 == 4:
        engine.evict_request(step // 5 % len(ASKS))


def new_weights(engine: DynamicInferenceEngine, step: int) -> None:
    if step == NEW_WEIGHTS_AT:
        engine.update_weights(plain_model(1).model.state_dict())


def nothing(engine: DynamicInferenceEngine, step: int) -> None:
    """Nothing happens."""


EVENTS: dict[str, Event] = {"none": nothing, "evictions": evictions, "new weights": new_weights}


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_log_probs_of_rollouts_are_those_of_a_plain_forward(depth: int, event: str) -> None:
    config = config_at(
        depth, dtype="float32", max_requests=4, block_size_tokens=BLOCK, prefill_chunk_tokens=24,
        max_sequence_length=128, block_count=60, audit_graphs=True,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        futures = {
            name: engine.add_request(number, prompt, params(**values))
            for number, (name, (prompt, values)) in enumerate(ASKS.items())
        }
        step = 0
        while engine.has_unfinished_requests():
            EVENTS[event](engine, step)
            engine.step_modern()
            step += 1
        counters = engine.counters
    requests = {name: future.result(0) for name, future in futures.items()}
    rollouts = {name: check(request) for name, request in requests.items()}
    assert len({rollout.generated_tokens for rollout in rollouts.values()}) == len(ASKS)
    # The processed ones are not the raw ones: the reference tells them apart.
    wrong = dataclasses.replace(requests["processed"].sampling_params, log_probs_mode="raw")
    requests["processed"].sampling_params = wrong
    with pytest.raises(AssertionError):
        check(requests["processed"])
    versions = {tuple(v for _, v in rollout.weight_spans) for rollout in rollouts.values()}
    if event == "new weights":
        assert (0, 1) in versions and versions <= {(0,), (0, 1), (1,)}
    else:
        assert versions == {(0,)}
    assert (counters.evictions > 0) == (event != "none")
    if event != "new weights":
        assert counters.tokens_cached >= 2 * BLOCK
        for name, request in requests.items():
            if name.startswith("processed"):
                assert request.prompt_log_probs is None
            else:
                check_prompt(request)
        assert sum(requests[name].counters.cached for name in requests) == counters.tokens_cached


def check_prompt(request: DynamicInferenceRequest) -> None:
    """Those of the prompt too: they are raw in any mode."""
    logits = plain_logits(tuple(request.prompt_tokens), 0).log_softmax(1)
    expected = [float(logits[i, token]) for i, token in enumerate(request.prompt_tokens[1:])]
    assert request.prompt_log_probs == pytest.approx(expected, abs=TOLERANCE)


def test_a_request_without_log_probs_or_an_end_has_no_rollout() -> None:
    config = config_at(1, dtype="float32", max_requests=2, max_sequence_length=64)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        future = engine.add_request(0, [65], params())
        engine.step_modern()
        with pytest.raises(RequestError, match="has not ended"):
            engine.get_request(0).rollout()
        asked = dataclasses.replace(params(), return_log_probs=False)
        (bare,) = engine.generate([[65]], asked)
        with pytest.raises(RequestError, match="return_log_probs=True"):
            bare.rollout()
        while not future.done():
            engine.step_modern()
    rollout = future.result(0).rollout()
    for spans in ((), (WeightSpan(1, 0),), (WeightSpan(0, 0), WeightSpan(LENGTH, 1))):
        with pytest.raises(IntegrityError, match="weight spans"):
            dataclasses.replace(rollout, weight_spans=spans)
    with pytest.raises(IntegrityError, match="log-probabilities"):
        dataclasses.replace(rollout, log_probs=rollout.log_probs[:-1])


# --- partial rollouts -------------------------------------------------------------------------

SHORT = 14
GUIDED = {"structured_outputs": {"regex": "[a-z]{40}"}}
STOPPED = {"stop_words": ["zzzz"], "include_stop_str_in_output": True}


def run_to_end(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()


def test_restarted_rollouts_are_of_the_new_weights_alone() -> None:
    """Each is what the new weights give from the start: guided, with stop words, n > 1, paused."""
    config = config_at(
        2, dtype="float32", max_requests=3, block_size_tokens=BLOCK, block_count=40,
        max_sequence_length=128, prefill_chunk_tokens=24, debug=True,
    )  # fmt: skip
    asks: list[dict[str, Any]] = [{}, {**GUIDED}, {**STOPPED, "n": 2}, {"temperature": 0.0}]
    new = plain_model(1).model.state_dict()
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        futures = [
            engine.add_request(i, SHARED[: 40 - i], params(num_tokens_to_generate=SHORT, **ask))
            for i, ask in enumerate(asks)
        ]
        for _ in range(8):
            engine.step_modern()
        engine.pause_request(0)
        engine.step_modern()
        begun = len(engine.get_request(0).generated_tokens)
        assert begun > 2
        assert engine.update_weights(new, partial_rollouts="restart") == 1
        assert engine.get_request(0).generated_tokens == []
        engine.resume_request(0)
        run_to_end(engine)
        again = [
            engine.add_request(i, SHARED[: 40 - i], params(num_tokens_to_generate=SHORT, **a))
            for i, a in enumerate(asks)
        ]
        run_to_end(engine)
    for future, fresh in zip(futures, again, strict=True):
        pairs = zip(future.result(0).choices or [future.result(0)],
                    fresh.result(0).choices or [fresh.result(0)], strict=True)  # fmt: skip
        for request, wanted in pairs:
            rollout = request.rollout()
            assert rollout.generated_tokens == wanted.rollout().generated_tokens
            assert rollout.log_probs == pytest.approx(wanted.rollout().log_probs, abs=TOLERANCE)
            assert request.prompt_log_probs == wanted.prompt_log_probs
            assert request.generated_text == wanted.generated_text
            assert rollout.weight_spans == (WeightSpan(0, 1),)
            counters = request.counters
            assert counters.launched == counters.committed + counters.discarded
    first = futures[0].result(0)
    assert first.counters.restarts == 1 and first.counters.discarded >= begun
    assert len(first.steps) == len(first.tpot) == SHORT
    assert sum(first.tpot) == pytest.approx(first.latency)
    assert set(rollout.weight_versions) == {1} and rollout.is_truncated


def test_what_has_been_handed_out_is_not_restarted() -> None:
    import asyncio

    config = config_at(1, dtype="float32", max_requests=2, max_sequence_length=64, block_count=20)
    new = plain_model(1).model.state_dict()

    async def streamed(engine: DynamicInferenceEngine) -> tuple[list[int], list[WeightSpan]]:
        tokens: list[int] = []
        spans: list[WeightSpan] = []
        pause = PauseAt(engine, ticket=8)
        engine.observe(pause)
        async for output in engine.stream([65], params(), request_id=5):
            if len(tokens) == 4:
                assert pause.has_come.wait(PATIENCE_SECONDS)
                spans = engine.get_request(5).weight_spans
                engine.update_weights(new, partial_rollouts="restart")
                engine.resume_request(5)
            assert output.token_id is not None
            tokens.append(output.token_id)
        return tokens, spans

    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        tokens, spans = asyncio.run(streamed(engine))
        assert len(tokens) == LENGTH and [span.version for span in spans] == [0, 1]
        with pytest.raises(RequestError, match="partial_rollouts='again' must be"):
            engine.update_weights(new, partial_rollouts="again")
        engine.deliver_to(NoSink())
        with pytest.raises(RequestError, match="have been delivered"):
            engine.update_weights(new, partial_rollouts="restart")
        assert engine.weight_version == 1


class PauseAt:
    """Observer of an engine that pauses request 5 in the step of a ticket, so that the engine's
    thread leaves the reader of its stream behind by no more than that."""

    def __init__(self, engine: DynamicInferenceEngine, ticket: int) -> None:
        self.engine, self.ticket = engine, ticket
        self.has_come = threading.Event()

    def on_commit(self, report: StepReport) -> None:
        if report.ticket == self.ticket:
            assert self.engine.pause_request(5)
            self.has_come.set()


class NoSink:
    """Takes everything."""

    def deliver(self, taken: Any) -> None:
        """Nothing comes."""

    def fail(self, error: Any) -> None:
        """It does not."""


def test_a_batch_masks_prompts_padding_and_tokens_that_are_too_old() -> None:
    common: dict[str, Any] = {"log_probs_mode": "raw", "seed": 1}
    partial = Rollout(
        prompt_tokens=(1, 2), generated_tokens=(3, 4, 5), log_probs=(-1.0, -2.0, -3.0),
        weight_spans=(WeightSpan(0, 0), WeightSpan(2, 1)), finish_reason=FinishReason.STOP,
        **common,
    )  # fmt: skip
    cut = Rollout(
        prompt_tokens=(6,), generated_tokens=(7,), log_probs=(-4.0,),
        weight_spans=(WeightSpan(0, 1),), finish_reason=FinishReason.LENGTH, **common,
    )  # fmt: skip
    assert partial.weight_versions == (0, 0, 1) and partial.loss_mask == (0, 0, 1, 1, 1)
    assert cut.is_truncated and not partial.is_truncated
    batch = batch_of([partial, cut], pad_token_id=9)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]]
    assert batch.attention_mask.int().tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.log_probs.tolist() == [[0, 0, -1, -2, -3], [0, -4, 0, 0, 0]]
    assert batch.weight_versions.tolist() == [[-1, -1, 0, 0, 1], [-1, 1, -1, -1, -1]]
    fresh = batch_of([partial, cut], oldest_version=1, mask_truncated=True).loss_mask
    assert fresh.int().tolist() == [[0, 0, 0, 0, 1], [0] * 5]
    # An aborted one had not ended by itself either, and was learned from.
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        ended = dataclasses.replace(partial, finish_reason=reason)
        assert not batch_of([ended], mask_truncated=True).loss_mask.any()
        assert batch_of([ended]).loss_mask.any()
    wrong: Any = [
        (([],), {}, "at least one"),
        (([7],), {}, "a int is no rollout"),
        (([cut],), {"pad_token_id": None}, "pad_token_id=None must be an integer"),
        (([cut],), {"oldest_version": 0.5}, "oldest_version=0.5 must be an integer"),
    ]
    for given, options, said in wrong:
        with pytest.raises(RequestError, match=said):
            batch_of(*given, **options)

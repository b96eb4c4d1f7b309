"""A model that gives NaN for one request at one step: it ends with an error, the others go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.errors import ModelOutputError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason, Status
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, drive, engine_at, sampling_params
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep

MARK = 10**12
"""The seed of requests that fail."""
PROMPT = (5, 6, 7)
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}


class FailsAt(HashModel):
    """One NaN among the logits after position ``position`` of requests with the seed MARK."""

    position = 10

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardBatch
    ) -> torch.Tensor:
        logits = super().forward(token_ids, position_ids, context)
        slots = context.token_slots
        if context.last_token_index is not None:
            slots, position_ids = (t[context.last_token_index] for t in (slots, position_ids))
        fails = (context.slots.seed[slots] == MARK) & (position_ids == self.position)
        logits[:, 7] = torch.where(fails, torch.nan, logits[:, 7])
        return logits


class DraftsAndFails(FailsAt, DraftingHashModel):
    """With drafts, of which many are wrong."""


def failing(max_new: int = 30, kind: str = "greedy") -> Ask:
    return Ask(PROMPT, max_new, seed=MARK, **KINDS[kind])  # type: ignore[arg-type]


def others(count: int = 5) -> list[Ask]:
    kinds = list(KINDS.values())
    return [
        Ask((i + 1, i + 2), 20 + 3 * i, seed=i, **kinds[i % 4])  # type: ignore[arg-type]
        for i in range(count)
    ]


def check_failed(request: DynamicInferenceRequest, ask: Ask, position: int) -> None:
    """It has the tokens before the one that the model did not give."""
    assert request.finish_reason is FinishReason.ERROR
    assert request.status is Status.FAILED and not request.succeeded()
    assert request.generated_tokens == decode_alone(ask)[0][: position + 1 - len(ask.prompt)]
    names = [event.type.name for event in request.events]
    assert names == ["ADD", "ERROR_NONTRANSIENT", "FAIL"]
    error = request.events[1].payload
    assert isinstance(error, ModelOutputError)
    assert f"the model gave NaN for the token after {request.generated_length}" in str(error)
    counts = request.counters
    assert counts.launched + counts.accepted == counts.committed + counts.discarded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("depth", DEPTHS)
def test_one_request_fails_and_the_others_go_on_unharmed(
    depth: int, debug: bool, kind: str
) -> None:
    ask, asks = failing(kind=kind), others()
    with engine_at(depth, model=FailsAt(), debug=debug) as engine:
        future = engine.add_request(9, list(ask.prompt), sampling_params(ask))
        futures = [
            engine.add_request(i, list(other.prompt), sampling_params(other))
            for i, other in enumerate(asks)
        ]
        outputs: list[TokenOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step_modern()["tokens"]
        request = future.result(timeout=0)
        check_failed(request, ask, FailsAt.position)
        assert request.counters.discarded == 1 + depth  # the row that failed, those behind it
        mine = [output for output in outputs if output.request_id == 9]
        assert [o.token_id for o in mine] == [*request.generated_tokens, None]
        assert [o.finish_reason for o in mine][-2:] == [None, FinishReason.ERROR]
        for other, done in zip(asks, futures, strict=True):
            got = done.result(timeout=0)
            assert (got.generated_tokens, got.finish_reason) == decode_alone(other)
            assert got.counters.discarded == 0
        assert engine.counters.tokens_discarded == 1 + depth
        assert engine.scheduler.allocator.free_count == 60
        # Slot and blocks serve others, and the same prompt too.
        (again,) = engine.generate([list(PROMPT)], sampling_params(Ask(PROMPT, 30)))
        assert again.generated_tokens == decode_alone(Ask(PROMPT, 30))[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_whose_first_token_fails_has_none(depth: int) -> None:
    model = FailsAt()
    model.position = 19
    ask = Ask(tuple(range(20)), 10, seed=MARK)
    with engine_at(depth, model=model, prefill_chunk_tokens=8) as engine:
        futures = [engine.add_request(i, list(ask.prompt), sampling_params(ask)) for i in range(2)]
        drive(engine)
    for future in futures:
        check_failed(future.result(timeout=0), ask, 19)
        assert future.result(timeout=0).generated_tokens == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_last_token_of_a_request_may_fail(depth: int) -> None:
    ask = failing(max_new=FailsAt.position + 2 - len(PROMPT))
    with engine_at(depth, model=FailsAt()) as engine:
        (request,) = engine.generate([list(PROMPT)], sampling_params(ask))
    check_failed(request, ask, FailsAt.position)
    assert request.generated_length == ask.max_new - 1 and request.counters.discarded == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_nan_behind_the_end_of_a_request_is_nothing(depth: int) -> None:
    """Rows that run over a stop token are garbage anyway."""
    ask = failing()
    tokens, _ = decode_alone(ask)
    last = FailsAt.position - len(PROMPT)  # the row of this token is the one that fails
    assert tokens[last] not in tokens[:last]
    stopping = Ask(PROMPT, 30, (tokens[last],), seed=MARK)
    with engine_at(depth, model=FailsAt()) as engine:
        (request,) = engine.generate([list(PROMPT)], sampling_params(stopping))
    assert (request.generated_tokens, request.finish_reason) == decode_alone(stopping)
    assert request.counters.discarded == depth


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("window", (2, 3, 4))
def test_a_window_of_drafts_keeps_the_tokens_before_the_nan(window: int, depth: int) -> None:
    ask, asks = failing(), others(3)
    model = DraftsAndFails(window - 1, error_rate=0.3)
    with engine_at(depth, model=model) as engine:
        all_asks = [ask, *asks]
        request, *rest = engine.generate(
            [list(a.prompt) for a in all_asks], [sampling_params(a) for a in all_asks]
        )
        assert engine.counters.tokens_accepted > 0
    check_failed(request, ask, FailsAt.position)
    assert [r.generated_tokens for r in rest] == [decode_alone(other)[0] for other in asks]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_evicted_request_that_fails_is_as_one_that_was_not(depth: int) -> None:
    ask = failing()
    with engine_at(depth, model=FailsAt()) as engine:
        future = engine.add_request(0, list(PROMPT), sampling_params(ask))
        while engine.get_request(0).counters.launched < 5:
            engine.step_modern()
        engine.evict_request(0)
        drive(engine)
        request = future.result(timeout=0)
    assert request.counters.evictions == 1
    assert request.finish_reason is FinishReason.ERROR
    assert request.generated_tokens == decode_alone(ask)[0][: FailsAt.position + 1 - len(PROMPT)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("depth", DEPTHS)
def test_one_request_fails_on_a_gpu(depth: int, debug: bool, kind: str) -> None:
    ask, asks = failing(kind=kind), others()
    model = FailsAt("cuda")
    with engine_at(depth, model=model, device_name="cuda", debug=debug) as engine:
        all_asks = [ask, *asks]
        request, *rest = engine.generate(
            [list(a.prompt) for a in all_asks], [sampling_params(a) for a in all_asks]
        )
    check_failed(request, ask, FailsAt.position)
    assert request.counters.discarded == 1 + depth
    assert [r.generated_tokens for r in rest] == [decode_alone(other)[0] for other in asks]


def test_a_stream_ends_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    ask = failing()

    async def main(engine: Any) -> list[TokenOutput]:
        return [output async for output in engine.stream(list(PROMPT), sampling_params(ask))]

    with caplog.at_level(logging.WARNING), engine_at(1, model=FailsAt()) as engine:
        outputs = asyncio.run(main(engine))
    assert [o.token_id for o in outputs] == [*decode_alone(ask)[0][: len(outputs) - 1], None]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    (record,) = [r for r in caplog.records if "has ended" in r.getMessage()]
    assert "gave NaN" in record.getMessage()


def test_text_before_the_nan_is_kept() -> None:
    class Tokenizer:
        eod = None

        def detokenize(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    with engine_at(1, model=FailsAt()) as engine:
        engine.outputs._tokenizer = Tokenizer()
        params = SamplingParams(
            temperature=0.0, num_tokens_to_generate=20, seed=MARK, termination_id=-1
        )
        (request,) = engine.generate([list(PROMPT)], params)
    assert request.finish_reason is FinishReason.ERROR and request.generated_length == 8
    assert request.generated_text == " ".join(map(str, request.generated_tokens))

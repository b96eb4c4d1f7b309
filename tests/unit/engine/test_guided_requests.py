"""Grammars, stop words and logits processors inside the chain, at every depth and in every event.

The hash model with a tokenizer of its ids: its text is noise unless something guides it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import GuidedRow, NotOverlapped
from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.errors import ReentrantCallError, RequestError
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.hash_tokenizer import hash_tokenizer

pytestmark = pytest.mark.sweep

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer", "maximum": 99}, "c": {"enum": [True, None]}},
    "required": ["ab", "c"],
    "additionalProperties": False,
}
END = hash_tokenizer().eod
LENGTH = 60


def params(**values: Any) -> SamplingParams:
    values = {"temperature": 1.2, "num_tokens_to_generate": LENGTH, "seed": 5, **values}
    return SamplingParams(**values)


GUIDED: dict[str, SamplingParams] = {
    "schema": params(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}),
    "greedy schema": params(
        temperature=0.0, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}
    ),
    "regex": params(structured_outputs={"regex": "[a-f]{3,9}[0-9]+é?x"}, return_log_probs=True),
    "choice": params(structured_outputs={"choice": ["abcabc", "null", "true false"]}),
    "no end token": params(structured_outputs={"regex": "(ab|cd){7}"}, ignore_eos=True),
    "stop word": params(stop_words=["b", "12"], ignore_eos=True),
    "plain": params(ignore_eos=True),
    "penalties": params(structured_outputs={"regex": "[a-z ]{20}"}, presence_penalty=1.0),
}
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
DEVICES = ("cpu", pytest.param("cuda", marks=ON_GPU))
EVENTS = ("none", "pauses", "evictions", "updates", "arrivals", "drafts")


def engine(depth: int, device: str = "cpu", **values: Any) -> DynamicInferenceEngine:
    values = {"max_requests": 5, "block_size_tokens": 4, "block_count": 100, **values}
    jitter = depth if device == "cpu" else None
    return hash_engine(
        depth, tokenizer=hash_tokenizer(), jitter_seed=jitter, device_name=device, **values
    )


def run(
    depth: int, event: str, device: str = "cpu", **values: Any
) -> tuple[dict[str, DynamicInferenceRequest], Any]:
    drafts: dict[str, Any] = {**values}
    if event == "drafts" and device == "cpu":
        drafts["model"] = DraftingHashModel(2, 0.2)
    elif event == "drafts":  # the hash model drafts on the host, which no graph can capture
        drafts.update(num_speculative_tokens=2, speculative_method="ngram")
    with engine(depth, device, **drafts) as made:
        futures: dict[str, Any] = {}
        waiting = list(GUIDED.items())
        step = 0
        while waiting or made.has_unfinished_requests():
            while waiting and (event != "arrivals" or step % 3 == 0):
                name, asked = waiting.pop(0)
                futures[name] = made.add_request(len(futures), [7, len(futures), 9], asked)
                if event == "arrivals":
                    break
            for request_id in range(len(GUIDED)):
                if event == "pauses" and (step + request_id) % 9 == 4:
                    made.pause_request(request_id)
                if event == "pauses" and (step + request_id) % 9 == 7:
                    made.resume_request(request_id)
            if event == "evictions" and step % 3 == 2:
                made.evict_request(step // 3 % len(GUIDED))
            if event == "updates" and step == 5:
                made.update_sampling_params(0, top_k=50)  # of so few: no other tokens
            made.step_modern()
            step += 1
            assert step < 3000
        return {name: future.result(0) for name, future in futures.items()}, made.counters


@functools.cache
def serial() -> dict[str, tuple[list[int], str | None, FinishReason | None]]:
    return {name: what_came(request) for name, request in run(0, "none")[0].items()}


def what_came(
    request: DynamicInferenceRequest,
) -> tuple[list[int], str | None, FinishReason | None]:
    return request.generated_tokens, request.generated_text, request.finish_reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_guided_requests_are_those_of_serial_decoding(depth: int, event: str, device: str) -> None:
    requests, counters = run(depth, event, device)
    for name, request in requests.items():
        assert what_came(request) == serial()[name], name
        counts = request.counters
        assert counts.launched + counts.accepted == counts.committed + counts.discarded, name
    texts = {name: request.generated_text or "" for name, request in requests.items()}
    for name in ("schema", "greedy schema"):
        found = json.loads(texts[name])
        assert set(found) == {"ab", "c"} and found["ab"] <= 99 and found["c"] in (True, None)
    assert re.fullmatch("[a-f]{3,9}[0-9]+é?x", texts["regex"])
    assert texts["choice"] in ("abcabc", "null", "true false")
    assert re.fullmatch("(ab|cd){7}", texts["no end token"])
    assert requests["no end token"].generated_tokens[-1] != END
    assert requests["schema"].generated_tokens[-1] == END
    assert "b" not in texts["stop word"] and "12" not in texts["stop word"]
    assert requests["stop word"].finish_reason is FinishReason.STOP
    assert requests["stop word"].stop_reason in ("b", "12")
    assert requests["plain"].finish_reason is FinishReason.LENGTH
    if depth and event in ("none", "drafts"):
        # Guided steps overlap, at depth 1 at most; the last are plain.
        assert counters.barriers == 0
        assert counters.steps_overlapped == counters.steps_committed - 1
        depths = {report.effective_depth for report in requests["schema"].steps}
        assert depths == {1}
        if depth > 1:
            assert max(r.effective_depth for r in requests["plain"].steps) == depth
    guided = [r for r in requests.values() if r.sampling_params.structured_outputs is not None]
    if event == "drafts":
        assert requests["plain"].counters.accepted > 0
        for name in ("greedy schema", "schema", "regex", "no end token", "penalties"):
            assert requests[name].counters.drafted > 0, name
        assert sum(r.counters.accepted for r in guided) > 0
    if event == "evictions":
        assert counters.evictions > 0
    rows, ways = sum(r.counters.launched for r in guided), counters.guided_rows
    assert ways.total() == rows and ways[GuidedRow.TOKEN] > 0
    assert (ways[GuidedRow.WINDOW] > 0) == (event == "drafts")


def test_witness_nothing_conforms_by_itself() -> None:
    with engine(0) as made:
        bare = params(ignore_eos=True)
        (request,) = made.generate([[7, 0, 9]], bare)
    with pytest.raises(ValueError):
        json.loads(request.generated_text or "")


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_was_sampled_behind_a_stop_word_is_discarded(depth: int) -> None:
    with engine(depth) as made:
        (request,) = made.generate([[7, 5, 9]], GUIDED["stop word"])
        counters = made.counters
    assert request.counters.discarded == min(depth, 1) * request.counters.discarded
    assert request.counters.launched == request.counters.committed + request.counters.discarded
    assert counters.tokens_discarded == request.counters.discarded
    assert (request.counters.discarded > 0) == (depth > 0)


# --- logits processors ------------------------------------------------------------------------


def only_even(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[1::2] = -torch.inf
    return logits


def not_the_last(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[tokens[-1]] = -torch.inf
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_logits_processors_are_barriers_with_their_reason(depth: int, device: str) -> None:
    asked = params(
        logits_processors=[only_even, not_the_last], num_tokens_to_generate=12, ignore_eos=True,
        return_log_probs=True,
    )  # fmt: skip
    plain = params(num_tokens_to_generate=30, ignore_eos=True)
    with engine(depth, device) as made:
        first = made.add_request(0, [7, 1, 9], asked)
        second = made.add_request(1, [7, 2, 9], plain)
        while made.has_unfinished_requests():
            made.step_modern()
        counters = made.counters
    request, other = first.result(0), second.result(0)
    tokens = request.generated_tokens
    assert len(tokens) == 12 and all(token % 2 == 0 for token in tokens)
    assert all(a != b for a, b in zip([9, *tokens], tokens, strict=False))
    with engine(0) as made:
        (again,) = made.generate([[7, 1, 9]], asked)
        (alone,) = made.generate([[7, 2, 9]], plain)
        (bare,) = made.generate([[7, 1, 9]], params(num_tokens_to_generate=12, ignore_eos=True))
    assert again.generated_tokens == tokens != bare.generated_tokens
    assert again.generated_log_probs == request.generated_log_probs
    assert other.generated_tokens == alone.generated_tokens
    if depth:
        # One for each of its steps, and none for the rest.
        assert counters.not_overlapped[NotOverlapped.LOGITS_PROCESSOR] == 12
    assert counters.guided_rows == {GuidedRow.PROCESSOR: 12}
    if depth:
        assert counters.barriers == 12
        assert counters.steps_overlapped >= 16


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_logits_processor_that_fails_ends_its_request_alone(depth: int) -> None:
    def fails(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 6:
            raise ZeroDivisionError("of its own making")
        return logits[:-1] if len(tokens) == 60 else logits

    with engine(depth) as made:
        bad, good = made.generate(
            [[1, 2, 3], [1, 2, 4]],
            [
                params(logits_processors=[fails], ignore_eos=True),
                params(ignore_eos=True),
            ],
        )
    assert bad.finish_reason is FinishReason.ERROR and len(bad.generated_tokens) == 3
    assert any(isinstance(event.payload, ZeroDivisionError) for event in bad.events)
    assert good.finish_reason is FinishReason.LENGTH and len(good.generated_tokens) == LENGTH


@pytest.mark.parametrize("raised", (SystemExit, asyncio.CancelledError, KeyboardInterrupt))
@pytest.mark.parametrize("own_thread", (False, True))
@pytest.mark.parametrize("depth", (0, 1))
def test_whatever_a_logits_processor_raises_no_other_request_suffers(
    depth: int, own_thread: bool, raised: type[BaseException]
) -> None:
    """Ctrl-C in the thread that steps is that thread's, and nothing is lost by it."""
    left = [1]

    def raises_once(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 5 and left:
            left.pop()
            raise raised("of a processor")
        return logits

    is_interrupt = raised is KeyboardInterrupt and not own_thread
    with engine(depth) as made:
        plain = made.add_request(0, [1, 2, 4], params(ignore_eos=True))
        bad = made.add_request(1, [1, 2, 3], params(logits_processors=[raises_once]))
        interrupts = 0
        if own_thread:
            made.start()
        while not own_thread and made.has_unfinished_requests():
            try:
                made.step_modern()
            except KeyboardInterrupt:
                interrupts += 1
        requests = plain.result(timeout=60), bad.result(timeout=60)
        (alone,) = made.generate([[1, 2, 4]], params(ignore_eos=True))
    assert interrupts == is_interrupt
    assert requests[0].generated_tokens == alone.generated_tokens
    if is_interrupt:
        assert requests[1].succeeded()
    else:
        assert requests[1].finish_reason is FinishReason.ERROR
        assert len(requests[1].generated_tokens) == 2


@pytest.mark.parametrize("depth", (0, 1))
def test_a_logits_processor_that_steps_the_engine_ends_its_request_alone(depth: int) -> None:
    def steps(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        (made.step_modern, made.suspend, made.reset)[len(tokens) % 3]()
        return logits

    with engine(depth) as made:
        asked = [params(logits_processors=[steps]), params(ignore_eos=True)]
        for prompt in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
            bad, good = made.generate([prompt, [9, 9]], asked)
            assert bad.finish_reason is FinishReason.ERROR and not bad.generated_tokens
            assert any(isinstance(event.payload, ReentrantCallError) for event in bad.events)
            assert len(good.generated_tokens) == LENGTH


@pytest.mark.parametrize("odd", (torch.Tensor.to_sparse, lambda logits: logits.to("meta")))
def test_odd_tensors_of_a_logits_processor_end_its_request_alone(odd: Any) -> None:
    with engine(1) as made:
        bad, good = made.generate(
            [[1, 2], [1, 3]],
            [
                params(logits_processors=[lambda tokens, logits: odd(logits)]),
                params(ignore_eos=True),
            ],
        )
    assert bad.finish_reason is FinishReason.ERROR
    assert len(good.generated_tokens) == LENGTH


@pytest.mark.parametrize("depth", (0, 1))
def test_what_logits_processors_do_to_their_arguments_stays_with_them(depth: int) -> None:
    seen: list[list[int]] = []

    def spoils(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        tokens[:] = [0]
        result = logits.clone()
        logits.fill_(float("nan"))
        return result

    def looks(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        return logits

    with engine(depth) as made:
        asked = params(num_tokens_to_generate=9, ignore_eos=True, return_log_probs=True)
        functions = dataclasses.replace(asked, logits_processors=[spoils, looks])
        request, expected = made.generate([[7, 1, 9]] * 2, [functions, asked])
    assert request.prompt_tokens == [7, 1, 9]
    assert request.generated_tokens == expected.generated_tokens
    assert request.generated_log_probs == expected.generated_log_probs
    assert seen == [[7, 1, 9, *request.generated_tokens[:count]] for count in range(9)]


# --- at the door ------------------------------------------------------------------------------


def test_grammars_are_refused_at_the_door_and_nothing_is_lost() -> None:
    with engine(1) as made:
        future = made.add_request(0, [1, 2], params(ignore_eos=True))
        for bad, named in (
            ({"regex": "(("}, "regex"),
            ({"json": "{"}, "json"),
            ({"grammar": "rot ::= "}, "grammar"),
            ({}, "structured_outputs"),
            ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ):
            with pytest.raises(RequestError, match=named):
                made.add_request(1, [1, 2], params(structured_outputs=bad))
        while not future.done():
            made.step_modern()
        assert len(future.result().generated_tokens) == LENGTH


def test_without_a_tokenizer_grammars_are_refused() -> None:
    with (
        hash_engine(1, max_requests=2, block_count=8) as made,
        pytest.raises(RequestError, match="tokenizer"),
    ):
        made.add_request(0, [1], params(structured_outputs={"regex": "a"}))


def test_extras_turned_off_are_refused_and_plain_requests_run() -> None:
    with engine(1, model=HashModel(), enable_sampling_extras=False) as made:
        for asked in (
            {"presence_penalty": 1.0},
            {"return_log_probs": True},
            {"structured_outputs": {"regex": "a"}},
        ):
            with pytest.raises(RequestError, match="enable_sampling_extras"):
                made.add_request(0, [1], params(**asked))
        (request,) = made.generate([[1, 2, 3]], params(ignore_eos=True, stop_words=["zzzz"]))
    assert request.finish_reason is FinishReason.LENGTH
    assert all(0 <= token < VOCAB_SIZE for token in request.generated_tokens)


# --- streams ----------------------------------------------------------------------------------


class SlowCompile:
    """Compiling waits until it is released; ``waited`` has False where nobody did in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.waited: list[bool] = []
        real = GrammarCompiler._compile

        def compile(compiler: GrammarCompiler, spec: Any) -> Any:
            self.begun.set()
            self.waited.append(self.released.wait(timeout=5))
            return real(compiler, spec)

        monkeypatch.setattr(GrammarCompiler, "_compile", compile)

    async def begin(self, stream: AsyncGenerator[TokenOutput, None]) -> asyncio.Task[TokenOutput]:
        """The first token of ``stream``, whose grammar is being compiled."""
        first = asyncio.ensure_future(anext(stream))
        while not self.begun.is_set():
            await asyncio.sleep(0)
        return first


def test_the_event_loop_goes_on_while_a_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SlowCompile(monkeypatch)

    async def main(made: DynamicInferenceEngine) -> str:
        stream = made.stream([7, 1, 9], params(structured_outputs={"regex": "[a-f]{5}"}))
        first = await slow.begin(stream)
        others = [output.text or "" async for output in made.stream([7], params(ignore_eos=True))]
        assert len(others) == LENGTH and not first.done()
        slow.released.set()
        return ((await first).text or "") + "".join([o.text or "" async for o in stream])

    with engine(1) as made:
        assert re.fullmatch("[a-f]{5}", asyncio.run(main(made)))
    assert slow.waited == [True]  # and it is compiled once


def test_a_stream_that_is_given_up_while_its_grammar_is_compiled_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SlowCompile(monkeypatch)

    async def main(made: DynamicInferenceEngine) -> None:
        stream = made.stream([7, 1, 9], params(structured_outputs={"regex": "[a-f]{5}"}))
        first = await slow.begin(stream)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        slow.released.set()
        with pytest.raises(RequestError, match="regex"):
            await anext(made.stream([7], params(structured_outputs={"regex": "(("})))

    with engine(1) as made:
        asyncio.run(main(made))
        assert not len(made.streams) and not made.has_unfinished_requests()

"""Engines, requests and models called as megatron-core's are."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import open_device
from megatron_async.engine.engine import DynamicInferenceEngine as OurEngine
from megatron_async.errors import ConfigError, RequestError, RequestTooLongError
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineState,
    EngineSuspendedError,
    GPTInferenceWrapper,
    InferenceConfig,
    MegatronAsyncLLM,
    MegatronLLM,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.megatron_api import engine as megatron_engine
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture, Status
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stock_model import (
    VOCAB,
    Tokenizer,
    no_gpu,  # noqa: F401
    stock_model,
)

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.inference.sampling_params import SamplingParams as TheirParams  # isort: skip
from megatron.core.inference.text_generation_controllers.text_generation_controller import (  # isort: skip
    TextGenerationController as TheirController,
)
from megatron.core.transformer.module import Float16Module  # isort: skip

GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=8, termination_id=-1)


@pytest.fixture(scope="module")
def model() -> Any:
    return stock_model()


def build(
    model: Any, config: EngineConfig | None = None, tokenizer: Any = None, **keywords: Any
) -> Any:
    """An engine as a script for core_v0.16.1 builds it."""
    sizes: dict[str, Any] = {
        "params_dtype": next(model.parameters()).dtype,
        "num_layers": 2,
        "kv_channels": 16,
        "num_attention_heads": 2,
        "max_sequence_length": 32,
        "buffer_size_gb": 0.001,
        "block_size_tokens": 4,
        "max_requests": 2,
    }
    context = DynamicInferenceContext(**(sizes | keywords))
    wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped, tokenizer or Tokenizer())
    return DynamicInferenceEngine(controller, context, random_seed=1, config=config)


def run(engine: Any) -> list[Any]:
    records = []
    while engine.has_unfinished_requests():
        records += engine.step_modern()["finished_request_records"]
    return records


# --- requests ----------------------------------------------------------------------------------


def test_a_request_that_is_too_long_becomes_a_failed_record(model: Any) -> None:
    engine = build(model, EngineConfig(inference_async_scheduling=True))
    future = engine.add_request(0, "a" * 30, GREEDY)
    engine.add_request(1, "abc", GREEDY)
    blocked = engine.add_request(2, [1] * 32, SamplingParams(num_tokens_to_generate=1))
    records = run(engine)
    assert [record.request_id for record in records] == [0, 2, 1]
    failed = records[0][-1]
    assert failed.failed() and not failed.succeeded() and failed.status is Status.FAILED
    assert failed.prompt_tokens.tolist() == [65] * 30 and failed.generated_tokens == []
    assert [event.type.name for event in failed.events] == ["ERROR_NONTRANSIENT", "FAIL"]
    assert isinstance(failed.events[0].payload, RequestTooLongError)
    assert future.result() is records[0] and blocked.result() is records[1]
    assert records[2].succeeded() and len(records[2].generated_tokens) == 8
    (again,) = engine.generate(["a" * 30], GREEDY)
    assert again.failed()
    with pytest.raises(RequestError, match="prompt is empty"):  # the others still raise
        engine.add_request(3, [], GREEDY)
    other = engine.with_config(EngineConfig(max_requests=2, max_sequence_length=32))
    assert other.add_request(0, "a" * 30, GREEDY).result().failed()  # however it is built
    other.close()
    engine.close()
    ours = OurEngine.from_pretrained("tiny", EngineConfig(device="cpu", max_sequence_length=32))
    with pytest.raises(RequestTooLongError, match="exceed the maximum sequence length"):
        ours.add_request(0, "a" * 30, GREEDY)
    ours.close()


def test_a_request_that_the_cache_never_holds_becomes_a_failed_record(model: Any) -> None:
    engine = build(model, buffer_size_gb=None, block_count=3)
    engine.add_request(0, "abcdefgh", GREEDY)
    (record,) = run(engine)
    assert record.failed() and "KV blocks" in str(record.events[0].payload)
    engine.close()


def test_a_record_has_what_scripts_ask_of_it(model: Any) -> None:
    engine = build(model)
    params = TheirParams(top_k=1, num_tokens_to_generate=8, return_log_probs=True, top_n_logprobs=2)
    future = engine.add_request(7, "abcde", params)
    (record,) = run(engine)
    request = record.merge()
    assert record.requests == [request] and record[-1] is record[0] is request
    with pytest.raises(IndexError):
        record[1]
    assert future.result() is record
    assert len(request.prompt_tokens) == request.prompt_length == 5
    assert request.prompt_tokens[0] == 65 and request.prompt_tokens[1:3] == [66, 67]
    ids = request.prompt_tokens
    assert ids.tolist() == [65, 66, 67, 68, 69]
    assert ids.numel() == ids.size(0) == ids.size(-1) == 5 and ids.shape == ids.size() == (5,)
    with pytest.raises(IndexError):
        ids.size(1)
    tops = request.prompt_top_n_logprobs + request.generated_top_n_logprobs
    assert len(tops) == 4 + 8
    for token, own, top in zip(
        request.generated_tokens,
        request.generated_log_probs,
        request.generated_top_n_logprobs,
        strict=True,
    ):
        assert next(iter(top)) == Tokenizer().detokenize([token]) and top[next(iter(top))] == own
    assert len(request.prompt_log_probs + request.generated_log_probs) == 4 + 8
    assert request.ttft == request.tpot[0] and request.num_cached_tokens == 0
    assert request.tracked_metadata == [1.0, 1, 0.0, -1, True, False, 2]
    names = [name for name, dtype, _ in request.get_metadata_types()]
    assert names[3] == "termination_id" and len(names) == len(request.tracked_metadata)
    assert request.get_metadata_types()[0][1] is torch.float32
    engine.close()


class Begins(Tokenizer):
    """Puts a begin token in front, and for ``~`` one more."""

    def tokenize(self, text: str) -> list[int]:
        begin = [self.bos] if text[:1] != "~" else [self.bos, self.bos]
        return begin + super().tokenize(text)


class NoBegin(Tokenizer):
    """One without a begin token, as megatron's base class has it."""

    @property
    def bos(self) -> int:  # type: ignore[override]
        raise NotImplementedError("no bos")


@pytest.mark.parametrize("add_begin", (False, True))
@pytest.mark.parametrize("text", ("a+b", "~ c"))
def test_begin_tokens_are_those_of_megatron_core(model: Any, text: str, add_begin: bool) -> None:
    """Whatever the tokenizer puts in front; asked of a controller, and of the class, as each
    release does."""
    tokenizer = Begins()
    theirs: Any = TheirController.tokenize_prompt
    is_static = "tokenizer" in inspect.signature(theirs).parameters
    asked = tokenizer if is_static else SimpleNamespace(tokenizer=tokenizer)
    expected = theirs(asked, text, add_begin)
    assert expected.count(tokenizer.bos) == int(add_begin)
    engine = build(model, tokenizer=tokenizer)
    controller = engine.controller
    assert controller.tokenize_prompt(text, add_begin) == expected
    assert controller.tokenize_prompt(tokenizer, text, add_BOS=add_begin) == expected
    of_class = TextGenerationController.tokenize_prompt
    assert of_class(tokenizer, text, add_begin) == expected
    assert of_class(tokenizer=tokenizer, prompt=text, add_BOS=add_begin) == expected
    params = dataclasses.replace(GREEDY, add_BOS=add_begin)
    (record,) = engine.generate([text], params)
    (same,) = engine.generate([expected], params)
    assert list(record.prompt_tokens) == expected
    assert record.generated_tokens == same.generated_tokens
    engine.close()


def test_a_tokenizer_without_a_begin_token_serves(model: Any) -> None:
    engine = build(model, tokenizer=NoBegin())
    (record,) = engine.generate(["ab"], GREEDY)
    assert list(record.prompt_tokens) == Tokenizer().tokenize("ab")
    with pytest.raises(RequestError, match="no begin token"):
        engine.generate(["ab"], dataclasses.replace(GREEDY, add_BOS=True))
    engine.close()


class Loses(Tokenizer):
    """Cannot show a token."""

    def detokenize(self, tokens: list[int]) -> str:
        if 3 in tokens:
            raise ValueError("no text for 3")
        return super().detokenize(tokens)


def test_a_record_has_the_text_of_a_prompt_of_token_ids(model: Any) -> None:
    """When it has ended, as theirs; also where it was aborted, and of each that its tokenizer can
    show."""
    engine = build(model, tokenizer=Loses())
    kept = [engine.add_request(1, [33, 34, 35], GREEDY), engine.add_request(2, [3, 34], GREEDY)]
    aborted = engine.add_request(3, torch.tensor([40, 41]), GREEDY)
    engine.step_modern()
    engine.abort_request(3)
    run(engine)
    assert [each.result(0).prompt for each in (*kept, aborted)] == ["ABC", None, "HI"]
    assert kept[1].result(0).succeeded()
    named = engine.add_request(4, [33], dataclasses.replace(GREEDY, stop_words=["zzz"]))
    run(engine)
    assert named.result(0).prompt == "A"
    engine.close()
    with OurEngine(TextGenerationController(model, Tokenizer()).served) as ours:
        assert ours.generate([[33, 34]], GREEDY)[0].prompt is None


class Padded(Tokenizer):
    """Raises for padding behind its vocabulary, as megatron's Hugging Face tokenizers do."""

    vocab_size = 60

    def detokenize(self, tokens: list[int]) -> str:
        if max(tokens, default=0) >= self.vocab_size:
            raise TypeError("'None' is not an instance of 'str'")
        return super().detokenize(tokens)


@pytest.mark.parametrize("depth", (0, 2))
def test_likely_tokens_without_a_text_end_nothing(model: Any, depth: int) -> None:
    """They stand under an empty text, and each request has its tokens."""
    top = dataclasses.replace(GREEDY, top_n_logprobs=20, return_log_probs=True)
    prompts = [[1, 2, 3], [44, 45]]
    engine = build(model, EngineConfig(depth=depth), tokenizer=Padded())
    other = engine.add_request(99, [7, 8], GREEDY)
    records = engine.generate(prompts, top)
    assert other.result(0).succeeded() and not engine.has_unfinished_requests()
    engine.close()
    engine = build(model, tokenizer=Tokenizer())
    expected = engine.generate(prompts, top)
    engine.close()
    for found, known in zip(records, expected, strict=True):
        assert found.succeeded() and found.generated_tokens == known.generated_tokens
        for kind in ("generated_top_n_logprobs", "prompt_top_n_logprobs"):
            for tops, all_tops in zip(getattr(found, kind), getattr(known, kind), strict=True):
                shown = {text: of for text, of in all_tops.items() if ord(text) - 32 < 60}
                hidden = [of for text, of in all_tops.items() if ord(text) - 32 >= 60]
                assert tops == shown | ({"": hidden[0]} if hidden else {})
    assert any("" in tops for each in records for tops in each.generated_top_n_logprobs)


def test_a_request_comes_back_from_json(model: Any) -> None:
    engine = build(model)
    params = SamplingParams(
        num_tokens_to_generate=3, top_n_logprobs=2, n=2, logit_bias={3: 1.5}, stop_words=["zz"]
    )
    done = engine.add_request(0, "abc", params)
    engine.add_request(1, "a" * 40)
    *_, failed = sorted(run(engine), key=lambda r: r.request_id)
    for request in (done.result(), failed):
        data = json.loads(json.dumps(request.serialize()))
        back = DynamicInferenceRequest.deserialize(data)
        assert back.serialize() == request.serialize()
        assert back.prompt_tokens.tolist() == request.prompt_tokens
        assert back.sampling_params == request.sampling_params
    back = DynamicInferenceRequest.deserialize(done.result().serialize())
    assert back.choices[0] is back and back.choices[1].request_id < 0
    assert back.generated_top_n_logprobs == done.result().generated_top_n_logprobs
    assert {type(token) for top in back.generated_top_n_logprobs for token in top} == {str}
    assert back.steps == done.result().steps and back.counters == done.result().counters
    for wrong in ({}, {"request_id": 1, "who": 2}, {"request_id": 1, "status": "GONE"}):
        with pytest.raises(RequestError, match="serialized request"):
            DynamicInferenceRequest.deserialize(wrong)
    engine.close()


def test_their_sampling_params_are_taken(model: Any) -> None:
    engine = build(model)
    ours, theirs = engine.generate(
        ["abc", "abc"],
        [
            SamplingParams(temperature=0.7, top_p=0.9, num_tokens_to_generate=9, seed=None),
            TheirParams(temperature=0.7, top_p=0.9, num_tokens_to_generate=9),
        ],
    )
    assert theirs.sampling_params == ours.sampling_params
    segments = TheirParams(return_segments=True)
    with pytest.raises(RequestError, match="return_segments=True is not supported: TokenOutput"):
        engine.add_request(9, "abc", segments)
    params = TheirParams()
    params.add_attributes({"min_length": 4})
    with pytest.raises(RequestError, match="no argument 'min_length'"):
        engine.add_request(9, "abc", params)
    engine.close()


@dataclasses.dataclass
class _Derived(TheirParams):
    group: str = "a"


class _Further(_Derived):
    pass


def test_parameters_may_be_of_a_class_derived_from_megatrons(model: Any) -> None:
    """Its own fields are left unread, and others are refused by name, as of megatron's own."""
    engine = build(model)
    plain, *derived = (
        kind(temperature=0.7, top_k=3, num_tokens_to_generate=4, **own)
        for kind, own in ((TheirParams, {}), (_Derived, {"group": "b"}), (_Further, {}))
    )
    expected, *found = engine.generate(["abc"] * 3, [plain, *derived])
    assert [each.sampling_params for each in found] == [expected.sampling_params] * 2
    derived[1].add_attributes({"min_length": 4})
    with pytest.raises(RequestError, match="no argument 'min_length'"):
        engine.add_request(9, "abc", derived[1])
    engine.close()


def test_asyncio_waits_for_futures_while_run_engine_steps(model: Any) -> None:
    async def main() -> None:
        engine = build(model, EngineConfig(inference_async_scheduling=True))
        stepping = asyncio.create_task(engine.run_engine())
        futures = [engine.add_request(n, "abc", GREEDY) for n in range(3)]
        done, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert done
        done, pending = await asyncio.wait(futures)
        assert done == set(futures) and not pending
        late = engine.add_request(9, "abc", GREEDY)
        records = await asyncio.gather(late, *futures)
        assert all(record.merge().succeeded() for record in records)
        done, pending = await asyncio.wait([RequestFuture()], timeout=0.001)
        assert not done and len(pending) == 1
        stepping.cancel()
        await stepping
        engine.add_request(10, "abc", GREEDY)
        assert [record.request_id for record in run(engine)] == [10]  # by the caller again
        engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("ends", ("stop", "close"))
def test_stop_ends_run_engine(model: Any, ends: str) -> None:
    async def main() -> None:
        engine = build(model, EngineConfig(inference_async_scheduling=True))
        stepping = asyncio.create_task(engine.run_engine())
        await asyncio.wait([engine.add_request(1, "abc", GREEDY)])
        await asyncio.to_thread(getattr(engine, ends))
        await asyncio.wait_for(stepping, PATIENCE_SECONDS)
        engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("value", [0, True, -2, 1.5, "2"])
def test_a_number_of_graphs_that_there_cannot_be_is_named(model: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_cuda_graphs=.*at least 1; None and -1 capture all"):
        DynamicInferenceContext(model.config, small(num_cuda_graphs=value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer_size_gb", float("nan")),
        ("buffer_size_gb", float("inf")),
        ("buffer_size_gb", "1"),
        ("params_dtype", "float32"),
        ("num_layers", 2.5),
        ("num_layers", 10**400),
        ("block_size_tokens", None),
    ],
)
def test_context_that_derives_its_rows_names_what_is_wrong(name: str, value: Any) -> None:
    sizes: dict[str, Any] = dict(
        params_dtype=torch.float32, num_layers=2, kv_channels=16, num_attention_heads=2,
        max_sequence_length=64, buffer_size_gb=0.001,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"{name}="):
        DynamicInferenceContext(**{**sizes, name: value})


def test_a_removed_callback_of_an_event_loop_is_not_called() -> None:
    async def main() -> list[str]:
        called: list[str] = []
        future = RequestFuture()
        kept, gone = (lambda _: called.append("kept")), (lambda _: called.append("gone"))
        future.when_done(lambda _: called.append("at once"))
        future.add_done_callback(kept)
        future.add_done_callback(gone)
        assert future.remove_done_callback(gone) == 1
        future.set_result(DynamicInferenceRequest(request_id=0))
        assert called == ["at once"]
        await asyncio.sleep(0)
        return called

    assert asyncio.run(main()) == ["at once", "kept"]


# --- steps -------------------------------------------------------------------------------------


def test_a_suspended_engine_hands_out_what_it_has_and_then_raises(model: Any) -> None:
    engine = build(model, EngineConfig(inference_async_scheduling=True, depth=2))
    engine.add_request(0, "abc", GREEDY)
    for _ in range(4):
        engine.step_modern()
    assert engine.is_decode_only and engine.decode_only.launched
    assert engine.step_count == engine.context.step_count == 4
    assert engine.context.lifetime_prefill_token_count == 3
    engine.suspend()
    engine.suspend()
    assert engine.is_suspended and engine.state is EngineState.SUSPENDED
    assert engine.step_modern()["tokens"]  # those that were in flight
    with pytest.raises(EngineSuspendedError):
        engine.step_modern()
    with pytest.raises(EngineSuspendedError):
        asyncio.run(engine.async_step())
    engine.resume()
    engine.resume()
    result = asyncio.run(engine.async_step())
    assert result["active_request_ids"] == [0]
    active, ended, seconds = engine.step()
    assert active[0].request_id == 0 and not ended and seconds > 0
    assert len(run(engine)[0].generated_tokens) == 8
    assert engine.capture_stats is None
    engine.reset()
    assert engine.step_count == 0
    engine.close()


def test_the_context_says_what_is_in_use(model: Any) -> None:
    engine = build(model, buffer_size_gb=None, block_count=9, paused_buffer_size_gb=2 * BLOCK_GIB)
    context = engine.context
    blocks = context.block_allocator
    assert blocks.total_count == context.block_count + 1 == 10
    assert blocks.paused_count == 2 and blocks.active_count == 7
    assert isinstance(context.max_tokens, int) and not context.has_unfinished_requests()
    for request_id in range(2):
        engine.add_request(request_id, "abcdef", GREEDY)
    engine.step_modern()
    assert context.total_request_count == context.get_active_request_count() == 2
    assert blocks.get_active_used() == blocks.get_total_used() == 4
    engine.pause_request(1)
    engine.step_modern()
    assert context.paused_request_count == 1 and blocks.get_paused_used() == 2
    assert blocks.total_avail == 9 - blocks.get_total_used()
    assert str(blocks).startswith("using: total ")
    engine.close()


BLOCK_GIB = 4 * 2 * 2 * 2 * 16 * 4 / 2**30
"""Of four tokens."""


def test_a_metrics_writer_that_raises_is_left_alone(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[dict[str, float]] = []

    def log(metrics: dict[str, float], commit: bool) -> None:
        calls.append(metrics)
        raise OSError("no network")

    config = EngineConfig(inference_logging_step_interval=2)
    engine = build(model, config, metrics_writer=SimpleNamespace(log=log))
    (record,) = engine.generate(["abc"], GREEDY)
    assert record.succeeded() and len(calls) == 1
    assert calls[0]["inference/active_request_count"] == 1
    assert sum("is not called again" in line for line in caplog.messages) == 1
    engine.close()


@pytest.mark.parametrize(("budget", "evictions"), ((None, 1), (6, 1), (3, 2)))
def test_requests_that_wait_for_a_block_keep_what_the_paused_buffer_holds(
    model: Any, budget: int | None, evictions: int
) -> None:
    """Three requests in nine blocks of four tokens, each of which needs four in the end."""
    gib = None if budget is None else budget * BLOCK_GIB
    engine = build(
        model, buffer_size_gb=None, block_count=9, paused_buffer_size_gb=gib, max_requests=3
    )
    (alone,) = engine.generate(["abcdefg"], GREEDY)
    engine.reset()
    for request_id in range(3):
        engine.add_request(request_id, "abcdefg", GREEDY)
    records = run(engine)
    assert engine.counters.stalls > 0
    assert engine.evicted_request_count == evictions
    assert all(record.generated_tokens == alone.generated_tokens for record in records)
    engine.close()


# --- models ------------------------------------------------------------------------------------


def test_wrappers_are_taken_off_the_model() -> None:
    wrapped = stock_model(bf16=True, params_dtype=torch.bfloat16)
    gpt = Float16Module(wrapped.config, wrapped)
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    for outer in (gpt, ddp, [gpt]):
        wrapper = GPTInferenceWrapper(outer, SimpleNamespace(), None)
        assert wrapper.model is wrapped
    engine = build(ddp)
    (record,) = engine.generate(["abc"], GREEDY)
    assert len(record.generated_tokens) == 8
    engine.close()


def test_both_values_of_the_graph_options_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = None
    for impl in ("none", "local"):
        own = stock_model()
        own.config.cuda_graph_impl = impl  # which no CPU builds a model with
        engine = build(own)
        assert own.config.cuda_graph_impl == "none"
        (record,) = engine.generate(["abc"], GREEDY)
        expected = expected or record.generated_tokens
        assert record.generated_tokens == expected
        engine.close()
    opened = []

    def noted(*arguments: Any, **options: Any) -> Any:
        opened.append(options)
        return open_device(*arguments, **options)

    monkeypatch.setattr(megatron_engine, "open_device", noted)
    for value in (False, True):
        context = build(model).context
        controller = TextGenerationController(model, Tokenizer(), pp_group=None)
        with pytest.raises(ConfigError, match="serves another engine"):
            DynamicInferenceEngine(controller, context, value, 0)
        context = DynamicInferenceContext(model.config, small())
        engine = DynamicInferenceEngine(controller, context, value, 0)
        assert engine.enable_cuda_graph is value
        assert engine.cuda_graph_impl == ("local" if value else "none")
        engine.close()
    assert opened[-1] == {"graphs": False} and len(opened) == 2, "of an engine that was not built"


# --- the main branch ---------------------------------------------------------------------------


def small(**changes: Any) -> InferenceConfig:
    fields: dict[str, Any] = {
        "buffer_size_gb": 0.001,
        "block_size_tokens": 4,
        "max_sequence_length": 32,
        "max_requests": 2,
    }
    return InferenceConfig(**(fields | changes))


def test_an_inference_config_says_how_the_engine_runs(model: Any) -> None:
    config = small(
        async_sched_mode="async",
        logprobs_mode="processed_logprobs",
        logging_step_interval=5,
        enable_prefix_caching=True,
        kv_cache_management_mode="recompute",
        use_cuda_graphs_for_non_decode_steps=False,
    )
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), Tokenizer())
    engine = DynamicInferenceEngine(controller=controller, context=context)
    assert engine.depth == 1 and engine.config.inference_logging_step_interval == 5
    assert engine.config.enable_prefix_caching and not engine.config.capture_mixed_steps
    assert engine.random_seed == model.config.inference_sampling_seed
    params = SamplingParams(
        temperature=0.5, top_k=3, return_log_probs=True, seed=1, num_tokens_to_generate=20
    )
    engine.add_request(0, "abc", params)
    for _ in range(4):
        engine.step_modern()
    engine.suspend()
    engine.resume()  # computes the request again
    (record,) = run(engine)
    assert engine.evicted_request_count == 1 and record.failed() is False
    assert record.sampling_params.log_probs_mode == "processed"
    assert context.async_sched_step_count > 10 and context.kv_block_allocator.pool_size == 524
    serial = build(model).generate(["abc"], [params])[0]
    assert record.generated_tokens == serial.generated_tokens
    engine.close()


def test_megatron_llm_generates_pauses_and_takes_weights(model: Any) -> None:
    prompts = ["abc", "megatron"]
    alone = [r.generated_tokens for r in build(model).generate(prompts, GREEDY)]
    direct = MegatronLLM(
        model=model, tokenizer=Tokenizer(), inference_config=small(), use_coordinator=False
    )
    assert [r.generated_tokens for r in direct.generate(prompts, GREEDY)] == alone
    assert direct.generate([], GREEDY) == []
    with pytest.raises(RuntimeError, match="requires use_coordinator=True"):
        direct.pause()
    with pytest.raises(RequestError, match="give a text"):
        direct.generate(("abc",), GREEDY)  # type: ignore[arg-type]
    direct.shutdown()
    other = {name: value * 1.5 for name, value in model.state_dict().items() if "weight" in name}
    before = {name: model.state_dict()[name].clone() for name in other}
    config = EngineConfig(inference_async_scheduling=True, depth=2)
    with MegatronLLM(
        model=[model], tokenizer=Tokenizer(), inference_config=small(), config=config
    ) as llm:
        assert llm.engine.depth == 2 and llm.is_primary_rank
        (one,) = llm.generate([65, 66, 67], GREEDY)
        assert one.generated_tokens == alone[0]
        llm.pause()
        future = llm.engine.add_request(0, "abc", GREEDY)
        llm.suspend()
        assert llm.engine.is_suspended and llm.update_weights(other, partial_update=True) == 1
        llm.resume()
        assert llm.engine.is_suspended and not future.done()
        llm.unpause()
        assert future.result(60).weight_spans[0].version == 1
        llm.update_weights(before, partial_update=True)
        assert llm.generate("abc", GREEDY)[0].generated_tokens == alone[0]
        with pytest.raises(AttributeError, match="megatron-async serve"):
            llm.serve  # noqa: B018
    llm.shutdown()
    llm.wait_for_shutdown()


def test_megatron_async_llm_gives_one_record_for_one_prompt(model: Any) -> None:
    async def main() -> None:
        async with MegatronAsyncLLM(
            model=model, tokenizer=Tokenizer(), inference_config=small(async_sched_mode="async")
        ) as llm:
            one, several = await asyncio.gather(
                llm.generate("abc", GREEDY), llm.generate(["abc", "x"], GREEDY)
            )
            assert one.generated_tokens == several[0].generated_tokens and len(several) == 2
            await llm.pause()
            waiting = asyncio.create_task(llm.generate([65, 66], GREEDY))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await llm.unpause()
            assert (await waiting).merge().succeeded()
            await llm.suspend()
            await llm.resume()
        await llm.wait_for_shutdown()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="needs use_coordinator=True"):
        MegatronAsyncLLM(model=model, tokenizer=None, use_coordinator=False)


def test_a_context_of_a_longer_length_takes_the_models(model: Any) -> None:
    context = DynamicInferenceContext(model.config, small(max_sequence_length=2560))
    engine = DynamicInferenceEngine(TextGenerationController(model, Tokenizer()), context)
    assert engine.max_sequence_length == context.max_sequence_length == 128
    engine.add_request(0, [1] * 128, GREEDY)
    assert run(engine)[0].failed()
    with pytest.raises(ConfigError, match="max_tokens=2 must be above"):
        build(model, max_tokens=2)
    engine.close()


assert VOCAB > 69


def test_an_engine_of_which_a_part_alone_is_batch_invariant_is_refused(model: Any) -> None:
    """The configuration alone changed nothing, and nothing said so."""
    with pytest.raises(ConfigError, match="said to GPTInferenceWrapper and DynamicInferenceCont"):
        build(model, EngineConfig(batch_invariant=True))
    with pytest.raises(ConfigError, match="is not said to GPTInferenceWrapper: give it to both"):
        build(model, batch_invariant=True)
    controller = TextGenerationController(
        GPTInferenceWrapper(model, None, batch_invariant=True), Tokenizer()
    )
    with pytest.raises(ConfigError, match="said to EngineConfig: give it to both GPTInferenceWr"):
        DynamicInferenceEngine(controller, None, config=EngineConfig())


def test_drafts_that_the_context_has_no_room_for_are_refused(model: Any) -> None:
    """They were not drafted, and nobody said so."""
    config = EngineConfig(num_speculative_tokens=2, speculative_method="ngram")
    for drafts in (0, 1):
        with pytest.raises(ConfigError, match=rf"=2 of EngineConfig, and {drafts} of Dynamic"):
            build(model, config, num_speculative_tokens=drafts)
    engine = build(model, config, num_speculative_tokens=2)
    engine.add_request(0, [1, 2, 3] * 4, GREEDY)
    run(engine)
    assert engine.counters.tokens_drafted
    engine.close()


def test_a_fused_rope_of_flashinfer_is_taken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """As NeMo RL gives it."""
    from megatron_async.megatron_api import InferenceConfig

    InferenceConfig(use_flashinfer_fused_rope=True)
    (record,) = caplog.records
    assert "use_flashinfer_fused_rope=True has no effect" in record.getMessage()
    caplog.clear()
    InferenceConfig(use_flashinfer_fused_rope=False)
    assert not caplog.records

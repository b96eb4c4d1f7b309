"""The calls that trainers make of Megatron's engine, in their order: NeMo RL's generation worker,
and Megatron's own ``MegatronLocal``."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import re
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import RequestError
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    EngineState,
    GPTInferenceWrapper,
    InferenceClient,
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingCoordinatorPolicy,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.megatron_api.main_tables import INFERENCE_CONFIG
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stock_hybrid import stock_hybrid
from tests.support.stock_model import no_gpu  # noqa: F401

NEW = 10
LONG = 60
PROMPTS = ("import itertools\nimport ", "def first(items, key=None):\n", "class A")
"""The first two fill a block of the cache."""


def config_of(model: Any, **changes: Any) -> InferenceConfig:
    """The 22 fields that NeMo RL's worker gives, for a model without recurrent layers."""
    mode = KVCacheManagementMode(changes.pop("kv_cache_management_mode", "recompute"))
    return InferenceConfig(
        block_size_tokens=16,
        buffer_size_gb=0.002,
        num_cuda_graphs=4,
        max_tokens=256,
        max_sequence_length=96,
        kv_cache_management_mode=mode,
        static_kv_memory_pointers=mode != "persist",
        use_cuda_graphs_for_non_decode_steps=True,
        use_flashinfer_fused_rope=model.config.params_dtype in (torch.float16, torch.bfloat16),
        sampling_backend="flashinfer",
        use_synchronous_zmq_collectives=True,
        materialize_only_last_token_logits=False,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy("first_prefix_block"),
        pg_collection=object(),
        mamba_inference_state_config=None,
        mamba_memory_ratio=changes.pop("mamba_memory_ratio", None),
        logging_step_interval=0,
        num_speculative_tokens=0,
        logprobs_mode="processed_logprobs",
        max_requests=4,
    )


class Worker:
    """The calls of NeMo RL's worker on one rank, which is the first."""

    def __init__(self, model: Any, tokenizer: Any, **config: Any) -> None:
        self.model = model
        model.config.flash_decode = False
        model.eval()
        self.config = config_of(model, **config)
        context = DynamicInferenceContext(model.config, self.config)
        controller = TextGenerationController(
            inference_wrapped_model=GPTInferenceWrapper(model, context), tokenizer=tokenizer
        )
        self.engine = DynamicInferenceEngine(controller, context)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client: Any = None
        self.run(self._start())

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_SECONDS)

    async def _start(self) -> None:
        address = await self.engine.start_listening_to_data_parallel_coordinator(
            inference_coordinator_port=None, launch_inference_coordinator=True
        )
        self.client = InferenceClient(inference_coordinator_address=address, deserialize=True)
        started = self.client.start()
        if started is not None:
            await started

    async def _ended(self) -> None:
        assert self.engine.engine_loop_task is not None
        await self.engine.engine_loop_task

    def params(self, *, greedy: bool = True, new: int = NEW) -> SamplingParams:
        return SamplingParams(
            temperature=0 if greedy else 0.7,
            top_k=1 if greedy else 0,
            top_p=0.0 if greedy else 0.9,
            skip_prompt_log_probs=True,
            return_log_probs=True,
            num_tokens_to_generate=new,
            termination_id=-1,
            stop_words=None,
        )

    async def _ask(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        return await asyncio.gather(*[self.client.add_request(each, params) for each in prompts])

    def generate(self, prompts: list[list[int]], params: Any = None) -> list[Any]:
        answers: list[Any] = self.run(self._ask(prompts, params or self.params()))
        return answers

    def suspend_for_refit(self) -> None:
        async def sleep() -> None:
            self.client.pause_engines()
            await self.engine.wait_until(EngineState.PAUSED)
            self.client.suspend_engines()
            await self.engine.wait_until(EngineState.SUSPENDED)

        self.run(sleep())
        theirs = enum.Enum("EngineState", "SUSPENDED")  # of a trainer that imports the other one
        self.run(self.engine.wait_until(theirs.SUSPENDED))  # type: ignore[arg-type]

    def resume_after_refit(self) -> None:
        async def wake() -> None:
            self.client.resume_engines()
            await self.engine.wait_until(EngineState.RESUMED)
            self.client.unpause_engines()
            await self.engine.wait_until(EngineState.RUNNING)

        self.run(wake())

    def set_generation_epoch(self, epoch: int) -> None:
        self.loop.call_soon_threadsafe(self.client.set_generation_epoch, epoch)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.client.stop)
        self.engine.close()
        self.run(self._ended())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_pretrained("tiny", dtype=torch.bfloat16)


@pytest.fixture
def made(loaded: Any) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    before = {name: value.clone() for name, value in loaded.model.named_parameters()}
    yield workers
    for worker in workers:
        worker.end()
    with torch.no_grad():
        for name, value in loaded.model.named_parameters():
            value.copy_(before[name])


def changed(model: Any) -> None:
    """What a trainer's optimizer does: the parameters are written to where they are."""
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.25)


def in_the_middle(worker: Worker, prompts: list[list[int]]) -> tuple[Any, list[Any]]:
    """Answers to come, and their requests in an engine that was suspended before their end."""
    while True:
        begun = worker.engine.counters.tokens_committed
        asking = worker._ask(prompts, worker.params(new=LONG))
        asked = asyncio.run_coroutine_threadsafe(asking, worker.loop)
        while worker.engine.counters.tokens_committed < begun + 8:
            time.sleep(0.001)
        worker.suspend_for_refit()
        coordinator: Any = worker.engine._service._coordinator
        live = [each.request for each in coordinator._live.values()]
        if len(live) == len(prompts):
            return asked, live
        worker.resume_after_refit()


@pytest.mark.parametrize("mode", ["recompute", "persist"])
def test_the_calls_of_nemo_rls_worker(loaded: Any, made: list[Worker], mode: str) -> None:
    worker = Worker(loaded.model, loaded.tokenizer, kv_cache_management_mode=mode)
    made.append(worker)
    prompts = [loaded.tokenizer.tokenize(prompt) for prompt in PROMPTS]
    old = worker.generate(prompts)
    for prompt, answer in zip(prompts, old, strict=True):
        assert isinstance(answer, DynamicInferenceRequest)
        assert answer.prompt_tokens == prompt and answer.policy_epoch is None
        assert len(answer.generated_tokens) == len(answer.generated_log_probs or ()) == NEW
        assert answer.sampling_params.log_probs_mode == "processed"
    worker.set_generation_epoch(1)
    asked, live = in_the_middle(worker, prompts[:2])
    had = [len(request.generated_tokens) for request in live]
    changed(loaded.model)
    worker.set_generation_epoch(2)
    worker.resume_after_refit()
    for answer, before in zip(asked.result(PATIENCE_SECONDS), had, strict=True):
        assert len(answer.generated_tokens) == LONG
        position = answer.prompt_length + before - 1
        assert answer.policy_epoch == [(0, 1), (position, 2)]
        whole = [(0, 2)] if mode == "recompute" else answer.policy_epoch
        assert answer.kv_cache_epoch == whole
    new = worker.generate(prompts)
    assert [each.policy_epoch for each in new] == [[(0, 2)]] * 3
    # As an engine that never had the old weights: no cached prefix is of them.
    other = Worker(loaded.model, loaded.tokenizer)
    made.append(other)
    assert [(e.generated_tokens, e.generated_log_probs) for e in new] == [
        (e.generated_tokens, e.generated_log_probs) for e in other.generate(prompts)
    ]
    assert [e.generated_tokens for e in new] != [e.generated_tokens for e in old]
    sampled = worker.generate(prompts, worker.params(greedy=False))
    assert all(max(each.generated_log_probs) <= 0.0 for each in sampled)


def test_weights_may_come_as_an_update_too(loaded: Any, made: list[Worker]) -> None:
    worker = Worker(loaded.model, loaded.tokenizer)
    made.append(worker)
    prompts = [loaded.tokenizer.tokenize(prompt) for prompt in PROMPTS]
    worker.generate(prompts)
    worker.suspend_for_refit()
    new = {name: value * 1.25 for name, value in loaded.model.named_parameters()}
    worker.engine.update_weights({name: value.detach() for name, value in new.items()})
    worker.set_generation_epoch(1)
    worker.resume_after_refit()
    for answer in worker.generate(prompts):
        assert [span.version for span in answer.weight_spans] == [1]
        assert answer.policy_epoch == [(0, 1)]


GIVEN = {
    "use_flashinfer_fused_rope", "sampling_backend", "use_synchronous_zmq_collectives",
    "mamba_memory_ratio",
}  # fmt: skip
"""Fields of NeMo RL's that have no effect, and ask for something."""


def test_each_field_of_nemo_rls_is_taken_and_those_without_effect_are_named(
    loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "megatron_async")
    config = config_of(loaded.model, mamba_memory_ratio=0.1)
    messages = [record.getMessage() for record in caplog.records]
    assert {said.partition("=")[0] for said in messages} == GIVEN and len(messages) == len(GIVEN)
    assert all(" has no effect: " in said for said in messages)
    DynamicInferenceContext(loaded.model.config, config)
    assert len(caplog.records) == len(GIVEN)  # once
    known = {field.name for field in dataclasses.fields(InferenceConfig)}
    assert known >= GIVEN and INFERENCE_CONFIG.keys() >= known

    # A config of megatron-core's own is asked when the context is built.
    theirs = dataclasses.make_dataclass("Theirs", [(n, Any, getattr(config, n)) for n in known])
    caplog.clear()
    DynamicInferenceContext(loaded.model.config, theirs())
    assert {r.getMessage().partition("=")[0] for r in caplog.records} == GIVEN


def test_the_state_of_recurrent_layers_has_the_dtype_that_is_asked_for() -> None:
    from megatron_async.megatron_api.inference_config import engine_settings

    @dataclasses.dataclass
    class States:
        layer_type_list: list[str]
        ssm_states_dtype: Any

    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (None, None)):
        config = InferenceConfig(mamba_inference_state_config=States(["M", "*"], dtype))
        assert engine_settings(config).recurrent_state_dtype == name
    # As NeMo RL's worker gives a hybrid model.
    model = stock_hybrid("M-*")
    config = InferenceConfig(
        buffer_size_gb=0.001, block_size_tokens=16, max_sequence_length=64, max_requests=2,
        mamba_inference_state_config=States(list("M-*"), torch.bfloat16), mamba_memory_ratio=0.1,
    )  # fmt: skip
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), None)
    with DynamicInferenceEngine(controller, context) as engine:
        assert engine.config.recurrent_state_dtype == "bfloat16"
        params = SamplingParams(num_tokens_to_generate=NEW, termination_id=-1)
        assert len(engine.generate([[1, 2, 3]], params)[0].generated_tokens) == NEW
    config = InferenceConfig(mamba_inference_state_config=States(["M"], torch.float16))
    with pytest.raises(ValueError, match="ssm_states_dtype=float16 is not supported"):
        engine_settings(config)


def test_the_calls_of_megatrons_trainer(loaded: Any, made: list[Worker]) -> None:
    """``MegatronLocal``: epochs come while it is suspended, and a ledger says them by uid."""
    worker = Worker(loaded.model, loaded.tokenizer)
    made.append(worker)
    engine = worker.engine
    engine.local_metadata_ledger_enabled = True
    assert engine.pg_collection is worker.config.pg_collection  # of which it asks the size
    assert engine.controller.tokenizer is loaded.tokenizer
    prompt = loaded.tokenizer.tokenize(PROMPTS[0])
    worker.suspend_for_refit()
    worker.set_generation_epoch(7)
    assert not engine._state_events[EngineState.RUNNING].is_set()
    worker.resume_after_refit()
    worker.generate([prompt, prompt])
    ledger, engine.local_metadata_ledger = engine.local_metadata_ledger, {}
    assert len(ledger) == 2
    for uid, record in ledger.items():
        assert uid.startswith("chatcmpl-") and record.num_evictions == 0
        assert record.policy_epoch == record.kv_cache_epoch == [(0, 7)]

    async def kill() -> None:
        worker.client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        worker.client.stop_engines()
        await engine.wait_until(EngineState.STOPPED)
        worker.client.shutdown_coordinator()

    worker.run(kill())
    assert engine.state is EngineState.STOPPED


def test_an_engine_of_a_directory_gives_its_memory_back_meanwhile() -> None:
    config = EngineConfig(
        enable_sleep_mode=True, audit_graphs=True, device="cpu", depth=1, max_requests=2
    )
    params = SamplingParams(num_tokens_to_generate=40, temperature=0.0, termination_id=-1)

    async def scenario(engine: DynamicInferenceEngine) -> None:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address, deserialize=True)
        client.start()
        expected = await client.add_request(PROMPTS[0], params)
        asked = client.add_request(PROMPTS[0], params)
        for signal in (client.pause_engines, client.suspend_engines):
            await signal()
        engine.sleep(1)
        await client.resume_engines()
        with pytest.raises(RequestError, match="the engine sleeps; wake_up"):
            await client.unpause_engines()
        assert engine.state is EngineState.PAUSED
        engine.wake_up()
        await client.unpause_engines()
        assert (await asked).generated_tokens == expected.generated_tokens
        client.stop()

    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        asyncio.run(scenario(engine))


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "rl.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if "InferenceClient" in block)
    exec(compile(example, "rl.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.count("[(0, ") == 2  # the epochs of both

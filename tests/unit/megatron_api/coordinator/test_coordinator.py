"""One engine answers inference clients: ours, and the installed release's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from megatron_async.errors import ConfigError, EngineStoppedError, RequestError
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    EngineState,
    GPTInferenceWrapper,
    InferenceClient,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.megatron_api.coordinator.epochs import Epochs
from megatron_async.megatron_api.coordinator.headers import (
    OF_0_16,
    OF_0_17,
    OF_0_19,
    OURS,
    Dialect,
    Headers,
    dialect_of,
)
from megatron_async.megatron_compat import installed
from megatron_async.request.request import FinishReason, Status, TokenIds
from tests.support.msgpack_module import msgpack_module
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stock_model import (
    Tokenizer,
    no_gpu,  # noqa: F401
    stock_model,
)

from megatron.core.inference import headers as their_headers  # isort: skip
from megatron.core.inference import inference_client as theirs  # isort: skip
from megatron.core.inference.sampling_params import SamplingParams as TheirParams  # isort: skip

NEW = 12
GREEDY = SamplingParams(num_tokens_to_generate=NEW, temperature=0.0, termination_id=-1)
LONG = SamplingParams(num_tokens_to_generate=80, temperature=0.0, termination_id=-1)
PROMPTS: list[Any] = ["Hello", "abc", [5, 6, 7], "x"]


@pytest.fixture(scope="module")
def model() -> Any:
    return stock_model()


def build(model: Any, tokenizer: Any = None, **fields: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {"block_size_tokens": 16, "max_sequence_length": 96, "max_requests": 3}
    config = InferenceConfig(buffer_size_gb=0.001, **(sizes | fields))
    context = DynamicInferenceContext(model.config, config)
    wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped, tokenizer or Tokenizer())
    return DynamicInferenceEngine(controller, context)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    """Of 80 tokens; shorter requests have their beginning."""
    with build(model) as engine:
        records = engine.generate(PROMPTS, LONG)
    return {
        str(prompt): each.generated_tokens for prompt, each in zip(PROMPTS, records, strict=True)
    }


@contextlib.asynccontextmanager
async def listening(model: Any, **fields: Any) -> AsyncIterator[tuple[Any, InferenceClient]]:
    """An engine, and our client."""
    engine = build(model, **fields)
    address = await engine.start_listening_to_data_parallel_coordinator()
    client = InferenceClient(address, deserialize=True)
    client.start()
    try:
        yield engine, client
    finally:
        client.stop()
        engine.close()


def run(what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(what(), PATIENCE_SECONDS))


def test_futures_bring_what_the_engine_generates(model: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            asked = [client.add_request(prompt, GREEDY) for prompt in PROMPTS]
            records = await asyncio.gather(*asked)
            for prompt, record in zip(PROMPTS, records, strict=True):
                assert isinstance(record, DynamicInferenceRequest) and record.succeeded()
                assert record.generated_tokens == expected[str(prompt)][:NEW]
                assert record.latency is not None and record.latency > 0
            plain = InferenceClient(client._address, deserialize=False)
            await plain.start()
            reply = await plain.add_request("abc", GREEDY)
            assert reply["generated_tokens"] == expected["abc"][:NEW]
            assert reply["status"] == "COMPLETED" and reply["uid"].startswith("chatcmpl-")
            plain.stop()
            assert engine.use_coordinator

    run(scenario)


class OfFew(Tokenizer):
    """Has a text of ids up to 65 alone."""

    def detokenize(self, tokens: list[int]) -> str:
        if max(tokens, default=0) > 65:
            raise ValueError("no such token")
        return super().detokenize(tokens)


def test_a_prompt_without_a_text_is_answered(
    model: Any,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the tokenizer cannot show the prompt's ids, the answer still has all tokens; by our
    client and by theirs. The log says so."""

    async def scenario() -> None:
        engine = build(model, tokenizer=OfFew())
        address = await engine.start_listening_to_data_parallel_coordinator()
        ours = InferenceClient(address, deserialize=True)
        ours.start()
        client = await their_client(address, monkeypatch)
        params = TheirParams(num_tokens_to_generate=NEW, temperature=0.0, termination_id=-1)
        last: Callable[[Any], Any] = (lambda r: r) if installed().since(17) else (lambda r: r[-1])
        for prompt, text in ((Tokenizer().tokenize("Hello"), None), ([5, 6, 7], "%&'")):
            asked = [ours.add_request(prompt, GREEDY), client.add_request(prompt, params)]
            mine, their = await asyncio.gather(*asked)
            for record in (mine, last(their)):
                name = "Hello" if text is None else str(prompt)
                assert record.generated_tokens == expected[name][:NEW]
                assert record.prompt == text and record.status.name == "COMPLETED"
        ours.stop()
        client.stop()
        engine.close()

    run(scenario)
    assert len([m for m in caplog.messages if "has no text of its prompt" in m]) == 2


async def their_client(address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed release's own, connected."""
    monkeypatch.setattr(theirs, "msgpack", msgpack_module(), raising=False)
    monkeypatch.setattr(theirs, "HAVE_MSGPACK", True)
    later = {"deserialize": True} if installed().since(17) else {}
    client = theirs.InferenceClient(address, **later)
    started = client.start()
    if started is not None:
        await started
    return client


async def maybe(result: Any) -> None:
    """Signals of 0.16 are awaited, and later ones are not."""
    if result is not None:
        await result


def test_the_installed_releases_own_client_is_answered(
    model: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = build(model)
        address = await engine.start_listening_to_data_parallel_coordinator(None, True)
        client = await their_client(address, monkeypatch)
        params = TheirParams(
            num_tokens_to_generate=NEW, temperature=0.0, termination_id=-1, return_log_probs=True
        )
        last: Callable[[Any], Any] = (lambda r: r) if installed().since(17) else (lambda r: r[-1])
        records = await asyncio.gather(*[client.add_request(p, params) for p in PROMPTS])
        for prompt, record in zip(PROMPTS, map(last, records), strict=True):
            assert record.generated_tokens == expected[str(prompt)][:NEW]
            assert len(record.generated_log_probs) == NEW and record.status.name == "COMPLETED"
            assert record.sampling_params.num_tokens_to_generate == NEW
        too_long = last(await client.add_request("x" * 200, params))
        assert too_long.status.name == "FAILED"
        assert "shorten the prompt" in str(too_long.events[0].payload)
        await maybe(client.pause_engines())
        await engine.wait_until(EngineState.PAUSED)
        waiting = client.add_request("Hello", params)
        client.suspend_engines()
        await engine.wait_until(EngineState.SUSPENDED)
        client.resume_engines()
        await engine.wait_until(EngineState.RESUMED)
        client.unpause_engines()
        await engine.wait_until(EngineState.RUNNING)
        assert last(await waiting).generated_tokens == expected["Hello"][:NEW]
        if installed().since(17):
            client.set_generation_epoch(4)
            record = await client.add_request("Hello", params)
            assert record.policy_epoch == [[0, 4]]
            client.pause_engines()
        await maybe(client.stop_engines())
        await engine.wait_until(EngineState.STOPPED)
        client.stop()
        engine.close()

    run(scenario)


def test_numbers_of_messages_are_those_of_the_installed_release() -> None:
    """Those that it sends or reads; later releases have more, and 0.16 fewer."""
    found: Dialect = OF_0_19
    if not installed().since(19):
        found = OF_0_17 if installed().since(17) else OF_0_16
    numbers = {member.name: member.value for member in their_headers.Headers}
    assert numbers.items() <= {each.name: number for each, number in found.numbers.items()}.items()


def test_a_dialect_is_known_by_the_first_message() -> None:
    assert dialect_of([0]) is OF_0_19 and dialect_of([0, "megatron_async"]) is OURS
    assert dialect_of([1]) is (OF_0_17 if installed().since(17) else OF_0_16)
    assert dialect_of([40]) is dialect_of(["x"]) is dialect_of([0, "other"]) is None
    for dialect in (OF_0_16, OF_0_17, OF_0_19, OURS):
        assert all(dialect.header(n) is header for header, n in dialect.numbers.items())
        assert dialect.header(99) is dialect.header(None) is None


def test_states_follow_signals(model: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            assert engine.state is EngineState.RUNNING and engine.running.is_set()
            await client.pause_engines()
            await engine.wait_until(EngineState.PAUSED)
            asked = client.add_request("Hello", LONG)
            assert not engine._state_events[EngineState.RUNNING].is_set() and engine.suspended
            steps = engine.counters.steps_launched
            await client.pause_engines()  # what was done already is no error
            await client.suspend_engines()
            assert engine.state is EngineState.SUSPENDED
            with pytest.raises(RequestError, match="UNPAUSE is for an engine that is PAUSED"):
                await client.unpause_engines()
            await client.resume_engines()
            await engine.wait_until(EngineState.RESUMED)
            assert engine.state is EngineState.PAUSED
            assert engine.counters.steps_launched == steps and not asked.done()
            await client.unpause_engines()
            await engine.wait_until(EngineState.RUNNING)
            assert (await asked).generated_tokens == expected["Hello"]
            # As 0.16's client: one call for both.
            again = client.add_request("Hello", LONG)
            await client.suspend_engines()
            assert engine.state is EngineState.SUSPENDED and engine.suspended
            await client.resume_engines()
            assert engine.state is EngineState.RUNNING and engine.running.is_set()
            assert (await again).generated_tokens == expected["Hello"]
            with pytest.raises(RequestError, match="STOP is for an engine that is PAUSED or SUSP"):
                await client.stop_engines()
            with pytest.raises(RequestError, match="PAUSING cannot be waited for"):
                await engine.wait_until(EngineState.PAUSING)

    run(scenario)
    with build(model) as alone:
        asyncio.run(alone.wait_until(EngineState.RUNNING))
        with pytest.raises(RequestError, match="nobody sends signals to this engine"):
            asyncio.run(alone.wait_until(EngineState.PAUSED))
        alone.suspend()
        assert alone.state is EngineState.SUSPENDED and not alone.use_coordinator


def test_what_waits_when_the_engine_is_stopped_fails(model: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            await client.pause_engines()
            asked = client.add_request("Hello", LONG)
            await client.stop_engines()
            await asyncio.wait_for(engine.engine_loop_task, PATIENCE_SECONDS)
            record = await asked
            assert record.failed() and "the engine was stopped" in str(record.events[0].payload)
            again = await client.add_request("Hello", GREEDY)
            assert again.failed()
            client.shutdown_coordinator()
            engine.resume()  # its caller has it again
            assert engine.generate(["abc"], GREEDY)[0].generated_tokens == expected["abc"][:NEW]
            # And clients may have it again, at another address.
            while engine.use_coordinator:
                await asyncio.sleep(0.001)
            address = await engine.start_listening_to_data_parallel_coordinator()
            assert engine.state is EngineState.RUNNING and not engine.stopped.is_set()
            second = InferenceClient(address, deserialize=True)
            second.start()
            record = await second.add_request("abc", GREEDY)
            assert record.generated_tokens == expected["abc"][:NEW]
            second.stop()

    run(scenario)


def test_an_engine_that_is_closed_answers_what_waits(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            await client.pause_engines()
            asked = client.add_request("Hello", LONG)
            await client.set_generation_epoch(0)  # it has arrived
            waiting = asyncio.ensure_future(engine.wait_until(EngineState.RESUMED))
            await asyncio.to_thread(engine.close)
            assert "the engine is closed" in str((await asked).events[0].payload)
            for state in (waiting, engine.wait_until(EngineState.PAUSED)):
                with pytest.raises(EngineStoppedError, match="the engine is closed"):
                    await state
            await engine.engine_loop_task

    run(scenario)


def test_an_engine_that_an_error_stopped_keeps_nobody_waiting(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            engine.observe(Broken())
            asked = await client.add_request("Hello", LONG)
            assert asked.failed() and "out of order" in str(asked.events[0].payload)
            waiting = asyncio.ensure_future(engine.wait_until(EngineState.PAUSED))
            with pytest.raises(RequestError, match=r"EngineStoppedError: .*out of order"):
                await client.pause_engines()
            with pytest.raises(EngineStoppedError, match="out of order"):
                await waiting
            await engine.wait_until(EngineState.STOPPED)

    run(scenario)


class Broken:
    def on_commit(self, report: Any) -> None:
        raise RuntimeError("out of order")


def test_requests_that_cannot_be_served_say_why(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (_, client):
            long = await client.add_request([1] * 200, GREEDY)
            assert long.status is Status.FAILED and "shorten" in str(long.events[0].payload)
            with pytest.raises(RequestError, match="models take text alone"):
                client.add_request("a", GREEDY, multi_modal_data={"image": b""})
            with pytest.raises(RequestError, match="temperature=-1"):
                client.add_request("a", SamplingParams(temperature=-1))
            with pytest.raises(RequestError, match="keys and values stay in the engine"):
                client.release_handoff(3)
            with pytest.raises(RequestError, match="generation_epoch='x' must be an integer"):
                await client.set_generation_epoch("x")  # type: ignore[arg-type]
            with pytest.raises(AttributeError, match="await what the client's signal returned"):
                _ = client.paused
        with pytest.raises(RuntimeError, match="not currently running"):
            client.add_request("a", GREEDY)

    run(scenario)


def test_a_client_sends_token_ids_of_any_integer_type(model: Any) -> None:
    """And nothing that would have to be rounded or guessed; what was asked before goes on."""

    async def scenario() -> None:
        async with listening(model) as (_, client):
            waiting = client.add_request([5, 6, 7], LONG)
            wrong: list[Any] = [
                None, 5, 1.5, [1.7, 2], ["5"], [True], [[1, 2]], {"a": 1}, [None], b"ab",
                torch.ones(2), np.ones((1, 2), dtype=np.int64),
            ]  # fmt: skip
            for prompt in wrong:
                with pytest.raises(RequestError, match="must be a text or a list of token ids"):
                    client.add_request(prompt, GREEDY)
            with pytest.raises(RuntimeError, match=r"running already: stop\(\) it"):
                client.start()
            ids: list[Any] = [(5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int32(5), 6]]
            answers = [await client.add_request(each, GREEDY) for each in ids]
            assert all(list(each.prompt_tokens) == [5, 6] for each in answers)
            assert len({tuple(each.generated_tokens) for each in answers}) == 1
            assert (await waiting).status is Status.COMPLETED

    run(scenario)


SENT = TheirParams(num_tokens_to_generate=2, termination_id=-1).serialize()
SUBMIT = OF_0_19.numbers[Headers.SUBMIT_REQUEST]
SAID = {
    "no prompt": ([SUBMIT, 0, {"a": 1}, SENT], "must be a text or a list of token ids"),
    "no token": ([SUBMIT, 0, ["a"], SENT], "must be a text or a list of token ids"),
    "no tokens of its vocabulary": ([SUBMIT, 0, [10**6], SENT], "1000000"),
    "no params": ([SUBMIT, 0, "a", None], "must be what serialize"),
    "unknown": ([SUBMIT, 0, "a", SENT | {"beams": 3}], "unknown sampling parameter beams=3"),
    "segments": ([SUBMIT, 0, "a", SENT | {"return_segments": True}], "return_segments=True is not"),
    "image": ([SUBMIT, 0, "a", SENT, {"image": b"x"}], "models take text alone"),
    "handoff": ([24, 0, "a", SENT, {}, []], "keys and values stay in this engine"),
}


def test_what_other_clients_send_is_answered_or_left_out(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on after each."""
    caplog.set_level(logging.CRITICAL, "megatron_async")

    async def scenario() -> None:
        async with listening(model) as (_, client):
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.connect(client._address)

                def ask(message: Any) -> Any:
                    socket.send(msgspec.msgpack.encode(message))
                    assert socket.poll(PATIENCE_SECONDS * 1000), message
                    return msgspec.msgpack.decode(socket.recv())

                socket.send(msgspec.msgpack.encode([SUBMIT, 0, "a", SENT]))  # not connected
                for garbage in (b"", b"\xc1", b"\x90", msgspec.msgpack.encode({"a": 1})):
                    socket.send(garbage)
                socket.send_multipart([b"a", b"b", b"c"])
                assert ask([OF_0_19.numbers[Headers.CONNECT]]) == [1]
                for broken in ([SUBMIT], [SUBMIT, 1], [44], [44, "x"], [23], [99], [80], [26, 1]):
                    socket.send(msgspec.msgpack.encode(broken))
                for message, said in SAID.values():
                    header, number, reply = ask(message)
                    assert (header, number, reply["status"]) == (21, 0, "FAILED")
                    assert said in reply["events"][0]["payload"]["message"]
                both = SENT | {"num_tokens_to_generate": 30, "num_tokens_total": 8}
                reply = ask([SUBMIT, 7, "abc", both, None])[2]
                assert reply["generated_length"] == 5  # a total goes before the default
            assert (await client.add_request("abc", GREEDY)).succeeded()

    run(scenario)


def test_tokens_come_as_they_are_committed(model: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            asked = SamplingParams(**{**vars(GREEDY), "return_log_probs": True})
            parts = [part async for part in client.add_request_streaming("Hello", asked)]
            final = parts.pop()["final"]
            tokens = [token for part in parts for token in part["partial"]["new_tokens"]]
            chances = [chance for part in parts for chance in part["partial"]["new_log_probs"]]
            assert final.generated_tokens == tokens == expected["Hello"][:NEW]
            assert final.generated_log_probs == chances and len(parts) > 1
            assert parts[0]["partial"]["prompt_log_probs"] == final.prompt_log_probs
            # Who leaves early has aborted it.
            stream: Any = client.add_request_streaming("Hello", LONG)
            await anext(stream)
            await stream.aclose()
            while engine._service._coordinator._live:
                await asyncio.sleep(0.001)
            await client.pause_engines()
            begun = engine.counters.tokens_committed
            cancelled = client.add_request("abc", LONG)
            await client.set_generation_epoch(1)
            assert len(engine._service._coordinator._live) == 1
            cancelled.cancel()
            await client.set_generation_epoch(2)
            await client.unpause_engines()
            while engine._service._coordinator._live:
                await asyncio.sleep(0.001)
            assert engine.counters.tokens_committed == begun

    run(scenario)


def test_who_leaves_has_aborted_what_he_asked(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            other = InferenceClient(client._address)
            other.start()
            await client.pause_engines()
            asked = other.add_request("Hello", LONG)
            await other.set_generation_epoch(0)
            assert len(engine._service._coordinator._live) == 1
            other.stop()
            assert asked.cancelled()
            while len(engine._service._coordinator._clients) > 1:
                await asyncio.sleep(0.001)
            await client.unpause_engines()
            while engine._service._coordinator._live:
                await asyncio.sleep(0.001)
            assert engine.counters.tokens_committed == 0

    run(scenario)


def test_an_epoch_begins_with_nothing_in_flight(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            asked = [client.add_request(prompt, LONG) for prompt in PROMPTS]
            seen: list[int] = []
            while not all(each.done() for each in asked):
                engine._service.between_steps(lambda: seen.append(engine.in_flight_count))
                await asyncio.sleep(0)
            assert set(seen) == {0} and engine.depth == 1

    run(scenario)


def test_a_stopped_engine_listens_again_without_a_shutdown(model: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            await client.pause_engines()
            await client.stop_engines()
            with pytest.raises(ConfigError, match="suspended"):
                await engine.start_listening_to_data_parallel_coordinator()
            assert (await client.add_request("Hello", GREEDY)).failed(), "it is answered still"
            engine.resume()
            address = await engine.start_listening_to_data_parallel_coordinator()
            second = InferenceClient(address, deserialize=True)
            second.start()
            record = await second.add_request("abc", GREEDY)
            assert record.generated_tokens == expected["abc"][:NEW]
            second.stop()

    run(scenario)


def test_an_engine_listens_once(model: Any) -> None:
    async def scenario() -> None:
        async with listening(model) as (engine, client):
            listen = engine.start_listening_to_data_parallel_coordinator
            with pytest.raises(ConfigError, match=r"listens already, at tcp://127\.0\.0\.1:"):
                await listen()
            with pytest.raises(ConfigError, match="launch_inference_coordinator=False is not"):
                await listen(launch_inference_coordinator=False)
            with pytest.raises(ConfigError, match="coordinator_schedule_output_path="):
                await listen(coordinator_schedule_output_path="x")
            port = int(client._address.rpartition(":")[2])
            with build(model) as second:  # as theirs: another port
                address = await second.start_listening_to_data_parallel_coordinator(port)
                assert not address.endswith(f":{port}")
            with build(model) as third:
                with pytest.raises(ConfigError, match="cannot listen at"):
                    await third.start_listening_to_data_parallel_coordinator(hostname="203.0.113.9")
                with pytest.raises(RequestError, match="nobody sends signals"):
                    await third.wait_until(EngineState.PAUSED)

    run(scenario)


def test_a_client_without_a_coordinator_says_so(model: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError, match="no inference coordinator answers at"):
            InferenceClient("tcp://127.0.0.1:9").start(connect_timeout_seconds=0.01)
        async with listening(model) as (engine, client):
            client.stop()
            for ask in (client.pause_engines, lambda: client.add_request("import ", LONG)):
                with pytest.raises(RuntimeError, match=r"not currently running: start\(\) it"):
                    ask()
            engine.close()
            with pytest.raises(TimeoutError, match="no inference coordinator answers at"):
                client.start(connect_timeout_seconds=0.01)

    run(scenario)


def test_epochs_say_what_sampled_and_what_filled_the_cache() -> None:
    """Positions of prompt and generated tokens, as megatron-core counts them."""
    epochs = Epochs()
    first = DynamicInferenceRequest(request_id=0, prompt_tokens=TokenIds([1, 2, 3]))
    epochs.opened(first)
    assert first.policy_epoch is None
    epochs.set(4, lambda _: False)  # it has nothing yet
    second = DynamicInferenceRequest(request_id=1, prompt_tokens=TokenIds([1]))
    epochs.opened(second)
    assert first.policy_epoch == second.policy_epoch == second.kv_cache_epoch == [(0, 4)]
    first.generated_tokens += [5, 6]
    epochs.set(5, lambda _: True)
    assert first.policy_epoch == first.kv_cache_epoch == [(0, 4), (4, 5)]
    first.counters.evictions += 1  # and came back
    first.generated_tokens += [7]
    epochs.set(6, lambda _: True)
    assert first.policy_epoch == [(0, 4), (4, 5), (5, 6)]
    assert first.kv_cache_epoch == [(0, 5), (5, 6)]
    second.counters.evictions += 1
    epochs.ended(second)
    assert second.kv_cache_epoch == [(0, 6)]
    first.counters.evictions += 1
    first.finish_reason = FinishReason.STOP  # by a step that the next epoch has waited for
    epochs.set(7, lambda _: False)
    assert second.policy_epoch == [(0, 4), (0, 5), (0, 6)]  # it had ended
    epochs.ended(first)
    assert first.policy_epoch == [(0, 4), (4, 5), (5, 6)] and first.kv_cache_epoch == [(0, 6)]

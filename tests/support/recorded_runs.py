"""Runs that are recorded, of requests that ask for more."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import hash_engine, random_ask, sampling_params
from tests.support.hash_tokenizer import hash_tokenizer

SIZES: dict[str, Any] = {
    "max_requests": 3,
    "block_size_tokens": 4,
    "block_count": 22,
    "prefill_chunk_tokens": 5,
}


def record(path: Path, depth: int, seed: int) -> dict[int, list[int]]:
    """A run in which much happens; the tokens of the requests that were not aborted."""
    rng = random.Random(seed)
    asks = [random_ask(rng, max_prompt=20, max_new=30) for _ in range(8)]
    futures = {}
    with hash_engine(depth, record=str(path), **SIZES) as engine:
        while len(futures) < len(asks) or engine.has_unfinished_requests():
            if len(futures) < len(asks) and rng.random() < 0.4:
                number = len(futures)
                futures[number] = engine.add_request(
                    number,
                    list(asks[number].prompt),
                    sampling_params(asks[number]),
                    priority=rng.choice((0, 0, -1)),
                )
            active = [n for n, future in futures.items() if not future.done()]
            victim = rng.choice(active or [0])
            draw = rng.random()
            if draw < 0.05:
                engine.abort_request(victim)
            elif draw < 0.2:
                engine.pause_request(victim)
            elif draw < 0.45:
                engine.evict_request(victim)
            elif draw < 0.5:
                engine.suspend()
                engine.step_modern()
                engine.resume()
            elif draw < 0.8:
                for number in futures:
                    engine.resume_request(number)
            engine.step_modern()
        engine.suspend()
        assert engine.counters.evictions and engine.counters.pauses and engine.counters.barriers
    ended = {number: future.result(timeout=0) for number, future in futures.items()}
    return {n: r.generated_tokens for n, r in ended.items() if r.finish_reason != "abort"}


def more(count: int = 22, **values: Any) -> SamplingParams:
    values = {"temperature": 1.2, "seed": 5, "ignore_eos": True, **values}
    return SamplingParams(num_tokens_to_generate=count, **values)


MORE: tuple[SamplingParams, ...] = (
    more(structured_outputs={"regex": "[a-f]{3,9}[0-9]+é?x"}),
    more(stop_words=["k1", "0", "tr"], min_tokens=3),
    more(return_log_probs=True, top_n_logprobs=3, presence_penalty=0.7, bad_words=[[1, 2], [3]]),
    more(n=3, structured_outputs={"choice": ["abcabcabcabc", "null", "true"]}, ignore_eos=False),
    more(logit_bias={7: 2.5}, min_p=0.05, stop_token_ids=range(0, 24, 2), min_tokens=4),
    more(9, n=2, best_of=4, stop_words=["a", "e"], frequency_penalty=0.4),
    more(40, structured_outputs={"json_object": True}, log_probs_mode="processed", top_k=30,
         return_log_probs=True, skip_prompt_log_probs=True),
    more(),
)  # fmt: skip
ABORTED = 6
MORE_SIZES = {**SIZES, "block_count": 32}


def with_requests(engine: DynamicInferenceEngine) -> dict[int, DynamicInferenceRequest]:
    """All requests that ``engine`` gets from now on, each sequence by its id."""
    requests: dict[int, DynamicInferenceRequest] = {}
    opens = engine.outputs.open

    def watched(key: int, request: DynamicInferenceRequest, *more: Any) -> Any:
        requests[request.request_id] = request
        return opens(key, request, *more)

    engine.outputs.open = watched  # type: ignore[method-assign]
    return requests


def what_came(requests: dict[int, DynamicInferenceRequest]) -> dict[int, Any]:
    return {
        number: (
            request.generated_tokens,
            request.generated_text,
            request.finish_reason,
            request.stop_reason,
            request.generated_log_probs,
            request.generated_top_n_logprobs,
            request.seed,
        )
        for number, request in requests.items()
        if number != ABORTED
    }


@functools.cache
def record_more(path: Path, depth: int) -> dict[int, Any]:
    """A run of requests that ask for more, paused, evicted and once aborted; what each got."""
    rng = random.Random(depth)
    with hash_engine(depth, tokenizer=hash_tokenizer(), record=str(path), **MORE_SIZES) as engine:
        requests = with_requests(engine)
        waiting = list(enumerate(MORE))
        step = 0
        while waiting or engine.has_unfinished_requests():
            if waiting and step % 4 == 0:
                number, asked = waiting.pop(0)
                engine.add_request(number, [7, 1, 9, number, 2, 7][: 3 + number % 4], asked)
            live = [n for n, request in requests.items() if request.finish_reason is None]
            draw, victim = rng.random(), rng.choice(live or [0])
            if draw < 0.1:
                engine.pause_request(victim)
            elif draw < 0.35:
                engine.evict_request(victim)
            elif draw < 0.7:
                for number in requests:
                    engine.resume_request(number)
            if len(waiting) == 0 and step % 7 == 0:
                engine.abort_request(ABORTED)
            engine.step_modern()
            step += 1
        engine.suspend()
        assert engine.counters.evictions and engine.counters.pauses
        assert engine.counters.steps_with_extras
    return what_came(requests)

"""The seeded random workload of ``verify``, and the counts that show what it exercised."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams
from megatron_async.verify.decode import Decoded, Work, decode

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine

MAX_NEW_TOKENS = 48
NO_TERMINATION = -1

_TEXT = """\
import os


def read_lines(path):
    with open(path) as file:
        return [line.rstrip() for line in file]
"""


def make_workload(engine: DynamicInferenceEngine, count: int, seed: int) -> list[Work]:
    """Requests of mixed lengths, greedy and sampled; a third of them stop early.

    ``engine`` is a serial one: a dry run without stop tokens says which tokens will come, so that
    a stop token can be chosen that a request does reach, whatever the model.
    """
    rng = random.Random(seed)
    works = [_make_work(engine, rng, number) for number in range(count)]
    dry = decode(engine, [work.changed(termination_id=NO_TERMINATION) for work in works])
    for number, request in enumerate(dry.requests):
        tokens = request.generated_tokens
        if number % 3 == 1 and len(tokens) >= 3:
            stop = tokens[rng.randrange(1, len(tokens) - 1)]
            works[number] = works[number].changed(stop_token_ids=(stop,))
    return works


def _make_work(engine: DynamicInferenceEngine, rng: random.Random, number: int) -> Work:
    limit = engine.max_sequence_length
    block = engine.limits.block_size
    chunk = engine.config.prefill_chunk_tokens
    max_new = min(rng.randint(4, MAX_NEW_TOKENS), max(1, limit // 2))
    short, medium = rng.randint(2, block + 1), rng.randint(chunk + 1, 3 * chunk)
    lengths = (1, short, block, medium, rng.randint(1, 2 * block))
    length = max(1, min(lengths[number % len(lengths)], limit - max_new))
    return Work(make_prompt(engine, rng, length), _make_params(rng, max_new))


def make_prompt(engine: DynamicInferenceEngine, rng: random.Random, length: int) -> list[int]:
    """A piece of text, or of noise now and then and where there is no tokenizer."""
    model = engine.model
    if model.tokenizer is None or rng.random() < 0.25:
        vocab_size = model.network.vocab_size
        return [rng.randrange(vocab_size) for _ in range(length)]
    text = model.tokenize_prompt(_TEXT)
    start = rng.randrange(len(text))
    return [text[(start + n) % len(text)] for n in range(length)]


def _make_params(rng: random.Random, max_new: int) -> SamplingParams:
    kind = rng.choice(("greedy", "plain", "top_k", "top_p", "both"))
    if kind == "greedy":
        return SamplingParams(temperature=0.0, num_tokens_to_generate=max_new)
    return SamplingParams(
        temperature=rng.choice((0.7, 1.0, 1.3)),
        top_k=rng.choice((5, 40)) if kind in ("top_k", "both") else 0,
        top_p=rng.choice((0.5, 0.9)) if kind in ("top_p", "both") else 0.0,
        seed=rng.getrandbits(63),
        num_tokens_to_generate=max_new,
    )


class Witnesses(NamedTuple):
    """How often that happened which makes asynchronous decoding hard. All must be above 0,
    ``discarded`` only where steps overlap."""

    finished_early: int
    discarded: int
    waited: int
    crossed_blocks: int
    chunked_prefills: int

    def missing(self, depth: int, logging: int = 0) -> list[str]:
        """What did not happen at this depth, and how to make it happen; every ``logging`` steps
        one was logged, which commits all before the next."""
        overlap_more = "--inference-logging-step-interval, as a logged step is a barrier, or "
        remedies = {
            "finished_early": "no request ended before its length: raise --requests",
            "discarded": "no token was sampled past a request's end: raise "
            f"{overlap_more if logging else ''}--requests",
            "waited": "no request waited for a slot: raise --requests above --max-requests",
            "crossed_blocks": "no decoding request crossed a KV block: lower "
            "--inference-dynamic-batching-block-size",
            "chunked_prefills": "no prompt was prefilled in chunks: lower --prefill-chunk-tokens",
        }
        unseen = [name for name, count in self._asdict().items() if not count]
        return [remedies[name] for name in unseen if name != "discarded" or depth]


def count_witnesses(decoded: Decoded, block_size: int, chunk_tokens: int) -> Witnesses:
    """Witnesses of a decoded workload: requests, tokens, launches, boundaries, requests."""
    requests = decoded.requests
    return Witnesses(
        finished_early=sum(r.finish_reason is FinishReason.STOP for r in requests),
        discarded=decoded.counters.tokens_discarded,
        waited=decoded.counters.steps_with_waiting,
        crossed_blocks=sum(crossed_blocks(r, block_size) for r in requests),
        chunked_prefills=sum(len(r.prompt_tokens) > chunk_tokens for r in requests),
    )


def crossed_blocks(request: DynamicInferenceRequest, block_size: int) -> int:
    """Block boundaries passed while decoding. The last token of a request is never written."""
    prompt = len(request.prompt_tokens)
    last = prompt + request.generated_length - 2
    return max(last // block_size - (prompt - 1) // block_size, 0)

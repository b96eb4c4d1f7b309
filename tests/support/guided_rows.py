"""Requests that a grammar guides, for drafts that know it: the prompt says which it is."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

from megatron_async.errors import IntegrityError
from megatron_async.request.request import DynamicInferenceRequest
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import hash_engine, random_ask, sampling_params
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone

GUIDED: tuple[dict[str, Any], ...] = (
    {"regex": "[a-d]{3,7}[0-9]*"},
    {"regex": "(ab|c|d1)+x", "stop_ids": ()},
    {"regex": "[0-9]{2}(true|null)", "stop_ids": (60,), "presence_penalty": 1.0},
    {"regex": "[ab]{2}x0y0z0[ab]x1y1z1[cd]{9}", "stop_ids": ()},
    {"regex": "([ab]x0y0z0){9}", "stop_ids": (59,)},
)
"""The last two have stretches that leave one way to go on."""
FIRST_MARK = 4
"""Prompts of other requests begin with lower ids."""
WINDOW = 4


def marked(ask: Ask, index: int) -> Ask:
    """``ask`` as guided request number ``index``, with a prompt that says so, and how long it is:
    at least two tokens."""
    length = max(2, len(ask.prompt))
    prompt = (FIRST_MARK + index, length, *ask.prompt[2:])
    return Ask(**{**vars(ask), "prompt": prompt, **GUIDED[index]})


def guide(tokens: list[int]) -> Ask | None:
    """What the grammar of a request with these tokens, prompt included, asks; None without one."""
    index = tokens[0] - FIRST_MARK
    if not 0 <= index < len(GUIDED):
        return None
    return Ask(tuple(tokens[: tokens[1]]), 1, **GUIDED[index])


def workload() -> list[Ask]:
    """Guided requests, greedy and sampled, and others between them."""
    rng = random.Random(5)
    asks = []
    for number in range(15):
        ask = random_ask(rng, max_prompt=9, max_new=24)
        values = {**vars(ask), "prompt": (number % 4, *ask.prompt), "max_new": 24 - number % 3}
        ask = Ask(**{**values, "stop_ids": ()})
        asks.append(marked(ask, number % 5) if number % 3 else ask)
    return asks


def play(
    depth: int,
    debug: bool = True,
    *,
    model: Any = None,
    ignore: tuple[type[BaseException], ...] = (),
    **values: Any,
) -> tuple[list[Ask], list[DynamicInferenceRequest], Counter[int]]:
    """Decode the workload with evictions and pauses, and go on behind errors to ``ignore``. Returns
    the steps by window too."""
    asks, model = workload(), model or DraftingHashModel(WINDOW - 1, 0.3, guide=guide)
    values = {
        "max_requests": 5, "block_size_tokens": 3, "block_count": 70, "prefill_chunk_tokens": 8,
        **values,
    }  # fmt: skip
    with hash_engine(
        depth, model=model, tokenizer=hash_tokenizer(), debug=debug, jitter_seed=depth, **values
    ) as engine:
        futures = [
            engine.add_request(number, list(ask.prompt), sampling_params(ask))
            for number, ask in enumerate(asks)
        ]
        step = 0
        while engine.has_unfinished_requests():
            active = list(engine.outputs.keys) or [len(asks)]
            if step % 11 == 7:
                engine.evict_request(active[step % len(active)])
            if step % 7 == 3:
                engine.pause_request(active[step % len(active)])
            if step % 7 == 5:
                for request_id in active:
                    engine.resume_request(request_id)
            with suppress(*ignore):
                engine.step_modern()
            step += 1
            assert step < 2000
        steps = engine.counters.steps_by_window
    return asks, [future.result(0) for future in futures], steps


def guided_rows_draft_and_are_those_of_the_oracle(depth: int, debug: bool = True) -> None:
    """Tokens are those of each request alone; guided ones have drafts that were accepted."""
    try:
        asks, requests, _ = play(depth, debug)
    except (IntegrityError, KeyError, IndexError) as error:
        raise AssertionError("an engine's own check has found it") from error
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask
    accepted = [r.counters.accepted for a, r in zip(asks, requests, strict=True) if a.regex]
    assert sum(accepted) > 30, accepted


def forced_stretches_come_as_drafts(depth: int, debug: bool = True) -> None:
    """What drafts errs always; the grammar knows better."""
    model = DraftingHashModel(WINDOW - 1, 1.0)
    asks, requests, _ = play(depth, debug, model=model)
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask
        if ask.regex is None:
            assert request.counters.accepted == 0
        elif "y0z0" in ask.regex:
            assert request.counters.accepted > 5, request.counters


def rows_that_sit_launches_out_are_those_of_the_oracle(depth: int, debug: bool = True) -> None:
    """What drafts knows the grammars and errs."""
    try:
        asks, requests, _ = play(depth, debug, guided_rows="sit_out")
    except (IntegrityError, KeyError, IndexError) as error:
        raise AssertionError("an engine's own check has found it") from error
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask

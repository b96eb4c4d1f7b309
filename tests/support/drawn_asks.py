"""What requests of the engine's state machine may be: Hypothesis strategies."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hypothesis import strategies as st

from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS
from tests.support.engines import extras_of
from tests.support.guided_rows import GUIDED, marked
from tests.support.hash_model import VOCAB_SIZE
from tests.support.oracle import Ask

LONGEST_PROMPT, MOST_NEW = 24, 16

# A few beginnings, of few different tokens, so that prompts share prefixes; many requests are
# short and stop early.
HEADS = ((0,) * 20, (0, 1, 2, 3) * 5, (1, 0) * 4 + (3,) * 12)
from_a_head = st.builds(
    lambda head, length, tail: (*head[:length], *tail),
    st.sampled_from((HEADS[0], *HEADS, HEADS[0])),
    st.sampled_from((4, 12, 20, 20)),
    st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST_PROMPT - 20).map(tuple),
)
prompts = st.one_of(
    *(from_a_head,) * 3,
    st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST_PROMPT).map(tuple),
)
# Sets of them, not drawn id by id: Hypothesis ends an example that has drawn too much.
STOPS = tuple(
    tuple(random.Random(number).sample(range(VOCAB_SIZE), MAX_STOP_TOKEN_IDS))
    for number in range(20)
)
# One of three requests has extras; a few of the sets, as above.
EXTRAS = tuple(extras_of(random.Random(number), MOST_NEW) for number in range(24))
PROCESSED: dict[str, Any] = {"bans_the_next": True, "max_new": 1}
FEW = 4
"""Tokens in the prompt of a request with a processor: each step with a chunk of it is a barrier."""
SELDOM = 32
"""Of this number of requests one is guided, and one is guided or has a processor, in turns, at
fixed places, so that few examples lack either. More would keep chains short, and a processor's step
is a barrier."""


def with_extras(ask: Ask, extras: dict[str, Any]) -> Ask:
    made = dataclasses.replace(ask, **extras)
    return dataclasses.replace(made, min_tokens=min(made.min_tokens, made.max_new))


plain_asks = st.builds(
    Ask,
    prompt=prompts,
    max_new=st.sampled_from((1, 2, 9, MOST_NEW, MOST_NEW, MOST_NEW, MOST_NEW)),
    stop_ids=st.sampled_from((*STOPS, *((),) * 4)),
    temperature=st.sampled_from((0.0, 1.0)),
    top_k=st.sampled_from((0, 5)),
    seed=st.integers(0, 5),
)
asks = st.builds(with_extras, plain_asks, st.sampled_from((*EXTRAS * 2, *({},) * 104)))
processed_asks = plain_asks.map(
    lambda ask: with_extras(ask, PROCESSED | {"prompt": ask.prompt[:FEW]})
)
guided_asks = st.builds(marked, plain_asks, st.integers(0, len(GUIDED) - 1))
long_guided_asks = guided_asks.map(lambda ask: dataclasses.replace(ask, max_new=MOST_NEW))


def asks_at(number: int, *, drafts: bool = False) -> st.SearchStrategy[Ask]:
    """What the request with this number may be. Beside drafts two more of each turn are guided, and
    long enough to have some drafts accepted."""
    turn, place = divmod(number, SELDOM)
    if drafts and place in (SELDOM // 16, SELDOM // 2):
        return long_guided_asks
    if place == SELDOM // 4:
        return processed_asks if turn % 2 else guided_asks
    return guided_asks if place == 3 * SELDOM // 4 else asks


def with_prompt_of(first: Ask, ask: Ask) -> Ask:
    """``ask`` with the prompt of another one, unless one of them is guided, as its prompt says, or
    has a processor."""
    if first.regex is not None or ask.regex is not None or ask.bans_the_next:
        return ask
    return dataclasses.replace(ask, prompt=first.prompt)


LOG_PROBS = (
    *({},) * 8,
    {"return_log_probs": True},
    {"return_log_probs": True, "skip_prompt_log_probs": True},
    {"top_n_logprobs": 3},
)


changes = st.sampled_from(
    (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 2.0, "seed": 77},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.5, "top_p": 0.7},
        {"seed": -5},
    )
)
"""New sampling parameters."""

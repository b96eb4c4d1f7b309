"""The scenarios of ``verify --scenario all``."""

from __future__ import annotations

from .scenarios import Action, Ask, Event, Scenario, Sizes, W

ADD, PAUSE, RESUME = Action.ADD, Action.PAUSE, Action.RESUME
EVICT, ABORT = Action.EVICT, Action.ABORT
SUSPEND, CONTINUE, NEW_WEIGHTS = Action.SUSPEND, Action.CONTINUE, Action.NEW_WEIGHTS

SHARED = (1, 17)
"""A piece of four full blocks of 4 tokens and one more."""

TABLE = (
    Scenario(
        "add-while-decoding",
        "requests arrive, several in one step, while others decode, end and cross KV blocks",
        (
            Ask("a", ((2, 9),), 24),
            Ask("b", ((3, 7),), 24, stop=6),
            Ask("c", ((4, 5),), 10, sampled=True),
            Ask("d", ((5, 17),), 12),
            Ask("e", ((6, 4),), 8),
        ),
        (Event("a", 4, ADD, "c"), Event("a", 4, ADD, "d"), Event("a", 9, ADD, "e")),
        frozenset({W.ADD, W.FINISH, W.BOUNDARY, W.STOP, W.LENGTH, W.DISCARD, W.CHUNKS, W.WAIT}),
        Sizes(rows=3),
    ),
    Scenario(
        "pause-and-resume",
        "two requests are paused with tokens in flight; another takes a row meanwhile",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 7),), 24),
            Ask("c", ((4, 5),), 22, sampled=True),
            Ask("d", ((5, 6),), 8),
        ),
        (
            Event("a", 3, PAUSE, "b"),
            Event("a", 4, ADD, "d"),
            Event("a", 5, PAUSE, "c"),
            Event("a", 9, RESUME, "c"),
            Event("a", 14, RESUME, "b"),
        ),
        frozenset({W.PAUSE, W.ADD, W.BOUNDARY, W.FINISH, W.LENGTH}),
        Sizes(rows=3),
    ),
    Scenario(
        "abort-in-flight",
        "requests are aborted with rows in flight; those that waited take over their rows",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 9),), 24, sampled=True),
            Ask("c", ((4, 13),), 24),
            Ask("d", ((5, 6),), 12),
            Ask("e", ((6, 4),), 10, sampled=True),
        ),
        (Event("a", 6, ABORT, "b"), Event("a", 7, ADD, "d"), Event("a", 9, ABORT, "c")),
        frozenset({W.ABORT, W.ABORT_IN_FLIGHT, W.ADD, W.BOUNDARY, W.FINISH, W.WAIT}),
        Sizes(rows=3),
    ),
    Scenario(
        "abort-while-paused",
        "of two paused requests one is aborted and one goes on, while another ends by a stop token",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 9),), 24),
            Ask("c", ((4, 5),), 24, sampled=True),
            Ask("d", ((5, 6),), 24, stop=5),
        ),
        (
            Event("a", 4, PAUSE, "b"),
            Event("a", 4, PAUSE, "c"),
            Event("a", 8, ABORT, "b"),
            Event("a", 12, RESUME, "c"),
        ),
        frozenset({W.PAUSE, W.ABORT, W.ABORT_PAUSED, W.FINISH, W.BOUNDARY, W.STOP, W.DISCARD}),
    ),
    Scenario(
        "abort-before-first-token",
        "one request is aborted between the chunks of its prompt, one while it waits",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 7),), 24),
            Ask("c", ((4, 60),), 8),
            Ask("d", ((5, 6),), 8),
            Ask("e", ((6, 4),), 8, sampled=True),
        ),
        (
            Event("a", 3, ADD, "c"),
            Event("a", 3, ADD, "d"),
            Event("a", 3, ADD, "e"),
            Event("a", 5, ABORT, "d"),
            Event("a", 6, ABORT, "c"),
        ),
        frozenset({W.ADD, W.ABORT, W.ABORT_WAITING, W.ABORT_PREFILLING, W.WAIT, W.FINISH}),
        Sizes(rows=3),
    ),
    Scenario(
        "evict-and-recompute",
        "requests are evicted with tokens in flight and computed again from their own blocks",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 9),), 24, sampled=True),
            Ask("c", ((4, 5),), 24, stop=4),
        ),
        (Event("a", 6, EVICT, "b"), Event("a", 9, EVICT, "a")),
        frozenset({W.EVICT, W.FINISH, W.BOUNDARY, W.RECALL, W.STOP, W.DISCARD}),
    ),
    Scenario(
        "evict-while-paused",
        "a paused request is evicted and resumed later",
        (
            Ask("a", ((2, 6),), 28),
            Ask("b", ((3, 7),), 24, sampled=True),
            Ask("c", ((4, 5),), 20),
        ),
        (Event("a", 3, PAUSE, "b"), Event("a", 6, EVICT, "b"), Event("a", 14, RESUME, "b")),
        frozenset({W.PAUSE, W.EVICT, W.BOUNDARY, W.FINISH, W.RECALL}),
    ),
    Scenario(
        "abort-after-eviction",
        "one request is aborted the moment it is evicted, one soon after",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 20),), 24),
            Ask("c", ((4, 5),), 24, sampled=True),
            Ask("d", ((5, 6),), 12),
        ),
        (
            Event("a", 5, EVICT, "b"),
            Event("a", 5, ABORT, "b"),
            Event("a", 7, EVICT, "c"),
            Event("a", 8, ABORT, "c"),
        ),
        frozenset({W.EVICT, W.ABORT, W.WAIT, W.FINISH, W.BOUNDARY}),
        Sizes(rows=3),
    ),
    Scenario(
        "shared-prefix",
        "prompts share KV blocks with one that decodes and with one that has ended",
        (
            Ask("a", (SHARED, (2, 3)), 26),
            Ask("b", (SHARED, (3, 2)), 5),
            Ask("c", (SHARED, (4, 6)), 18, sampled=True),
            Ask("d", (SHARED, (3, 2)), 24, stop=3),
        ),
        (Event("a", 3, ADD, "b"), Event("a", 3, ADD, "c"), Event("a", 12, ADD, "d")),
        frozenset({W.ADD, W.PREFIX, W.FINISH, W.BOUNDARY, W.STOP, W.DISCARD, W.CHUNKS}),
    ),
    Scenario(
        "shared-prefix-evicted",
        "requests that share KV blocks are evicted, and more arrive with the same prefix",
        (
            Ask("a", (SHARED, (2, 3)), 26),
            Ask("b", (SHARED, (3, 2)), 24, sampled=True),
            Ask("c", (SHARED, (4, 3)), 12),
        ),
        (
            Event("a", 2, ADD, "b"),
            Event("a", 5, EVICT, "a"),
            Event("a", 7, ADD, "c"),
            Event("b", 6, EVICT, "b"),
        ),
        frozenset({W.ADD, W.PREFIX, W.EVICT, W.RECALL, W.BOUNDARY, W.FINISH}),
    ),
    Scenario(
        "shared-prefix-aborted",
        "the request that brought a prefix is aborted while others use it and before one finds it",
        (
            Ask("a", ((2, 6),), 32),
            Ask("b", (SHARED, (3, 2)), 24, sampled=True),
            Ask("c", (SHARED, (4, 3)), 24),
            Ask("d", (SHARED, (5, 2)), 8),
        ),
        (
            Event("a", 3, ADD, "c"),
            Event("a", 5, ABORT, "b"),
            Event("c", 4, ABORT, "c"),
            Event("a", 10, ADD, "d"),
        ),
        frozenset({W.ADD, W.PREFIX, W.ABORT, W.ABORT_IN_FLIGHT, W.FINISH, W.BOUNDARY}),
    ),
    Scenario(
        "shared-prefix-paused",
        "requests that share KV blocks are paused in turn",
        (
            Ask("a", ((2, 6),), 28),
            Ask("b", (SHARED, (3, 2)), 24, sampled=True),
            Ask("c", (SHARED, (4, 3)), 24),
        ),
        (
            Event("a", 4, PAUSE, "b"),
            Event("a", 5, ADD, "c"),
            Event("c", 2, PAUSE, "c"),
            Event("a", 12, RESUME, "b"),
            Event("a", 15, RESUME, "c"),
        ),
        frozenset({W.PAUSE, W.PREFIX, W.ADD, W.BOUNDARY, W.FINISH}),
    ),
    Scenario(
        "memory-pressure",
        "four requests grow beyond the cache: they stall and evict each other",
        (
            Ask("a", ((2, 9),), 24),
            Ask("b", ((3, 9),), 24, sampled=True),
            Ask("c", ((4, 5),), 24),
            Ask("d", ((5, 6),), 22, sampled=True),
        ),
        (),
        frozenset({W.EVICT, W.PRESSURE, W.STALL, W.WAIT, W.BOUNDARY, W.FINISH}),
        Sizes(blocks=16),
    ),
    Scenario(
        "pressure-on-paused",
        "the paused request is the first to give way when memory runs short",
        (
            Ask("a", ((2, 9),), 24),
            Ask("b", ((3, 17),), 24, sampled=True),
            Ask("c", ((4, 5),), 20),
        ),
        (Event("a", 2, PAUSE, "b"), Event("a", 4, ADD, "c"), Event("a", 20, RESUME, "b")),
        frozenset({W.PAUSE, W.ADD, W.EVICT, W.PRESSURE, W.STALL, W.BOUNDARY, W.FINISH}),
        Sizes(blocks=14),
    ),
    Scenario(
        "priority",
        "an urgent request overtakes one that waits; the least urgent is evicted",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 9),), 24, sampled=True, priority=1),
            Ask("c", ((4, 5),), 10, priority=1),
            Ask("d", ((5, 6),), 12, sampled=True, priority=-1),
        ),
        (Event("a", 3, ADD, "d"),),
        frozenset({W.PRIORITY, W.ADD, W.WAIT, W.EVICT, W.PRESSURE, W.FINISH}),
        Sizes(rows=2, blocks=10),
    ),
    Scenario(
        "suspend",
        "requests arrive, are aborted and evicted while the engine is suspended",
        (
            Ask("a", ((2, 6),), 24),
            Ask("b", ((3, 9),), 24, sampled=True),
            Ask("c", ((4, 5),), 24),
            Ask("d", ((5, 6),), 10),
        ),
        (
            Event("a", 5, SUSPEND),
            Event("a", 5, ADD, "d"),
            Event("a", 5, ABORT, "c"),
            Event("a", 5, CONTINUE),
            Event("b", 10, SUSPEND),
            Event("b", 10, EVICT, "b"),
            Event("b", 10, CONTINUE),
        ),
        frozenset({W.SUSPEND, W.ADD, W.ABORT, W.EVICT, W.BOUNDARY, W.FINISH}),
    ),
    Scenario(
        "new-weights",
        "the model's own weights are loaded again while requests decode, prefill and are paused",
        (
            Ask("a", ((2, 6),), 26),
            Ask("b", ((3, 9),), 24, sampled=True),
            Ask("c", ((4, 40),), 12),
        ),
        (
            Event("a", 3, ADD, "c"),
            Event("a", 5, NEW_WEIGHTS),
            Event("b", 8, PAUSE, "b"),
            Event("a", 10, NEW_WEIGHTS),
            Event("a", 14, RESUME, "b"),
        ),
        frozenset({W.WEIGHTS, W.EVICT, W.ADD, W.PAUSE, W.CHUNKS, W.BOUNDARY, W.FINISH}),
    ),
    Scenario(
        "logged-steps",
        "every third step is logged, a barrier, while requests are paused and aborted",
        (
            Ask("a", ((2, 6),), 24),
            Ask("b", ((3, 9),), 20, sampled=True),
            Ask("c", ((4, 5),), 24),
            Ask("d", ((5, 6),), 24, stop=4),
        ),
        (Event("a", 4, PAUSE, "b"), Event("a", 7, ABORT, "c"), Event("a", 10, RESUME, "b")),
        frozenset({W.LOGGED, W.PAUSE, W.ABORT, W.STOP, W.BOUNDARY, W.FINISH}),
        Sizes(logging=3),
    ),
    Scenario(
        "smallest-cache",
        "the cache holds exactly the longest request; all of three get to their ends",
        (
            Ask("a", ((2, 9),), 24),
            Ask("b", ((3, 9),), 20, sampled=True),
            Ask("c", ((4, 5),), 18),
        ),
        (Event("a", 4, EVICT, "a"), Event("b", 5, PAUSE, "b"), Event("b", 5, RESUME, "b")),
        frozenset({W.EVICT, W.PRESSURE, W.STALL, W.WAIT, W.PAUSE, W.BOUNDARY, W.FINISH}),
        Sizes(blocks=8),
    ),
    Scenario(
        "blocks-of-one-token",
        "every token crosses a KV block, under pause, eviction, abort and a shared prefix",
        (
            Ask("a", (SHARED, (2, 3)), 26),
            Ask("b", (SHARED, (3, 1)), 24, stop=6),
            Ask("c", ((4, 5),), 24, sampled=True),
            Ask("d", ((5, 6),), 24),
        ),
        (
            Event("a", 2, ADD, "b"),
            Event("a", 4, PAUSE, "c"),
            Event("a", 6, EVICT, "a"),
            Event("a", 9, ABORT, "d"),
            Event("a", 12, RESUME, "c"),
        ),
        frozenset(
            {W.ADD, W.PAUSE, W.EVICT, W.ABORT, W.FINISH, W.BOUNDARY, W.PREFIX, W.STOP, W.DISCARD}
        ),
        Sizes(block=1, blocks=192),
    ),
    Scenario(
        "everything",
        "all of it in one run, short of memory and with logged steps",
        (
            Ask("a", (SHARED, (2, 3)), 28),
            Ask("b", (SHARED, (3, 2)), 24, sampled=True),
            Ask("c", ((4, 5),), 24, stop=5),
            Ask("d", ((5, 6),), 24, priority=1),
            Ask("e", (SHARED, (6, 4)), 24, sampled=True),
            Ask("f", ((7, 3),), 8, priority=-1),
            Ask("g", (SHARED, (8, 7)), 10, priority=2),
        ),
        (
            Event("a", 3, ADD, "g"),
            Event("a", 3, ADD, "e"),
            Event("a", 4, PAUSE, "d"),
            Event("a", 5, ADD, "f"),
            Event("a", 6, EVICT, "b"),
            Event("a", 8, NEW_WEIGHTS),
            Event("a", 10, SUSPEND),
            Event("a", 10, RESUME, "d"),
            Event("a", 10, CONTINUE),
            Event("e", 4, ABORT, "e"),
        ),
        frozenset(
            {W.ADD, W.PAUSE, W.EVICT, W.ABORT, W.FINISH, W.BOUNDARY, W.PREFIX, W.STOP, W.LENGTH}
            | {W.CHUNKS, W.WAIT, W.STALL, W.PRIORITY, W.SUSPEND, W.WEIGHTS, W.LOGGED}
        ),
        Sizes(blocks=18, logging=5),
    ),
)
"""Every scenario, each under its own name."""

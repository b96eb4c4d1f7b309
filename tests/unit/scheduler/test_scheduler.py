"""The scheduler and what it owns, without a device: small statements."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest

from megatron_async.cache.block_allocator import NULL_BLOCK, BlockAllocator
from megatron_async.cache.prefix_cache import ROOT, PrefixCache
from megatron_async.cache.retire_queue import RetireQueue
from megatron_async.errors import IntegrityError
from megatron_async.request.request import FinishReason
from megatron_async.scheduler.events import Change
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.preemption import choose_victims
from megatron_async.scheduler.queue import WaitingQueue
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scheduler.slots import SlotTable
from megatron_async.step.plan import Plan, SlotUpdate
from megatron_async.step.records import ENDED, FAILED, RUNNING, StepResult

GREEDY = (0.0, 0, 0.0, 0)
STOP = 99


def sequence(key: int, prompt: int = 1, max_new: int = 8) -> Sequence:
    """Tokens of different requests differ, so that no prefix is shared."""
    return Sequence(key, tuple(range(100 * key, 100 * key + prompt)), max_new, (STOP,), GREEDY)


def keyed(key: int, state: State, held: bool = False) -> Sequence:
    made = sequence(key)
    made.priority_key, made.state, made.held = (key, key), state, held
    made.blocks = [key]
    return made


class Row(NamedTuple):
    """What a commit says of one row."""

    key: int
    tokens: tuple[int, ...]
    reason: FinishReason | None
    discarded: bool


class Chain:
    """A scheduler with up to ``depth`` plans in flight; every row samples ``token``."""

    def __init__(self, depth: int = 0, *, debug: bool = False, **values: Any) -> None:
        self.depth = depth
        rows = values.get("max_requests", 2)
        self.scheduler = Scheduler(
            Limits(
                **{
                    "max_requests": rows,
                    "slot_count": rows * (depth + 1),
                    "max_tokens": 64,
                    "prefill_chunk_tokens": 8,
                    "block_size": 4,
                    "block_count": 16,
                    "max_assignments": 64,
                    **values,
                }
            ),
            debug=debug,
        )
        self.in_flight: deque[Plan] = deque()
        self.commits: list[Row] = []

    def add(self, *sequences: Sequence, priority: int = 0) -> None:
        for added in sequences:
            self.scheduler.add(added, priority)

    def launch(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append(plan)
        self.scheduler.check()
        return plan

    def commit(self, token: int = 7) -> list[Row]:
        plan = self.in_flight.popleft()
        count = len(plan.rows)
        result = StepResult([1] * count, [RUNNING] * count, [(token,)] * count)
        commit = self.scheduler.commit(plan, result)
        rows = [
            Row(key, tokens, commit.reasons.get(key), key in commit.discarded)
            for key, tokens in zip(commit.keys, commit.tokens, strict=True)
        ]
        assert all(row.tokens == (() if row.discarded else (token,)) for row in rows)
        self.commits += rows
        self.scheduler.check()
        return rows

    def step(self, token: int = 7) -> Plan | None:
        """As the engine's step."""
        plan = self.launch()
        allowed = self.depth if plan is not None else max(len(self.in_flight) - 1, 0)
        while len(self.in_flight) > allowed:
            self.commit(token)
        return plan

    def finish(self) -> None:
        for _ in range(1000):
            if not self.in_flight and not self.scheduler.has_unfinished:
                return self.scheduler.check_idle()
            self.step()
        raise AssertionError("the chain does not come to an end")


# --- blocks -----------------------------------------------------------------------------------


def test_blocks_are_given_out_once_and_never_the_null_block() -> None:
    allocator = BlockAllocator(3)
    assert sorted(allocator.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IntegrityError, match="none is free"):
        allocator.allocate()


def test_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    allocator.share(block)
    assert allocator.release([block]) == []
    assert allocator.release([block]) == [block]
    with pytest.raises(IntegrityError, match="nobody holds it"):
        allocator.release([block])
    with pytest.raises(IntegrityError, match="shared although it is free"):
        allocator.share(block)
    with pytest.raises(IntegrityError):
        allocator.release([NULL_BLOCK])


def test_kept_blocks_are_reused_last_and_the_least_recent_first() -> None:
    allocator = BlockAllocator(3)
    reused: list[int] = []
    allocator.on_reuse = reused.append
    first, second, plain = (allocator.allocate() for _ in range(3))
    allocator.keep(first)
    allocator.keep(second)
    assert allocator.release([second, first, plain]) == [plain]
    assert allocator.free_count == 3
    assert [allocator.allocate() for _ in range(3)] == [plain, second, first]
    assert reused == [second, first]


@pytest.mark.parametrize("holders", ([], [[1], [1]], [[1, 2]]))
def test_check_finds_a_block_whose_holders_do_not_agree(holders: list[list[int]]) -> None:
    allocator = BlockAllocator(2)
    assert allocator.allocate() == 1
    allocator.check([[1]])
    with pytest.raises(IntegrityError):
        allocator.check(holders)


# --- prefixes ---------------------------------------------------------------------------------


def prefixes(block_count: int = 4) -> tuple[BlockAllocator, PrefixCache]:
    allocator = BlockAllocator(block_count)
    return allocator, PrefixCache(allocator, 2, enabled=True)


def test_prefix_is_matched_by_whole_blocks_from_the_beginning() -> None:
    allocator, cache = prefixes()
    first, second = allocator.allocate(), allocator.allocate()
    node = cache.insert(cache.insert(ROOT, (1, 2), first), (3, 4), second)
    assert cache.match([1, 2, 3, 4, 5], 4) == ([first, second], node)
    assert cache.match([1, 2, 3, 4], 3)[0] == [first]
    assert cache.match([1, 2, 9, 4], 4)[0] == [first]
    assert cache.match([3, 4, 1, 2], 4)[0] == []


def test_known_content_stays_in_the_block_that_had_it_first() -> None:
    allocator, cache = prefixes()
    first, second = allocator.allocate(), allocator.allocate()
    node = cache.insert(ROOT, (1, 2), first)
    assert cache.insert(ROOT, (1, 2), second) == node
    assert allocator.release([second]) == [second]
    assert cache.match([1, 2], 2)[0] == [first]


def test_reused_block_is_forgotten_and_what_followed_it_not_found() -> None:
    allocator, cache = prefixes(2)
    first, second = allocator.allocate(), allocator.allocate()
    cache.insert(cache.insert(ROOT, (1, 2), first), (3, 4), second)
    allocator.release([first, second])
    assert allocator.allocate() == first
    assert cache.match([1, 2, 3, 4], 4) == ([], ROOT)


def test_cleared_or_disabled_cache_finds_nothing() -> None:
    allocator, cache = prefixes()
    block = allocator.allocate()
    cache.insert(ROOT, (1, 2), block)
    cache.clear()
    assert cache.match([1, 2], 2)[0] == []
    assert allocator.release([block]) == [block]
    disabled = PrefixCache(allocator, 2, enabled=False)
    assert disabled.insert(ROOT, (1, 2), allocator.allocate()) == ROOT
    assert disabled.match([1, 2], 2) == ([], ROOT)


# --- queues, slots, victims -------------------------------------------------------------------


def test_retire_queue_gives_nothing_before_its_ticket() -> None:
    retiring: RetireQueue[str] = RetireQueue()
    for ticket, item in ((5, "late"), (3, "a"), (3, "b")):
        retiring.push(ticket, item)
    assert [retiring.retire(ticket) for ticket in (2, 3, 4, 5)] == [[], ["a", "b"], [], ["late"]]


def test_slot_comes_back_once_and_the_lowest_is_taken_first() -> None:
    slots = SlotTable(3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    with pytest.raises(IntegrityError, match="slot 0"):
        slots.release(0)
    assert slots.take() == 0
    slots.check([0, 1])
    with pytest.raises(IntegrityError):
        slots.check([0])


def test_waiting_queue_passes_over_the_paused_and_keeps_their_place() -> None:
    queue = WaitingQueue()
    first, second = keyed(1, State.WAITING, held=True), keyed(2, State.WAITING)
    queue.add(second)
    queue.add(first)
    assert queue.head() is second
    first.held = False
    assert queue.head() is first
    queue.remove(first)
    with pytest.raises(ValueError, match="not waiting"):
        queue.remove(first)


def test_paused_give_way_first_then_the_highest_key_and_nobody_below_the_beneficiary() -> None:
    low, high = keyed(1, State.DECODING), keyed(9, State.STALLED)
    paused = keyed(2, State.HELD, held=True)
    ending = keyed(10, State.ENDING)
    table = Chain().scheduler.table
    table.sequences = {s.key: s for s in (low, paused, ending, high)}

    def chosen(deficit: int, at: int = 5) -> list[Sequence]:
        evictable = table.evictable()
        return choose_victims(evictable, deficit, (at, at), lambda s: len(s.blocks))

    assert chosen(0) == []
    assert chosen(1) == [paused]
    assert chosen(5) == [paused, high]
    assert chosen(5, at=0) == [paused, high, low]
    high.blocks = []
    assert chosen(5) == [paused], "who gives nothing back is not evicted"


# --- plans ------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    assert Chain().launch() is None


def test_prompt_is_prefilled_in_chunks_and_sampled_after_the_last() -> None:
    chain = Chain()
    chain.add(sequence(1, prompt=19))
    plans = [chain.step() for _ in range(3)]
    chunks = [(c.start, len(c.tokens), c.samples) for p in plans if p for c in p.prefills]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 3, True)]
    assert len(chain.commits) == 1


@pytest.mark.parametrize("depth", (0, 1, 4))
def test_no_row_is_launched_beyond_a_known_length(depth: int) -> None:
    chain = Chain(depth)
    chain.add(sequence(1, max_new=5))
    chain.finish()
    assert [c.tokens for c in chain.commits] == [(7,)] * 5
    assert [c.reason for c in chain.commits] == [None] * 4 + [FinishReason.LENGTH]
    assert chain.scheduler.next_ticket == 5


@pytest.mark.parametrize("depth", (1, 2, 4))
def test_rows_in_flight_behind_a_stop_are_discarded_and_hold_slot_and_blocks(depth: int) -> None:
    chain = Chain(depth)
    chain.add(sequence(1))
    for _ in range(depth + 1):
        chain.launch()
    (stop,) = chain.commit(token=STOP)
    assert stop.reason is FinishReason.STOP
    free = chain.scheduler.allocator.free_count
    for _ in range(depth):
        assert chain.scheduler.allocator.free_count == free < 16
        assert chain.scheduler.table.slots.free_count == 2 * (depth + 1) - 1
        (dropped,) = chain.commit()
        assert dropped.discarded
    assert chain.scheduler.allocator.free_count == 16
    chain.scheduler.check_idle()


@pytest.mark.parametrize("block_size", (1, 3, 4))
def test_block_is_assigned_with_the_step_that_writes_its_first_token(block_size: int) -> None:
    chain = Chain(2, block_size=block_size)
    chain.add(sequence(1, prompt=2, max_new=9))
    chain.launch()
    for position in range(2, 10):
        plan = chain.launch()
        assert plan is not None
        assert len(plan.assignments) == (position % block_size == 0)


def test_plan_stays_what_it_was_at_launch() -> None:
    chain = Chain(2)
    chain.add(sequence(1, max_new=2), sequence(2, max_new=9))
    plan = chain.launch()
    assert plan is not None
    before = (plan.rows.slots, plan.rows.epochs, plan.rows.keys)
    chain.finish()
    assert (plan.rows.slots, plan.rows.epochs, plan.rows.keys) == before == ((0, 1), (0, 0), (1, 2))


def test_head_of_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    chain = Chain(max_requests=3, block_count=6)
    chain.add(sequence(1, prompt=8), sequence(2, prompt=16, max_new=2), sequence(3))
    plan = chain.step()
    assert plan is not None and plan.rows.keys == (1,)
    chain.finish()
    ends = [c.key for c in chain.commits if c.reason]
    assert ends.index(2) < ends.index(3)


def test_lower_priority_goes_first_and_what_overtakes_is_bounded() -> None:
    chain = Chain(max_requests=1, priority_step=10)
    chain.add(sequence(1, max_new=30))
    chain.step()
    chain.add(sequence(2, max_new=1))
    chain.add(sequence(3, max_new=1), priority=-1)
    while chain.scheduler.waiting_count and chain.scheduler.next_ticket < 20:
        chain.step()
    chain.add(sequence(4, max_new=1), priority=-1)
    chain.finish()
    # Request 4 came ten tickets and more after request 2: one step of priority is not enough.
    assert [c.key for c in chain.commits if c.reason] == [1, 3, 2, 4]


# --- what happens to requests -----------------------------------------------------------------


def changes(chain: Chain) -> list[tuple[int, Change]]:
    return [(event.key, event.change) for event in chain.scheduler.table.take_events()]


def test_abort_ends_a_request_once_wherever_it_is() -> None:
    chain = Chain(1, max_requests=1)
    chain.add(sequence(1), sequence(2))
    chain.step()
    assert chain.scheduler.abort(2) and chain.scheduler.abort(1)
    assert not chain.scheduler.abort(1) and not chain.scheduler.abort(5)
    chain.finish()
    assert all(commit.discarded for commit in chain.commits)


def test_paused_request_leaves_the_rows_keeps_its_tokens_and_goes_on() -> None:
    chain = Chain(2)
    chain.add(sequence(1), sequence(2, max_new=20))
    chain.launch()
    chain.launch()
    assert chain.scheduler.pause(1) and not chain.scheduler.pause(1)
    plan = chain.launch()
    assert plan is not None and plan.rows.keys == (2,)
    assert [c.key for c in chain.commit() + chain.commit()] == [1, 2, 1, 2]
    assert chain.scheduler.resume(1) and not chain.scheduler.resume(1)
    chain.finish()
    assert sum(c.key == 1 for c in chain.commits) == 8


@pytest.mark.parametrize("depth", (0, 1, 2, 4))
def test_evicted_request_keeps_its_tokens_in_flight_and_is_computed_again(depth: int) -> None:
    chain = Chain(depth)
    chain.add(sequence(1, prompt=3))
    for _ in range(depth):
        chain.step()
    in_flight = len(chain.in_flight)
    assert chain.scheduler.evict(1) == (depth > 0)
    chain.finish()
    assert [c.tokens for c in chain.commits] == [(7,)] * 8 and not any(
        c.discarded for c in chain.commits
    )
    if depth:
        assert in_flight == depth
        assert changes(chain) == [(1, Change.ADMIT), (1, Change.EVICT), (1, Change.ADMIT)]


def test_request_short_of_a_block_stalls_and_the_lowest_key_gets_what_it_needs() -> None:
    chain = Chain(1, max_requests=3, block_count=4, block_size=4)
    chain.add(*(sequence(key, prompt=3, max_new=13) for key in (1, 2, 3)))
    chain.finish()
    happened = changes(chain)
    assert (1, Change.EVICT) not in happened
    assert {change for _, change in happened} >= {Change.STALL, Change.EVICT}
    ends = [c.key for c in chain.commits if c.reason]
    assert ends[0] == 1 and sorted(ends) == [1, 2, 3]


def test_new_weights_evict_all_and_forget_all_prefixes() -> None:
    chain = Chain()
    chain.add(sequence(1, prompt=8), sequence(2, prompt=8))
    chain.step()
    assert len(chain.scheduler.table.prefixes) > 0
    chain.scheduler.evict_all()
    chain.scheduler.table.forget_prefixes()
    assert len(chain.scheduler.table.prefixes) == 0
    assert chain.scheduler.allocator.free_count == 16
    assert chain.scheduler.waiting_count == 2
    chain.finish()


# --- control ----------------------------------------------------------------------------------


def controls(chain: Chain, count: int) -> list[tuple[SlotUpdate, ...]]:
    plans = [chain.launch() for _ in range(count)]
    return [plan.control for plan in plans if plan is not None]


def test_the_end_that_only_the_host_knows_goes_with_the_next_launch_and_no_other() -> None:
    chain = Chain(2)
    chain.add(sequence(1), sequence(2))
    chain.launch()
    assert chain.scheduler.abort(2)
    assert controls(chain, 2) == [(SlotUpdate(1, True, None),), ()]
    chain.finish()


def test_an_end_before_any_launch_or_after_all_commits_is_not_told() -> None:
    """No row of it is in flight: nobody would take it for live."""
    chain = Chain(1)
    chain.add(sequence(1), sequence(2), sequence(3))
    chain.launch()
    chain.commit()
    assert chain.scheduler.abort(1) and chain.scheduler.abort(3)
    assert controls(chain, 1) == [()]


def test_changed_values_go_with_the_next_launch_and_come_back_with_an_admission() -> None:
    chain = Chain(1, max_requests=1)
    chain.add(sequence(1), sequence(2, max_new=2))
    chain.step()
    running, waiting = (1.0, 5, 0.5, 3), (2.0, 0, 0.0, 4)
    assert chain.scheduler.update_values(1, GREEDY) and chain.scheduler.update_values(1, running)
    assert chain.scheduler.update_values(2, waiting)
    assert not chain.scheduler.update_values(3, running)
    assert controls(chain, 2) == [(SlotUpdate(0, False, running),), ()]
    assert chain.scheduler.evict(1)
    admitted = []
    while chain.scheduler.has_unfinished:
        plan = chain.step()
        if plan is not None:
            assert plan.control == ()
            admitted += [admission.values[4:] for admission in plan.admissions]
    assert admitted == [waiting, running]  # the row was free before the last token of 1 had come


# --- records with a count ---------------------------------------------------------------------


def take(chain: Chain, count: int, status: int, *tokens: int) -> tuple[Any, ...]:
    """Commit the oldest plan, of one row: what is kept, and why the request ends."""
    commit = chain.scheduler.commit(
        chain.in_flight.popleft(), StepResult([count], [status], [tokens])
    )
    chain.scheduler.check()
    ((key, kept),) = zip(commit.keys, commit.tokens, strict=True)
    return kept, commit.reasons.get(key), key in commit.discarded


def windows(max_new: int = 20, depth: int = 0, **values: Any) -> Chain:
    """A request with its first token, then decode rows that may bring three, ``depth`` + 1 of them
    in flight."""
    chain = Chain(depth, windows=(1, 3), max_requests=1, **values)
    chain.add(sequence(1, max_new=max_new))
    chain.launch()
    assert take(chain, 1, RUNNING, 7) == ((7,), None, False)
    for _ in range(depth + 1):
        chain.launch()
    return chain


@pytest.mark.parametrize("count", (1, 2, 3))
def test_a_row_brings_as_many_tokens_as_its_record_says(count: int) -> None:
    chain = windows()
    assert take(chain, count, RUNNING, 1, 2, 3) == ((1, 2, 3)[:count], None, False)
    (decoding,) = chain.scheduler.table.sequences.values()
    assert (decoding.committed, decoding.launched) == (1 + count, 1 + count)
    assert decoding.kv_bound == 1 + count  # the newest token is not written


@pytest.mark.parametrize(
    ("max_new", "tokens", "kept", "reason"),
    [
        (20, (1, STOP, 3), (1, STOP), FinishReason.STOP),
        (20, (STOP, 2, STOP), (STOP,), FinishReason.STOP),
        (3, (1, 2, 3), (1, 2), FinishReason.LENGTH),
        (3, (1, STOP, 3), (1, STOP), FinishReason.STOP),
        (4, (1, 2, 3), (1, 2, 3), FinishReason.LENGTH),
    ],
)
def test_a_window_is_cut_where_the_request_ends(
    max_new: int, tokens: tuple[int, ...], kept: tuple[int, ...], reason: FinishReason
) -> None:
    """And the rows in flight behind it are dead."""
    chain = windows(max_new, depth=1)
    assert take(chain, 3, ENDED, *tokens) == (kept, reason, False)
    if chain.in_flight:
        assert take(chain, 0, ENDED, 4, 5, 6) == ((), None, True)
    chain.scheduler.check_idle()


def test_a_row_that_failed_ends_its_request_without_a_token() -> None:
    chain = windows(depth=1, debug=True)
    assert take(chain, 0, FAILED, -1, -1, -1) == ((), FinishReason.ERROR, False)
    assert take(chain, 0, ENDED, -1, -1, -1) == ((), None, True)
    chain.scheduler.check_idle()


def test_a_window_that_failed_keeps_the_tokens_before() -> None:
    chain = windows(debug=True)
    assert take(chain, 2, FAILED, 1, 2, -1) == ((1, 2), FinishReason.ERROR, False)
    chain.scheduler.check_idle()


@pytest.mark.parametrize(
    ("count", "status", "tokens"),
    [
        (1, RUNNING, (STOP, 0, 0)),  # an end that the device did not see
        (1, ENDED, (1, 0, 0)),  # one that only the device saw
        (3, ENDED, (1, STOP, 0)),  # a token behind the end
        (0, RUNNING, (1, 2, 3)),  # a live row without a token
        (0, ENDED, (1, 2, 3)),
    ],
)
def test_debug_finds_a_device_that_disagrees(
    count: int, status: int, tokens: tuple[int, ...]
) -> None:
    with pytest.raises(IntegrityError, match="the host takes"):
        take(windows(debug=True), count, status, *tokens)


def test_debug_finds_a_row_that_was_sampled_behind_an_end_that_the_device_knew() -> None:
    chain = windows(depth=1, debug=True)
    assert take(chain, 1, ENDED, STOP, 0, 0) == ((STOP,), FinishReason.STOP, False)
    with pytest.raises(IntegrityError, match=r"ended by FinishReason\.STOP"):
        take(chain, 1, RUNNING, 1, 0, 0)


def test_a_request_that_begins_again_has_its_drafts_again() -> None:
    begun = sequence(1, 3)
    begun.take_window(4)
    begun.end_drafts()
    assert begun.window == 1
    begun.restart()
    assert begun.window == 4


@pytest.mark.parametrize("micro_batches", (1, 2))
def test_where_rows_need_guesses_those_that_have_some_open_their_windows_once(
    micro_batches: int,
) -> None:
    chain = Chain(
        depth=micro_batches - 1, windows=(1, 4), needs_guesses=True, micro_batches=micro_batches,
        max_tokens=99, block_count=40,
    )  # fmt: skip
    scheduler = chain.scheduler
    chain.add(sequence(1, max_new=40), sequence(2, max_new=40))
    scheduler.add(sequence(3, max_new=40), drafts=1)

    def windows() -> dict[int, int]:
        """Of each request in the next steps, until each micro-batch has had one."""
        found: dict[int, int] = {}
        for _ in range(micro_batches):
            plan = chain.step()
            assert plan is not None
            found |= dict(zip(plan.rows.keys, plan.rows.windows or [1] * 9, strict=False))
            own = max(plan.rows.windows, default=1)
            assert plan.window == (4 if own > 1 else 1) and plan.drafts == plan.window - 1
        return found

    while len(found := windows()) < 2 or chain.scheduler.table.prefilling:
        pass
    running = sorted(found)
    assert set(found.values()) == {1}
    first, second = running[:2]
    scheduler.foresee({first: 2, second: 0, 99: 3})
    assert windows() == {first: 3, second: 1}
    assert windows() == {first: 1, second: 1}
    scheduler.foresee({first: 9})
    scheduler.foresee({second: 1})
    assert windows() == {first: 4, second: 2}
    if micro_batches > 1:
        return  # which of them a row comes back to is another matter
    scheduler.foresee({first: 2, second: 2})
    scheduler.pause(first)
    assert windows().get(second) == 3
    scheduler.resume(first)
    while first not in (found := windows()):
        pass
    assert found[first] == 1, "it has come back while the step was planned"
    scheduler.foresee({first: 0, second: 0})
    assert windows() == {first: 1, second: 1}


# --- long prompts -----------------------------------------------------------------------------


def prefilled(plan: Plan | None) -> list[tuple[int, int]]:
    """Key and tokens of each chunk."""
    assert plan is not None
    keys = plan.rows.keys[plan.decode_rows :]
    return [(key, len(chunk.tokens)) for key, chunk in zip(keys, plan.prefills, strict=True)]


LONG: dict[str, Any] = {
    "max_requests": 6, "max_tokens": 16, "prefill_chunk_tokens": 4, "block_count": 200,
    "max_assignments": 400,
}  # fmt: skip


def test_a_short_prompt_waits_for_no_more_than_one_long_one() -> None:
    """Four long ones fill a step's tokens: without classes it waits until the first has ended."""
    first: dict[int | None, int] = {}
    for threshold in (None, 8):
        chain = Chain(long_prompt_tokens=threshold, **LONG)
        chain.add(*(sequence(key, prompt=40, max_new=2) for key in range(4)))
        chain.step()
        chain.add(sequence(9, prompt=5, max_new=2))
        plans = [chain.step() for _ in range(12)]
        steps = [n for n, plan in enumerate(plans) if 9 in dict(prefilled(plan))]
        first[threshold] = steps[0]
        chain.finish()
    assert first[8] == 0 and first[None] >= 8


def test_long_prompts_take_turns_in_the_order_of_their_arrival() -> None:
    chain = Chain(long_prompt_tokens=8, long_prompts=2, **LONG)
    chain.add(*(sequence(key, prompt=24, max_new=1) for key in range(4)))
    seen = [[key for key, _ in prefilled(chain.step())] for _ in range(5)]
    # What is left of a prompt is no longer long behind its fourth chunk, and the next begins.
    assert seen[:4] == [[0, 1]] * 4 and seen[4] == [0, 1, 2, 3]
    chain.finish()


def test_what_is_left_of_a_long_prompt_is_short() -> None:
    chain = Chain(long_prompt_tokens=8, **LONG)
    chain.add(sequence(0, prompt=16, max_new=1), sequence(1, prompt=16, max_new=1))
    assert [prefilled(chain.step()) for _ in range(3)] == [[(0, 4)], [(0, 4)], [(0, 4), (1, 4)]]
    chain.finish()


def test_short_prompts_pass_a_long_one_only_while_another_is_under_way() -> None:
    """A long one that waits for blocks is passed by nobody, so that it gets them."""
    values = {**LONG, "block_count": 14, "max_requests": 3}
    chain = Chain(long_prompt_tokens=8, **values)
    chain.add(sequence(0, prompt=12, max_new=30), sequence(1, prompt=40, max_new=1))
    chain.add(*(sequence(key, prompt=4, max_new=1) for key in range(2, 9)))
    order: list[int] = []
    for _ in range(200):
        plan = chain.step()
        if plan is not None:
            order += [key for key, _ in prefilled(plan) if key not in order]
    # 2 and 3 pass it while 0 is long, behind it all wait until 0 has ended.
    assert order[0] == 0 and order.index(1) < order.index(8)
    chain.finish()


def test_paused_long_prompts_are_passed_over() -> None:
    chain = Chain(long_prompt_tokens=8, **LONG)
    chain.add(*(sequence(key, prompt=40, max_new=1) for key in range(3)), sequence(3, prompt=4))
    assert chain.scheduler.pause(1)
    assert [key for key, _ in prefilled(chain.step())] == [0, 3]
    for _ in range(100):
        chain.step()
    assert chain.scheduler.unfinished_count == 1 and chain.scheduler.resume(1)
    chain.finish()


def test_long_prompts_that_were_resumed_wait_for_each_other_too() -> None:
    chain = Chain(long_prompt_tokens=8, **LONG)
    chain.add(sequence(0, prompt=40, max_new=1), sequence(1, prompt=40, max_new=1))
    assert prefilled(chain.step()) == [(0, 4)]
    assert chain.scheduler.pause(0)
    assert prefilled(chain.step()) == [(1, 4)]
    assert chain.scheduler.resume(0)
    chain.add(sequence(2, prompt=20, max_new=1), sequence(3, prompt=4, max_new=1))
    assert [key for key, _ in prefilled(chain.step())] == [1, 3]
    chain.finish()


def test_a_long_request_that_begins_anew_while_it_waits_may_become_short() -> None:
    """Evicted, it has its prompt and its tokens to compute; without the tokens it is short."""
    chain = Chain(long_prompt_tokens=8, **LONG)
    begun = sequence(0, prompt=6, max_new=20)
    chain.add(begun)
    for _ in range(8):
        chain.step()
    assert chain.scheduler.evict(0) and chain.scheduler.pause(0)
    chain.add(sequence(1, prompt=40, max_new=1), sequence(2, prompt=4, max_new=2))
    while begun.state is not State.WAITING:
        chain.step()
    assert chain.scheduler.restart(0) and chain.scheduler.resume(0)
    chain.finish()
    assert begun.reason is not None

"""Plans as late as the device allows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.stepping import late_planning
from megatron_async.engine.stepping.late_planning import LatePlanning
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import Plan, PrefillChunk, RowMap, SampleShape, Ticket

MS = 1_000_000


def ticket(number: int, prompt: int = 0) -> Ticket:
    """A step of eight rows, and a chunk of ``prompt`` tokens if there are any."""
    chunks = (PrefillChunk(8, 8, 0, (0,) * prompt, True, (), ()),) if prompt else ()
    rows = RowMap((), (), ())
    return Ticket(number, Plan(number, rows, 8, (), chunks), SampleShape(8))


class Machine:
    """A device that runs one step after the other, and a host whose work takes its time."""

    def __init__(self, *, depth: int = 1, host: int = MS // 3, sampling: int = 0) -> None:
        self.now = 0
        self.host = host
        self.sampling = sampling
        """Nanoseconds of what samples a step's tokens, at the head of the next one."""
        self.depth = depth
        self.pace = LatePlanning(lambda: self.now, self._sleep)
        self.ends: dict[int, int] = {}
        self.in_flight: list[Ticket] = []
        self.slept = 0
        self.idle: list[int] = []
        """Nanoseconds of each step that the device waited for it."""
        self.early: list[int] = []
        """Nanoseconds of each step between the beginning of its plan and its own."""

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += 1
        self.now += int(seconds * 1e9) + 60_000  # it wakes up late

    def step(self, cost: int, prompt: int = 0, hiccup: int = 0) -> None:
        if len(self.in_flight) == self.depth:
            self.pace.wait(self.in_flight[0])
        planned = self.now
        self.now += self.host + hiccup
        number = len(self.ends)
        free = self.ends.get(number - 1, 0)
        begins = max(free, self.now)
        self.idle.append(begins - free if number else 0)
        self.early.append(begins - planned)
        sampled = begins + self.sampling
        self.ends[number] = sampled + cost
        self.in_flight.append(ticket(number, prompt))
        while len(self.in_flight) > self.depth:
            oldest = self.in_flight.pop(0)
            end = sampled if self.sampling else self.ends[oldest.number]
            waited = max(0, end - self.now)
            self.now += waited
            self.pace.taken(oldest, waited, followed=bool(self.in_flight))
            self.now += self.host // 2


@pytest.mark.parametrize("depth", (1, 2))
def test_a_plan_begins_shortly_before_the_device_is_free(depth: int) -> None:
    machine = Machine(depth=depth)
    for _ in range(400):
        machine.step(5 * MS)
    assert sum(machine.idle[20:]) == 0
    # As soon as the depth allows it would be a step earlier.
    assert max(machine.early[300:]) < MS + (depth - 1) * 5 * MS


@pytest.mark.parametrize("sampling", (MS // 10, MS // 2, 2 * MS))
def test_a_wait_for_sampling_alone_is_no_slack(sampling: int) -> None:
    """The host waits for what it has launched, too, however late it came."""
    machine = Machine(sampling=sampling)
    for _ in range(400):
        machine.step(5 * MS)
    assert sum(machine.idle[100:]) == 0
    assert max(machine.early[300:]) < MS


def test_a_host_that_is_slower_than_the_device_never_waits() -> None:
    machine = Machine(host=4 * MS)
    for _ in range(100):
        machine.step(2 * MS)
    assert machine.slept == 0


def test_steps_of_several_sizes_are_known_apart() -> None:
    """Every third step has a chunk of a prompt, and takes four times as long."""
    machine = Machine()
    for number in range(600):
        long = number % 3 == 0
        machine.step(20 * MS if long else 5 * MS, prompt=200 if long else 0)
    assert sum(machine.idle[30:]) == 0
    assert max(machine.early[400:]) < 1.3 * MS


def test_a_hiccup_costs_its_own_time_alone() -> None:
    machine = Machine()
    for number in range(600):
        machine.step(5 * MS, hiccup=30 * MS if number == 300 else 0)
    assert sum(machine.idle[20:300]) == 0 and sum(machine.idle[303:]) == 0
    assert sum(machine.idle[300:303]) <= 31 * MS
    assert max(machine.early[500:]) < MS


def test_costs_that_shrink_are_followed_at_once() -> None:
    """As where requests end, and rows of the same graph have shorter contexts."""
    machine = Machine()
    for number in range(300):
        machine.step((5 if number < 150 else 3) * MS)
    late = sum(machine.idle[150:])
    assert late <= 2.1 * MS and sum(machine.idle[153:]) == 0


def test_an_unknown_step_is_not_waited_for() -> None:
    machine = Machine()
    for _ in range(50):
        machine.step(5 * MS)
    machine.step(5 * MS, prompt=300)
    before = machine.now
    machine.pace.wait(machine.in_flight[0])
    assert machine.now == before


class Calls:
    """In the place of what waits: does something before a plan."""

    def __init__(self) -> None:
        self.before_plan: Any = lambda: None
        self.taken_tickets: list[tuple[int, bool]] = []

    def wait(self, oldest: Ticket) -> None:
        self.before_plan()

    def taken(self, ticket: Ticket, waited: int, *, followed: bool) -> None:
        assert waited >= 0
        self.taken_tickets.append((ticket.number, followed))


def engine_of(**values: Any) -> DynamicInferenceEngine:
    config = EngineConfig(device="cpu", max_requests=4, max_sequence_length=64, **values)
    return DynamicInferenceEngine.from_pretrained("tiny", config)


def params(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=length, termination_id=-1)


def test_a_request_that_comes_during_the_wait_is_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls()
    monkeypatch.setattr("megatron_async.build.engine._late_planning", lambda: calls)
    with engine_of(depth=1, late_planning=True) as engine:
        engine.add_request(0, "def f", params(20))
        for _ in range(5):
            engine.step_modern()
        assert engine.loop.in_flight_count == 1
        admitted: list[int] = []
        coming = engine.scheduler.next_ticket

        class Watch:
            def on_launch(self, plan: Plan) -> None:
                if plan.admissions:
                    admitted.append(plan.number)

        engine.loop.observe(Watch())
        calls.before_plan = lambda: engine.add_request(1, "class A", params(3))
        engine.step_modern()
        assert admitted == [coming]
        calls.before_plan = lambda: None
        while engine.has_unfinished_requests():
            engine.step_modern()
    numbers = [number for number, _ in calls.taken_tickets]
    assert numbers == sorted(numbers) and not calls.taken_tickets[-1][1]
    assert all(followed for number, followed in calls.taken_tickets[1:8])


def test_ctrl_c_during_the_wait_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr("megatron_async.build.engine._late_planning", lambda: calls)

    def interrupt() -> None:
        raise KeyboardInterrupt

    found = []
    for interrupted in (False, True):
        with engine_of(depth=1, late_planning=True) as engine:
            engine.add_request(0, "def f", params(12))
            for _ in range(4):
                engine.step_modern()
            if interrupted:
                calls.before_plan = interrupt
                with pytest.raises(KeyboardInterrupt):
                    engine.step_modern()
                calls.before_plan = lambda: None
            ended = []
            while engine.has_unfinished_requests():
                ended += engine.step_modern()["finished_request_records"]
            found.append([request.generated_tokens for request in ended])
    assert len(found[0]) == 1 and found[0] == found[1]


@pytest.mark.parametrize("depth", (0, 1, 2, 4))
def test_tokens_are_the_same(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are long here, and in the middle of all that happens."""
    slept: list[float] = []
    monkeypatch.setattr(late_planning, "LEAST_SLACK_NS", 0)
    monkeypatch.setattr(late_planning.time, "sleep", slept.append)
    prompts = ["def read(self", "import ", "class A:\n    x", "for i in"]
    lengths = [params(n) for n in (12, 5, 17, 9)]
    found = []
    for late in (False, True):
        with engine_of(depth=depth, late_planning=late) as engine:
            found.append(
                [request.generated_tokens for request in engine.generate(prompts, lengths)]
            )
            assert engine.config.late_planning is late
    assert found[0] == found[1]
    assert depth or not slept

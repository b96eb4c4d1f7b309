"""``megatron-async trace``: its file keeps the rules of the format, and shows the overlap."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring.loads import Load
from megatron_async.cli.main import main
from megatron_async.device import cuda_timeline
from megatron_async.device.cpu import CpuDevice, Span
from megatron_async.device.cuda_timeline import CudaTimeline
from megatron_async.device.kernel_profiler import KernelProfiler, clock_shift_ns, kernels_of
from megatron_async.engine.lifecycle.host_timeline import HostTimeline
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.perfetto.events import (
    DEVICE_LANE,
    FIRST_KERNEL_LANE,
    HOST_LANE,
    DeviceKernel,
    Recording,
    short_name,
    trace_events,
)
from megatron_async.perfetto.timeline import (
    device_steps,
)
from megatron_async.ranks.timelines import RankTimeline
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan
from megatron_async.step.records import StepResult
from megatron_async.trace import record
from tests.support.engines import hash_engine, sampling_params
from tests.support.oracle import Ask
from tests.support.patience import PATIENCE_SECONDS

Capture = pytest.CaptureFixture[str]
Event = dict[str, Any]
STEPS = 24
DEPTHS = (0, 1, 2)
SMALL = ("--device", "cpu", "--prompt-tokens", "8", "--steps", str(STEPS))


@pytest.fixture(scope="module", params=DEPTHS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[int, list[Event]]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    options = ("--shape", "tiny-llama", "--batch-size", "3", "--depth", str(request.param))
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            hold_forwards(patch)
        assert main(["trace", *SMALL, *options, "-o", str(path)]) == 0
    return request.param, read(path)


def hold_forwards(patch: pytest.MonkeyPatch) -> None:
    """Forward n + 1 does not end before commit n has begun, however slow the host is."""
    begun: defaultdict[int, threading.Event] = defaultdict(threading.Event)
    commit, run = Scheduler.commit, CpuDevice.run

    def seen_commit(self: Scheduler, plan: Plan, result: StepResult) -> Any:
        begun[plan.number].set()
        return commit(self, plan, result)

    def held_run(self: CpuDevice, work: Callable[[], None], name: str, *marks: int) -> None:
        def held() -> None:
            work()
            if "F" in name.split() and marks[0] > 0:
                assert begun[marks[0] - 1].wait(PATIENCE_SECONDS), "the host waits for this forward"

        run(self, held, name, *marks)

    patch.setattr(Scheduler, "commit", seen_commit)
    patch.setattr(CpuDevice, "run", held_run)


def read(path: Path) -> list[Event]:
    trace = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[Event] = trace["traceEvents"]
    return events


def check_format(events: list[Event]) -> None:
    """What Perfetto's reader of JSON traces asks for."""
    last = -1.0
    for event in events:
        assert isinstance(event["name"], str) and event["ph"] in "MXCstf"
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert type(event["ts"]) is float and event["ts"] >= 0
        assert event["ts"] * 1000 == int(event["ts"] * 1000), "not a whole nanosecond"
        if event["ph"] == "M":
            assert last <= 0 and event["args"]
            continue
        assert event["ts"] >= last, "out of order"
        last = event["ts"]
        if event["ph"] == "X":
            assert type(event["dur"]) is float and event["dur"] >= 0
            assert event["dur"] * 1000 == int(event["dur"] * 1000)
        elif event["ph"] == "C":
            assert event["args"] and all(type(v) is int for v in event["args"].values())
        else:
            assert type(event["id"]) is int and event["bp"] == "e" and event["cat"] == "ticket"


def bound_flows(events: list[Event]) -> dict[int, list[tuple[str, Event]]]:
    """The slice that encloses each point of each arrow; slices in a lane must nest."""
    stacks: dict[tuple[int, int], list[Event]] = {}
    flows: dict[int, list[tuple[str, Event]]] = {}
    for event in events:
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] in "XCstf":
            while stack and end_of(stack[-1]) <= event["ts"] and stack[-1]["ts"] < event["ts"]:
                stack.pop()
        if event["ph"] == "X":
            if stack:
                assert end_of(event) <= end_of(stack[-1]), "slices overlap without nesting"
                is_part = event["tid"] == HOST_LANE or event["args"].get("work") == "collective"
                assert is_part, "the device does one thing at a time"
            stack.append(event)
        elif event["ph"] in "stf":
            assert stack, "an arrow ends at no slice"
            whole = [each for each in stack if each["args"].get("work") != "collective"]
            flows.setdefault(event["id"], []).append((event["ph"], whole[-1]))
    return flows


def end_of(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def slices(events: list[Event], lane: int, category: str | None = None) -> list[Event]:
    return [
        event
        for event in events
        if event["ph"] == "X" and event["tid"] == lane and category in (None, event["cat"])
    ]


def overlaps(a: Event, b: Event) -> bool:
    return bool(a["ts"] < end_of(b) and b["ts"] < end_of(a))


def test_file_keeps_the_rules_of_the_format(traced: tuple[int, list[Event]]) -> None:
    check_format(traced[1])
    bound_flows(traced[1])


def test_every_ticket_has_an_arrow_from_launch_over_the_device_to_its_commit(
    traced: tuple[int, list[Event]],
) -> None:
    depth, events = traced
    launched = [event["args"]["ticket"] for event in slices(events, HOST_LANE, "launch")]
    assert launched == list(range(launched[0], launched[0] + STEPS))
    flows = bound_flows(events)
    assert sorted(flows) == launched
    for ticket, points in flows.items():
        assert [phase for phase, _ in points] == ["s", "t", "t", "f"]
        launch, forward, sample, commit = (at for _, at in points)
        assert (launch["name"], commit["name"]) == (f"launch {ticket}", f"commit {ticket}")
        assert f"F{ticket}" in forward["name"].split()
        assert f"S{ticket}" in sample["name"].split()
        assert forward["tid"] == sample["tid"] == DEVICE_LANE
        assert (commit["args"]["ticket"], launch["tid"], commit["tid"]) == (ticket, 1, 1)
    # Those in flight before the first launch are committed as well.
    assert len(slices(events, HOST_LANE, "commit")) == STEPS + depth


def test_host_and_device_overlap_from_depth_1_on_and_never_at_depth_0(
    traced: tuple[int, list[Event]],
) -> None:
    depth, events = traced
    forwards = {
        int(word[1:]): event
        for event in slices(events, DEVICE_LANE)
        for word in event["name"].split()
        if word.startswith("F")
    }
    commits = {event["args"]["ticket"]: event for event in slices(events, HOST_LANE, "commit")}
    pairs = [(commits[n - 1], forward) for n, forward in forwards.items() if n - 1 in commits]
    assert len(pairs) >= STEPS - 1
    beside = sum(overlaps(commit, forward) for commit, forward in pairs)
    assert beside > len(pairs) // 2 if depth else beside == 0


def test_each_commit_says_how_deep_its_step_ran(traced: tuple[int, list[Event]]) -> None:
    depth, events = traced
    commits = [event["args"] for event in slices(events, HOST_LANE, "commit")]
    for args in commits[:STEPS]:
        assert args["effective_depth"] == depth
        assert args["overlapped"] is (depth > 0)
        assert args["reason"] == (None if depth else "serial: depth 0")
    # What is left in flight at the end is committed for the engine to be suspended.
    for left, args in enumerate(reversed(commits[STEPS:])):
        assert (args["effective_depth"], args["overlapped"]) == (left, left > 0)
    assert {args["committed"] + args["discarded"] for args in commits} <= {2, 3}


def test_trace_shows_a_request_leave_and_another_one_join(
    traced: tuple[int, list[Event]],
) -> None:
    depth, events = traced
    rows = [event["args"] for event in events if event["name"] == "rows"]
    assert len(rows) == STEPS
    assert rows[0] == rows[-1] == {"decode": 3, "prefill": 0}
    assert {"decode": 2, "prefill": 0} in rows
    assert {"decode": 2, "prefill": 1} in rows
    assert [e["cat"] for e in slices(events, DEVICE_LANE)].count("H2D F mixed") == 1
    in_flight = [e["args"]["tickets"] for e in events if e["name"] == "tickets in flight"]
    assert in_flight[0] == depth and in_flight[-1] == 0 and max(in_flight) == depth + 1


def test_lanes_and_slices_have_names(traced: tuple[int, list[Event]]) -> None:
    depth, events = traced
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[HOST_LANE] == "host" and names[DEVICE_LANE].startswith("device: ")
    (process,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert process == f"tiny-llama, float32, batch 3, depth {depth}"
    kinds = {event["cat"] for event in slices(events, HOST_LANE)}
    assert kinds == {"plan", "launch", "pack", "sample", "wait", "commit", "output"}


def test_drafts_are_shown_at_their_commits(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    drafts = ("--num-speculative-tokens", "2", "--speculative-method", "ngram")
    options = ("--shape", "tiny-llama", "--batch-size", "2", *drafts, "-o", str(path))
    assert main(["trace", *SMALL, *options]) == 0
    events = read(path)
    commits = [e for e in slices(events, HOST_LANE, "commit") if e["args"]["drafted"]]
    shown = {e["ts"]: e["args"] for e in events if e["name"] == "drafts" and e["ph"] == "C"}
    of_device = {
        e["args"]["accepted"] for e in slices(events, DEVICE_LANE) if "drafted" in e["args"]
    }
    for commit in commits:
        args = commit["args"]
        accepted, rejected = args["accepted"], args["drafted"] - args["accepted"]
        assert args["drafted"] in (2, 4)
        assert shown[commit["ts"]] == {"accepted": accepted, "rejected": rejected}
        name = f"commit {args['ticket']}: {accepted} of {args['drafted']} drafts"
        assert commit["name"] == name
        assert accepted in of_device
    assert len(commits) == len(shown) >= STEPS
    total = [sum(commit["args"][name] for commit in commits) for name in ("accepted", "drafted")]
    assert total[0] > 0
    out = capsys.readouterr().out.splitlines()
    assert "batch 2, depth 1, window 3: " in out[0]
    assert out[1] == f"{total[0]} of {total[1]} drafts accepted"


def test_a_batch_of_one_is_replaced_without_a_drain(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    options = ("--shape", "tiny-llama", "--batch-size", "1", "--depth", "1", "-o", str(path))
    assert main(["trace", *SMALL, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == f"{path}: open it at https://ui.perfetto.dev"
    rows = [event["args"] for event in read(path) if event["name"] == "rows"]
    assert len(rows) == STEPS and {"decode": 0, "prefill": 1} in rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("depth", (0, 1))
def test_on_a_gpu(
    depth: int, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward takes some milliseconds more, so that the host commits during it even where
    others use the machine."""
    forward_into = GPTNetwork.forward_into

    def slow_forward_into(self: GPTNetwork, *arguments: Any) -> None:
        torch.cuda._sleep(40_000_000)
        forward_into(self, *arguments)

    monkeypatch.setattr(GPTNetwork, "forward_into", slow_forward_into)
    path = tmp_path / "trace.json"
    options = ["--shape", "gpt2", "--batch-size", "3", "--depth", str(depth)]
    options += ["--kernels"] if kernels else []
    assert main(["trace", "--device", "cuda", *SMALL[2:], *options, "-o", str(path)]) == 0
    events = read(path)
    check_format(events)
    flows = bound_flows(events)
    assert len(flows) == STEPS
    for points in flows.values():
        assert [phase for phase, _ in points] == ["s", "t", "t", "f"]
    test_host_and_device_overlap_from_depth_1_on_and_never_at_depth_0((depth, events))
    found = slices(events, FIRST_KERNEL_LANE, "kernel")
    if not kernels:
        assert not found
        return
    # Clocks agree: nearly all kernels lie in a slice of the device.
    assert len(found) > 20 * STEPS
    work = slices(events, DEVICE_LANE)
    slack = 100.0  # the profiler's clock drifts from that of the events; forwards take 20 ms
    inside = sum(
        any(w["ts"] - slack <= k["ts"] and end_of(k) <= end_of(w) + slack for w in work)
        for k in found
    )
    assert inside > 0.9 * len(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_of_the_host_lies_beside_the_next_drafting_step_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host_work_beside_drafts("cuda", tmp_path / "trace.json", monkeypatch)


def check_host_work_beside_drafts(device: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ms of host work in each commit, and forwards that take longer: each commit lies beside a
    later forward, though nobody knows how many drafts that one's rows will accept."""
    forward_into = GPTNetwork.forward_into

    def slow_forward_into(self: GPTNetwork, *arguments: Any) -> None:
        if device == "cuda":
            torch.cuda._sleep(40_000_000)
        forward_into(self, *arguments)

    monkeypatch.setattr(GPTNetwork, "forward_into", slow_forward_into)
    monkeypatch.setattr(record, "Load", functools.partial(Load, host_work_us=4000.0))
    options = ("--shape", "tiny-llama", "--batch-size", "3", "--num-speculative-tokens", "2")
    assert main(["trace", "--device", device, *SMALL[2:], *options, "-o", str(path)]) == 0
    events = read(path)
    test_host_and_device_overlap_from_depth_1_on_and_never_at_depth_0((1, events))
    commits = slices(events, HOST_LANE, "commit")
    assert all(commit["dur"] >= 4000 for commit in commits)
    assert sum(commit["args"]["drafted"] > 0 for commit in commits) >= STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shape", "gpt2", "--steps", "1000"), "--prompt-tokens 64, --steps 1000, --batch"),
        (("--shape", "gpt2", "--batch-size", "1000"), "--batch-size 1000 and --depth 1 make"),
        (("--batch-size", "65537"), "argument --batch-size: '65537' must be an integer between"),
        (("--shape", "gpt2", "--model", "tiny"), "not allowed with"),
        (("--kernels",), "--kernels needs a GPU"),
        (("-o", "/nowhere/trace.json"), "/nowhere/trace.json"),
        (("-o", "/proc/trace.json"), "--output /proc/trace.json: cannot be written"),
        (("--model", "/nowhere"), "not a directory"),
        (("--steps", "2"), "at least 6"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    try:
        status = main(["trace", "--device", "cpu", *options])
    except SystemExit as left:
        status = int(left.code or 0)
    captured = capsys.readouterr()
    assert status == 2 and not captured.out
    assert message in captured.err and captured.err.count("\n") == 1


# --- the parts --------------------------------------------------------------------------------


def test_a_detached_timeline_sees_nothing_more() -> None:
    params = sampling_params(Ask(prompt=(4,), max_new=5))
    with hash_engine(1, max_requests=2, block_count=8, debug=False) as engine:
        timeline = HostTimeline(engine)
        engine.device.start_timeline()
        engine.generate([[4]], params)
        seen = len(timeline.slices), len(timeline.launches), len(timeline.reports)
        assert min(seen) > 0 and engine.device.take_timeline()
        timeline.detach()
        engine.generate([[4]], params)
        assert (len(timeline.slices), len(timeline.launches), len(timeline.reports)) == seen
        assert isinstance(engine.device, CpuDevice) and engine.device.timeline is None


def test_s_is_named_after_the_ticket_whose_logits_it_samples() -> None:
    work = [
        ("S", 7, 6, "S6"), ("H2D F mixed", 7, 6, "H2D F7 mixed"), ("S H2D F", 8, 7, "S7 H2D F8"),
        ("C S+ H2D F", 9, 8, "C S8+ H2D F9"), ("S+ processed", 9, 9, "S9+ processed"),
        # Of two stages the first one takes what the last has sampled two launches later.
        ("T", 10, 8, "T8"), ("T H2D F", 11, 9, "T9 H2D F11"),
    ]  # fmt: skip
    spans = [Span(name, ticket, n, n + 1, of) for n, (name, ticket, of, _) in enumerate(work)]
    steps = device_steps(spans)
    assert [step.title for step in steps] == [title for *_, title in work]
    assert [step.handed_out for step in steps] == [6, -1, 7, 8, 9, 8, 9]
    assert [step.forwarded for step in steps] == [-1, 7, 8, 9, -1, -1, 11]


class FakeClock:
    """Stands for ``time``: each look at it takes a microsecond."""

    def __init__(self) -> None:
        self.ns = 10**9

    def perf_counter_ns(self) -> int:
        self.ns += 1000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


CLOCK = FakeClock()


class FakeEvent:
    """A CUDA event of a device whose clock runs ``SKEW`` behind the host's."""

    SKEW = 1_000_000_000

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        self.at = stream.now()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.at <= CLOCK.ns - FakeEvent.SKEW - FakeStream.behind

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e-6


class FakeStream:
    behind = 0
    """Nanoseconds of work that the device has yet to do."""

    def __init__(self) -> None:
        self.lead = 0

    def now(self) -> int:
        return CLOCK.perf_counter_ns() - FakeEvent.SKEW - self.lead

    def synchronize(self) -> None:
        pass


def test_cuda_spans_come_on_the_hosts_clock_and_never_before_their_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_timeline.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda_timeline, "time", CLOCK)
    stream: Any = FakeStream()
    timeline = CudaTimeline(stream)
    called = []
    for ticket in range(3):
        called.append(CLOCK.perf_counter_ns())
        timeline.record(lambda: CLOCK.sleep(1e-3), "S H2D F", ticket)
    for start, span in zip(called, timeline.spans(), strict=True):
        assert 0 <= span.start_ns - start < 5e3
        assert span.end_ns - span.start_ns >= 1e6
    # The clocks have drifted since they were aligned: by as much the spans are moved.
    stream.lead = 300_000
    called.append(CLOCK.perf_counter_ns())
    timeline.record(lambda: None, "S", 3)
    spans = timeline.spans()
    assert spans[-1].start_ns >= called[-1]
    assert 0 <= spans[0].start_ns - called[0] < 5e5


def test_cuda_spans_that_are_over_can_be_had_while_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_timeline.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda_timeline, "time", CLOCK)
    stream: Any = FakeStream()
    timeline = CudaTimeline(stream, most=4)
    assert timeline.finished() == []
    called = []
    for ticket in range(6):
        called.append(CLOCK.perf_counter_ns())
        timeline.record(lambda: CLOCK.sleep(1e-3), "S H2D F", ticket)
    monkeypatch.setattr(FakeStream, "behind", 500_000)
    monkeypatch.setattr(FakeStream, "synchronize", None)  # nobody may wait
    for _ in range(2):  # the second time by the clock of the first
        spans = timeline.finished()
        assert [span.ticket for span in spans] == [2, 3, 4]
        for span in spans:
            assert 0 <= span.start_ns - called[span.ticket] < 5e3
            assert 1e6 <= span.end_ns - span.start_ns < 1.01e6
    monkeypatch.setattr(FakeStream, "behind", 0)
    assert [span.ticket for span in timeline.finished()] == [2, 3, 4, 5]


def test_kernels_come_on_the_hosts_clock() -> None:
    from torch.profiler import record_function

    profiler = KernelProfiler(device_activity=False)
    start = time.perf_counter_ns()
    with record_function("probe"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    end = time.perf_counter_ns()
    marks = profiler._marks
    events = profiler.take_events()
    (probe,) = [e for e in events if e.get("name") == "probe" and e["cat"] == "user_annotation"]
    at = float(probe["ts"]) * 1e3 + clock_shift_ns(events, marks)
    # As far as the shortest mark tells; it is short unless others keep the machine busy.
    slack = 1e5 + min(after - before for before, after in marks)
    assert start - slack < at and at + float(probe["dur"]) * 1e3 < end + slack
    kernel = {"ph": "X", "cat": "kernel", "name": "void f<int>(int)", "dur": 2.5}
    (found,) = kernels_of([*events, kernel | {"ts": probe["ts"]}], marks)
    assert abs(found.start_ns - at) < 1e3 and found.end_ns - found.start_ns == 2500


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_split_kernel", "_split_kernel"),
        ("void at::native::reduce_kernel<512, 1>(float*)", "reduce_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("void at::native::(anonymous namespace)::f<1>(int)", "f"),
    ],
)
def test_kernels_have_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_kernels_that_overlap_get_lanes_of_their_own() -> None:
    with hash_engine(1, max_requests=2, block_count=8, debug=False) as engine:
        host = HostTimeline(engine)
        host.detach()
    kernels = [DeviceKernel(f"k{n}", n * 1000, n * 1000 + 1500) for n in range(4)]
    kernels.append(DeviceKernel("void f<int>(int)", 9000, 10000))
    recording = Recording("title", "device", 0, host, [], kernels)
    events, summary = trace_events(recording)
    check_format(events)
    bound_flows(events)
    lanes = [[e["name"] for e in slices(events, FIRST_KERNEL_LANE + n)] for n in range(3)]
    assert lanes == [["k0", "k2", "f"], ["k1", "k3"], []]
    other = RankTimeline(3, 1, [], [], [], kernels[:2])
    events, _ = trace_events(recording._replace(ranks=[other]))
    check_format(events)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes_of_other = [names[4, FIRST_KERNEL_LANE + n] for n in range(2)]
    assert lanes_of_other == ["kernels", "kernels 2"] and len(names) == 8
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 4} == {"k0", "k1"}
    assert summary.commits == summary.flows == 0

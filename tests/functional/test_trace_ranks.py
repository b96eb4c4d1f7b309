"""``megatron-async trace`` over several ranks: a process of the picture for each, on one clock."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from tests.functional.test_trace import (
    DEVICE_LANE,
    HOST_LANE,
    Event,
    bound_flows,
    check_format,
    end_of,
    read,
)
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS

STEPS = 12
LAYOUTS = {"TP2": "--tensor-model-parallel-size", "PP2": "--pipeline-model-parallel-size"}


@pytest.fixture(scope="module", params=LAYOUTS)
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Event], str]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    words = f"--shape tiny-llama --device cpu --prompt-tokens 8 --steps {STEPS} --batch-size 4"
    command = ["trace", *words.split(), LAYOUTS[request.param], "2", "-o", str(path)]
    said = subprocess.run(
        [sys.executable, "-m", "megatron_async", *command],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
    )
    assert not said.stderr.strip() or "recording" in said.stderr
    return request.param, read(Path(path)), said.stdout


def launches(events: list[Event], rank: int) -> list[Event]:
    """The device's work of a rank, without the collectives in it."""
    return [
        event
        for event in events
        if event["ph"] == "X" and event["tid"] == DEVICE_LANE and event["pid"] == rank + 1
        if event["args"]["work"] != "collective"
    ]


def times(events: list[Event], rank: int, kind: str) -> dict[int, Event]:
    """By ticket the work with its S, F or T."""
    found = {}
    for event in launches(events, rank):
        for number in re.findall(rf"\b{kind}(\d+)", event["name"]):
            assert int(number) not in found, "each once"
            found[int(number)] = event
    return found


def test_each_rank_has_a_host_and_a_device(traced: tuple[str, list[Event], str]) -> None:
    layout, events, _ = traced
    check_format(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[1].startswith("rank 0: tiny-llama") and names[1].endswith(layout)
    assert names[2] == f"rank 1, stage {int(layout == 'PP2')}"
    kinds: dict[tuple[int, int], set[str]] = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            kinds[event["pid"], event["tid"]].add(event["cat"])
    assert {"plan", "launch", "wait", "commit"} <= kinds[1, HOST_LANE]
    assert {"launch", "pack", "receive"} <= kinds[2, HOST_LANE]
    collectives = {"all-reduce"} if layout == "TP2" else {"send", "receive"}
    s, t = ("S", "S") if layout == "TP2" else ("T", "S")
    for rank, letter in enumerate((s, t)):
        assert collectives | {f"{letter} H2D F"} <= kinds[rank + 1, DEVICE_LANE]


def test_every_ticket_has_an_arrow_over_all_stages(traced: tuple[str, list[Event], str]) -> None:
    layout, events, _ = traced
    flows = bound_flows(events)
    assert len(flows) == STEPS
    for ticket, points in flows.items():
        phases = "".join(phase for phase, _ in points)
        lanes = [(event["pid"], event["tid"]) for _, event in points]
        if layout == "TP2":
            assert phases == "sttf" and set(lanes) == {(1, 1), (1, 2)}
            continue
        assert phases == "sttttf" and lanes == [(1, 1), (1, 2), (2, 2), (2, 2), (1, 2), (1, 1)]
        for letter, (_, event) in zip("FFST", points[1:5], strict=True):
            assert f"{letter}{ticket}" in event["name"].split()


def test_stages_show_their_work_on_one_clock(traced: tuple[str, list[Event], str]) -> None:
    """A stage ends F behind the one before it, which hands it the hidden states, and the first one
    takes tokens that the last has begun to sample: so it is on one clock alone."""
    layout, events, _ = traced
    first, last = times(events, 0, "F"), times(events, 1, "F")
    common = set(first) & set(last)
    assert len(common) >= STEPS  # that of the last stage may end later and begin later
    if layout == "TP2":
        assert not times(events, 0, "T") and times(events, 1, "S")
        return
    for ticket in common:
        assert first[ticket]["ts"] <= end_of(last[ticket])
    sampled, taken = times(events, 1, "S"), times(events, 0, "T")
    both = sorted(set(sampled) & set(taken))
    assert len(both) >= STEPS and not times(events, 0, "S") and not times(events, 1, "T")
    assert all(after == before + 1 for before, after in pairwise(both))
    for ticket in both:
        assert sampled[ticket]["ts"] <= end_of(taken[ticket])
        # With two micro-batches the first stage is two launches further, and not one.
        assert f"F{ticket + 1}" not in taken[ticket]["name"].split()


def test_the_bubble_of_stages_is_said(traced: tuple[str, list[Event], str]) -> None:
    layout, _, said = traced
    found = re.findall(r"^bubble: stage 0 ([\d.]+) %, stage 1 ([\d.]+) % \(", said, re.MULTILINE)
    assert len(found) == (layout == "PP2")
    assert all(0 < float(share) < 100 for shares in found for share in shares)

"""One model on several ranks, over gloo on the CPU: the tokens of one rank's, at every depth.

Each layout plays the same requests while some are paused, evicted, aborted and suspended
(``tests/support/ranked.py``), in batch-invariant mode, so that nothing but the ranks differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.sweeps import some

ROOT = Path(__file__).parents[3]
LAYOUTS = {"dense": ("2,1,1", "1,2,1", "2,2,1"), "experts": ("1,1,2", "2,1,1")}
ALONE = "1,1,1"
DEPTHS = ("0", "1", "2", "4")
ABORTED = 2
CASES = some([(model, sizes) for model, several in LAYOUTS.items() for sizes in several], 2)
"""Each commit plays two layouts."""
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Found]:
    """All runs, made by the first process of the suite that asks; the others wait, since the ranks
    keep all cores busy."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "ranks"
    models = dict.fromkeys(("dense", *(model for model, _ in CASES)))
    layouts = [(model, ALONE) for model in models] + CASES
    names = [f"{model}:{sizes}" for model, sizes in layouts]
    names += ["meeting:1,2,1", "soak:2,1,1", "killed:", "stopped:"]
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            folder.mkdir(exist_ok=True)
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "tests.support.ranked", str(folder), *names],
                env=child_environment(OMP_NUM_THREADS="1"),
                cwd=ROOT,
                check=True,
                timeout=PATIENCE_SECONDS,
            )
            (folder / "complete").touch()
    pairs = [tuple(name.split(":")) for name in names]
    return {
        (m, sizes): json.loads((folder / f"{m}:{sizes}.json").read_text()) for m, sizes in pairs
    }


def tokens_of(run: Found) -> list[list[int]]:
    """Of all requests but the aborted one."""
    return [tokens for n, tokens in enumerate(run["tokens"]) if n != ABORTED]


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_tokens_are_those_of_one_rank_at_every_depth(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    alone = found[model, ALONE]["depths"]
    several = found[model, sizes]["depths"]
    expected = tokens_of(alone["0"])
    assert len({tuple(tokens) for tokens in expected}) >= len(expected) - 1
    whole = alone["0"]["tokens"][ABORTED]
    for depth in DEPTHS:
        run = several[depth]
        assert tokens_of(run) == expected == tokens_of(alone[depth])
        if run["batches"] == alone[depth]["batches"]:  # the same plans
            assert run["tokens"][ABORTED] == alone[depth]["tokens"][ABORTED]
        shorter = min(len(whole), len(run["tokens"][ABORTED]))
        assert shorter > 0 and run["tokens"][ABORTED][:shorter] == whole[:shorter]
        # The events have happened, and steps have overlapped.
        events = run["events"]
        assert events["evictions"] >= 2 and events["pauses"] >= 1 and events["tokens_cached"] > 0
        assert events["prefill_chunks"] > len(run["tokens"])
        assert (run["overlapped"] > 30) == (depth != "0")


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_the_own_thread_serves_all_over_a_full_cache(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    expected = found[model, ALONE]["depths"]["0"]["tokens"]
    for n, tokens in enumerate(expected):
        for run in found[model, sizes]["full"].values():
            assert run[n] == tokens or (n == ABORTED and run[n][: len(tokens)] == tokens)


def test_two_ranks_serve_many_requests_over_a_full_cache(
    found: dict[tuple[str, str], Found],
) -> None:
    """``SOAK=10000`` serves as many."""
    run = found["soak", "2,1,1"]
    assert run["served"] == int(os.environ.get("SOAK", "32")) and run["wrong"] == []


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_log_probabilities_and_structure_are_those_of_one_rank(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    expected = found[model, ALONE]["depths"]["0"]
    for run in found[model, sizes]["depths"].values():
        assert len(expected["log_probs"]) > 16
        assert run["log_probs"] == pytest.approx(expected["log_probs"], abs=2e-5)
        assert run["text"] == expected["text"]


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_hidden_states_are_those_of_one_rank_where_it_has_all_layers(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    several, alone = found[model, sizes], found[model, ALONE]["hidden states"]
    if sizes.split(",")[1] == "1":
        assert several["hidden states"] == pytest.approx(alone, abs=2e-4) and max(alone) > 1
        assert several["refused"]["hidden states"] == "nothing"
    else:
        assert "all of whose layers are on rank 0" in several["refused"]["hidden states"]


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_a_run_of_one_rank_is_repeated_plan_by_plan(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    exact, differences, endings = found[model, sizes]["replay"]
    assert (
        exact and differences == [] and endings == len(found[model, ALONE]["depths"]["0"]["tokens"])
    )


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_drafts_change_no_token(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    alone, several = found[model, ALONE], found[model, sizes]
    kinds = [kind for kind in ("ngram", "grammar", "mtp") if kind in several]
    assert ("mtp" in kinds) == (model == "dense" and sizes == "2,1,1")
    for kind in kinds:
        assert several[kind] == alone[kind] and several[kind]["accepted"] > 0
        for n, tokens in enumerate(several[kind]["tokens"]):
            if n != ABORTED:
                assert tokens == alone["depths"]["0"]["tokens"][n]


@pytest.mark.parametrize("sizes", [sizes for model, sizes in CASES if model == "dense"])
def test_new_weights_reach_all_ranks(sizes: str, found: dict[tuple[str, str], Found]) -> None:
    new, old = found["dense", sizes]["new"], found["dense", ALONE]["depths"]["0"]["tokens"]
    assert new == found["dense", ALONE]["new"] != old[:3]


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_what_ranks_do_not_do_is_refused(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    refused = found[model, sizes]["refused"]
    assert refused["processors"].startswith("RequestError: logits_processors")
    assert "asks for TP4 and the model is on" in refused["sizes"]
    assert "the new weights are empty" in refused["state dict"]
    assert ": rank " in refused["wrong weights"]
    assert "two may not be stepped at the same time" in refused["two at once"]
    if sizes != "2,1,1":
        refused_drafts = found[model, sizes]["refused drafts"]
        assert refused_drafts.startswith("ConfigError: num_speculative_tokens")


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_running_requests_are_divided_among_the_stages(
    model: str, sizes: str, found: dict[tuple[str, str], Found]
) -> None:
    stages = int(sizes.split(",")[1])
    assert {run["batches"] for run in found[model, sizes]["depths"].values()} == {stages}


def test_stages_compute_different_micro_batches_at_the_same_time(
    found: dict[tuple[str, str], Found],
) -> None:
    """In each step the first stage stood still in its layers until the second one was in those of
    the step before, and that one until the first was there."""
    meeting = found["meeting", "1,2,1"]
    assert meeting["seen"] == list(range(20)) and meeting["tokens"] == [20] * 4
    for before, rows in pairwise(meeting["rows"][:21]):
        assert len(rows) == len(before) == 2 and not set(rows) & set(before)


@pytest.mark.parametrize(
    ("name", "death"),
    [
        ("killed", "rank 1 of the model was killed by SIGKILL"),
        ("stopped", "rank 1 of the model has not answered for rank_timeout_seconds=1 or longer"),
    ],
)
def test_a_rank_that_dies_or_stands_still_ends_the_group_and_its_requests(
    name: str, death: str, found: dict[tuple[str, str], Found]
) -> None:
    """Of a group of processes that rank 0 has started itself."""
    killed = found[name, ""]
    assert killed["step"].startswith(f"RankDiedError: {death}") and killed["is gone"]
    assert len(killed["requests"]) == 3 and all(death in line for line in killed["requests"])
    assert killed["next"].startswith("EngineStoppedError") and death in killed["next"]

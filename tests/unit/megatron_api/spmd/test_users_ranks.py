"""Models that megatron-core has divided, served by all of their ranks (SPMD): over gloo, on the
CPU, with the tokens of the whole model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port
from tests.support.sweeps import some

ROOT = Path(__file__).parents[4]
LAYOUTS = {"2,1,1": 1, "1,2,1": 1, "1,1,2": 0, "2,1,1 experts": 1}
"""Tensor, pipeline and expert parallel sizes, and the depth."""
CASES = some(list(LAYOUTS), 2)
"""Each commit plays two."""
OF_FOUR = {"2,1,1": 2, "2,2,1": 1, "1,2,2": 1, "2,1,2": 0}
"""The first and the last have two data-parallel replicas."""
EVENTS = (
    "events", "script", "coordinated", "hybrid", "refit", "sequence", "unsupported", "broken"
)  # fmt: skip
"""The last one ends rank 1."""
Found = list[dict[str, Any]]


def start(folder: Path, ranks: int, *cases: str) -> Found:
    """What each rank found, of processes that are started as by a launcher."""
    folder.mkdir()
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.users_ranks", folder, *cases],
            env=child_environment(
                RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
            ),
            cwd=ROOT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            process.wait(PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert [each["failed"] for each in found if "failed" in each] == []
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases of two ranks, by the first process of the suite that asks."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(f"{folder}/users_ranks.lock"):
        file = folder / "users_ranks.json"
        if not file.exists():
            layouts = [f"{name}:{LAYOUTS[name]}" for name in CASES]
            cases = (*layouts, *EVENTS)
            file.write_text(json.dumps(start(folder / "users_ranks", 2, *cases)))
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def check(found: Found, layout: str) -> None:
    """The tokens of the whole model on each rank, with old and with new weights."""
    alone = found[0][f"alone {layout.endswith(('experts', ',2'))}"]
    old, new = alone["old"], alone["new"]
    assert len({tuple(tokens) for tokens in old + new}) == len(old + new)
    for each in found:
        case = each[layout]
        assert case["old"] == old and case["new"] == new
        assert case["rank 0 adds"] == old
        assert case["in place"]
        steps, is_suspended, steps_of_context = case["state"]
        assert steps == steps_of_context >= 10 and not is_suspended
        assert case["refused"].startswith("EngineStoppedError")
        assert case.get("rank 0 alone", new) == new
        assert ("rank 0 alone" in case) == (case["rank"] == 0)
    assert len({json.dumps(each[layout]["texts"]) for each in found}) == 1


@pytest.mark.parametrize("layout", CASES)
def test_all_ranks_have_the_tokens_of_one_and_keep_their_weights(layout: str, found: Found) -> None:
    check(found, layout)
    assert [each[layout]["rank"] for each in found] == [0, 1]


def test_a_hybrid_model_has_experts_on_two_ranks(found: Found) -> None:
    alone = found[0]["hybrid"]["alone"]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert all(each["hybrid"]["divided"] == alone for each in found)


def test_sequence_parallelism_is_for_training_alone(found: Found) -> None:
    for each in found:
        case = each["sequence"]
        assert case["old"] == found[0]["alone False"]["old"]
        assert case["stays on"] and case["layers"] > 4


def test_requests_and_their_errors_are_the_same_on_all_ranks(found: Found) -> None:
    first, other = (each["events"] for each in found)
    old = found[0]["alone False"]["old"]
    assert first["futures"] == other["futures"] == [old[0], "FAILED"]
    for name in ("same id", "wrong", "aborts", "too long"):
        assert first[name] == other[name]
    assert first["same id"].startswith("RequestError") and "top_p" in first["wrong"]
    assert first["aborts"] == [True, False] and first["too long"] == "FAILED"


def test_rank_0_alone_generates_while_the_others_follow(found: Found) -> None:
    first, other = (each["events"] for each in found)
    old = found[0]["alone False"]["old"]
    assert first["primary"] and not other["primary"]
    assert first["llm"] == old and "llm" not in other
    assert first["threaded"] == other["threaded"] == old[0]
    assert first["after"] == other["after"] == old


def test_clients_of_a_coordinator_are_answered_by_rank_0(found: Found) -> None:
    first, other = (each["coordinated"] for each in found)
    old = found[0]["alone False"]["old"]
    assert first["all"] == other["all"] == first["served"] == old
    assert first["address"] == other["address"] and other["served"] == []


def test_all_ranks_use_as_many_blocks_as_each_has(found: Found) -> None:
    first, other = (each["coordinated"] for each in found)
    used, room = first["blocks"]
    assert other["blocks"] == [used, used + 1] and room > used + 1
    for case in (first, other):
        assert "has max_requests=5 and that of rank 0 4" in case["differ"]


def test_requests_are_no_longer_than_the_model_takes(found: Found) -> None:
    assert [each["coordinated"]["longest"] for each in found] == [128, 128]


def test_new_weights_in_place_while_requests_run(found: Found) -> None:
    alone = found[0]["alone False"]
    for each in found:
        case = each["refit"]
        assert case["divided"] == case["alone"]
        assert case["divided, evicted"] == case["alone, evicted"] > 0
        assert case["divided, asleep"] == case["alone, asleep"] != ""
        for tokens, old, new in zip(case["divided"], alone["old"], alone["new"], strict=True):
            assert tokens[:3] == old[:3] and tokens not in (old, new)


def test_new_weights_come_from_rank_0(found: Found) -> None:
    for each in found:
        events = each["events"]
        assert events["version"] == 1
        assert events["updated"] == found[0]["alone False"]["new"]
        assert "CheckpointError" in events["lacking"]
    assert found[0]["events"]["lacking"] == found[1]["events"]["lacking"]


def test_a_script_as_nvidias_runs_on_two_ranks(found: Found) -> None:
    first, other = (each["script"] for each in found)
    alone = first["alone"]
    for run in (first["divided"], other["divided"]):
        assert run["tokens"] == alone["tokens"] == found[0]["alone False"]["old"]
        for theirs, ours in zip(run["log_probs"], alone["log_probs"], strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4)
        assert run["steps"] == alone["steps"] and run["attempts"] == alone["attempts"]
    assert first["divided"]["setup"] == other["divided"]["setup"]


def test_what_ranks_do_not_do_is_refused_by_name(found: Found) -> None:
    for each in found:
        refused = each["unsupported"]
        assert "tensor_model_parallel_size=1, and this process is one of 2" in refused["context"]
        assert "Mamba layers are not divided over tensor-parallel ranks" in refused["hybrid"]
        assert "pipeline_model_parallel_size=4 is not supported" in refused["stages"]
        assert "multi_latent_attention has no stages" in refused["latent"]


def test_calls_that_differ_end_all_ranks_with_their_names(found: Found) -> None:
    first, other = (each["broken"] for each in found)
    named = "rank 1 calls suspend() where rank 0 has called step_modern()"
    assert other["differ"].startswith(f"EngineStoppedError: {named}")
    # A call that comes later names what has stopped the engine.
    assert "RankDiedError: rank 1" in first["differ"] and named in first["differ"]
    assert "makes no call of the engine" in first["away"] and "step_modern()" in first["away"]
    assert "makes no call of the engine" in other["away"]


def test_an_error_or_the_end_of_one_rank_ends_the_others(found: Found) -> None:
    first, other = (each["broken"] for each in found)
    assert other["fail"] == "ValueError: a user's own"
    assert "rank 1 of the model failed: ValueError: a user's own" in first["fail"]
    assert "rank 1 of the model failed: ValueError" in first["fail, later"]
    assert "rank 1 has left" in other["fail, later"]
    assert "RankDiedError: rank 1 of the model" in first["killed"] and "killed" not in other


@pytest.mark.sweep
@pytest.mark.parametrize("case", [*OF_FOUR, "torchrun"])
def test_four_ranks_and_torchrun(case: str, tmp_path: Path) -> None:
    """Two replicas, stages of two ranks, and the example as its user starts it."""
    if case == "torchrun":
        old, new = run_by_torchrun("--tensor-model-parallel-size", "2", "--learning-rate", "1")
        assert len(old) == len(new) == 4 and old != new
    else:
        check(start(tmp_path / "ranks", 4, f"{case}:{OF_FOUR[case]}"), case)


def run_by_torchrun(*options: str) -> list[list[list[int]]]:
    """What the example prints."""
    run = subprocess.run(
        [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", str(free_port()), "examples/megatron_ranks.py", *options,
        ],
        env=child_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]

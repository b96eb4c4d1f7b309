"""New weights from memory in an engine over ranks, and its sleep, over gloo on the CPU
(``tests/support/ranked_weights.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.sweeps import some

ROOT = Path(__file__).parents[3]
CASES = some(["dense:2,1,1", "experts:1,1,2", "experts:2,1,1"], 1)
PROJECTION = "decoder.layers.1.self_attention.linear_proj.weight"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what all layouts gave."""
    made = tmp_path_factory.mktemp("rank_weights")
    alone = dict.fromkeys(f"{case.partition(':')[0]}:1,1,1" for case in CASES)
    names = [*alone, *CASES]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.ranked_weights", str(made), *names],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return made


def found_in(folder: Path, name: str) -> tuple[Found, Found]:
    """What a layout gave, and one rank."""
    names = name, f"{name.partition(':')[0]}:1,1,1"
    one, other = (json.loads((folder / f"{each}.json").read_text()) for each in names)
    return one, other


@pytest.mark.parametrize("name", CASES)
def test_new_tensors_give_the_tokens_of_one_rank(name: str, folder: Path) -> None:
    """Between two steps of requests that run: these go on, or begin again."""
    several, alone = found_in(folder, name)
    assert several["old"] == alone["old"] and several["new"] == alone["new"]
    assert all(old != new for old, new in zip(alone["old"], alone["new"], strict=True))
    assert several["continued"] == alone["continued"]
    spans = [len(each) for each in several["continued"]["spans"]]
    assert spans == [2, 2, 1], "two requests were under way, the third was waiting"
    assert several["restarted"] == alone["restarted"]
    assert several["restarted"]["restarts"] == [1, 1, 0]
    assert several["restarted"]["tokens"] == alone["old"]


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_its_share_of_whole_tensors(name: str, folder: Path) -> None:
    """The one that it loads from a directory, to the bit, in whatever way they came; rank 1 ends
    with an error if a parameter moves."""
    several, _ = found_in(folder, name)
    ways = ["shared memory", "divided trainer" if name.startswith("dense") else "file"]
    assert all(several[way] == several["directory"] != several["some"] for way in ways)
    assert "the new weights lack " in several["lacks"] and "partial" in several["lacks"]
    digests = (folder / f"{name}.1").read_text().split()
    new, old, after_sleep, _, some, directory, _, shared, _, last, again, _ = digests
    assert again == old
    assert new == after_sleep == directory == shared == last and len({new, old, some}) == 3


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_choose_scales_of_an_fp8_cache_for_new_weights(name: str, folder: Path) -> None:
    """Keys are 64 times larger, and queries smaller: tokens stay if no rank cuts keys off."""
    for found in found_in(folder, name):
        cached = found["e4m3"]
        assert cached["old"] == cached["continued"] == cached["new"]


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(name: str, folder: Path) -> None:
    several, _ = found_in(folder, name)
    refused = several["refused"]
    assert several["after refusals"] == several["old"]
    for kind, said in {
        "nan": f"{PROJECTION} has 1 of 65,536 elements that are NaN or infinite",
        "shape": f"the new {PROJECTION} has shape (254, 256), the whole model's has (256, 256)",
        "share": f"the new {PROJECTION} has shape (256, 128), the whole model's has (256, 256)",
        "dtype": f"the new {PROJECTION} has dtype torch.int32, the model's has torch.float32",
        "unknown": "hold decoder.layers.9.mlp.linear_fc1.weight, which the model does not have",
        "unknown expert": "local_experts.64.linear_fc1.weight, which the model does not have",
        "empty": "the new weights are empty",
    }.items():
        assert refused[kind].startswith("CheckpointError: ") and said in refused[kind]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_sleep_and_wake(name: str, folder: Path) -> None:
    """Requests that ran go on; discarded weights are waited for, and all must be given."""
    several, alone = found_in(folder, name)
    slept = several["sleep"]
    assert slept["tokens"] == alone["old"] and slept["new tokens"] == alone["new"]
    assert "wake_up(['weights']) first" in slept["while asleep"]
    assert (
        f"lack {PROJECTION}; give all of them, or say that the update is partial"
        in slept["lacking"]
    )
    assert slept["no memory"] == "CacheTooLargeError: rank 1: no memory"
    assert slept["still asleep"] == ["kv_cache"], "it was tried again"
    # On a CPU weights that are kept stay where they are; a rank wakes up part by part.
    given_back = (folder / f"{name}.asleep").read_text().split()
    assert given_back == ["caches", "caches", "nothing", "weights,caches", "caches", "nothing"]

"""An engine over ranks takes its shares from the ranks of a trainer of another layout, by shared
memory and over gloo, while requests run (``tests/support/sharded_updates.py``)."""

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
CASES = some(["dense:2,1,1", "experts:1,1,2"], 1)
LAYER = "self_attention.linear_proj.weight"
PROJECTION = f"decoder.layers.1.{LAYER}"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what all layouts gave."""
    made = tmp_path_factory.mktemp("sharded_updates")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.sharded_updates", str(made), *CASES],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return made


def found_in(folder: Path, name: str) -> Found:
    found: Found = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_requests_go_on_with_the_trainers_weights(name: str, folder: Path) -> None:
    """As with those weights given whole."""
    found = found_in(folder, name)
    assert found["continued"]["tokens"] != found["old"]
    assert found["continued by shards"] == found["continued"]
    assert [len(each) for each in found["continued"]["spans"]] == [2, 2, 1]
    assert found["continued by a group"]["tokens"] == found["continued"]["tokens"]


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_its_share_to_the_bit(name: str, folder: Path) -> None:
    """By memory, by a group, and of one tensor alone; rank 1 ends with an error if a parameter
    moves."""
    found = found_in(folder, name)
    assert found["shared memory"] == found["whole"]
    assert found["group"] == [found["whole"], "", ""]
    assert found["shared memory some"] == found["some"]
    assert len({found["whole"], found["some"], found["old digest"]}) == 3
    digests = (folder / f"{name}.1").read_text().split()
    new, old, shared, some_whole, _, some_shared, _, group, last = digests
    assert new == shared == group and some_whole == some_shared and old == last
    assert len({new, old, some_whole}) == 3


@pytest.mark.parametrize("name", CASES)
def test_what_one_rank_refuses_none_takes(name: str, folder: Path) -> None:
    """Rank 1 has written down no update between; its tokens at the end are the old ones."""
    found = found_in(folder, name)
    refused = found["refused"]
    for kind, said in {
        "lacking": "lack",
        "shape": f"{PROJECTION}",
        "nan": f"{PROJECTION} has 1 of ",
        "checksum": f"{LAYER} of trainer rank 1 has another checksum",
        "gone": "the new weights lack",
    }.items():
        assert refused[kind].startswith("CheckpointError: ") and said in refused[kind]
        assert kind == "gone" or LAYER in refused[kind]
    for kind in ("sent nan", "sent lacking"):
        assert refused[kind][0].startswith("CheckpointError: ")
        for side in refused[kind][1:]:
            assert "of the engine refuses them: the new " in side and PROJECTION in side
    assert refused["digest"] == found["old digest"]


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_that_dies_in_the_middle_changes_nothing(name: str, folder: Path) -> None:
    found = found_in(folder, name)
    assert "has ended in the middle of a weight transfer" in found["died"]
    assert found["after death"] == found["old"]

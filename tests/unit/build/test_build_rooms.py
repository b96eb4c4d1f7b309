"""Building an engine goes one way: from the command line to the graphs through few rooms.

The definitions of rooms, passages and climbs are those of ``scripts/count_build_rooms.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "count_build_rooms.py"

MOST_ROOMS = 44
"""All files that are entered; 47 before there was one way. It may only fall."""


@pytest.fixture(scope="module")
def way() -> Any:
    spec = importlib.util.spec_from_file_location("count_build_rooms", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.way_to_the_graphs()


def test_the_way_to_the_graphs_goes_on_from_fewer_than_25_rooms(way: Any) -> None:
    assert len(way.rooms) <= MOST_ROOMS
    assert len(way.passages) < 25
    assert len(way.with_config) < 25
    assert len(way.climbs()) <= 4
    # The counter sees both ends, and all rooms of ``build/`` that one rank has.
    ends = {"megatron_async/cli/options/options.py", "megatron_async/runner/cuda_graphs.py"}
    names = ("model", "ranks", "spec", "runner")
    assert way.rooms >= ends | {f"megatron_async/build/{name}.py" for name in names}

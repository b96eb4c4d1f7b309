"""How many rooms one crosses from ``load_engine`` to the captured graphs, and how often one climbs.

    python scripts/count_build_rooms.py [--list]

The embedded model on a CPU. A *room* is a file of this checkout in which a function is called on
the way; reading a checkpoint is a single room, that of ``load_pretrained``. A room is a *passage*
if the way goes on from it into another room; the others are cupboards. The *configuration's* rooms
are those in which a function is handed the configuration, or an object of ours that was made with
it. A *climb* is a call into a room on a higher floor. A file stands one floor above the highest
file that it imports at its top.
"""

from __future__ import annotations

import argparse
import ast
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import megatron_async
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.cli.options.options import load_engine
from megatron_async.config.engine_config import EngineConfig
from megatron_async.runner.cuda_graphs import StepGraphs

PACKAGE = Path(megatron_async.__file__).parent
ROOT = PACKAGE.parent
HOMES = {PACKAGE: "megatron_async"}
CLOSED = load_pretrained.__code__
END = StepGraphs.capture.__code__


class Way:
    """What was seen.

    Attributes:
        calls: (room that calls, room that is called), in their order; the first has no caller.
        with_config: rooms in which the configuration is.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, str]] = []
        self.with_config: set[str] = set()

    @property
    def rooms(self) -> set[str]:
        """All of them."""
        return {to for _, to in self.calls}

    @property
    def passages(self) -> set[str]:
        """Rooms from which the way goes on."""
        return {at for at, to in self.calls if at is not None and at != to}

    def climbs(self) -> set[tuple[str, str]]:
        """Calls into a room on a higher floor."""
        level = floors()
        return {(at, to) for at, to in self.calls if at is not None and level[to] > level[at]}


@cache
def room_of(code: CodeType) -> str | None:
    """The room of a function; None of others'."""
    path = Path(code.co_filename)
    is_ours = any(path.is_relative_to(home) for home in HOMES)
    return str(path.relative_to(ROOT)) if is_ours else None


class Walker:
    """Sees the calls on this thread until graphs are captured."""

    def __init__(self, config: EngineConfig) -> None:
        self.way = Way()
        self._stack: list[FrameType] = []
        self._marked: dict[int, Any] = {id(config): config}
        """By id, what was made with the configuration, kept alive."""
        self._is_over = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if self._is_over or (room := room_of(frame.f_code)) is None:
            return
        if event == "call":
            if not (self._stack and self._stack[-1].f_code is CLOSED):
                self._enter(frame, room)
            self._is_over = frame.f_code is END
        elif event == "return" and self._stack and self._stack[-1] is frame:
            self._stack.pop()
            if room in self.way.with_config:
                self._mark(value)

    def _enter(self, frame: FrameType, room: str) -> None:
        caller = room_of(self._stack[-1].f_code) if self._stack else None
        self.way.calls.append((caller, room))
        self._stack.append(frame)
        if any(id(part) in self._marked for each in frame.f_locals.values() for part in of(each)):
            self.way.with_config.add(room)
            if frame.f_code.co_name == "__init__":
                self._mark(frame.f_locals.get("self"))

    def _mark(self, value: Any) -> None:
        for part in of(value):
            if type(part).__module__.startswith("megatron_async"):
                self._marked[id(part)] = part


def of(value: Any) -> list[Any]:
    """A value, or the parts of a plain container."""
    if type(value) in (tuple, list):
        return list(value)
    return list(value.values()) if type(value) is dict else [value]


def way_to_the_graphs() -> Way:
    """Build the engine of the embedded model, and see what of ours is called."""
    config = EngineConfig(device="cpu", block_size_tokens=256)
    load_engine("tiny", config).close()  # so that the next one imports nothing
    walker = Walker(config)
    sys.setprofile(walker)
    try:
        engine = load_engine("tiny", config)
    finally:
        sys.setprofile(None)
    engine.close()
    return walker.way


@cache
def floors() -> dict[str, int]:
    """The floor of each file, by the imports at its top."""
    files = {
        ".".join((name, *path.relative_to(home).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for home, name in HOMES.items()
        for path in home.rglob("*.py")
    }
    imported = {name: imports_of(name, path) & files.keys() for name, path in files.items()}

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(each) for each in imported[name] - {name}), default=-1)

    return {str(path.relative_to(ROOT)): floor(name) for name, path in files.items()}


def imports_of(name: str, path: Path) -> set[str]:
    """Modules, and names in them, that a file imports at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = name.split(".") + ["x"] * (path.name == "__init__.py")
                module = ".".join([*above[: -node.level], *([module] if module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the rooms")
    args = parser.parse_args()
    way = way_to_the_graphs()
    print(
        f"{len(way.rooms)} rooms, {len(way.passages)} of them passages, the configuration is in "
        f"{len(way.with_config)}; {len(way.climbs())} climbs"
    )
    if args.list:
        for each in dict.fromkeys(to for _, to in way.calls):
            marks = f"{'>' * (each in way.passages):1} {'c' * (each in way.with_config):1}"
            print(f"{floors()[each]:3} {marks} {each}")
        print(*(f"{at} -> {to}" for at, to in sorted(way.climbs())), sep="\n")

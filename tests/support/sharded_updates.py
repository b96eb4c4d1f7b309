"""An engine over ranks that takes its shares from the ranks of a trainer of another layout, for
``tests/unit/ranks/test_sharded_updates.py``.

``python -m tests.support.sharded_updates FOLDER CASE...`` runs :func:`case` on each layout of an
engine, such as ``dense:2,1,1`` (tensor, pipeline, expert), and writes what rank 0 found to
``FOLDER/CASE.json``. The trainer of a dense model has two pipeline stages, and that of a model with
experts two tensor-parallel ranks. Each rank is a process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.build.rank_process import follow
from megatron_async.checkpoint.targets import EMBEDDING, OUTPUT
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.ranks.layout import Layout
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.parallel_layouts import shard_of
from megatron_async.weights.sharded.group import ShardGroup
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.shared import ShardedWeights
from megatron_async.weights.sharded.source import open_sharded
from tests.support.cut_models import write_layers
from tests.support.forks import run_together
from tests.support.patience import PATIENCE_SECONDS
from tests.support.ranked import Found, refused
from tests.support.ranked_weights import (
    MODELS,
    PROJECTION,
    changed,
    engine_over,
    partly,
    tokens_of,
    under_way,
    update,
    watch_updates,
)
from tests.support.served_over_http import free_port

TRAINERS = 2
BUCKET_BYTES = 1 << 16
NORM = "decoder.final_layernorm.weight"
State = dict[str, Tensor]


def share_of(model: str, state: State, rank: int) -> tuple[State, TrainerLayout]:
    """What a trainer's rank has of a whole model of two layers."""
    if model == "experts":
        own = {n: shard_of(n, t, rank, TRAINERS, gated=True).clone() for n, t in state.items()}
        return own, TrainerLayout(tensor_rank=rank, tensor_size=TRAINERS)
    later = ("decoder.layers.1.", NORM, "mtp.")
    if not rank:
        return {n: t for n, t in state.items() if not n.startswith(later)}, TrainerLayout()
    last = [n for n in state if n.startswith(later)]
    own = {n.replace("decoder.layers.1.", "decoder.layers.0."): state[n] for n in last}
    return {**own, OUTPUT: state[EMBEDDING].clone()}, TrainerLayout(first_layer=1)


class TrainerRank:
    """A process of a trainer, which does what it is told."""

    def __init__(self, model: str, state: State, rank: int, port: int) -> None:
        self._state, self._layout = share_of(model, state, rank)
        self._local = PROJECTION if model == "experts" else PROJECTION.replace("1", "0", 1)
        self._has_it = self._local in self._state and (model == "experts" or rank == 1)
        self._rank = rank
        self._shared: ShardedWeights | None = None
        self._group = ShardGroup(
            "127.0.0.1", port, self._layout, rank=rank, trainers=TRAINERS, engine_ranks=2,
            timeout=PATIENCE_SECONDS, bucket_bytes=BUCKET_BYTES, checksums=True,
        )  # fmt: skip

    def run(self, told: Connection) -> None:
        while True:
            name, change = told.recv()
            if name == "end":
                return
            told.send(getattr(self, name)(self._changed(change)))

    def _changed(self, change: str) -> State:
        """The state of this rank; ``change`` is of the projection of the last layer."""
        state = dict(self._state)
        if change == "alone":
            return {self._local: state[self._local]} if self._has_it else {}
        if not self._has_it or (change == "lacking" and self._rank == 0):
            return state
        values = state[self._local].clone()
        if change == "nan":  # in what another rank than 0 takes
            values[-1, -1] = float("nan")
        elif change == "shape":
            values = values[:-2]
        if change == "lacking":
            del state[self._local]
        else:
            state[self._local] = values
        return state

    def export(self, state: State) -> Any:
        """Handles; None for nothing."""
        if self._shared is not None:
            self._shared.close()
        self._shared = ShardedWeights(state, self._layout, checksums=True) if state else None
        return self._shared and self._shared.export()

    def handles(self, state: State) -> Any:
        return {} if self._rank else self._group.handles

    def send(self, state: State) -> str:
        try:
            self._group.send(state)
        except CheckpointError as error:
            return str(error)
        return ""

    def die(self, state: State) -> str:
        """Rank 1 ends when it has sent some of its buckets."""
        if self._rank:
            send_to, count = WeightGroup.send_to, iter(range(4))

            def ends(group: WeightGroup, rank: int, tensor: Tensor) -> None:
                if next(count, None) is None:
                    os._exit(0)
                send_to(group, rank, tensor)

            WeightGroup.send_to = ends  # type: ignore[method-assign]
        return self.send(state)


class Trainer:
    """All of its ranks, as this process talks to them."""

    def __init__(self, ranks: list[Connection]) -> None:
        self._ranks = ranks

    def tell(self, name: str, change: str = "") -> None:
        for rank in self._ranks:
            rank.send((name, change))

    def hear(self) -> list[Any]:
        return [rank.recv() for rank in self._ranks]

    def export(self, change: str = "") -> list[Any]:
        self.tell("export", change)
        return [handles for handles in self.hear() if handles is not None]


def case(engine: DynamicInferenceEngine, folder: Path, model: str, trainer: Trainer) -> Found:
    """What one layout gives."""
    old, new = (load_file(folder / m / "model.safetensors") for m in (model, f"{model}-new"))
    found: Found = {"old": tokens_of(engine)}
    found["continued"] = under_way(engine, new, "continue")
    found["whole"] = digest_of_rank_0(engine)
    engine.update_weights(old)
    source = open_sharded(trainer.export())
    found["continued by shards"] = under_way(engine, source, "continue")
    found["shared memory"] = digest_of_rank_0(engine)
    found["some"] = update(engine, {**old, PROJECTION: new[PROJECTION]})
    engine.update_weights(old)
    found["shared memory some"] = update(engine, open_sharded(trainer.export("alone")), partly)
    engine.update_weights(old)
    found["old digest"] = digest_of_rank_0(engine)
    found["refused"] = refusals(engine, trainer)
    trainer.tell("send")
    source = open_sharded(group_handles)
    found["continued by a group"] = under_way(engine, source, "continue")
    found["group"] = [digest_of_rank_0(engine), *trainer.hear()]
    engine.update_weights(old)
    trainer.tell("die")
    found["died"] = refused(lambda: engine.update_weights(open_sharded(group_handles)))
    found["after death"] = tokens_of(engine)
    return found


group_handles: dict[str, Any] = {}
"""Those of the trainer's group."""


def digest_of_rank_0(engine: DynamicInferenceEngine) -> str:
    return update(engine, None, lambda engine, nothing: None)


def refusals(engine: DynamicInferenceEngine, trainer: Trainer) -> Found:
    """Of shared memory and of a group."""

    def by_memory(change: str = "", wrong: str = "") -> str:
        handles = trainer.export(change)
        if wrong:
            handles[1]["checksums"][wrong] = "0" * 32
        return refused(lambda: engine.update_weights(open_sharded(handles)))

    def sent(change: str) -> list[str]:
        trainer.tell("send", change)
        said = refused(lambda: engine.update_weights(open_sharded(group_handles)))
        return [said, *trainer.hear()]

    trainer.tell("handles")
    group_handles.update(trainer.hear()[0])
    local = next(n for n in trainer.export()[1]["checksums"] if n.endswith("linear_proj.weight"))
    return {
        "lacking": by_memory("lacking"),
        "shape": by_memory("shape"),
        "nan": by_memory("nan"),
        "checksum": by_memory(wrong=local),
        "gone": refused(lambda: engine.update_weights(open_sharded([GONE]))),
        "sent nan": sent("nan"),
        "sent lacking": sent("lacking"),
        "digest": digest_of_rank_0(engine),
    }


GONE = {
    "layout": TrainerLayout().to_json(),
    "weights": [{"kind": "cpu", "tensors": [[NORM, "float32", [256]]], "path": "/none"}],
    "checksums": None,
}


def run_layout(folder: Path, name: str) -> None:
    """Fork the ranks of an engine and of its trainer, and wait for them."""
    model, _, sizes = name.partition(":")
    layout = Layout(*map(int, sizes.split(",")))
    pipes, port = [Pipe() for _ in range(TRAINERS)], free_port()
    state = load_file(folder / f"{model}-new" / "model.safetensors")
    ends: list[Callable[[], None]] = []

    def lead() -> None:
        store = dist.FileStore(str(folder / f"{name}.store"), layout.world_size)
        trainer = Trainer([here for here, _ in pipes])
        with engine_over(folder / model, layout, store) as engine:
            found = case(engine, folder, model, trainer)
        pipes[0][0].recv()  # what it says of the other's death
        pipes[0][0].send(("end", ""))
        (folder / f"{name}.json").write_text(json.dumps(found))

    def be_rank(rank: int) -> Callable[[], None]:
        def run() -> None:
            store = dist.FileStore(str(folder / f"{name}.store"), layout.world_size)
            watch_updates(folder / f"{name}.{rank}")
            follow(layout, "cpu", store=store, rank=rank)

        return run

    def train(rank: int) -> Callable[[], None]:
        return lambda: TrainerRank(model, state, rank, port).run(pipes[rank][1])

    ends += [be_rank(rank) for rank in range(1, layout.world_size)]
    ends += [train(rank) for rank in range(TRAINERS)]
    run_together(name, [*ends, lead])


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    root = Path(sys.argv[1])
    for model_name in {name.partition(":")[0] for name in sys.argv[2:]}:
        write_layers(MODELS[model_name], root / model_name, 2)
        other = shutil.copytree(root / model_name, root / f"{model_name}-new")
        whole = load_file(other / "model.safetensors")
        save_file(changed(whole), other / "model.safetensors", metadata={"format": "pt"})
    for layout_name in sys.argv[2:]:
        run_layout(root, layout_name)

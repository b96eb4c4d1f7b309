"""A trainer in one process and an engine in another one, which gets new weights by a collective
while requests run, for ``tests/unit/weights/test_group_updates.py``.

``python -m tests.support.group_updates FOLDER BACKEND`` forks both. What the engine found is in
``FOLDER/found.json``. With ``nccl`` the trainer is on the first GPU and the engine on the second.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.sharded.group import ShardGroup
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.source import open_sharded
from tests.support.cut_models import write_layers
from tests.support.forks import run_together
from tests.support.patience import PATIENCE_SECONDS
from tests.support.ranked import Found, refused
from tests.support.ranked_weights import CONFIG, PROJECTION, changed, tokens_of, under_way
from tests.support.served_over_http import free_port

ADDRESS = "127.0.0.1"
BUCKET_BYTES = 1 << 16
DEVICES = {"gloo": ("cpu", "cpu"), "nccl": ("cuda:0", "cuda:1")}
"""By backend those of the trainer and of the engine."""
State = dict[str, Tensor]


def train(folder: Path, backend: str, ports: list[int], told: Connection) -> None:
    """The trainer, which does what it is told and answers what was refused."""
    device = torch.device(DEVICES[backend][0])
    state = {
        name: value.to(device, torch.bfloat16)
        for name, value in load_file(folder / "new" / "model.safetensors").items()
    }
    whole = WeightGroup(
        ADDRESS, ports[0], rank=0, world_size=2, backend=backend, device=device,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    shards = ShardGroup(
        ADDRESS, ports[1], TrainerLayout(), rank=0, trainers=1, backend=backend, device=device,
        timeout=PATIENCE_SECONDS, bucket_bytes=BUCKET_BYTES, checksums=True,
    )  # fmt: skip
    ways: dict[str, Callable[[State], None]] = {"whole": whole.send, "shards": shards.send}
    told.send(shards.handles)
    while (way := told.recv()) != "end":
        tensors = dict(state)
        if way == "nan":
            tensors[PROJECTION] = state[PROJECTION].clone()
            tensors[PROJECTION][-1, -1] = float("nan")
        try:
            ways.get(way, shards.send)(tensors)
        except CheckpointError as error:
            told.send(str(error))
        else:
            told.send("")


def lead(folder: Path, backend: str, ports: list[int], trainer: Connection) -> None:
    """The engine."""
    device = DEVICES[backend][1]
    config = dataclasses.replace(
        CONFIG, device=device, dtype="bfloat16", enable_sleep_mode=False, audit_graphs=True
    )
    old, new = (load_file(folder / each / "model.safetensors") for each in ("old", "new"))
    with DynamicInferenceEngine.from_pretrained(folder / "old", config) as engine:
        whole = WeightGroup(
            ADDRESS, ports[0], rank=1, world_size=2, backend=backend, device=device,
            timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        handles = trainer.recv()
        found: Found = {"old": tokens_of(engine)}
        found["given"] = under_way(engine, new, "continue")
        found["given bits"] = has_bits(engine, new)
        engine.update_weights(old)
        trainer.send("whole")
        received, found["meanwhile"] = receive_beside(engine, whole)
        found["whole"] = under_way(engine, received, "continue")
        found["whole bits"] = [has_bits(engine, new), trainer.recv()]
        engine.update_weights(old)
        trainer.send("nan")
        found["nan"] = [
            refused(lambda: engine.update_weights(open_sharded(handles))), trainer.recv(),
            has_bits(engine, old),
        ]  # fmt: skip
        trainer.send("shards")
        found["shards"] = under_way(engine, open_sharded(handles), "continue")
        found["shard bits"] = [has_bits(engine, new), trainer.recv()]
        trainer.send("end")
    (folder / "found.json").write_text(json.dumps(found))


def receive_beside(
    engine: DynamicInferenceEngine, group: WeightGroup
) -> tuple[State, list[list[list[int]]]]:
    """Whole tensors that come while the engine decodes, and the tokens of its requests."""
    meanwhile = []
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(group.receive)
        while not meanwhile or not receiving.done():
            meanwhile.append(tokens_of(engine))
    return receiving.result(), meanwhile


def has_bits(engine: DynamicInferenceEngine, state: State) -> bool:
    """Whether the engine's parameters are those of ``state``, in its dtype."""
    parameters: Any = engine.model.weights_owner.named_parameters()
    return all(
        torch.equal(value.detach().cpu(), state[name].to(value.dtype)) for name, value in parameters
    )


def main(folder: Path, backend: str) -> None:
    """Write both models, and run both processes."""
    write_layers("tiny", folder / "old", 2)
    file = shutil.copytree(folder / "old", folder / "new") / "model.safetensors"
    save_file(changed(load_file(file)), file, metadata={"format": "pt"})
    here, there = Pipe()
    ports = [free_port() for _ in range(2)]
    run_together(
        backend,
        [lambda: train(folder, backend, ports, there), lambda: lead(folder, backend, ports, here)],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    main(Path(sys.argv[1]), sys.argv[2])

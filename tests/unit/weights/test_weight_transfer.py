"""Weights from a trainer's process to an engine's: by memory that both see, and by a collective."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.parallel_layouts import join_shards, relay, shard_of
from megatron_async.weights.shared_memory import SharedWeights, open_weights
from megatron_async.weights.tensor_info import TensorInfo
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"

PROGRAM = """
import json, os, sys
import torch
from megatron_async.weights.parallel_layouts import relay, shard_of
from megatron_async.errors import CheckpointError
from megatron_async.weights.shared_memory import SharedWeights, open_weights
from megatron_async.weights.group import WeightGroup

root, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
torch.manual_seed(0)
whole = {
    "decoder.layers.0.self_attention.linear_qkv.weight": torch.randn(16, 6),
    "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(8, 6).bfloat16(),
    "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(6, 4),
    "decoder.final_layernorm.weight": torch.randn(6),
    "decoder.final_layernorm._extra_state": None,
}
handles, acknowledged = os.pipe(), os.pipe()
is_engine = os.fork() == 0
rank = int(is_engine)
groups = [WeightGroup("127.0.0.1", port, rank=rank, world_size=2, timeout=60) for port in ports]
if is_engine:
    # A trainer of two tensor-parallel ranks, and an engine of one.
    state = relay([group.receive() for group in groups], gated=True)
    os.close(handles[1])
    shared = open_weights(json.loads(os.fdopen(handles[0]).read()))
    torch.save((state, {name: value.clone() for name, value in shared.items()}), root + "/got.pt")
    os.write(acknowledged[1], b".")
    try:
        groups[0].receive()
    except CheckpointError as error:
        assert "too many" in str(error), error
    os._exit(0)
for rank, group in enumerate(groups):
    group.send({
        name: value if value is None else shard_of(name, value, rank, 2, gated=True)
        for name, value in whole.items()
    })
with SharedWeights(whole) as trainer:
    whole["decoder.final_layernorm.weight"].fill_(3.0)  # as an optimizer's step does
    exported = json.dumps(trainer.export())
    os.write(handles[1], exported.encode())
    os.close(handles[1])
    assert os.read(acknowledged[0], 1)
assert not os.path.exists(json.loads(exported)["path"])
try:
    groups[0].send({"a": torch.zeros(1).expand(1 << 41)})
except CheckpointError as error:
    assert "refuses" in str(error), error
torch.save(whole, root + "/sent.pt")
assert os.wait()[1] == 0
os._exit(0)
"""


@pytest.mark.slow
def test_another_process_gets_the_weights_of_a_divided_trainer(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ports = [str(free_port()) for _ in range(2)]
    subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path), *ports],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    sent = torch.load(tmp_path / "sent.pt", weights_only=True)
    by_collective, by_memory = torch.load(tmp_path / "got.pt", weights_only=True)
    sent = {name: tensor for name, tensor in sent.items() if tensor is not None}
    assert sent.keys() == by_collective.keys() == by_memory.keys()
    for name, tensor in sent.items():
        assert by_memory[name].dtype == tensor.dtype and torch.equal(by_memory[name], tensor)
        assert by_collective[name].dtype == tensor.dtype
        # The optimizer's step came after the collective.
        assert torch.equal(by_collective[name], tensor) == (name != NORM), name


def pair(timeout: float) -> list[WeightGroup]:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(WeightGroup, "127.0.0.1", port, rank=rank, world_size=2, timeout=timeout)
            for rank in range(2)
        ]
        return [each.result() for each in made]


def test_who_is_left_in_the_middle_of_a_transfer_says_so() -> None:
    """It raised gloo's error, or a later one that named nothing."""
    groups = pair(PATIENCE_SECONDS)
    trainer, engine = groups
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(engine.receive)
        trainer.broadcast(torch.tensor([3]))  # the header's length, and then it ends
        trainer.close()
        with pytest.raises(CheckpointError, match="the trainer has ended in the middle"):
            receiving.result()
    with pytest.raises(CheckpointError, match="over: the trainer has ended; make a new one"):
        engine.receive()
    with pytest.raises(CheckpointError, match="over: it was closed"):
        trainer.send({NORM: torch.ones(3)})
    trainer, engine = pair(0.2)
    with pytest.raises(CheckpointError, match=r"the trainer said nothing for 0\.2 seconds"):
        engine.receive()
    trainer, engine = pair(PATIENCE_SECONDS)
    engine.close()
    with pytest.raises(CheckpointError, match="an engine has ended in the middle"):
        trainer.send({NORM: torch.ones(3)})


def test_shared_weights_are_read_where_they_lie() -> None:
    new = {FC1: torch.randn(4, 2).bfloat16(), NORM: torch.arange(3.0), "empty": torch.zeros(0, 2)}
    with SharedWeights(new) as trainer:
        tensors = open_weights(trainer.export())
        assert all(torch.equal(tensors[name], tensor) for name, tensor in new.items())
        new[NORM].add_(1)
        trainer.export()
        assert torch.equal(tensors[NORM], new[NORM])


@pytest.mark.parametrize(
    ("handles", "said"),
    [
        ({}, "KeyError"),
        ({"kind": "tape", "tensors": []}, "give cpu or cuda"),
        ({"kind": "cpu", "tensors": [["a", "float32", [2]]], "path": "/none"}, "does not hold"),
        ({"kind": "cpu", "tensors": [["a", "float31", [2]]], "path": "/none"}, "'float31'"),
        ({"kind": "cpu", "tensors": [["a", "float32", [-1]]], "path": "/none"}, "shape"),
        ({"kind": "cpu", "tensors": ["a"], "path": "/none"}, "no name, dtype and shape"),
        ({"kind": "cpu", "tensors": 7, "path": "/none"}, "no list of tensors"),
        ({"kind": "cpu", "tensors": [["a", "int8", [1]]] * 2, "path": "/none"}, "a is announced t"),
        ({"kind": "cuda", "tensors": [["a", "float32", [2]]], "handles": [{}]}, "KeyError"),
    ],
)
def test_what_is_no_handle_is_refused(handles: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_weights(handles)


def test_what_cannot_be_shared_or_sent_is_refused() -> None:
    for tensors, said in (
        ({}, "no device"),
        ({"a": torch.zeros(2, device="meta")}, "on meta"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({3: torch.zeros(2)}, "by their names"),
        ([("a", torch.zeros(2))], "a list that is no state dict"),
        (None, "a NoneType that is no state dict"),
    ):
        with pytest.raises(CheckpointError, match=said):
            SharedWeights(tensors)  # type: ignore[arg-type]
    options: dict[str, Any] = {"rank": 0, "world_size": 2}
    for wrong, said in (
        ({"backend": "mpi"}, "gloo, nccl"),
        ({"rank": 2}, "below world_size"),
        ({"device": "meta"}, "does not send tensors of meta"),
        ({"rank": 1, "timeout": 0.2}, "no weight group"),
    ):
        with pytest.raises(ConfigError, match=said):
            WeightGroup("127.0.0.1", free_port(), **{**options, **wrong})
    for port in (0, -1, 65536, 99999, "5000", 5000.0, None, True):
        for rank in (0, 1):
            with pytest.raises(ConfigError, match="must be an integer from 1 to 65535"):
                WeightGroup("127.0.0.1", port, rank=rank, world_size=2)  # type: ignore[arg-type]


def test_a_group_listens_at_the_address_of_the_trainer_alone() -> None:
    """Whatever the name of its host leads to."""

    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections(kind="tcp")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    before, port = listening(), free_port()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(
                WeightGroup, "127.0.0.1", port, rank=rank, world_size=2, timeout=PATIENCE_SECONDS
            )
            for rank in range(2)
        ]
        groups = [each.result() for each in made]
    new = listening() - before
    assert len(new) == 3 and {address for address, _ in new} == {"127.0.0.1"}
    for group in groups:
        group.close()
    with pytest.raises(ConfigError, match=r"no weight group at 192\.0\.2\.77"):
        WeightGroup("192.0.2.77", port, rank=0, world_size=2)


def test_tensor_infos_are_plain_types() -> None:
    info = TensorInfo("a", torch.bfloat16, (2, 3))
    assert info.to_json() == ["a", "bfloat16", [2, 3]] and info.nbytes == 12
    assert TensorInfo.from_json(info.to_json()) == info
    for wrong, said in (
        (7, "no name, dtype and shape"),
        (["a", "float32"], "no name, dtype and shape"),
        ([7, "float32", [2]], r"Expected `str`, got `int` - at `\$\[0\]`"),
        (["a", "float32", [-1]], "Expected `int` >= 0"),
        (["a", "float32", [2.5]], "Expected `int`, got `float`"),
        (["a", "float32", [1] * 9], "length <= 8"),
        (["a", "float8", [2]], "the new a has dtype 'float8'; supported are float64"),
        (["a", "float32", [1 << 21, 1 << 21]], "the new a has 4,398,046,511,104 elements: too"),
    ):
        with pytest.raises(CheckpointError, match=said):
            TensorInfo.from_json(wrong)


def test_experts_are_divided_like_other_layers() -> None:
    """Stacked, or each by itself: gate and up projection in turns of ranks."""
    stacked = torch.arange(2 * 8 * 3).view(2, 8, 3)
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    shards = [shard_of(name, stacked, rank, 2, gated=True) for rank in range(2)]
    assert torch.equal(shards[1][0], stacked[0, [2, 3, 6, 7]])
    for of_one in ("local_experts.1.linear_fc1.weight", "linear_fc1.weight1"):
        one = f"decoder.layers.0.mlp.experts.{of_one}"
        assert torch.equal(shard_of(one, stacked[1], 0, 2, gated=True), shards[0][1])
    assert torch.equal(join_shards(name, shards, gated=True), stacked)
    of_trainer = [{name: shard} for shard in shards]
    for rank in range(2):  # to an engine that has each expert on one rank, and back
        ours = relay(of_trainer, gated=True, rank=rank, size=2)
        assert torch.equal(ours[name], stacked[rank : rank + 1])
    split = [{name: stacked[:1]}, {name: stacked[1:]}]
    back = relay(split, gated=True, rank=1, size=2, by_expert=(True, False))
    assert torch.equal(back[name], shards[1])
    down = shard_of(name.replace("fc1", "fc2"), torch.ones(2, 3, 8), 1, 2, gated=True)
    assert down.shape == (2, 3, 4)


def test_shards_that_do_not_fit_together_are_refused() -> None:
    one = {FC2: torch.ones(2, 3), NORM: torch.ones(2)}
    for other, said in (
        ({FC2: torch.ones(2, 3)}, f"{NORM} is not on each"),
        ({**one, FC2: torch.ones(2, 4)}, r"\(2, 4\) on tensor-parallel rank 1"),
        ({**one, NORM: torch.zeros(2)}, f"{NORM} is not divided, and differs"),
    ):
        with pytest.raises(CheckpointError, match=said):
            relay([one, other], gated=False)
    with pytest.raises(CheckpointError, match="3 rows or columns do not divide by 2"):
        shard_of(FC1, torch.ones(3, 2), 0, 2, gated=False)
    with pytest.raises(CheckpointError, match="no shards"):
        relay([], gated=False)


def test_rows_that_pad_the_vocabulary_are_left_out() -> None:
    shards = [{EMBEDDING: torch.full((4, 2), float(rank))} for rank in range(2)]
    assert relay(shards, gated=False, vocab_size=6)[EMBEDDING][:, 0].tolist() == [0] * 4 + [1] * 2


ENDINGS = """
import os, sys, torch
from megatron_async.weights.shared_memory import SharedWeights

ENDINGS = {
    "del": "del shared",
    "exception": "raise ValueError('of the trainer')",
    "end of the script": "",
    "exit": "sys.exit(3)",
    "a fork that ends": "if not os.fork(): sys.exit(0)\\nos.wait()\\nassert os.path.exists(path)",
}
for name, ending in ENDINGS.items():
    if not os.fork():
        shared = SharedWeights({"a": torch.ones(1000)})
        path = shared.export()["path"]
        print(name, path, sep=":", flush=True)
        exec(ending)
        assert ending or os.path.exists(path)
        assert ending != "del shared" or not os.path.exists(path)
        sys.exit(0)
    os.wait()
"""


def test_no_segment_outlives_its_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDINGS],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    paths = [line.split(":")[1] for line in done.stdout.splitlines()]
    assert len(paths) == 5 and done.returncode == 0 and "AssertionError" not in done.stderr
    assert [path for path in paths if Path(path).exists()] == []

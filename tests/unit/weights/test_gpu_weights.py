"""New weights by CUDA IPC and NCCL, and an engine on a GPU that sleeps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.child_environment import child_environment
from tests.support.engines import config_at, greedy
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[100, 101, 102, 32], [40] * 70]

# The child is forked before anything of CUDA is there.
IPC = """
import json, os
handles, done = os.pipe(), os.pipe()
if os.fork() == 0:
    import torch
    from megatron_async.weights.shared_memory import open_weights
    os.close(handles[1])
    tensors = open_weights(json.loads(os.fdopen(handles[0]).read()))
    assert tensors["a"].is_cuda and tensors["a"].tolist() == list(map(float, range(1000)))
    assert tensors["b"].dtype == torch.bfloat16 and (tensors["b"] == 2).all()
    assert tensors["c"].shape == (3, 2) and tensors["c"].tolist() == [[0, 2], [4, 6], [8, 10]]
    del tensors
    torch.cuda.synchronize()
    os.write(done[1], b".")
    os._exit(0)
import torch
from megatron_async.weights.shared_memory import SharedWeights
new = {
    "a": torch.zeros(1000, device="cuda"),
    "b": torch.full((7, 5), 2, dtype=torch.bfloat16, device="cuda"),
    "c": torch.arange(12, device="cuda").view(6, 2).view(3, 4)[:, ::2],
}
with SharedWeights(new) as shared:
    new["a"].copy_(torch.arange(1000.0))
    os.write(handles[1], json.dumps(shared.export()).encode())
    os.close(handles[1])
    assert os.read(done[0], 1)
assert os.wait()[1] == 0
"""

NCCL = """
import ctypes, os, pickle, sys
ports = [int(port) for port in sys.argv[1:]]
rank = int(os.fork() == 0)
import torch
import torch.distributed as dist
from megatron_async.weights.announced import receive_announced, send_announced
from megatron_async.weights.nccl_group import ID_KEY, NcclGroup
from megatron_async.weights.tensor_info import infos_of
from megatron_async.weights.group import WeightGroup

class UniqueId(ctypes.Structure):  # as vLLM's wrapper of NCCL has it
    _fields_ = [("internal", ctypes.c_byte * 128)]

device = torch.device("cuda", rank)
torch.cuda.set_device(device)
new = {"a": torch.arange(1000.0), "b": torch.full((7, 5), 2).bfloat16(), "c": torch.ones(3).half()}
there = {name: tensor.to(device) for name, tensor in new.items()}
if rank == 0:  # as a trainer with vLLM's PyNcclCommunicator
    store = dist.TCPStore("127.0.0.1", ports[0], 2, is_master=True, wait_for_workers=False,
                          use_libuv=False)
    own = UniqueId()
    assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(own)) == 0
    store.set(ID_KEY, pickle.dumps(own))
group = NcclGroup("127.0.0.1", ports[0], rank=rank, world_size=2, device=device)
ours = WeightGroup("127.0.0.1", ports[1], rank=rank, world_size=2, backend="nccl", device=device)
for packed in (True, False):
    if rank == 0:
        send_announced(group, list(there.values()), packed=packed)
    else:
        found = receive_announced(group, infos_of(new), packed=packed)
        assert all(torch.equal(found[name].cpu(), new[name]) for name in new), packed
if rank == 0:
    ours.send(there)
else:
    found = ours.receive()
    assert all(torch.equal(found[name].cpu(), new[name]) for name in new)
torch.cuda.synchronize()
if rank == 0:
    assert os.wait()[1] == 0
os._exit(0)
"""

# A trainer of two tensor-parallel ranks, which are two objects of one process, and an engine's rank
# in another one, by CUDA IPC or by NCCL between two GPUs.
SHARDS = """
import json, os, sys
ways, port = sys.argv[1], int(sys.argv[2])
handles, done = os.pipe(), os.pipe()
is_engine = os.fork() == 0
import torch
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.weights.parallel_layouts import shard_of
from megatron_async.weights.place import read_weights
from megatron_async.weights.sharded.group import ShardGroup
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.shared import ShardedWeights
from megatron_async.weights.sharded.source import open_sharded
device = torch.device("cuda", int(is_engine and ways == "nccl"))
torch.cuda.set_device(device)
config = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=64, ffn_hidden_size=64, max_sequence_length=32)

def model(seed):
    return build_random_model(config, device=device, dtype=torch.bfloat16, seed=seed)

new = {name: value.detach() for name, value in model(2).named_parameters()}
if is_engine:
    os.close(handles[1])
    served = model(1)
    source = open_sharded(json.loads(os.fdopen(handles[0]).read()))
    read_weights(served, source, all_parameters=True)()
    torch.cuda.synchronize()
    assert all(torch.equal(value, new[name]) for name, value in served.named_parameters())
    os.write(done[1], b".")
    os._exit(0)
places = [TrainerLayout(tensor_rank=rank, tensor_size=2) for rank in range(2)]
if ways == "nccl":  # a rank for each GPU: a trainer of one rank
    group = ShardGroup("127.0.0.1", port, TrainerLayout(), rank=0, trainers=1, backend="nccl",
                       device=device, bucket_bytes=5000, checksums=True)
    os.write(handles[1], json.dumps(group.handles).encode())
    os.close(handles[1])
    group.send(new)
else:
    shares = [
        {name: shard_of(name, value, rank, 2, gated=True) for name, value in new.items()}
        for rank in range(2)
    ]
    sides = [
        ShardedWeights(share, place, checksums=True)
        for share, place in zip(shares, places, strict=True)
    ]
    os.write(handles[1], json.dumps([side.export() for side in sides]).encode())
    os.close(handles[1])
assert os.read(done[0], 1)
assert os.wait()[1] == 0
os._exit(0)
"""


def run(program: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=child_environment(),
        check=True,
        timeout=PATIENCE_SECONDS,
    )


def test_another_process_reads_weights_where_they_lie() -> None:
    run(IPC)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_come_over_nccl() -> None:
    run(NCCL, str(free_port()), str(free_port()))


def test_shards_are_read_where_they_lie() -> None:
    run(SHARDS, "ipc", "0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_shards_come_over_nccl() -> None:
    run(SHARDS, "nccl", str(free_port()))


@pytest.mark.parametrize("level", (1, 2))
def test_graphs_are_as_good_as_before_after_a_sleep(level: int) -> None:
    config = config_at(
        2, device="cuda", max_requests=2, max_sequence_length=256, buffer_size_gb=1.0,
        enable_sleep_mode=True, num_cuda_graphs=2,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        model = engine.model.network.model
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        where = {name: p.data_ptr() for name, p in model.named_parameters()}
        expected = [request.generated_tokens for request in engine.generate(PROMPTS, greedy(24))]
        futures = [engine.add_request(i, p, greedy(24)) for i, p in enumerate(PROMPTS)]
        for _ in range(9):
            engine.step_modern()
        graphs, free = engine.runner.graph_count, torch.cuda.mem_get_info()[0]
        engine.sleep(level)
        assert torch.cuda.mem_get_info()[0] - free > 0.95 * 2**30
        somebody_elses = torch.empty(2**29, dtype=torch.uint8, device="cuda").fill_(0x7F)
        del somebody_elses
        torch.cuda.empty_cache()
        engine.wake_up()
        if level == 2:
            assert engine.is_sleeping
            engine.update_weights(state)
        assert torch.cuda.mem_get_info()[0] < free + 2**28
        assert where == {name: p.data_ptr() for name, p in model.named_parameters()}
        assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert engine.runner.graph_count == graphs
        assert [future.result(0).generated_tokens for future in futures] == expected

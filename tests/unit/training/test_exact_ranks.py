"""Two tensor-parallel ranks of a trainer have the values of two ranks of an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.models.gpt_network import GPTNetwork
from tests.support.batches import new_batch
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS

ENGINE = """
import sys
import torch
from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.request.rollouts import batch_of

PROMPTS = ["def a(", "class B", "import ", "x = 1", "def a(b"]

if __name__ == "__main__":
    params = [
        SamplingParams(
            temperature=1.0, seed=row, num_tokens_to_generate=20, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True,
        )
        for row in range(len(PROMPTS))
    ]
    found = {}
    for dtype in ("float32",):  # bfloat16 hides what differs by a little
        config = EngineConfig(
            device="cpu", dtype=dtype, depth=2, max_requests=3, max_sequence_length=64,
            block_count=24, block_size_tokens=8, batch_invariant=True,
            tensor_model_parallel_size=2,
        )
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            requests = engine.generate(PROMPTS, params)
            found[dtype] = batch_of([request.rollout() for request in requests])._asdict()
    torch.save(found, sys.argv[1] + "/rollouts.pt")
"""
TRAINER = """
import os
import sys
import torch
import torch.distributed as dist
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.errors import ConfigError
from megatron_async.training import exact_numerics
from megatron.core import parallel_state

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2
)
parallel_state.initialize_model_parallel(2)
found = {}
for dtype, batch in torch.load(folder + "/rollouts.pt", weights_only=True).items():
    tokens = batch["tokens"]
    model = load_pretrained("tiny", dtype=getattr(torch, dtype)).model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with exact_numerics(model) as exact:
        losses = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
        losses.sum().backward()
        found[dtype] = -losses.detach()
        logits = model(tokens, positions, None)
        assert logits.shape[-1] * 2 == model.vocab_size  # its share of the columns
        try:
            exact.log_probs(logits, tokens)
            raise AssertionError
        except ConfigError as error:
            assert "one rank's share" in str(error), error
    assert all(p.grad is not None for n, p in model.named_parameters() if "mtp" not in n)
torch.save(found, f"{folder}/found{rank}.pt")
# A rank that leaves while the other still talks to it takes gloo's threads down with a crash.
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # the interpreter takes a second to end
"""


@pytest.mark.slow
def test_two_ranks_have_the_log_probs_of_two_ranks(tmp_path: Path) -> None:
    def start(source: str, rank: int) -> subprocess.Popen[bytes]:
        program = tmp_path / f"program{rank}.py"
        program.write_text(source)
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(tmp_path), str(rank)],
            env=child_environment(OMP_NUM_THREADS="1"),
        )

    assert start(ENGINE, 0).wait(timeout=PATIENCE_SECONDS) == 0
    ranks = [start(TRAINER, rank) for rank in range(2)]
    assert [rank.wait(timeout=PATIENCE_SECONDS) for rank in ranks] == [0, 0]
    batches = torch.load(tmp_path / "rollouts.pt", weights_only=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}.pt", weights_only=True)
        for dtype, batch in batches.items():
            mask = batch["loss_mask"]
            assert mask.sum() == 100
            own = found[dtype].roll(1, dims=1)
            assert torch.equal(own[mask], batch["log_probs"][mask]), dtype


def test_weights_that_want_gradients_give_the_same_bits() -> None:
    """torch.matmul multiplied each token by itself where they did not, and the shape was another
    than that of a copy: an engine over a trainer's own model had other bits."""
    network = GPTNetwork(load_pretrained("tiny", dtype=torch.float32).model)
    shapes = []
    network.model.decoder.register_forward_pre_hook(
        lambda *given: shapes.append(given[-1]["hidden_states"].stride()), with_kwargs=True
    )
    spec = network.kv_cache_spec
    batch = new_batch(
        params_dtype=spec.dtype, num_layers=spec.num_layers, kv_channels=spec.head_dim,
        num_attention_heads=spec.num_kv_heads, max_sequence_length=64, max_requests=1,
        block_size_tokens=8, block_count=8, device="cpu", batch_invariant=True,
    )  # fmt: skip
    positions = torch.arange(40)
    batch.begin_forward(
        torch.full((40,), batch.null_slot), positions, decode_rows=40, read_lengths=True
    )
    network.forward(positions, positions, batch)
    assert shapes == [(256, 256, 1)]

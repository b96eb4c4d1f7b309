"""Two tensor-parallel ranks of a megatron-core trainer that are the engine's ranks too, for
``tests/unit/training/test_exact_ranks.py``.

``python -m tests.support.exact_own_ranks FOLDER`` forks both. Each trains over rollouts of its own
engine, in place, and writes what it found to ``FOLDER/RANK.json``. With ``RANKED_DEVICE=cuda`` each
has a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.config.engine_config import EngineConfig
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    GPTInferenceWrapper,
    SamplingParams,
)
from megatron_async.request.rollouts import batch_of
from megatron_async.training import exact_numerics
from tests.support.ranked import ON_GPUS, Found
from tests.support.served_over_http import free_port
from tests.support.sharded_updates import run_together
from tests.support.users_ranks import example

from megatron.core import parallel_state  # isort: skip
from megatron.core.fusions import fused_softmax  # isort: skip
from megatron.core.tensor_parallel import random  # isort: skip
from megatron.core.transformer import dot_product_attention  # isort: skip

RANKS = 2
UPDATES = 2
LENGTH = 16
PROMPTS = ["def read(path):", "import os", "def read(pa", "x = [1, 2", "import sys"]
CONFIG = functools.partial(
    EngineConfig, batch_invariant=True, num_speculative_tokens=2, speculative_method="ngram"
)  # fmt: skip
INVARIANT = {
    "EngineConfig": CONFIG,
    "GPTInferenceWrapper": functools.partial(GPTInferenceWrapper, batch_invariant=True),
    "DynamicInferenceContext": functools.partial(DynamicInferenceContext, batch_invariant=True),
}


def train_on_a_cpu() -> None:
    """megatron's attention reads the random state of a GPU, and its mask is made on one."""
    states: Any = mock.MagicMock()
    tensor_parallel: Any = dot_product_attention.tensor_parallel
    tensor_parallel.get_cuda_rng_tracker = random.get_cuda_rng_tracker = states

    def mask(size: int) -> Tensor:
        return torch.ones(size, size).triu(diagonal=1).bool()

    fused_softmax.get_default_causal_mask = mask


def rollouts_of(engine: Any, first: int) -> Any:
    """A batch of rollouts of all prompts."""
    for number, prompt in enumerate(PROMPTS, first):
        params = SamplingParams(
            temperature=1.0, seed=number, num_tokens_to_generate=LENGTH, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True,
        )  # fmt: skip
        engine.add_request(number, prompt, params)
    ended = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            ended[record.request_id] = record.merge().rollout()
    return batch_of([ended[number] for number in sorted(ended)])


def losses_of(model: Any, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    losses: Tensor = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
    return losses


def different(losses: Tensor, batch: Any) -> int:
    """Tokens that have another log-probability than they were sampled with."""
    own = -losses.detach().cpu().roll(1, dims=1)
    return int((own != batch.log_probs)[batch.loss_mask].sum())


def train(folder: Path, rank: int, port: int) -> None:
    """A rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if not ON_GPUS:
        train_on_a_cpu()
    found = {}
    for dtype, options in {"float32": [], "bfloat16": ["--bf16"]}.items():
        args = example.parse_args(["--tensor-model-parallel-size=2", "--depth=2", *options])
        example.initialise(args)
        if ON_GPUS:
            random.model_parallel_cuda_manual_seed(1)
        model = example.build_model(args)
        with mock.patch.multiple(example, **INVARIANT):
            engine = example.build_engine(args, model)
        found[dtype] = updates(engine, model)
        engine.close()
        dist.barrier()
        parallel_state.destroy_model_parallel()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def updates(engine: Any, model: Any) -> list[Found]:
    """By update how many tokens there are, and how many of them differ with exact numerics and
    without."""
    found = []
    for number in range(UPDATES):
        batch = rollouts_of(engine, number * len(PROMPTS))
        tokens = batch.tokens.to(next(model.parameters()).device)
        model.train().requires_grad_(True)
        plain = different(losses_of(model, tokens), batch)
        with exact_numerics(model):
            losses = losses_of(model, tokens)
            losses.mean().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.eval().requires_grad_(False)
        engine.reset_prefix_cache()
        found.append(
            {
                "tokens": int(batch.loss_mask.sum()),
                "plain": plain,
                "exact": different(losses, batch),
                "sum": float(batch.log_probs[batch.loss_mask].sum()),
            }
        )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    root, meeting = Path(sys.argv[1]), free_port()
    run_together(
        "both ranks",
        [
            lambda rank=rank: train(root, rank, meeting)  # type: ignore[misc]
            for rank in range(RANKS)
        ],
    )

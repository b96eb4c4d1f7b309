"""Rollouts of an engine over two ranks, whose log-probabilities two tensor-parallel ranks of a
trainer compute again, for ``tests/unit/training/test_exact_ranks.py``.

``python -m tests.support.exact_ranks FOLDER MODEL DTYPE DEPTH...`` forks all four processes. What a
rank of the trainer found is in ``FOLDER/RANK.json``, and gradients of the old weights, of the last
depth's rollouts, in ``FOLDER/RANK.pt``. With ``RANKED_DEVICE=cuda`` both have the same two GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.build.rank_process import follow
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.start import device_of_rank
from megatron_async.request.rollouts import batch_of
from megatron_async.sampling_params import SamplingParams
from megatron_async.training import exact_numerics
from tests.support.cut_models import write_layers
from tests.support.forks import run_together
from tests.support.ranked import DEVICE, ON_GPUS, Found, engine_over
from tests.support.ranked_weights import MODELS, changed

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip

RANKS = 2
COMMON = "import os\nimport sys\n\n\n"
PROMPTS = [COMMON + "def a(", "class B", COMMON + "def b(", "x = 1", "import ", COMMON + "x = "]
LENGTH = 20
UPDATE_AT = 12
"""Steps behind which new weights come."""
VERSIONS = ("old", "new")


def config_at(depth: int, dtype: str) -> EngineConfig:
    """A cache that is too small for all rows, with drafts."""
    return EngineConfig(
        device=DEVICE, dtype=dtype, depth=depth, max_requests=3, max_sequence_length=64,
        block_count=12, block_size_tokens=8, prefill_chunk_tokens=16, batch_invariant=True,
        num_speculative_tokens=2, speculative_method="ngram", debug=not ON_GPUS,
    )  # fmt: skip


def roll_out(engine: DynamicInferenceEngine, folder: Path) -> Found:
    """Rollouts of all prompts, with new weights in between, and which weights have which number."""
    params = [
        SamplingParams(
            temperature=0.7, seed=row, num_tokens_to_generate=LENGTH, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True,
        )
        for row in range(len(PROMPTS))
    ]  # fmt: skip
    numbers = {"old": engine.update_weights(folder / "old")}
    pairs = enumerate(zip(PROMPTS, params, strict=True))
    futures = [engine.add_request(n, *pair) for n, pair in pairs]
    steps = 0
    while engine.has_unfinished_requests():
        engine.step_modern()
        steps += 1
        if steps == UPDATE_AT:
            numbers["new"] = engine.update_weights(folder / "new")
    counters = engine.counters
    return {
        "batch": batch_of([future.result(0).rollout() for future in futures])._asdict(),
        "numbers": numbers,
        "counters": {
            name: getattr(counters, name)
            for name in ("evictions", "tokens_cached", "tokens_accepted", "tokens_discarded")
        },
    }


def lead(folder: Path, dtype: str, depths: list[int], tell: list[Connection]) -> None:
    """Rank 0 of the engine."""
    store = dist.FileStore(str(folder / "engine.store"), RANKS)
    found = {}
    with engine_over(folder / "old", config_at(0, dtype), Layout(RANKS), store) as engine:
        for depth in depths:
            with engine.with_config(config_at(depth, dtype)) as other:
                found[depth] = roll_out(other, folder)
    torch.save(found, folder / "rollouts.pt")
    for trainer in tell:
        trainer.send("rollouts.pt")


def be_rank(folder: Path) -> None:
    """Rank 1 of the engine."""
    os.environ["LOCAL_RANK"] = "1"
    follow(Layout(RANKS), DEVICE, store=dist.FileStore(str(folder / "engine.store"), RANKS), rank=1)


def train(folder: Path, dtype: str, rank: int, told: Connection) -> None:
    """A rank of the trainer."""
    os.environ["LOCAL_RANK"] = str(rank)
    device = device_of_rank(DEVICE)
    dist.init_process_group(
        "nccl" if ON_GPUS else "gloo", store=dist.FileStore(str(folder / "trainer.store"), RANKS),
        rank=rank, world_size=RANKS,
    )  # fmt: skip
    parallel_state.initialize_model_parallel(RANKS)
    if ON_GPUS:
        model_parallel_cuda_manual_seed(1)
    models = {
        name: load_pretrained(folder / name, device=device, dtype=getattr(torch, dtype)).model
        for name in VERSIONS
    }
    for model in models.values():
        for parameter in model.train().parameters():
            parameter.requires_grad_(True)
    found = {}
    for depth, rolled in torch.load(folder / told.recv(), weights_only=True).items():
        found[depth] = {"counters": rolled["counters"]}
        for name, model in models.items():
            found[depth][name] = compare(model, rolled["batch"], rolled["numbers"][name], device)
    gradients = {n: p.grad for n, p in models["old"].named_parameters() if p.grad is not None}
    torch.save(gradients, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that leaves earlier takes gloo's threads of the other one down
    dist.destroy_process_group()


def compare(model: Any, batch: dict[str, Tensor], number: int, device: torch.device) -> Found:
    """How many of the tokens that weights ``number`` sampled have other log-probabilities here,
    with exact numerics and without."""
    tokens = batch["tokens"].to(device)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    mask = batch["loss_mask"] & (batch["weight_versions"] == number)

    def different() -> int:
        losses = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
        model.zero_grad()
        losses.sum().backward()
        own = -losses.detach().cpu().roll(1, dims=1)
        return int((own != batch["log_probs"])[mask].sum())

    plain = different()
    with exact_numerics(model) as exact:
        found = {"tokens": int(mask.sum()), "plain": plain, "exact": different()}
        logits = model(tokens, positions, None)
        found["columns"] = [logits.shape[-1], model.vocab_size]
        try:
            exact.log_probs(logits, tokens)
        except ConfigError as error:
            found["share"] = str(error)
    return found


def main(folder: Path, model: str, dtype: str, depths: list[int]) -> None:
    """Write both models, and run all ranks."""
    write_layers(MODELS[model], folder / "old", 2)
    file = shutil.copytree(folder / "old", folder / "new") / "model.safetensors"
    save_file(changed(load_file(file)), file, metadata={"format": "pt"})
    pipes = [Pipe() for _ in range(RANKS)]
    run_together(
        f"{model} in {dtype}",
        [
            lambda: be_rank(folder),
            *(
                lambda rank=rank: train(folder, dtype, rank, pipes[rank][1])  # type: ignore[misc]
                for rank in range(RANKS)
            ),
            lambda: lead(folder, dtype, depths, [here for here, _ in pipes]),
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [int(each) for each in sys.argv[4:]])

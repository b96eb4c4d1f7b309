"""E4m3 weights with their scales in an engine over ranks that keeps e4m3: whole tensors of rank 0,
of which each rank takes its share.

Run with a folder that has ``old`` and ``new``, and layouts such as ``2,1,1``: the tokens and
log-probabilities of each go to ``LAYOUT.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.build.model import load_share
from megatron_async.build.rank_process import follow
from megatron_async.build.ranks import config_of_ranks
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import LoadModel
from megatron_async.ranks.start import lead
from megatron_async.sampling_params import SamplingParams
from tests.support.forks import run_together
from tests.support.fp8_models import kept_bytes
from tests.support.ranked import refused

CONFIG = EngineConfig(
    device="cpu", inference_async_scheduling=True, depth=1, max_requests=2, block_size_tokens=8,
    block_count=30, max_sequence_length=48, batch_invariant=True, debug=True, quantization="fp8",
)  # fmt: skip
PROMPTS = [[3, 5, 7, 9, 11], [9] * 13]
PARAMS = SamplingParams(
    temperature=0.0, num_tokens_to_generate=8, termination_id=-1, return_log_probs=True
)
PROJECTION = "model.layers.1.self_attn.o_proj.weight"


def found_by(engine: DynamicInferenceEngine) -> list[Any]:
    done = engine.generate(PROMPTS, PARAMS)
    return [[each.generated_tokens, each.generated_log_probs] for each in done]


def lead_layout(folder: Path, layout: Layout, store: dist.Store) -> dict[str, Any]:
    """What rank 0 sees of a layout, which has the new weights from a directory, then as tensors."""
    cpu = torch.device("cpu")
    old, new = folder / "old", folder / "new"
    group = lead(layout, cpu, store, layout.world_size)
    group.tell(LoadModel(str(old), config_of_ranks(CONFIG)))
    model = load_share(old, CONFIG, cpu)
    group.await_answers()
    state = load_file(new / "model.safetensors")
    with DynamicInferenceEngine(
        dataclasses.replace(model, group=group), CONFIG, owned_group=group
    ) as engine:
        before = found_by(engine)
        engine.update_weights(new)
        share = {n: x.clone() for n, x in kept_bytes(engine.model.weights_owner).items()}
        directory = found_by(engine)
        engine.update_weights(old)
        lacking = {name: x for name, x in state.items() if name != f"{PROJECTION}_scale_inv"}
        zero = {**state, f"{PROJECTION}_scale_inv": state[f"{PROJECTION}_scale_inv"] * 0}
        said = [refused(lambda bad=bad: engine.update_weights(bad)) for bad in (lacking, zero)]
        back = found_by(engine)
        engine.update_weights(state)
        now = kept_bytes(engine.model.weights_owner)
        return {
            "old": before, "directory": directory, "refused": said, "back": back,
            "tensors": found_by(engine),
            "differ": [name for name in share if not now[name].equal(share[name])],
        }  # fmt: skip


def run_layout(folder: Path, name: str) -> None:
    """Have a layout's ranks in processes of their own, and wait for them."""
    layout = Layout(*map(int, name.split(",")))

    def be_rank(rank: int) -> None:
        store = dist.FileStore(str(folder / f"{name}.store"), layout.world_size)
        if rank:
            follow(layout, "cpu", store=store, rank=rank)
        else:
            found = lead_layout(folder, layout, store)
            (folder / f"{name}.json").write_text(json.dumps(found))

    run_together(name, [partial(be_rank, rank) for rank in reversed(range(layout.world_size))])


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    for layout_name in sys.argv[2:]:
        run_layout(Path(sys.argv[1]), layout_name)

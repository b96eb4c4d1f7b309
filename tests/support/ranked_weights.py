"""New weights and sleep of an engine over ranks, for ``tests/unit/ranks/test_rank_weights.py``.

``python -m tests.support.ranked_weights FOLDER CASE...`` runs :func:`case` on each layout, such as
``dense:2,1,1`` (tensor, pipeline, expert), and writes what rank 0 found to ``FOLDER/CASE.json``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.build.model import load_share
from megatron_async.build.rank_model import RankModel
from megatron_async.build.rank_process import follow
from megatron_async.build.ranks import config_of_ranks
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.sleep_mode import KV_CACHE, WEIGHTS
from megatron_async.errors import CacheTooLargeError
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import LoadModel, Message, ReplaceWeights, Sleep, WakeUp
from megatron_async.ranks.start import lead
from megatron_async.sampling_params import SamplingParams
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.parallel_layouts import relay, shard_of
from megatron_async.weights.shared_memory import SharedWeights, open_weights
from tests.support.cut_models import write_layers
from tests.support.forks import run_together
from tests.support.patience import PATIENCE_SECONDS
from tests.support.ranked import Found, refused
from tests.support.served_over_http import free_port

PROMPTS = ["def read(path):\n", "x = [1, ", "for i in range("]
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=NEW_TOKENS, termination_id=-1)
CONFIG = EngineConfig(
    device="cpu", inference_async_scheduling=True, depth=2, max_requests=2, block_size_tokens=8,
    block_count=40, max_sequence_length=64, batch_invariant=True, debug=True,
    enable_sleep_mode=True,
)  # fmt: skip
MODELS = {"dense": "tiny", "experts": "tiny-moe"}
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
PROJECTION = "decoder.layers.1.self_attention.linear_proj.weight"


@contextmanager
def engine_over(path: Path, layout: Layout, store: dist.Store) -> Iterator[DynamicInferenceEngine]:
    """That of rank 0 of a layout, or of the one process."""
    cpu = torch.device("cpu")
    group: RankGroup | None = None
    if layout.world_size > 1:
        group = lead(layout, cpu, store, layout.world_size)
        group.tell(LoadModel(str(path), config_of_ranks(CONFIG)))
    model = load_share(path, CONFIG, cpu)
    if group is not None:
        group.await_answers()
        model = dataclasses.replace(model, group=group)
    engine = DynamicInferenceEngine(model, CONFIG, owned_group=group)
    with engine:
        yield engine


def watch_updates(file: Path) -> None:
    """Have a rank other than 0 end with an error when new weights come to other addresses, and
    write down what it has after each update, and what it has given back. Of three wake-ups of the
    cache the second finds no memory."""
    prepare = Follower._prepare
    wakes = iter([False, True, False])

    def prepared(follower: Follower, message: Message) -> None:
        model = follower._model
        assert isinstance(model, RankModel)
        if isinstance(message, Sleep | WakeUp):
            if message == WakeUp(1, KV_CACHE) and next(wakes):
                raise CacheTooLargeError("no memory")
            prepare(follower, message)
            with file.with_suffix(".asleep").open("a") as out:
                out.write(f"{asleep(model)}\n")
            return
        if not isinstance(message, ReplaceWeights):
            return prepare(follower, message)
        assert model._given is not None
        parameters = dict(model._given.weights_owner.named_parameters())
        before = [parameter.data_ptr() for parameter in parameters.values()]
        prepare(follower, message)
        assert [parameter.data_ptr() for parameter in parameters.values()] == before
        with file.open("a") as out:
            out.write(f"{digest_of(parameters)}\n")

    Follower._prepare = prepared  # type: ignore[method-assign, assignment]


def asleep(model: RankModel) -> str:
    """What a rank has given back; weights that it still has on a CPU count as kept."""
    (memory,) = model._memory.values()
    weights, caches = memory._weights, memory._kv_caches
    assert weights is not None and caches
    given = [
        name
        for name, is_so in (
            ("weights", weights.is_released),
            ("caches", all(each.is_released for each in caches)),
        )
        if is_so
    ]
    return ",".join(given) or "nothing"


def digest_of(parameters: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, parameter in parameters.items():
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    return found.hexdigest()


def tokens_of(engine: DynamicInferenceEngine) -> list[list[int]]:
    return [request.generated_tokens for request in engine.generate(PROMPTS, GREEDY)]


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of which each is another one."""
    random = torch.Generator().manual_seed(1)
    noise = (torch.randn(value.shape, generator=random) for value in weights.values())
    return {
        name: value + 0.3 * value.std() * each
        for (name, value), each in zip(weights.items(), noise, strict=True)
    }


def by_expert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert by itself, as megatron-core's ``SequentialMLP`` names it."""
    new = {}
    for name, value in weights.items():
        prefix, is_stacked, rest = name.partition(".experts.linear_")
        if not is_stacked:
            new[name] = value
        for n, expert in enumerate(value if is_stacked else ()):
            new[f"{prefix}.experts.local_experts.{n}.linear_{rest}"] = expert
    return new


def under_way(engine: DynamicInferenceEngine, new: Any, partial_rollouts: str) -> Found:
    """New weights while some requests run and one waits."""
    futures = [engine.add_request(n, prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]
    for _ in range(7):
        engine.step_modern()
    engine.update_weights(new, partial_rollouts=partial_rollouts)
    while engine.has_unfinished_requests():
        engine.step_modern()
    found = [future.result(0) for future in futures]
    first = found[0].weight_spans[0].version
    return {
        "tokens": [request.generated_tokens for request in found],
        "spans": [[[s.version - first, s.start] for s in r.weight_spans] for r in found],
        "restarts": [request.counters.restarts for request in found],
    }


def with_larger_keys(engine: DynamicInferenceEngine, weights: dict[str, Tensor]) -> Any:
    """The same model, whose keys are 64 times larger and its queries smaller."""
    config = engine.model.network.model.config
    heads, groups = config.num_attention_heads, config.num_query_groups
    state = {name: value.clone() for name, value in weights.items()}
    for name, value in state.items():
        if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
            rows = value.unflatten(0, (groups, heads // groups + 2, -1))
            rows[:, :-2] /= 64
            rows[:, -2] *= 64
    return state


def in_e4m3(engine: DynamicInferenceEngine, weights: dict[str, Tensor]) -> Found:
    """New weights over an FP8 KV cache, whose scales all ranks choose anew."""
    config = dataclasses.replace(CONFIG, kv_cache_dtype="fp8", enable_sleep_mode=False)
    engine.update_weights(weights)
    with engine.with_config(config) as other:
        return {
            "old": tokens_of(other),
            "continued": under_way(other, with_larger_keys(engine, weights), "continue")["tokens"],
            "new": tokens_of(other),
        }


def slept(engine: DynamicInferenceEngine, old: dict[str, Tensor], new: dict[str, Tensor]) -> Found:
    """Requests that run while the engine sleeps, with its weights and without; then the old ones
    are back."""
    futures = [engine.add_request(n, prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]
    for _ in range(7):
        engine.step_modern()
    engine.sleep(1)
    engine.wake_up()
    while engine.has_unfinished_requests():
        engine.step_modern()
    engine.sleep(2)
    while_asleep = refused(lambda: engine.update_weights(new))
    engine.wake_up([WEIGHTS])
    lacking = {name: value for name, value in new.items() if name != PROJECTION}
    found = {
        "tokens": [future.result(0).generated_tokens for future in futures],
        "while asleep": while_asleep,
        "lacking": refused(lambda: engine.update_weights(lacking)),
    }
    engine.update_weights(by_expert(new))
    found["no memory"] = refused(lambda: engine.wake_up([KV_CACHE]))
    found["still asleep"] = sorted(engine.sleep_mode.asleep)
    engine.wake_up([KV_CACHE])
    found["new tokens"] = tokens_of(engine)
    engine.update_weights(old)
    return found


def by_thread(engine: DynamicInferenceEngine, new: Any) -> list[int]:
    """New weights while the engine's own thread steps; the last one's tokens."""
    engine.start()
    long = SamplingParams(temperature=0.0, num_tokens_to_generate=30, termination_id=-1)
    futures = [engine.add_request(n, prompt, long) for n, prompt in enumerate(PROMPTS)]
    engine.update_weights(new)
    last = engine.add_request(9, PROMPTS[0], GREEDY)
    for future in futures:
        future.result(PATIENCE_SECONDS)
    found: list[int] = last.result(PATIENCE_SECONDS).generated_tokens
    engine.stop()
    return found


def refusals(engine: DynamicInferenceEngine, weights: dict[str, Tensor]) -> dict[str, str]:
    def update(**changes: Tensor) -> str:
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return refused(lambda: engine.update_weights(weights | named))

    bad = weights[PROJECTION].clone()
    bad[-1, -1] = float("nan")
    experts = "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"
    return {
        "nan": update(**{PROJECTION: bad}),
        "shape": update(**{PROJECTION: bad[:-2].clone()}),
        "share": update(**{PROJECTION: bad[:, : bad.shape[1] // 2].clone()}),
        "dtype": update(**{PROJECTION: torch.ones_like(bad, dtype=torch.int32)}),
        "unknown": update(**{FC1.replace("1", "9", 1): torch.ones(2)}),
        "unknown expert": update(**{experts.replace("4", "64"): torch.ones(2)}),
        "empty": refused(lambda: engine.update_weights({})),
    }


def from_divided_trainer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Through a collective with each of a trainer's two tensor-parallel ranks."""

    def member(port: int, rank: int) -> WeightGroup:
        return WeightGroup("127.0.0.1", port, rank=rank, world_size=2, timeout=PATIENCE_SECONDS)

    shards = [
        {name: shard_of(name, value, rank, 2, gated=True) for name, value in weights.items()}
        for rank in range(2)
    ]
    with ThreadPoolExecutor(4) as pool:
        ports = [free_port() for _ in shards]
        own = [pool.submit(member, port, 1) for port in ports]
        theirs = [member(port, 0) for port in ports]
        sent = [pool.submit(t.send, shard) for t, shard in zip(theirs, shards, strict=True)]
        received = [each.result().receive() for each in own]
        for each in sent:
            each.result()
    return relay(received, gated=True)


def case(engine: DynamicInferenceEngine, folder: Path, model: str, *, alone: bool) -> Found:
    """What one layout gives."""
    old, new = (load_file(folder / m / "model.safetensors") for m in (model, f"{model}-new"))
    found: Found = {"old": tokens_of(engine)}
    if not alone:
        found |= {"refused": refusals(engine, old), "after refusals": tokens_of(engine)}
    found["continued"] = under_way(engine, by_expert(new), "continue")
    found["new"] = tokens_of(engine)
    found["restarted"] = under_way(engine, old, "restart")
    if alone:
        return found | {"e4m3": in_e4m3(engine, old)}
    found["sleep"] = slept(engine, old, new)
    found["some"] = update(engine, {name: new[name] for name in list(new)[::2]}, partly)
    found["lacks"] = refused(lambda: engine.update_weights({PROJECTION: new[PROJECTION]}))
    found["directory"] = update(engine, folder / f"{model}-new")
    engine.update_weights(old)
    with SharedWeights(new) as shared:
        found["shared memory"] = update(engine, open_weights(shared.export()), by_thread)
    if model == "dense":
        engine.update_weights(old)
        found["divided trainer"] = update(engine, from_divided_trainer(new))
    else:
        partly(engine, {PROJECTION: old[PROJECTION]})
        found["file"] = update(engine, folder / f"{model}-new" / "model.safetensors")
    return found | {"e4m3": in_e4m3(engine, old)}


def update(
    engine: DynamicInferenceEngine,
    new: Any,
    way: Callable[[DynamicInferenceEngine, Any], object] = DynamicInferenceEngine.update_weights,
) -> str:
    """What rank 0 has afterwards."""
    way(engine, new)
    model = engine.model.network.model
    return digest_of(dict(model.named_parameters()))


def partly(engine: DynamicInferenceEngine, new: Any) -> None:
    """An update of some parameters."""
    engine.update_weights(new, partial_update=True)


def run_layout(folder: Path, name: str) -> None:
    """Fork a layout's ranks, and wait for them."""
    model, _, sizes = name.partition(":")
    layout = Layout(*map(int, sizes.split(",")))

    def be_rank(rank: int) -> None:
        store = dist.FileStore(str(folder / f"{name}.store"), layout.world_size)
        if rank:
            watch_updates(folder / f"{name}.{rank}")
            follow(layout, "cpu", store=store, rank=rank)
        with engine_over(folder / model, layout, store) as engine:
            found = case(engine, folder, model, alone=layout.world_size == 1)
        (folder / f"{name}.json").write_text(json.dumps(found))

    run_together(name, [partial(be_rank, rank) for rank in reversed(range(layout.world_size))])


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks may have no others
    root = Path(sys.argv[1])
    for model_name, source in MODELS.items():
        write_layers(source, root / model_name, 2)
        other = shutil.copytree(root / model_name, root / f"{model_name}-new")
        whole = load_file(other / "model.safetensors")
        save_file(changed(whole), other / "model.safetensors", metadata={"format": "pt"})
    for layout_name in sys.argv[2:]:
        run_layout(root, layout_name)

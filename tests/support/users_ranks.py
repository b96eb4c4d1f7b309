"""Ranks that are all processes of the user's, for
``tests/unit/megatron_api/spmd/test_users_ranks.py``: ``python -m tests.support.users_ranks FOLDER
CASE...`` in each process, with a launcher's environment. What a rank found is in
``FOLDER/RANK.json``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async import megatron_compat as compat
from megatron_async.config.engine_config import EngineConfig
from megatron_async.megatron_api import (
    DynamicInferenceEngine,
    EngineState,
    InferenceClient,
    InferenceConfig,
    MegatronLLM,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.ranks import users_ranks
from megatron_async.weights.parallel_layouts import shard_of
from tests.support import megatron_script
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stock_hybrid import EXPERTS, stock_hybrid

from megatron.core import parallel_state  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    get_transformer_layer_offset,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_ranks.py"
NEW_TOKENS = 10
EXPERTS_OF = " experts"
"""Behind the sizes of a layout without expert parallelism."""
Found = dict[str, Any]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_ranks", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()
CHARACTERS = example.Characters()
GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=NEW_TOKENS, termination_id=-1)


def has_experts(layout: str) -> bool:
    """Whether the model of a case has experts."""
    sizes_of = layout.partition(":")[0]
    return sizes_of.endswith((EXPERTS_OF, ",2"))


def arguments(tensor: int, pipeline: int, expert: int, *, experts: bool, depth: int = 1) -> Any:
    return example.parse_args(
        [
            f"--tensor-model-parallel-size={tensor}",
            f"--pipeline-model-parallel-size={pipeline}",
            f"--expert-model-parallel-size={expert}",
            f"--num-tokens-to-generate={NEW_TOKENS}",
            f"--depth={depth}",
            *(["--num-experts=4"] if experts else []),
        ]
    )


@contextmanager
def sizes(args: Any) -> Iterator[None]:
    example.initialise(args)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def fill(model: Any, whole: dict[str, Tensor]) -> None:
    """Give a share the values of the whole model, in place."""
    for name, value in shares(model, whole):
        value.data.copy_(whole_of(name, model, whole))


def shares(model: Any, whole: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def whole_of(name: str, model: Any, whole: dict[str, Tensor]) -> Tensor:
    """The share of ``name``'s values in the whole model."""
    first = get_transformer_layer_offset(model.config)
    name = re.sub(r"(?<=layers\.)\d+", lambda n: str(int(n[0]) + first), name, count=1)
    spread = model.config.expert_model_parallel_size
    if "local_experts" in name and spread > 1:
        at = (
            model.config.num_moe_experts // spread * parallel_state.get_expert_model_parallel_rank()
        )
        return whole[re.sub(r"(?<=local_experts\.)\d+", lambda n: str(int(n[0]) + at), name)]
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    return shard_of(name, whole[name], rank, size, gated=True)


def update(model: Any, gradient: Callable[[str], Tensor]) -> None:
    """A step of an optimizer, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for name, parameter in model.named_parameters():
        parameter.grad = gradient(name).clone()
    optimizer.step()
    optimizer.zero_grad()


def noise(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    return {n: 0.1 * torch.randn(v.shape, generator=random) for n, v in whole.items()}


def alone(experts: bool) -> tuple[Found, dict[str, Tensor]]:
    """The whole model in each process, which are data-parallel replicas of one rank."""
    args = arguments(1, 1, 1, experts=experts)
    with sizes(args):
        model = example.build_model(args)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        with example.build_engine(args, model) as engine:
            found = {"rank": engine.rank, "old": example.run(args, engine)}
            update(model, noise(whole).__getitem__)
            engine.reset_prefix_cache()
            found["new"] = [r.generated_tokens for r in engine.generate(args.prompts, GREEDY)]
    return found, whole


def divided(name: str, whole: dict[str, Tensor], *, depth: int) -> Found:
    """One layout: all ranks add, rank 0 alone adds, new weights in place, rank 0 alone calls."""
    tensor, pipeline, expert = map(int, name.removesuffix(EXPERTS_OF).split(","))
    args = arguments(tensor, pipeline, expert, experts=has_experts(name), depth=depth)
    # Ranks have all tokens: nothing of megatron's may exchange them.
    with sizes(args), mock.patch.object(MoELayer, "dispatch", None):
        model = example.build_model(args)
        fill(model, whole)
        wrapped_at = [p.data_ptr() for p in model.parameters()]
        engine = example.build_engine(args, model)
        if has_experts(name):  # stacked once, when they are wrapped
            wrapped_at = [p.data_ptr() for p in model.parameters()]
        found: Found = {"rank": engine.rank, "old": example.run(args, engine)}
        found["state"] = [engine.step_count, engine.is_suspended, engine.context.step_count]
        found["rank 0 adds"] = rank_0_adds(args, engine)
        engine.suspend()
        engine.resume()
        gradients = noise(whole)
        update(model, lambda each: whole_of(each, model, gradients))
        engine.reset_prefix_cache()
        records = engine.generate(args.prompts, GREEDY)
        found["new"] = [record.generated_tokens for record in records]
        found["texts"] = [record.generated_text for record in records]
        found["in place"] = wrapped_at == [p.data_ptr() for p in model.parameters()]
        if engine.rank == 0:
            found["rank 0 alone"] = [
                r.generated_tokens for r in engine.generate(args.prompts, GREEDY)
            ]
        engine.close()
        found["refused"] = refused(lambda: engine.step_modern())
        dist.barrier()  # torch.distributed is the user's
    return found


def rank_0_adds(args: Any, engine: Any) -> list[list[int]]:
    ended: dict[int, list[int]] = {}
    futures = []
    if engine.rank == 0:
        for number, prompt in enumerate(args.prompts):
            futures.append(engine.add_request(number, prompt, GREEDY))
    while engine.has_unfinished_requests():
        active, finished, _ = engine.step()
        assert all(request.finish_reason is None for request in active)
        ended |= {request.request_id: request.generated_tokens for request in finished}
    assert all(f.result(0).generated_tokens == ended[n] for n, f in enumerate(futures))
    return [ended[number] for number in sorted(ended)]


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def events(whole: dict[str, Tensor]) -> Found:
    """Futures, errors of a request, aborts; a thread of the engine's own; another engine over the
    same model."""
    args = arguments(2, 1, 1, experts=False)
    with sizes(args):
        model = example.build_model(args)
        fill(model, whole)
        engine = example.build_engine(args, model)
        found: Found = {}
        future = engine.add_request(0, args.prompts[0], GREEDY)
        kept = engine.add_request(1, args.prompts[1], GREEDY)
        found["same id"] = refused(lambda: engine.add_request(1, "x", GREEDY))
        found["too long"] = engine.add_request(2, "x" * 500, GREEDY)
        found["wrong"] = refused(lambda: engine.add_request(3, "x", SamplingParams(top_p=7.0)))
        engine.step_modern()
        found["aborts"] = [engine.abort_request(1), engine.abort_request(77)]
        while engine.has_unfinished_requests():
            engine.step_modern()
        found["too long"] = found["too long"].result(0).status.name
        found["futures"] = [future.result(0).generated_tokens, kept.result(0).status.name]
        engine.close()
        with MegatronLLM(model=model, tokenizer=example.Characters()) as llm:
            found["primary"] = llm.is_primary_rank
            if llm.is_primary_rank:
                records = llm.generate(args.prompts, GREEDY)
                found["llm"] = [record.generated_tokens for record in records]
        engine = example.build_engine(args, model)
        new = {name: value - noise(whole)[name] for name, value in whole.items()}
        found["version"] = engine.update_weights(new if engine.rank == 0 else None)
        found["updated"] = example.run(args, engine)
        found["lacking"] = refused(lambda: engine.update_weights({}))
        engine.update_weights(whole if engine.rank == 0 else None)
        engine.start()
        future = engine.add_request(0, args.prompts[0], GREEDY)
        found["threaded"] = future.result(PATIENCE_SECONDS).generated_tokens
        engine.stop()
        found["after"] = example.run(args, engine)
        engine.close()
    return found


def broken(whole: dict[str, Tensor], found: Found, write: Callable[[], None]) -> None:
    """Calls that differ, an error on one rank, a rank that stays away, and one that is killed."""
    rank = dist.get_rank()
    args = arguments(2, 1, 1, experts=False)

    def attempt(name: str, calls: Callable[[Any], object]) -> None:
        with sizes(args):
            model = example.build_model(args)
            fill(model, whole)
            engine = example.build_engine(args, model)
            found[name] = refused(lambda: calls(engine))
            found[f"{name}, later"] = refused(engine.has_unfinished_requests)
            refused(engine.close)
            dist.barrier()

    def run(engine: Any) -> object:
        return example.run(args, engine)

    def differ(engine: Any) -> object:
        engine.add_request(9, args.prompts[0], GREEDY)
        return run(engine) if rank == 0 else engine.suspend()

    def fail(engine: Any) -> object:
        with engine:
            engine.add_request(9, args.prompts[0], GREEDY)
            if rank == 1:
                raise ValueError("a user's own")
            return run(engine)

    def stay_away(engine: Any) -> object:
        engine.add_request(9, args.prompts[0], GREEDY)
        if rank == 0:
            return run(engine)
        while engine._calls._line.lost is None:
            time.sleep(0.05)
        while True:
            engine.step_modern()

    def die(engine: Any) -> object:
        engine.add_request(9, args.prompts[0], GREEDY)
        engine.step_modern()
        if rank == 1:
            write()
            os._exit(9)
        return run(engine)

    attempt("differ", differ)
    attempt("fail", fail)
    with mock.patch.object(users_ranks, "APART_SECONDS", 0.5):
        attempt("away", stay_away)
    with sizes(args):
        model = example.build_model(args)
        fill(model, whole)
        engine = example.build_engine(args, model)
        found["killed"] = refused(lambda: die(engine))


def script(whole: dict[str, Tensor]) -> Found:
    """A script as NVIDIA's example reads, suspended and resumed in its steps."""
    texts = list(example.PROMPTS)
    argv = ["--prompts", *texts, "--num-tokens-to-generate", str(NEW_TOKENS)]
    argv += ["--incoming-requests-per-step", "1", "--suspend-resume-interval", "4"]
    argv += ["--inference-dynamic-batching-buffer-size-gb", "0.01", "--return-log-probs"]
    argv += ["--termination-id", "-1", "--inference-repeat-n", "2"]
    found: Found = {}
    for name, ranks in (("alone", 1), ("divided", 2)):
        args = arguments(ranks, 1, 1, experts=False)
        with sizes(args):
            model = example.build_model(args)
            fill(model, whole)
            told = [*argv, "--tensor-model-parallel-size", str(ranks)]
            result = megatron_script.main(told, functools.partial(_as_it_is, model), CHARACTERS)
            engine = result["engine"]
            found[name] = {
                "tokens": [asked.output_tokens for asked in result["requests"]],
                "log_probs": [asked.log_probs for asked in result["requests"]],
                "steps": result["step_count"],
                "attempts": result["attempts"],
                "setup": result["setup"],
            }
            engine.close()
    return found


def coordinated(whole: dict[str, Tensor]) -> Found:
    """Stages under ``MegatronLLM``, and clients of a coordinator, which rank 0 answers for all."""
    args = arguments(1, 2, 1, experts=False)
    with sizes(args):
        model = example.build_model(args)
        fill(model, whole)
        rank = dist.get_rank()
        llm = directly(
            model, buffer_size_gb=0.01 / (1 + rank), max_requests=4,
            max_sequence_length=2 * example.LONGEST,
        )  # fmt: skip
        found = {"all": [r.generated_tokens for r in llm.generate(args.prompts, GREEDY)]}
        found["longest"] = llm.context.max_sequence_length
        found["blocks"] = llm.context.block_count, len(llm.context.memory_buffer[0, 0])
        llm.shutdown()
        found["differ"] = refused(
            lambda: directly(model, buffer_size_gb=0.01, max_requests=4 + rank)
        )
        engine = example.build_engine(args, model)
        found |= asyncio.run(_served(args, engine))
        engine.close()
    return found


def refit(whole: dict[str, Tensor]) -> Found:
    """New weights in place while requests run: the engine is suspended meanwhile, and computes what
    they have so far again."""
    found: Found = {}
    gradients = noise(whole)
    for name, ranks in (("alone", 1), ("divided", 2)):
        args = arguments(ranks, 1, 1, experts=False)
        with sizes(args):
            model = example.build_model(args)
            fill(model, whole)
            llm = directly(
                model, buffer_size_gb=0.01, max_requests=4, kv_cache_management_mode="recompute"
            )
            engine = llm.engine
            futures = [engine.add_request(n, each, GREEDY) for n, each in enumerate(args.prompts)]
            for _ in range(6):
                engine.step_modern()
            engine.suspend()
            update(model, functools.partial(_of, gradients, model))
            engine.resume()
            while engine.has_unfinished_requests():
                engine.step_modern()
            found[name] = [future.result(0).generated_tokens for future in futures]
            found[f"{name}, evicted"] = engine.evicted_request_count
            found[f"{name}, asleep"] = refused(engine.sleep)
            llm.shutdown()
    return found


def _of(gradients: dict[str, Tensor], model: Any, name: str) -> Tensor:
    return whole_of(name, model, gradients)


def directly(model: Any, **options: Any) -> MegatronLLM:
    """megatron-core's wrapper of an engine, which all ranks call."""
    config = InferenceConfig(block_size_tokens=8, **{"max_sequence_length": 64} | options)
    return MegatronLLM(
        model=model, tokenizer=CHARACTERS, inference_config=config, use_coordinator=False
    )


async def _served(args: Any, engine: Any) -> Found:
    address = await engine.start_listening_to_data_parallel_coordinator()
    if engine.rank == 0:
        client = InferenceClient(address)
        client.start()
        replies = [await client.add_request(prompt, GREEDY) for prompt in args.prompts]
        tokens = [reply.generated_tokens for reply in replies]
        client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        client.stop_engines()
    else:
        tokens = []
        await engine.wait_until(EngineState.PAUSED)
    await engine.wait_until(EngineState.STOPPED)
    await engine.engine_loop_task
    if engine.rank == 0:
        client.shutdown_coordinator()
        client.stop()
    return {"address": address, "served": tokens}


def sequence(whole: dict[str, Tensor]) -> Found:
    """A model that trains with sequence parallelism, which an engine leaves on. megatron-core needs
    Transformer Engine's norms to build one, so here it is turned on afterwards."""
    args = arguments(2, 1, 1, experts=False)
    with sizes(args):
        model = example.build_model(args)
        fill(model, whole)
        model.config.sequence_parallel = True
        for module in model.modules():
            for name in ("sequence_parallel", "reduce_scatter_embeddings"):
                if hasattr(module, name):
                    setattr(module, name, True)
        before = _divides_sequences(model)
        with example.build_engine(args, model) as engine:
            found = {"old": example.run(args, engine)}
        found["stays on"] = before == _divides_sequences(model) and model.config.sequence_parallel
        found["layers"] = len(before)
    return found


def _divides_sequences(model: Any) -> list[str]:
    return [n for n, each in model.named_modules() if getattr(each, "sequence_parallel", False)]


def hybrid() -> Found:
    """A hybrid model, whole and with its experts on two ranks; the engine makes its cache."""
    found: Found = {}
    whole: dict[str, Tensor] = {}
    for name, ranks in (("alone", 1), ("divided", 2)):
        parallel = {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1}
        with sizes(arguments(1, 1, ranks, experts=True)):
            model = stock_hybrid("ME*-M", **EXPERTS, **parallel)
            whole = whole or {key: p.detach().clone() for key, p in model.named_parameters()}
            fill(model, whole)
            config = EngineConfig(
                max_requests=4, block_size_tokens=8, block_count=32, max_sequence_length=64
            )
            controller = TextGenerationController(model, CHARACTERS)
            with DynamicInferenceEngine(controller, None, config=config) as engine:
                records = engine.generate(list(example.PROMPTS), GREEDY)
                found[name] = [record.generated_tokens for record in records]
    return found


def _as_it_is(model: Any) -> Any:
    return model


def unsupported() -> Found:
    """What is refused by name, before anything is built."""
    found: Found = {}
    args = arguments(2, 1, 1, experts=False)
    with sizes(args):
        context = {"tensor_model_parallel_size": 1}
        found["context"] = refused(lambda: context_of(**context))
        with mock.patch.object(compat, "ensure_parallel_state"):
            mixers = stock_hybrid("M*", tensor_model_parallel_size=2)
        found["hybrid"] = refused(lambda: TextGenerationController(mixers, CHARACTERS))
    args = arguments(1, 2, 1, experts=False)
    with sizes(args):
        model = example.build_model(args)
        model.config.pipeline_model_parallel_size = 4
        found["stages"] = refused(lambda: TextGenerationController(model, CHARACTERS))
        model.config.pipeline_model_parallel_size = 2
        model.config.multi_latent_attention = True
        found["latent"] = refused(lambda: TextGenerationController(model, CHARACTERS))
    return found


def context_of(**sizes_of: int) -> Any:
    return example.DynamicInferenceContext(
        params_dtype=torch.float32, num_layers=2, kv_channels=16, num_attention_heads=2,
        max_sequence_length=64, buffer_size_gb=0.001, **sizes_of,
    )  # fmt: skip


def main(folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: Found = {}
    wholes: dict[bool, dict[str, Tensor]] = {}

    def write() -> None:
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))

    try:
        for experts in sorted({False, *map(has_experts, cases)}):
            found[f"alone {experts}"], wholes[experts] = alone(experts)
        for case in cases:
            if case == "events":
                found[case] = events(wholes[False])
            elif case == "script":
                found[case] = script(wholes[False])
            elif case == "coordinated":
                found[case] = coordinated(wholes[False])
            elif case == "refit":
                found[case] = refit(wholes[False])
            elif case == "sequence":
                found[case] = sequence(wholes[False])
            elif case == "hybrid":
                found[case] = hybrid()
            elif case == "unsupported":
                found[case] = unsupported()
            elif case == "broken":
                broken(wholes[False], found.setdefault(case, {}), write)
            else:
                layout, depth = case.split(":")
                found[layout] = divided(layout, wholes[has_experts(layout)], depth=int(depth))
    except BaseException:
        found["failed"] = traceback.format_exc()
    write()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""OpenRLHF's rollout actor, with the calls of its trainer, its executor and its weights."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

from megatron_async.cli.main import build_parser
from megatron_async.contrib.trainers import openrlhf
from megatron_async.contrib.trainers.client import Client
from megatron_async.contrib.trainers.openrlhf import RolloutEngine
from megatron_async.errors import ConfigError, RequestError
from megatron_async.weights.group import WeightGroup
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port
from tests.unit.serving.test_development_api import PROMPT, expected, llama


@dataclass
class VllmParams:
    """The fields of vLLM's SamplingParams that OpenRLHF sets, and some that it leaves."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 8
    min_tokens: int = 1
    skip_special_tokens: bool = False
    logprobs: int | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    stop: Any = ()


GREEDY = VllmParams(temperature=0.0, logprobs=1)


class Executor:
    """Reads what OpenRLHF's single-turn executor reads."""

    async def execute(self, *, prompt: str, llm_engine: Any, sampling_params: Any, **_: Any) -> Any:
        output = (await llm_engine.generate(PROMPT, sampling_params)).outputs[0]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        log_probs = [of[token].logprob for token, of in pairs]
        return prompt, output.token_ids, log_probs, output.finish_reason == "length", output.text


@pytest.fixture
def engine(client: Client) -> Iterator[RolloutEngine]:
    """Made with the arguments of ``create_vllm_engines``."""
    made = RolloutEngine(
        model="model", url=client.url, executor=Executor(), enforce_eager=True, seed=1,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1, distributed_executor_backend="uni", max_model_len=64,
        enable_prefix_caching=True, dtype="bfloat16", trust_remote_code=True,
        full_determinism=False, gpu_memory_utilization=0.5, bundle_indices=None, num_gpus=0.2,
        enable_sleep_mode=True, agent_func_path=None, remote_rm_url=None, mm_pad_token_ids=set(),
    )  # fmt: skip
    yield made
    made.shutdown()


def tokens_of(engine: RolloutEngine) -> list[int]:
    output = asyncio.run(engine.generate(PROMPT, GREEDY))
    return output.outputs[0].token_ids


def test_episodes_read_texts_and_log_probs(engine: RolloutEngine) -> None:
    episodes = asyncio.run(
        engine.generate_responses("hello", "label", GREEDY, 64, None, num_samples=3)
    )
    assert len(episodes) == 3 and engine.get_num_unfinished_requests() == 0
    for prompt, tokens, log_probs, is_truncated, _ in episodes:
        assert prompt == "hello" and tokens == expected(llama(1)) and is_truncated
        assert len(log_probs) == 8 and all(each < 0 for each in log_probs)


def test_log_probs_are_the_models_unless_processed_ones_are_asked_for(client: Client) -> None:
    hot = VllmParams(temperature=5.0, logprobs=1, max_tokens=1, top_k=1000)
    found = {}
    for mode in (None, "processed_logprobs"):
        engine = RolloutEngine(model="model", url=client.url, logprobs_mode=mode)
        params = SimpleNamespace(**vars(hot), seed=3)
        (output,) = asyncio.run(engine.generate(PROMPT, params)).outputs
        assert output.logprobs is not None
        found[mode] = output.token_ids, output.logprobs[0][output.token_ids[0]].logprob
        engine.shutdown()
    (tokens, raw), (again, processed) = found.values()
    assert tokens == again and raw != pytest.approx(processed, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n": 2}, "n=2"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_what_is_not_served_is_named(engine: RolloutEngine, changes: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        asyncio.run(engine.generate(PROMPT, VllmParams(**changes)))
    with pytest.raises(RequestError, match="multi_modal_data"):
        asyncio.run(engine.generate(PROMPT, GREEDY, {"image": [1]}))
    for wrong in ({"tensor_parallel_size": 2}, {"limit_mm_per_prompt": {"image": 1}}):
        with pytest.raises(ConfigError, match="is not served"):
            RolloutEngine(model="model", url="http://nowhere", **wrong)
    with pytest.raises(ConfigError, match="sync_with_ray"):
        asyncio.run(engine.init_process_group("a", 1, 1, 2, "g", use_ray=True))


def test_rank_0_broadcasts_one_tensor_after_the_other(engine: RolloutEngine) -> None:
    port, new = free_port(), {name: p.detach() for name, p in llama(2).named_parameters()}

    async def sync() -> None:
        joins = asyncio.create_task(
            engine.init_process_group("127.0.0.1", port, 1, 2, "openrlhf", backend="gloo")
        )
        group = await asyncio.to_thread(
            WeightGroup, "127.0.0.1", port, rank=0, world_size=2, timeout=PATIENCE_SECONDS
        )
        await joins
        for count, (name, tensor) in enumerate(new.items(), 1):
            taken = asyncio.create_task(
                engine.update_weight(
                    name, dtype=tensor.dtype, shape=tensor.shape, empty_cache=count == len(new)
                )
            )
            await asyncio.to_thread(group.broadcast, tensor.contiguous())
            await taken
        group.close()

    before = tokens_of(engine)
    asyncio.run(engine.pause_generation())
    asyncio.run(sync())
    asyncio.run(engine.resume_generation())
    assert tokens_of(engine) == expected(llama(2)) != before


def test_a_gpu_shows_one_tensor_after_the_other(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the handles are files in memory."""
    monkeypatch.setattr(openrlhf, "_own_gpu", lambda handles: next(iter(handles)))
    torch.multiprocessing.set_sharing_strategy("file_system")
    new = {name: p.detach().clone() for name, p in llama(2).named_parameters()}
    asyncio.run(engine.wake_up(["weights"]))
    for count, (name, tensor) in enumerate(new.items(), 1):
        handles = {"GPU": reduce_tensor(tensor)}
        asyncio.run(
            engine.update_weight_cuda_ipc(
                name, dtype=tensor.dtype, shape=tensor.shape, ipc_handles=handles,
                empty_cache=count == len(new),
            )
        )  # fmt: skip
    assert tokens_of(engine) == expected(llama(2))


def test_an_error_in_the_middle_leaves_the_old_weights(engine: RolloutEngine) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"weight.(transfer|group)"):
            asyncio.run(engine.update_weight("a", torch.float32, (1,), empty_cache=True))
    assert tokens_of(engine) == expected(llama(1))


def test_it_sleeps_and_wakes_up_in_parts(engine: RolloutEngine) -> None:
    asyncio.run(engine.sleep(level=1))
    asyncio.run(engine.wake_up(tags=["weights"]))
    asyncio.run(engine.wake_up(tags=["kv_cache"]))
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake_up())
    asyncio.run(engine.reset_prefix_cache())
    assert tokens_of(engine) == expected(llama(1))


def test_a_server_is_started_by_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []

    class Started:
        url = "http://nowhere"

        def __init__(self, *arguments: Any) -> None:
            noted.extend(arguments)

        def close(self) -> None:
            noted.append("closed")

    monkeypatch.setattr(openrlhf, "ServerProcess", Started)
    engine = RolloutEngine(
        model="m", max_model_len=64, enable_sleep_mode=True, options=["--depth", "2"],
        logprobs_mode="processed_logprobs", enable_prefix_caching=True, dtype="bfloat16",
    )  # fmt: skip
    parsed = build_parser().parse_args(["serve", "--model", noted[0], *noted[1]])
    assert parsed.enable_sleep_mode and parsed.weight_transfer_config == "nccl"
    assert parsed.logprobs_mode == "processed_logprobs"
    engine.shutdown()
    assert noted[-1] == "closed"


def test_it_takes_the_place_of_openrlhfs_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="OpenRLHF"):
        openrlhf.install()
    names = ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray")
    modules = {name: ModuleType(name) for name in (*names, f"{names[-1]}.vllm_engine")}
    theirs: Any = modules[f"{names[-1]}.vllm_engine"]
    theirs.ray = SimpleNamespace(remote=lambda kind: ("remote", kind))
    vars(modules[names[-1]])["vllm_engine"] = theirs
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    openrlhf.install()
    assert theirs.RolloutRayActor == ("remote", RolloutEngine)

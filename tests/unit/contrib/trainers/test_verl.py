"""verl's rollout, with the calls of its replica, its agent loops and its training workers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.cli.main import build_parser
from megatron_async.contrib.trainers import server_process, verl
from megatron_async.contrib.trainers.client import Client
from megatron_async.errors import ConfigError, EngineDeadError, RequestError
from tests.support.engines import config_at
from tests.support.served_engine import NoParent
from tests.support.served_over_http import serving
from tests.unit.checkpoint.test_fp8_published import BLOCKS, by_block, publish, write_plain
from tests.unit.serving.test_development_api import PROMPT, expected, llama

CONFIG: dict[str, Any] = {
    "name": "megatron_async", "tensor_model_parallel_size": 1, "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "free_cache_engine": True, "prompt_length": 3,
    "response_length": 8, "max_model_len": 64, "max_num_seqs": 4, "dtype": "bfloat16",
    "logprobs_mode": "processed_logprobs", "enable_prefix_caching": True, "quantization": None,
    "engine_kwargs": {"megatron_async": ["--depth", "2"]},
    "checkpoint_engine": SimpleNamespace(update_weights_bucket_megabytes=0),
}  # fmt: skip
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


def config_of(**changes: Any) -> Any:
    return SimpleNamespace(**(CONFIG | changes))


@dataclass
class TokenOutput:
    """As verl's."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None


class BaseRollout:
    """As verl's."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


class RolloutReplica:
    """As verl's."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.world_size, self.rollout_mode, self.is_reward_model = 1, "hybrid", False
        self.workers: list[Any] = []
        self.servers: list[Any] = []


class Registry:
    """As verl's of replicas."""

    known: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, name: str, loader: Any) -> None:
        cls.known[name] = loader


class Handle:
    """An actor's handle: its methods have ``remote``, which is awaited."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            found = getattr(self._actor, name)(*args, **kwargs)
            return await found if asyncio.iscoroutine(found) else found

        return SimpleNamespace(remote=call)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """verl and Ray, as far as they are asked."""
    names = ("verl", "verl.workers", "verl.workers.rollout", "verl.single_controller")
    more = ("verl.workers.rollout.base", "verl.workers.rollout.replica",
            "verl.single_controller.ray", "ray")  # fmt: skip
    made: dict[str, Any] = {name: ModuleType(name) for name in (*names, *more)}
    vars(made["verl.workers.rollout"])["base"] = base = made["verl.workers.rollout.base"]
    base.BaseRollout, base._ROLLOUT_REGISTRY = BaseRollout, {}
    replica = made["verl.workers.rollout.replica"]
    replica.RolloutReplica, replica.TokenOutput = RolloutReplica, TokenOutput
    replica.RolloutReplicaRegistry = Registry
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    for name in ("ServerAdapter", "Replica"):
        vars(verl).pop(name, None)


@pytest.fixture
def server(client: Client, modules: dict[str, Any]) -> verl.Server:
    return verl.Server(config_of(), SimpleNamespace(local_path="model"), url=client.url)


@pytest.fixture
def adapter(server: verl.Server, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finds the server's actor by its name."""
    actors = {"megatron_async_server_3": Handle(server)}
    modules["ray"].get_actor = actors.__getitem__
    monkeypatch.setenv(verl.ACTOR, "megatron_async_server_3")
    kind = importlib.import_module("megatron_async.contrib.trainers.verl").ServerAdapter
    assert issubclass(kind, BaseRollout)
    return kind(config_of(), None, None)


def generated(server: verl.Server, **sampling: Any) -> TokenOutput:
    """As an agent loop asks."""
    call = server.generate(
        request_id="turn", prompt_ids=PROMPT, sampling_params=SAMPLING | sampling, image_data=None,
        video_data=None,
    )  # fmt: skip
    found: TokenOutput = asyncio.run(call)
    return found


def test_agent_loops_get_tokens_and_log_probs(server: verl.Server) -> None:
    found = generated(server, logprobs=True)
    assert found.token_ids == expected(llama(1)) and found.stop_reason == "completed"
    assert found.log_probs is not None and len(found.log_probs) == 8
    silent = generated(server, logprobs=False, max_tokens=2)
    assert silent.token_ids == found.token_ids[:2] and silent.log_probs is None
    for wrong in ({"best_of": 3}, {"n": 0}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            generated(server, **wrong)
    with pytest.raises(RequestError, match="image_data"):
        asyncio.run(server.generate(PROMPT, SAMPLING, "turn", image_data=[1]))


@pytest.mark.parametrize(
    ("config", "asked", "most"),
    [
        ({}, {}, 8),
        ({"prompt_length": 30, "response_length": 6}, {}, 6),
        ({"prompt_length": 1, "response_length": 6}, {}, 4),
        ({"max_model_len": 12}, {"max_tokens": 50}, 9),
        ({"max_model_len": 8, "prompt_length": 30}, {}, 5),
        ({"max_model_len": 64}, {"max_new_tokens": 3}, 3),
    ],
)
def test_a_response_is_as_long_as_verl_has_it(
    client: Client, modules: dict[str, Any], config: Any, asked: Any, most: int
) -> None:
    """A whole response at most, behind a short prompt too, and what the model takes."""
    model = SimpleNamespace(local_path="model")
    server = verl.Server(config_of(**config), model, url=client.url)
    assert len(generated(server, ignore_eos=True, **asked).token_ids) == most
    for wrong, said in ((0, "max_new_tokens"), ("7", "must be an integer")):
        with pytest.raises(RequestError, match=said):
            generated(server, max_tokens=wrong)
    too_long = server.generate(list(range(5, 70)), SAMPLING, "long")
    with pytest.raises(RequestError, match="64"):
        asyncio.run(too_long)


def test_a_worker_brings_new_weights(server: verl.Server, adapter: Any) -> None:
    """The order is that of verl's ``update_weights`` in a hybrid worker."""
    new = ((name, p.detach()) for name, p in llama(2).named_parameters())

    async def update() -> None:
        await server.sleep()
        await adapter.resume(tags=["weights"])
        await adapter.update_weights(new, peft_config=None, base_sync_done=True)
        await adapter.resume(tags=["kv_cache"])
        await server.clear_kv_cache()
        await server.start_profile(global_step=1)
        await server.stop_profile()

    asyncio.run(update())
    assert generated(server).token_ids == expected(llama(2))
    asyncio.run(adapter.release())
    asyncio.run(adapter.resume(["kv_cache", "weights"]))
    with pytest.raises(ConfigError, match="LoRA"):
        asyncio.run(adapter.update_weights([], peft_config={}))
    with pytest.raises(ConfigError, match="wire_format='delta_flush' is not served"):
        asyncio.run(adapter.update_weights([], wire_format="delta_flush"))
    with pytest.raises(RequestError, match="lack"):
        asyncio.run(adapter.update_weights([("model.norm.weight", torch.ones(64))]))
    assert generated(server).token_ids == expected(llama(2))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints in FP8, by block, as DeepSeek and Qwen have them."""
    root = tmp_path_factory.mktemp("fp8")
    old, new = (
        publish(root / str(seed), write_plain(root / f"plain{seed}", seed=seed), BLOCKS, by_block,
                suffix="_scale_inv")
        for seed in (3, 4)
    )  # fmt: skip
    return old, new


def config_in_fp8(**more: Any) -> EngineConfig:
    """As the options say that a rollout in FP8 starts its server with."""
    command = ["serve", "--model", "m", *verl.options_of(config_of(quantization="fp8"))]
    parsed = build_parser().parse_args(command)
    return config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        quantization=parsed.quantization, quantize_activations=parsed.quantize_activations, **more,
    )  # fmt: skip


@pytest.mark.parametrize("sent", ("bfloat16", "e4m3"))
def test_rollouts_in_fp8_take_new_weights(
    sent: str,
    published: tuple[Path, Path],
    modules: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16 bits, as trainers have them, and of e4m3 with scales, each tensor in a bucket of its
    own; what lacks a scale changes nothing, and the same steps take the next update."""
    old, new = published
    weights = load_file(new / "model.safetensors")
    if sent == "bfloat16":
        plain = load_file(new.parent / "plain4" / "model.safetensors")
        weights = {name: x.bfloat16() for name, x in plain.items()}
    with DynamicInferenceEngine.from_pretrained(old, config_in_fp8()) as engine:
        first = tokens_of(engine)
        engine.update_weights(new if sent == "e4m3" else weights)
        meant = tokens_of(engine)
    assert meant != first
    engine = DynamicInferenceEngine.from_pretrained(old, config_in_fp8(enable_sleep_mode=True))
    with serving(engine, NoParent(), development=True) as url:
        config = config_of(quantization="fp8")
        made = verl.Server(config, SimpleNamespace(local_path="model"), url=url)
        modules["ray"].get_actor = {"fp8": Handle(made)}.__getitem__
        monkeypatch.setenv(verl.ACTOR, "fp8")
        adapter = verl.adapter_class()(config, None, None)
        assert generated(made).token_ids == first

        def update(state: dict[str, torch.Tensor]) -> None:
            async def steps() -> None:
                await made.sleep()
                await adapter.resume(tags=["weights"])
                try:
                    await adapter.update_weights(iter(state.items()), base_sync_done=True)
                finally:
                    await adapter.resume(tags=["kv_cache"])

            asyncio.run(steps())

        lacking = dict(weights)
        del lacking[min(name for name in weights if "o_proj" in name and "scale" not in name)]
        with pytest.raises(RequestError, match="o_proj"):
            update(lacking)
        assert generated(made).token_ids == first
        update(weights)
        assert generated(made).token_ids == meant


def tokens_of(engine: DynamicInferenceEngine) -> list[int]:
    """What :func:`generated` asks for."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8)
    found: list[int] = engine.generate([PROMPT], params)[0].generated_tokens
    return found


def test_checkpoints_in_fp8_keep_it(published: tuple[Path, Path]) -> None:
    """As vLLM and SGLang do without the rollout's ``quantization``."""
    stored = json.loads((published[0] / "config.json").read_text())["quantization_config"]
    in_fp8 = ["--quantization", "fp8", "--quantize-activations"]
    for found, meant in ((stored, in_fp8), ({"quant_method": "mxfp4"}, []), (None, [])):
        for kind in (dict, SimpleNamespace):
            values = found if found is None else kind(**found)
            model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=values))
            options = verl.options_of(config_of(engine_kwargs=None), model)
            assert options[-len(in_fp8) :] == meant if meant else "--quantization" not in options
    own = {"megatron_async": ["--quantization", "fp8"]}
    options = verl.options_of(config_of(quantization="fp8", engine_kwargs=own))
    assert options[-2:] == own["megatron_async"] and "--quantize-activations" not in options


def test_requests_are_aborted_and_go_on(server: verl.Server) -> None:
    asyncio.run(server.abort_all_requests())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generated, server, logprobs=True)
        while not asyncio.run(server.abort_request("turn"))["aborted"]:
            """It has not come yet."""
        found = asked.result()
    assert found.stop_reason == "aborted" and found.token_ids == found.log_probs == []
    asyncio.run(server.resume_generation())
    assert generated(server).stop_reason == "completed"


def test_modes_say_who_wakes_it_up(client: Client) -> None:
    for mode, said in (("hybrid", "update_weights wakes"), ("colocated", None)):
        made = verl.Server(config_of(), None, SimpleNamespace(value=mode), url=client.url)
        if said is None:
            asyncio.run(made.wake_up())
            continue
        with pytest.raises(ConfigError, match=said):
            asyncio.run(made.wake_up())


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensor_model_parallel_size", 2), ("quantization", "torchao"), ("quantization", "mxfp8"),
     ("quantization_config_file", "ao.json"), ("qat", {"enable": True}),
     ("enable_rollout_routing_replay", True), ("pipeline_model_parallel_size", 2)],
)  # fmt: skip
def test_what_is_not_served_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        verl.Server(config_of(**{field: value}), None, url="http://nowhere")


def test_a_replica_starts_its_server(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node and the GPU of its worker, by options that its configuration gives."""
    noted: dict[str, Any] = {}

    class Started:
        url = "http://10.0.0.1:123"

        def __init__(self, model: str, options: list[str], **more: Any) -> None:
            noted.update(model=model, options=options, **more)

    class Remote:
        def __init__(self, kind: Any) -> None:
            self._kind = kind

        def options(self, **options: Any) -> Any:
            noted.update(options)
            return SimpleNamespace(remote=lambda *args: Handle(self._kind(*args)))

    monkeypatch.setattr(verl, "ServerProcess", Started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    ray = modules["ray"]
    ray.remote = Remote
    context = SimpleNamespace(get_node_id=lambda: "node")
    ray.get_runtime_context = lambda: context
    ray.util = SimpleNamespace(
        get_node_ip_address=lambda: "10.0.0.1",
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=dict),
    )
    worker = SimpleNamespace()
    worker.__ray_call__ = lambda function, *args: function(worker, *args)
    monkeypatch.setenv(verl.ACTOR, "")
    verl.register()
    replica = Registry.known["megatron_async"]()(2, config_of(), SimpleNamespace(local_path="m"))
    assert isinstance(replica, RolloutReplica)
    replica.workers = [Handle(worker)]
    asyncio.run(replica.launch_servers())
    assert noted["scheduling_strategy"] == {"node_id": "node", "soft": False}
    assert noted["name"] == verl.actor_name(2) and noted["host"] == "10.0.0.1"
    assert noted["environment"] == {"CUDA_VISIBLE_DEVICES": "5"} and noted["model"] == "m"
    assert noted["options"][-2:] == ["--depth", "2"] and "--enable-sleep-mode" in noted["options"]
    assert os.environ[verl.ACTOR] == verl.actor_name(2) == "megatron_async_server_2"
    assert replica._server_address == "10.0.0.1:123" and replica._server_handle is not None
    base = modules["verl.workers.rollout.base"]
    path = base._ROLLOUT_REGISTRY["megatron_async", "async"]
    module, _, name = path.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), BaseRollout)
    replica.workers *= 2
    with pytest.raises(ConfigError, match="one GPU"):
        asyncio.run(replica.launch_servers())


def test_a_worker_without_a_server_says_so(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(verl.ACTOR, raising=False)
    adapter = verl.adapter_class()(config_of(), None, None)
    with pytest.raises(ConfigError, match="has no server"):
        asyncio.run(adapter.resume(["weights"]))


def test_it_says_that_verl_is_missing() -> None:
    with pytest.raises(ConfigError, match="verl"):
        verl.register()


def test_a_server_that_ends_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Ended:
        def __init__(self, module: str, command: list[str], environment: dict[str, str]) -> None:
            assert importlib.util.find_spec(module) is not None
            started.append(command)
            assert environment == {"CUDA_VISIBLE_DEVICES": "3"}

        def poll(self) -> int:
            return 2

    monkeypatch.setattr(server_process, "Child", Ended)
    with pytest.raises(EngineDeadError, match="status 2"):
        server_process.ServerProcess(
            "m", verl.options_of(config_of()), environment={"CUDA_VISIBLE_DEVICES": "3"}
        )
    parsed = build_parser().parse_args(started[0])
    assert parsed.server_dev_mode and parsed.enable_sleep_mode and parsed.model == "m"

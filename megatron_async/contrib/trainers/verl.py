"""verl: ``actor_rollout_ref.rollout.name=megatron_async``, after :func:`register`.

:class:`Server` is the actor that verl's agent loops ask; ``ServerAdapter`` is in each training
worker, and brings the weights of that worker's GPU to the server there; ``Replica`` starts the
actor. An engine has one GPU: tensor_model_parallel_size and its like must be 1.

With ``quantization="fp8"``, and of a checkpoint that is FP8 itself (``quant_method: fp8``), the
engine keeps e4m3 and quantizes inputs too, as verl's vLLM and SGLang do. verl has those two
rollouts quantize the trainer's weights on their way; here the engine does it when it takes them, by
the scheme of its own checkpoint. Weights that come as e4m3 with their scales are taken as they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.contrib.trainers.client import Client
from megatron_async.contrib.trainers.server_process import ServerProcess
from megatron_async.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

NAME = "megatron_async"
BUCKET_BYTES = 512 << 20
REFUSED = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_parallel_size": 1,
    "quantization_config_file": None,
    "enable_rollout_routing_replay": False,
}
"""Fields of the rollout's configuration with the one value that is served."""
FP8 = "fp8"
NAMED_TENSORS = "named_tensors"
"""The one form of weights that is taken: names, and whole tensors."""
DEVICES = "CUDA_VISIBLE_DEVICES"
ACTOR = "MEGATRON_ASYNC_VERL_SERVER"
"""The variable of a worker that names the server of its GPU."""


def check_config(config: Any) -> None:
    """Raises ConfigError for what a rollout's configuration asks and is not served."""
    for name, served in REFUSED.items():
        value = _field(config, name, served)
        if value not in (served, None):
            raise ConfigError(f"rollout.{name}={value!r} is not served; set it to {served!r}")
    quantization = _field(config, "quantization", None)
    if quantization not in (FP8, None):
        raise ConfigError(
            f"rollout.quantization={quantization!r} is not served; set it to {FP8!r}, or leave it "
            "out"
        )
    if _field(_field(config, "qat", None), "enable", False):
        raise ConfigError("rollout.qat.enable=True is not served; set it to False")


def options_of(config: Any, model_config: Any = None) -> list[str]:
    """Options of the server by the configurations of a rollout and of its model;
    ``engine_kwargs.megatron_async`` is a list of more."""
    options = ["--logprobs-mode", _field(config, "logprobs_mode", None) or "processed_logprobs"]
    for name, option in (
        ("max_model_len", "--inference-max-seq-length"),
        ("max_num_seqs", "--max-requests"),
        ("dtype", "--dtype"),
    ):
        value = _field(config, name, None)
        if value is not None:
            options += [option, str(value)]
    if _field(config, "free_cache_engine", True):
        options.append("--enable-sleep-mode")
    if _field(config, "enable_prefix_caching", True):
        options.append("--enable-prefix-caching")
    more = (_field(config, "engine_kwargs", None) or {}).get(NAME) or []
    is_fp8 = FP8 in (_field(config, "quantization", None), _stored_as(model_config))
    if is_fp8 and "--quantization" not in more:
        options += ["--quantization", FP8, "--quantize-activations"]
    return [*options, *map(str, more)]


def _stored_as(model_config: Any) -> str | None:
    """How a model's configuration says that its checkpoint is quantized."""
    found = _field(_field(model_config, "hf_config", None), "quantization_config", None)
    method = _field(found, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


class Server:
    """One engine of verl: what ``RolloutReplica`` and the agent loops call, as an actor of Ray.

    Args:
        config: the rollout's.
        model_config: of the model; ``local_path`` is its directory.
        rollout_mode: verl's ``RolloutMode``, or its name.
        cuda_visible_devices: the GPU of the engine.
        url: of a server that runs already; None starts one.
    """

    def __init__(
        self,
        config: Any,
        model_config: Any,
        rollout_mode: Any = "hybrid",
        cuda_visible_devices: str | None = None,
        url: str | None = None,
    ) -> None:
        check_config(config)
        self._config = config
        self._model_config = model_config
        self._mode = str(getattr(rollout_mode, "value", rollout_mode))
        self._devices = cuda_visible_devices
        self._process: ServerProcess | None = None
        self._client: Client | None = None if url is None else Client(url)

    async def launch_server(self, host: str = "127.0.0.1") -> None:
        """Start the server, unless there is one."""
        if self._client is None:
            environment = {} if self._devices is None else {DEVICES: self._devices}
            path = self._model_config.local_path
            options = options_of(self._config, self._model_config)
            self._process = await asyncio.to_thread(
                ServerProcess, path, options, environment=environment, host=host
            )
            self._client = Client(self._process.url)

    def get_server_address(self) -> tuple[str, int]:
        """Host and port at which it listens."""
        host, _, port = self.client.url.partition("://")[2].rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def client(self) -> Client:
        """Calls the server; raises ConfigError before it is launched."""
        if self._client is None:
            raise ConfigError("the server is not launched; call launch_server first")
        return self._client

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
    ) -> Any:
        """verl's ``TokenOutput`` for one prompt: tokens, their log-probabilities where
        ``logprobs`` is asked for, and whether the text was completed or aborted.

        Raises:
            RequestError: something is asked that is not served.
        """
        if image_data or video_data:
            raise RequestError("image_data and video_data are not served; send token ids alone")
        sampling = {k: v for k, v in sampling_params.items() if k not in ("logprobs", "max_tokens")}
        if sampling.get("max_new_tokens") is None:
            sampling["max_new_tokens"] = sampling_params.get("max_tokens")
        most = sampling["max_new_tokens"]
        sampling["max_new_tokens"] = self._most_tokens(len(prompt_ids), most)
        wants = sampling_params.get("logprobs", False)
        has_log_probs = wants is not None and wants is not False
        found = await self.client.generate(
            list(prompt_ids), sampling, rid=request_id, log_probs=has_log_probs
        )
        meta = found["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        is_aborted = meta["finish_reason"]["type"] == "abort"
        return _token_output()(
            token_ids=found["output_ids"],
            log_probs=[log_prob for log_prob, _, _ in pairs] if has_log_probs else None,
            stop_reason="aborted" if is_aborted else "completed",
        )

    def _most_tokens(self, prompt_length: int, asked: int | None) -> int:
        """How many tokens a prompt gets at most, by verl's rule: what is asked for, or a response
        that fits behind the prompt; never more than the model takes."""
        config, most = self._config, asked
        if most is None:
            room = config.prompt_length + config.response_length
            most = min(config.response_length, room - prompt_length)
        elif not isinstance(most, int) or most < 1:
            return most  # the server says what is wrong
        longest = _field(config, "max_model_len", None)
        if longest is not None:
            most = min(most, longest - prompt_length)
        return max(1, most)  # where nothing fits, the server says that the prompt is too long

    async def wake_up(self) -> None:
        """Take the memory of an engine back whose weights do not change; in hybrid mode
        ``ServerAdapter`` does it with the weights."""
        if self._mode == "hybrid":
            raise ConfigError("in hybrid mode update_weights wakes the engine up")
        if self._mode == "colocated":
            await self.client.asking("/resume_memory_occupation", {})

    async def sleep(self) -> None:
        """Give its memory back."""
        if self._mode != "standalone" and _field(self._config, "free_cache_engine", True):
            await self.client.asking("/release_memory_occupation", {})

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self.client.asking("/reset_prefix_cache", {})

    async def abort_all_requests(self) -> None:
        """End all requests with what they have, and take none until :meth:`resume_generation`."""
        await self.client.asking("/pause_generation", {"mode": "abort"})

    async def resume_generation(self) -> None:
        """Go on."""
        await self.client.asking("/continue_generation", {})

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with what it has."""
        found = await self.client.asking("/abort_request", {"rid": request_id})
        return {"aborted": bool(found["aborted"]), "request_id": request_id}

    async def start_profile(self, **options: Any) -> None:
        """No profile is taken: ``POST /profile`` of the server is one."""

    async def stop_profile(self) -> None:
        """See :meth:`start_profile`."""

    def shutdown(self) -> None:
        """End the server, if this has started it."""
        if self._process is not None:
            self._process.close()


class AdapterMethods:
    """What verl's ``BaseRollout`` asks, in a training worker; :meth:`_server` finds the server of
    its GPU."""

    config: Any
    _own_client: Client | None = None

    async def _server(self) -> Client:
        if self._own_client is None:
            import ray

            name = os.environ.get(ACTOR)
            if name is None:
                raise ConfigError("this worker has no server; its Replica must have started one")
            actor = ray.get_actor(name)
            host, port = await actor.get_server_address.remote()
            shown = f"[{host}]" if ":" in host else host
            self._own_client = Client(f"http://{shown}:{port}")
        return self._own_client

    async def resume(self, tags: Sequence[str]) -> None:
        """Take the memory of weights or of the KV cache."""
        if _field(self.config, "free_cache_engine", True):
            await asyncio.to_thread((await self._server()).restore, tags)

    async def release(self) -> None:
        """Give the memory of both back."""
        if _field(self.config, "free_cache_engine", True):
            await asyncio.to_thread((await self._server()).release)

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        *,
        peft_config: Any = None,
        wire_format: str = NAMED_TENSORS,
        **_: Any,
    ) -> None:
        """Send all weights, in buckets of one update that is taken whole or not at all. A weight of
        e4m3 and its scales may be in different ones.

        Raises:
            ConfigError: they are those of a LoRA, or differences to the last ones.
        """
        if wire_format != NAMED_TENSORS:
            raise ConfigError(
                f"wire_format={wire_format!r} is not served; send whole tensors "
                f"({NAMED_TENSORS!r}), by another checkpoint_engine.backend"
            )
        if peft_config is not None:
            raise ConfigError("weights of a LoRA are not served; merge them into the model's")
        client = await self._server()
        size = _field(_field(self.config, "checkpoint_engine", None), _MEGABYTES, None)
        most = BUCKET_BYTES if size is None else int(size) << 20
        bucket: dict[str, Tensor] = {}
        total = 0
        async for name, tensor in _each(weights):
            if bucket and total + tensor.nbytes > most:
                await asyncio.to_thread(client.send_bucket, bucket)
                bucket, total = {}, 0
            # verl's generators reuse the memory of a tensor that they have given.
            bucket[name] = tensor.detach().clone()
            total += tensor.nbytes
        if bucket:
            await asyncio.to_thread(client.send_bucket, bucket)
        await asyncio.to_thread(client.end_update)


_MEGABYTES = "update_weights_bucket_megabytes"


class ReplicaMethods:
    """What verl's ``RolloutReplica`` leaves to its kinds."""

    replica_rank: int
    world_size: int
    config: Any
    model_config: Any
    rollout_mode: Any
    is_reward_model: bool
    workers: list[Any]
    servers: list[Any]
    _server_handle: Any
    _server_address: str

    def get_ray_class_with_init_args(self) -> Any:
        """The placeholder in each worker of a rollout with GPUs of its own."""
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs

        kind = ray.remote(adapter_class())
        settings = {"config": self.config, "model_config": self.model_config, "device_mesh": None}
        return RayClassWithInitArgs(cls=kind, **settings)

    async def launch_servers(self) -> None:
        """Start the one server, on the node and the GPU of its worker."""
        import ray

        check_config(self.config)
        if self.world_size != 1 or len(self.workers) != 1:
            raise ConfigError(f"an engine has one GPU, and {len(self.workers)} workers came")
        name = actor_name(self.replica_rank, is_reward_model=self.is_reward_model)
        node_id, devices, address = await self.workers[0].__ray_call__.remote(_join, name)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=node_id, soft=False
        )
        server = (
            ray.remote(Server)
            .options(
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {f"RAY_EXPERIMENTAL_NOSET_{DEVICES}": "1"}},
                name=name,
                max_concurrency=1024,
            )
            .remote(self.config, self.model_config, self.rollout_mode, devices)
        )
        self.servers.append(server)
        await server.launch_server.remote(address)
        host, port = await server.get_server_address.remote()
        self._server_handle = server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def actor_name(replica_rank: int, *, is_reward_model: bool = False) -> str:
    """The name of a replica's actor."""
    return f"{NAME}_server_{'reward_' if is_reward_model else ''}{replica_rank}"


def adapter_class() -> Any:
    """``ServerAdapter``, a ``BaseRollout`` of verl, for the worker of one GPU."""
    from verl.workers.rollout.base import BaseRollout

    return type("ServerAdapter", (AdapterMethods, BaseRollout), {"__module__": __name__})


def replica_class() -> Any:
    """``Replica``, a ``RolloutReplica`` of verl."""
    from verl.workers.rollout.replica import RolloutReplica

    return type("Replica", (ReplicaMethods, RolloutReplica), {"__module__": __name__})


def register() -> None:
    """Make ``rollout.name=megatron_async`` known to verl, in this process; in each one with
    ``VERL_USE_EXTERNAL_MODULES=megatron_async.contrib.trainers.verl_module``.

    Raises:
        ConfigError: verl is not installed, or is one without these registries.
    """
    try:
        from verl.workers.rollout import base
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        registry: dict[tuple[str, str], str] = base._ROLLOUT_REGISTRY
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"verl with its registries of rollouts is needed: {error}") from error
    registry[NAME, "async"] = f"{__name__}.ServerAdapter"
    RolloutReplicaRegistry.register(NAME, replica_class)


def __getattr__(name: str) -> Any:
    kinds = {"ServerAdapter": adapter_class, "Replica": replica_class}
    if name not in kinds:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = kinds[name]()
    return made


def _join(_: Any, name: str) -> tuple[str, str, str]:
    """Node, GPUs and address of a worker, in which this runs, and which learns its server's
    name."""
    import ray

    os.environ[ACTOR] = name
    context = ray.get_runtime_context()
    return context.get_node_id(), os.environ[DEVICES], ray.util.get_node_ip_address()


def _token_output() -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of one of verl's configurations, which are dataclasses or mappings."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


async def _each(weights: Any) -> AsyncIterator[tuple[str, Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for each in weights:
            yield each
        return
    for each in weights:
        yield each

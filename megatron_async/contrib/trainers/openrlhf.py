"""OpenRLHF: its rollout actor, over a server of this package.

:func:`install` puts :class:`RolloutEngine` in the place of ``RolloutRayActor``, which
``create_vllm_engines`` makes. vLLM must be installed for OpenRLHF's own side: it makes the sampling
parameters, and its NCCL sends the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from megatron_async.contrib.trainers.client import Client
from megatron_async.contrib.trainers.server_process import ServerProcess
from megatron_async.errors import ConfigError, RequestError

OPTIONS = {"model", "max_model_len", "dtype", "enable_prefix_caching", "enable_sleep_mode",
           "logprobs_mode", "url", "options"}  # fmt: skip
WITHOUT_EFFECT = {
    "enforce_eager", "worker_extension_cls", "seed", "distributed_executor_backend",
    "trust_remote_code", "full_determinism", "gpu_memory_utilization", "bundle_indices",
    "num_gpus", "max_logprobs", "mm_pad_token_ids",
}  # fmt: skip
"""Arguments of OpenRLHF's that change no token here. No code of a model is run; noise is a function
of each request's seed."""
SERVED_PARAMS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "seed": "sampling_seed",
    "skip_special_tokens": "skip_special_tokens", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repetition_penalty": "repetition_penalty",
    "include_stop_str_in_output": "no_stop_trim",
}  # fmt: skip
"""Fields of vLLM's ``SamplingParams``, and what ``/generate`` calls them."""
REFUSED_PARAMS = (
    "prompt_logprobs", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs",
    "guided_decoding", "logits_processors", "truncate_prompt_tokens", "extra_args",
)  # fmt: skip


@dataclass(frozen=True)
class Logprob:
    """A log-probability, as vLLM has it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One text, as vLLM has it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The texts of one request, as vLLM has them."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)


class RolloutEngine:
    """What OpenRLHF's trainer calls on a rollout actor.

    Args:
        model: a model directory.
        tensor_parallel_size: 1.
        url: of a server that runs already; None starts one.
        options: more options of the server.
        agent_func_path, remote_rm_url: as OpenRLHF's.
        executor: runs episodes; None makes OpenRLHF's.
        arguments: others of OpenRLHF's; see :data:`WITHOUT_EFFECT`.

    Raises:
        ConfigError: something is asked that is not served.
    """

    def __init__(
        self,
        *,
        model: str,
        tensor_parallel_size: int = 1,
        url: str | None = None,
        options: Sequence[str] = (),
        agent_func_path: str | None = None,
        remote_rm_url: str | None = None,
        executor: Any = None,
        **arguments: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            said = f"tensor_parallel_size={tensor_parallel_size} is not served; set it to 1"
            raise ConfigError(f"{said}, and more engines")
        for name, value in arguments.items():
            if name not in OPTIONS | WITHOUT_EFFECT and value not in (None, False, {}, ()):
                raise ConfigError(f"{name}={value!r} is not served; leave it out")
        self._executor = executor
        self._executor_arguments = agent_func_path, remote_rm_url
        self._process: ServerProcess | None = None
        if url is None:
            self._process = ServerProcess(model, [*_options(arguments), *options])
            url = self._process.url
        self._client = Client(url)
        self._unfinished = 0
        self._is_open = False
        """The server has begun an update."""
        self._mode = arguments.get("logprobs_mode") or "raw_logprobs"

    # --- rollouts -----------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """The text that continues a prompt.

        Args:
            sampling_params: vLLM's.

        Raises:
            RequestError: something is asked that is not served; it is named.
        """
        if multi_modal_data:
            raise RequestError("multi_modal_data is not served; send token ids alone")
        sampling, top = _sampling(sampling_params)
        name = uuid4().hex
        self._unfinished += 1
        try:
            found = await self._client.generate(
                prompt_token_ids, sampling, rid=name, log_probs=top is not None, top=top or 0,
                mode=self._mode,
            )  # fmt: skip
        finally:
            self._unfinished -= 1
        output = _output(found, top is not None, sampling.get("stop_token_ids") or ())
        return RequestOutput(name, list(prompt_token_ids), [output])

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[Any]:
        """What OpenRLHF's executor makes of ``num_samples`` episodes of a prompt."""
        if self._executor is None:
            self._executor = _openrlhf_executor(*self._executor_arguments)
        episodes = (
            self._executor.execute(
                prompt=prompt,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=self,
                images=images,
            )
            for _ in range(num_samples)
        )
        return list(await asyncio.gather(*episodes))

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self._unfinished

    # --- the engine ---------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        await self._client.asking("/reset_prefix_cache", {})

    async def pause_generation(self) -> None:
        """Launch nothing; requests are kept."""
        await self._client.asking("/pause", {"mode": "keep"})

    async def resume_generation(self) -> None:
        """Go on."""
        await self._client.asking("/resume", {})

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back."""
        await self._client.asking(f"/sleep?level={int(level)}", {})

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it again, or the part that ``tags`` name."""
        await self._client.asking("/resume_memory_occupation", {"tags": _list(tags)})

    def shutdown(self) -> None:
        """End the server, if this has started it."""
        self._client.close()
        if self._process is not None:
            self._process.close()

    # --- weights ------------------------------------------------------------------------------

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        """Join the trainer's group, as its first rank calls it. The server must have been started
        with the same backend (``--weight-transfer-config``), as one that this starts is.

        Raises:
            ConfigError: the group is one of Ray's.
        """
        if use_ray:
            raise ConfigError("vllm.sync_with_ray is not served; leave it out")
        where = {"master_address": master_address, "master_port": int(master_port)}
        info = {**where, "rank_offset": rank_offset, "world_size": world_size, "packed": False}
        await self._client.asking("/init_weight_transfer_engine", {"init_info": info})

    async def update_weight(
        self, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Take one tensor of the trainer's group. ``empty_cache``, as OpenRLHF sets it, says that
        it is the last: all are taken then, or none."""
        if not self._is_open:
            await self._client.asking("/start_weight_update", {})
        self._is_open = False  # an error ends the update
        one = {"names": [name], "dtype_names": [_word(dtype)], "shapes": [list(shape)]}
        await self._client.asking("/update_weights", {"update_info": one})
        if empty_cache:
            await self._client.asking("/finish_weight_update", {})
        self._is_open = not empty_cache

    async def update_weight_cuda_ipc(
        self,
        name: str,
        dtype: Any,
        shape: Sequence[int],
        ipc_handles: Mapping[str, Any],
        empty_cache: bool = False,
    ) -> None:
        """Take one tensor of the trainer's GPU, as :meth:`update_weight` does.

        Args:
            ipc_handles: by the UUID of a GPU; this actor's own is taken.
        """
        from megatron_async.contrib.trainers.shared_tensors import serialized_handle

        own = _own_gpu(ipc_handles)
        text = serialized_handle(name, ipc_handles[own], own)
        body = {"serialized_named_tensors": [text], "flush_cache": empty_cache}
        await self._client.asking("/update_weights_from_tensor", body)


def install() -> None:
    """Have ``create_vllm_engines`` make :class:`RolloutEngine`, in this process.

    Raises:
        ConfigError: OpenRLHF is not installed.
    """
    try:
        from openrlhf.trainer.ray import vllm_engine
    except ImportError as error:
        raise ConfigError(f"OpenRLHF, with its vLLM, is needed: {error}") from error
    vllm_engine.RolloutRayActor = vllm_engine.ray.remote(RolloutEngine)


def _options(arguments: Mapping[str, Any]) -> list[str]:
    options = ["--weight-transfer-config", '{"backend": "nccl"}']
    for name, option in (
        ("max_model_len", "--inference-max-seq-length"),
        ("dtype", "--dtype"),
        ("logprobs_mode", "--logprobs-mode"),
    ):
        if arguments.get(name) is not None:
            options += [option, str(arguments[name])]
    for name in ("enable_prefix_caching", "enable_sleep_mode"):
        if arguments.get(name):
            options.append(f"--{name.replace('_', '-')}")
    return options


def _sampling(params: Any) -> tuple[dict[str, Any], int | None]:
    """What ``/generate`` is asked for vLLM's parameters, and how many likely tokens; None for no
    log-probabilities."""
    for name in REFUSED_PARAMS:
        value = getattr(params, name, None)
        if value or type(value) is int:  # prompt_logprobs=0 asks for those of the prompt's tokens
            raise RequestError(f"{name} is not served here; leave it out of the sampling_params")
    if getattr(params, "n", 1) not in (None, 1):
        raise RequestError(f"n={params.n} is not served here; ask for one text at a time")
    sampling = {
        called: value
        for name, called in SERVED_PARAMS.items()
        if (value := getattr(params, name, None)) is not None and value != []
    }
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1  # vLLM's word for off
    top = getattr(params, "logprobs", None)
    return sampling, None if top is None else int(top)


def _output(
    found: Mapping[str, Any], has_log_probs: bool, stop_ids: Sequence[int]
) -> CompletionOutput:
    meta = found["meta_info"]
    reason = meta["finish_reason"]
    log_probs: list[dict[int, Logprob]] | None = None
    if has_log_probs:
        log_probs = []
        own = meta["output_token_logprobs"]
        tops = meta.get("output_top_logprobs") or [[]] * len(own)
        for (log_prob, token, _), likely in zip(own, tops, strict=True):
            each = {other: Logprob(of, rank) for rank, (of, other, _) in enumerate(likely, 1)}
            log_probs.append({token: each.get(token, Logprob(log_prob)), **each})
    matched = reason.get("matched")
    if not isinstance(matched, str) and matched not in stop_ids:
        matched = None  # the model's own end, of which vLLM says nothing
    text, ids = found["text"], found["output_ids"]
    return CompletionOutput(0, text, ids, log_probs, reason["type"], matched)


def _openrlhf_executor(agent_func_path: str | None, remote_rm_url: str | None) -> Any:
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    if agent_func_path:
        return _load_agent_executor(agent_func_path)
    return SingleTurnAgentExecutor(remote_rm_url)


def _own_gpu(handles: Mapping[str, Any]) -> str:
    import torch

    visible = range(torch.cuda.device_count())
    known = [str(torch.cuda.get_device_properties(index).uuid) for index in visible]
    for name in handles:
        if name in known:
            return name
    raise ConfigError("no handle is of a GPU that this actor sees; place it on the trainer's")


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _list(tags: Sequence[str] | None) -> list[str] | None:
    return None if tags is None else list(tags)

"""NeMo RL: a generation object for the HTTP way of its ``SGLangGeneration``.

NeMo RL chooses its generation class by names that it knows, so make one and give it to
``grpo_train`` or to ``HTTPWeightSynchronizer``. Its own code makes the batches, sends the weights
to the URLs, and asks for what stands here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.contrib.trainers.client import Client
from megatron_async.errors import ConfigError

REFUSED = ("pp_size", "ep_size", "dp_size", "speculative_algorithm", "enable_return_routed_experts")
"""Fields of ``sglang_server_args`` that a server of this package has options of its own for."""


class GenerationMethods:
    """What takes the place of ``SGLangGeneration``'s methods.

    Args:
        urls: of servers, each of one engine, in the order of the trainer's ranks.
        config: ``policy.generation``, as for the backend ``sglang``.
        api_key: an administrator's, where the servers have keys.
        loop: runs coroutines for NeMo RL's own ``generate``: an ``AsyncLoopThread``.
    """

    num_gpus_per_engine = num_gpus_per_node = 1

    def __init__(
        self,
        urls: Sequence[str],
        config: Mapping[str, Any],
        *,
        api_key: str | None = None,
        loop: Any = None,
    ) -> None:
        if not urls:
            raise ConfigError("urls is empty; give the URL of at least one server")
        server = config["sglang_cfg"]["sglang_server_config"]
        if server.get("num_gpus_per_engine", 1) != 1:
            raise ConfigError("num_gpus_per_engine must be 1: a server is one rank to the trainer")
        for name in REFUSED:
            if config["sglang_cfg"].get(name) not in (None, False, 1):
                raise ConfigError(f"{name} is not taken from here; start the servers with options")
        self.sglang_cfg = config
        self.needs_offload = bool(server["needs_offload"])
        self.all_engines: list[Any] = []  # none that NeMo RL has started
        self._clients = [Client(url, api_key) for url in urls]
        self._turns = itertools.cycle(self._clients)
        self._async_loop = loop

    def get_rollout_engine_urls(self) -> list[str]:
        """To which the trainer sends weights: ``/update_weights_from_tensor``, ``/flush_cache``."""
        return [client.url for client in self._clients]

    async def generate_one_sample(
        self, sampling_params: Mapping[str, Any], input_ids: Sequence[int], index: int
    ) -> tuple[int, list[int], list[float], bool]:
        """The tokens of one sample with their log-probabilities, and whether its length ended it.
        One that is aborted, as by an update, goes on with what it has."""
        tokens: list[int] = []
        log_probs: list[float] = []
        client, most = next(self._turns), int(sampling_params["max_new_tokens"])
        while True:
            sampling = {**sampling_params, "max_new_tokens": most - len(tokens)}
            if (least := sampling.get("min_new_tokens")) is not None:
                sampling["min_new_tokens"] = max(0, least - len(tokens))
            found = (await client.generate([*input_ids, *tokens], sampling))["meta_info"]
            pairs = found["output_token_logprobs"]
            tokens += [token for _, token, _ in pairs]
            log_probs += [log_prob for log_prob, _, _ in pairs]
            reason = found["finish_reason"]["type"]
            if reason != "abort" or len(tokens) >= most:
                return index, tokens, log_probs, reason != "stop"
            await asyncio.sleep(0)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Take memory back; ``tags`` says which."""
        if self.needs_offload:
            for client in self._clients:
                client.restore(kwargs.get("tags"))
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give memory back. A subset of the tags cannot be given back alone, and is refused."""
        tags = kwargs.get("tags")
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise ConfigError("tags must be weights and kv_cache, which are released together")
        if self.needs_offload:
            for client in self._clients:
                client.release()
        return True

    def invalidate_kv_cache(self) -> bool:
        """Forget cached prefixes, and take the weights that have come."""
        for client in self._clients:
            client.end_update()
        return True

    def check_weights(self, action: str) -> Any:
        """Not served."""
        raise ConfigError(f"check_weights({action!r}) is not served")

    def shutdown(self) -> bool:
        """Leave the servers, which go on."""
        for client in self._clients:
            client.close()
        loop, self._async_loop = self._async_loop, None
        if loop is not None:
            loop.close()
        return True


def generation(
    urls: Sequence[str], config: Mapping[str, Any], *, api_key: str | None = None
) -> Any:
    """An ``SGLangGeneration`` of NeMo RL over servers of this package; see
    :class:`GenerationMethods`.

    Raises:
        ConfigError: NeMo RL is not installed, or something is configured that is not served.
    """
    try:
        from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
        from nemo_rl.models.generation.sglang.utils.async_utils import AsyncLoopThread
    except ImportError as error:
        raise ConfigError(f"NeMo RL with its SGLang backend is needed: {error}") from error
    kind: Any = type("MegatronAsyncGeneration", (GenerationMethods, SGLangGeneration), {})
    return kind(urls, config, api_key=api_key, loop=AsyncLoopThread())

"""NeMo RL's generation, with the calls of its ``SGLangGeneration`` and its weight synchronizer."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron_async.contrib.trainers import nemo_rl
from megatron_async.contrib.trainers.client import Client
from megatron_async.errors import ConfigError
from tests.support.sglang_trainers import bucket, serialized
from tests.unit.serving.test_development_api import PROMPT, expected, llama

SERVER = {"needs_offload": True, "num_gpus_per_engine": 1, "num_gpus": 1}
CONFIG: dict[str, Any] = {"sglang_cfg": {"sglang_server_config": SERVER, "context_length": 64}}
SAMPLING = {
    "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 8, "no_stop_trim": True,
    "spaces_between_special_tokens": False, "stop_token_ids": [99],
}  # fmt: skip


class SGLangGeneration:
    """NeMo RL's: its ``generate`` asks for one sample after the other, or for all at once."""

    _async_loop: Any

    def generate(self, prompts: list[list[int]]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            each: Any = self
            made = (each.generate_one_sample(SAMPLING, p, i) for i, p in enumerate(prompts))
            return list(await asyncio.gather(*made))

        found: list[Any] = self._async_loop.run(all_of_them())
        return found


class AsyncLoopThread:
    """NeMo RL's."""

    closed = False

    def run(self, work: Any) -> Any:
        return asyncio.run(work)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def generation(client: Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    root = "nemo_rl.models.generation.sglang"
    parents = ["nemo_rl", "nemo_rl.models", "nemo_rl.models.generation", root, f"{root}.utils"]
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kind in (
        (f"{root}.sglang_generation", SGLangGeneration),
        (f"{root}.utils.async_utils", AsyncLoopThread),
    ):
        module = ModuleType(name)
        vars(module)[kind.__name__] = kind
        monkeypatch.setitem(sys.modules, name, module)
    made = nemo_rl.generation([client.url], CONFIG)
    assert isinstance(made, SGLangGeneration)
    return made


def test_its_own_generate_asks_the_servers(generation: Any) -> None:
    tokens = expected(llama(1))
    for number, found, log_probs, is_truncated in generation.generate([PROMPT, PROMPT]):
        assert number in (0, 1) and found == tokens and is_truncated
        assert len(log_probs) == 8 and all(each < 0 for each in log_probs)
    loop = generation._async_loop
    assert generation.shutdown() and generation.shutdown() and loop.closed


def test_the_synchronizer_sends_weights_to_the_urls(generation: Any) -> None:
    """What ``HTTPWeightSynchronizer.sync_weights`` and the policy's workers do."""
    before = generation.generate([PROMPT])[0][1]
    assert generation.finish_generation()
    generation.prepare_for_generation(tags=["weights"])
    (url,) = generation.get_rollout_engine_urls()
    with httpx.Client(base_url=url, timeout=60.0) as http:
        alive = []
        for name, parameter in llama(2).named_parameters():
            alive.append(bucket({name: parameter.detach()}))
            body = {
                "serialized_named_tensors": [serialized(alive[-1])], "flush_cache": False,
                "load_format": "flattened_bucket", "weight_version": "3",
            }  # fmt: skip
            answer = http.post("/update_weights_from_tensor", json=body).raise_for_status()
            assert answer.json()["success"] is True
        assert http.get("/flush_cache").status_code == 200
    generation.prepare_for_generation(tags=["kv_cache"])
    assert generation.invalidate_kv_cache()
    assert generation.generate([PROMPT])[0][1] == expected(llama(2)) != before


def test_a_sample_that_is_aborted_goes_on(generation: Any, client: Client) -> None:
    client.post("/pause_generation", mode="retract")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generation.generate, [PROMPT])
        while not client.abort():
            """It has not come yet."""
        client.post("/continue_generation")
        ((_, tokens, log_probs, _),) = asked.result()
    assert tokens == expected(llama(1)) and len(log_probs) == 8


@pytest.mark.parametrize(
    ("least", "mins"),
    [({}, (-1, -1)), ({"min_new_tokens": 7}, (7, 5)), ({"min_new_tokens": 1}, (1, 0))],
)
def test_it_goes_on_behind_the_tokens_that_it_has(
    monkeypatch: pytest.MonkeyPatch, least: dict[str, int], mins: tuple[int, int]
) -> None:
    asked: list[tuple[list[int], int, int]] = []
    parts = [([5, 6], "abort"), ([], "abort"), ([7], "stop")]

    async def generate(_: Client, prompt: list[int], sampling: dict[str, Any]) -> Any:
        asked.append((prompt, sampling["max_new_tokens"], sampling.get("min_new_tokens", -1)))
        tokens, reason = parts[len(asked) - 1]
        pairs = [[-0.5, token, None] for token in tokens]
        return {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": reason}}}

    monkeypatch.setattr(Client, "generate", generate)
    made = nemo_rl.GenerationMethods(["http://nowhere"], CONFIG)
    found = asyncio.run(made.generate_one_sample(SAMPLING | least, PROMPT, 4))
    assert found == (4, [5, 6, 7], [-0.5] * 3, False)
    first, later = mins
    behind = [*PROMPT, 5, 6]
    assert asked == [(PROMPT, 8, first), (behind, 6, later), (behind, 6, later)]


@pytest.mark.parametrize(
    ("server", "more"), [({"num_gpus_per_engine": 2}, {}), ({}, {"speculative_algorithm": "EAGLE"})]
)
def test_what_is_not_served_is_named(server: Any, more: Any) -> None:
    wrong = {"sglang_cfg": {"sglang_server_config": SERVER | server, **more}}
    with pytest.raises(ConfigError, match=next(iter({**server, **more}))):
        nemo_rl.GenerationMethods(["http://nowhere"], wrong)


def test_parts_are_released_together(generation: Any) -> None:
    with pytest.raises(ConfigError, match="released together"):
        generation.finish_generation(tags=["kv_cache"])
    with pytest.raises(ConfigError, match="check_weights"):
        generation.check_weights("snapshot")
    with pytest.raises(ConfigError, match="urls is empty"):
        nemo_rl.GenerationMethods([], CONFIG)
    idle = nemo_rl.GenerationMethods(
        ["http://nowhere"],
        {"sglang_cfg": {"sglang_server_config": {"needs_offload": False}}},
        loop=SimpleNamespace(close=lambda: None),
    )
    assert idle.prepare_for_generation() and idle.finish_generation() and idle.shutdown()


def test_it_says_that_nemo_rl_is_missing() -> None:
    with pytest.raises(ConfigError, match="NeMo RL"):
        nemo_rl.generation(["http://nowhere"], CONFIG)

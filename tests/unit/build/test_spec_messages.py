"""What rank 0 plans is what the other ranks build from."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from msgspec.msgpack import decode as plain
from msgspec.msgpack import encode as msgpack

from megatron_async.build.model import load_model, network_over
from megatron_async.build.rank_model import SPECS
from megatron_async.build.ranks import config_of_ranks
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.kv_events import KVEventsConfig
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.served import ServedModel
from megatron_async.ranks.messages import MESSAGES, BuildEngine, BuildModel, LoadModel

SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=2, num_kv_heads=2, head_dim=16,
    ffn_hidden_size=48, vocab_size=64, max_sequence_length=128,
)  # fmt: skip
LATENT = LatentAttention(kv_lora_rank=16, qk_pos_emb_head_dim=8, v_head_dim=8)
MODELS = {
    "dense": ModelConfig(**SIZES),
    "experts": ModelConfig(
        num_moe_experts=4, moe_ffn_hidden_size=16, moe_layer_freq=(0, 1), **SIZES
    ),
    "hybrid": ModelConfig(
        **SIZES | {"num_layers": 3, "position_embedding": "none"},
        hybrid_override_pattern="M*-", mamba_num_heads=2, mamba_head_dim=16, mamba_num_groups=1,
        mamba_state_dim=16,
    ),
    "latents": ModelConfig(latent_attention=LATENT, **SIZES),
    "window": ModelConfig(sliding_window=32, sliding_layers=(0, 1), **SIZES),
}  # fmt: skip


def told(spec: EngineSpec) -> EngineSpec:
    message = MESSAGES.decode(MESSAGES.encode(BuildEngine(1, SPECS.encode(spec))))
    assert isinstance(message, BuildEngine)
    return SPECS.decode(message.spec)


def spec_of(model: str, config: EngineConfig) -> EngineSpec:
    made = build_random_model(
        MODELS[model], device=torch.device("cpu"), dtype=torch.bfloat16, seed=1
    )
    return EngineSpec.of(ServedModel(network=network_over(made, config)), config, "cpu")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("drafts", [0, 2])
def test_the_spec_of_each_kind_of_model_arrives_as_it_was(model: str, drafts: int) -> None:
    config = EngineConfig(
        device="cpu", num_speculative_tokens=drafts, speculative_method="ngram",
        testing={"speculative_step_costs": [(1, w, 0.5) for w in range(1, 2 + drafts)]},  # type: ignore[arg-type]
    )  # fmt: skip
    spec = spec_of(model, config)
    assert told(spec) == spec and spec.cache.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 2, "draft_model": "tiny"},
        {"num_speculative_tokens": 3, "speculative_method": "ngram"},
        {"depth": 2, "max_requests": 3, "block_size_tokens": 16, "buffer_size_gb": 1.5},
    ],
)
def test_the_spec_of_each_way_to_draft_arrives_as_it_was(more: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", **more)
    spec = EngineSpec.of(load_model("tiny", config), config, "cpu")
    assert told(spec) == spec and repr(told(spec)) == repr(spec)


def test_other_ranks_have_a_device_of_their_own_and_record_and_publish_nothing() -> None:
    config = EngineConfig(
        device="cuda:1", record="run.jsonl", kv_events_config=KVEventsConfig(), depth=2
    )
    assert config_of_ranks(config) == EngineConfig(device="cuda", depth=2)
    assert config_of_ranks(EngineConfig()) == EngineConfig()


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_random_weights_is_told_as_it_is(model: str) -> None:
    message = BuildModel(MODELS[model], torch.float16, 7)
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


WRONG: list[tuple[tuple[str, ...], Any, str]] = [
    (("limits",), None, "Expected `object`, got `None` - at `$.limits`"),
    (("limits", "windows"), 3, "Expected `array`, got `int`"),
    (("cache", "dtype"), "float33", "'float33' is no torch.dtype"),
    (("cache", "dtype"), "nn", "'nn' is no torch.dtype"),
    (("cache", "dtype"), 16, "16 is no torch.dtype"),
    (("drafting",), ["guess", 0, False], "Invalid enum value 'guess'"),
    (("config", "max_requests"), 0, "max_requests=0 must be an integer of at least 1"),
    (("config", "testing", "jitter_seed"), "1", "Expected `int | null`, got `str`"),
    (("layout", "expert"), 3, "expert_model_parallel_size=3 must be a multiple of"),
    (("model", "vocab_size"), "64", "Expected `int`, got `str`"),
]


@pytest.mark.parametrize(("place", "value", "reason"), WRONG)
def test_a_wrong_field_of_a_spec_is_no_message(
    place: tuple[str, ...], value: Any, reason: str
) -> None:
    spec = spec_of("dense", EngineConfig(device="cpu"))
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, tensor=2, expert=2))
    message = plain(SPECS.encode(spec))
    fields = message
    for name in place[:-1]:
        fields = fields[name]
    fields[place[-1]] = value
    with pytest.raises(ValueError, match=f"this is not a message: .*{re.escape(reason)}"):
        SPECS.decode(msgpack(message))


def test_a_spec_that_lacks_a_field_or_ends_early_is_no_message() -> None:
    data = SPECS.encode(spec_of("dense", EngineConfig(device="cpu")))
    message = plain(data)
    del message["sizes"]["asked"]
    for wrong in (data[:-1], data + b"\0", msgpack(message), msgpack(None), b"", b"\xc1"):
        with pytest.raises(ValueError, match="this is not a message: "):
            SPECS.decode(wrong)


def test_what_loads_a_model_has_a_configuration_that_is_checked() -> None:
    message = LoadModel("tiny", EngineConfig(depth=3))
    assert MESSAGES.decode(MESSAGES.encode(message)) == message
    data = plain(MESSAGES.encode(message))
    data[2]["depth"] = 65
    with pytest.raises(ValueError, match="this is not a message: depth=65 must be at most 64"):
        MESSAGES.decode(msgpack(data))

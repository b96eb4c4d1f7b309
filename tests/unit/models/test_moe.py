"""Layers of experts: megatron-core's own as the reference, and whole engines at every depth."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.checkpoint.native import save_native
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.kernels.moe.reference import route, router_logits
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_random_model, transformer_config
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.features import features
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe import adapt
from megatron_async.models.moe.layer import MoELayer, mixture
from megatron_async.models.moe.trainer_ranks import TrainerRanks
from megatron_async.models.served import ServedModel
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from megatron_async.weights.place import read_weights
from tests.support.engines import DEPTHS, config_at, tokens_with_pauses

from megatron.core.models.gpt import GPTModel as MegatronGPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # isort: skip
from megatron.core.transformer.spec_utils import build_module  # isort: skip

pytestmark = pytest.mark.sweep

CONFIG = ModelConfig(
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=96,
    max_sequence_length=256,
    num_moe_experts=8,
    moe_ffn_hidden_size=32,
    moe_layer_freq=(1, 0, 1),
    moe_shared_expert_intermediate_size=48,
    moe_shared_expert_gate=True,
)
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "one by sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "groups and a bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_gate": False,
    },
    "groups": {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk": 2,
        "moe_shared_expert_gate": False,
        "moe_shared_expert_intermediate_size": None,
        "activation": "gelu",
    },
}


def changed(**values: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, **values)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """A random model that says something: larger weights, and biases of experts."""
    model = build_random_model(config, device=torch.device("cpu"), dtype=dtype, seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
        elif name.endswith("bias"):
            parameter.normal_(std=0.2)
    return model


def layers_of(model: Any) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


# --- against megatron-core ---------------------------------------------------------------------


def stock_layer(config: ModelConfig, ours: MoELayer) -> Any:
    """megatron's own, one expert after another, with the weights of ``ours``."""
    megatron = transformer_config(config, torch.float32, "cpu")
    megatron.use_te_activation_func = False
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    # Until 0.17 it is a ModuleSpec.
    build = spec if callable(spec) else functools.partial(build_module, spec)
    stock = build(config=megatron, pg_collection=get_default_pg_collection())
    for kind in ("linear_fc1", "linear_fc2"):
        weights = getattr(ours.experts, kind).weight
        for expert, weight in zip(stock.experts.local_experts, weights, strict=True):
            getattr(expert, kind).weight.data.copy_(weight)
    state = {k: v for k, v in ours.state_dict().items() if not k.startswith("experts.")}
    missing, unexpected = stock.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("experts.") for name in missing)
    return stock.eval()


@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_layer_is_that_of_megatron(router: str) -> None:
    config = changed(**ROUTERS[router], num_layers=1, moe_layer_freq=None)
    (ours,) = layers_of(model_of(config))
    hidden = torch.randn(19, 1, 64, generator=torch.Generator().manual_seed(1))
    expected, _ = stock_layer(config, ours)(hidden)
    found, bias = ours(hidden)
    assert bias is None
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_part_of_a_sequence_is_refused_by_name() -> None:
    """As a trainer with sequence parallelism would give it; an engine's forwards have it off."""
    (ours,) = layers_of(model_of(changed(num_layers=1, moe_layer_freq=None)))
    hidden = torch.randn(6, 1, 64)
    ours.config.sequence_parallel = True
    assert ours(hidden)[0].shape == hidden.shape
    ours.ranks = TrainerRanks()
    with pytest.raises(ConfigError, match=r"^sequence_parallel=True .* MoELayer"):
        ours(hidden)


def replaced(router: str) -> ModelConfig:
    return dataclasses.replace(CONFIG, **ROUTERS[router])


def stock_model(config: ModelConfig, fields: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A model that a megatron-core user has built, with other ``fields`` of megatron's config."""
    compat.ensure_parallel_state()
    megatron = transformer_config(config, torch.float32, "cpu")
    megatron.use_te_activation_func = False
    for name, value in fields.items():
        setattr(megatron, name, value)
    spec = get_gpt_decoder_block_spec(megatron, False, normalization="RMSNorm")
    torch.manual_seed(4)
    model = MegatronGPTModel(
        config=megatron, transformer_layer_spec=spec, vocab_size=96, max_sequence_length=64,
        position_embedding_type="rope",
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.eval()


@torch.no_grad()
def test_the_expert_bias_of_a_given_model_stays_where_graphs_have_it() -> None:
    """In a model of 16 bits megatron's router puts one of float32 in its place when it is called
    first, as by a trainer behind the engine's start."""
    model = stock_model(replaced("groups and a bias")).bfloat16()
    adapt_model(model)
    routers = [m.router for m in model.modules() if isinstance(m, adapt.AdaptedMoELayer)]
    assert len(routers) == 2
    before = [router.expert_bias.data_ptr() for router in routers]
    for router in routers:
        router.train()(torch.randn(5, 1, 64).bfloat16())
    assert before == [router.expert_bias.data_ptr() for router in routers]


@torch.no_grad()
def test_experts_of_a_given_model_that_were_moved_are_stacked_anew_or_named() -> None:
    """What is computed with may not be what they were."""
    model, hidden = stock_model(changed(num_layers=1, moe_layer_freq=None)), torch.randn(5, 1, 64)
    (layer,) = adapt_model(model).decoder.layers
    model.double().float()
    for parameter in model.parameters():
        parameter.mul_(2)
    doubled = stock_model(changed(num_layers=1, moe_layer_freq=None))
    doubled.load_state_dict(model.state_dict())
    expected = doubled.decoder.layers[0].mlp(hidden)[0]
    torch.testing.assert_close(layer.mlp(hidden)[0], expected, atol=2e-5, rtol=1e-4)
    model.load_state_dict(doubled.state_dict(), assign=True)
    with pytest.raises(ConfigError, match=r"layer 1: parameters of experts .* without assign=True"):
        layer.mlp(hidden)


@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_layers_of_a_given_model_choose_experts_as_megatrons_do(router: str) -> None:
    """By each function and in groups, whose fields megatron's own config has."""
    model, hidden = stock_model(replaced(router)), torch.randn(11, 1, 64)
    expected = [layer.mlp(hidden)[0] for layer in model.decoder.layers]
    adapt_model(model)
    for layer, wanted in zip(model.decoder.layers, expected, strict=True):
        torch.testing.assert_close(layer.mlp(hidden)[0], wanted, atol=2e-5, rtol=1e-4)


OF_MEGATRON: dict[str, dict[str, Any]] = {
    "groups of which all are kept": {"moe_router_num_groups": 4, "moe_router_group_topk": None},
    "a clamp without a gate": {
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
        "activation_func_clamp_value": 0.01,
    },
}
"""Fields that our own config refuses, or does not have."""


@pytest.mark.parametrize("fields", OF_MEGATRON)
@torch.no_grad()
def test_layers_of_a_given_model_read_fields_as_megatrons_do(fields: str) -> None:
    changes = {"moe_shared_expert_gate": False, "moe_shared_expert_intermediate_size": None}
    model = stock_model(changed(num_layers=1, moe_layer_freq=None, **changes), OF_MEGATRON[fields])
    (layer,), hidden = model.decoder.layers, torch.randn(11, 1, 64)
    expected = layer.mlp(hidden)[0]
    adapt_model(model)
    torch.testing.assert_close(layer.mlp(hidden)[0], expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_noise_and_capacity_of_a_given_model_are_left_to_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so once; layers compute what they do without."""
    fields = {"moe_input_jitter_eps": 0.375, "moe_expert_capacity_factor": 0.625}
    plain, given, hidden = stock_model(CONFIG), stock_model(CONFIG, fields), torch.randn(11, 1, 64)
    for model in (plain, given):
        adapt_model(model)
    for layer, other in zip(plain.decoder.layers, given.decoder.layers, strict=True):
        assert torch.equal(layer.mlp(hidden)[0], other.mlp(hidden)[0])
    said = [each for each in caplog.messages if "training alone" in each]
    assert len(said) == 2 and "0.375" in said[0] and "drops no token" in said[1]


@torch.no_grad()
def test_layers_of_a_given_model_compute_the_same_without_reading_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, hidden = stock_model(CONFIG), torch.randn(11, 1, 64)
    expected = [layer.mlp(hidden)[0] for layer in model.decoder.layers]
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapt_model(model)
    monkeypatch.setattr(SequentialMLP, "forward", None)
    for layer, wanted in zip(model.decoder.layers, expected, strict=True):
        torch.testing.assert_close(layer.mlp(hidden)[0], wanted, atol=2e-5, rtol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # In an engine padding chooses no expert.
    seen = []
    monkeypatch.setattr(adapt, "mixture", lambda *args: seen.append(args[2]) or mixture(*args))
    tokens = []
    for depth in (0, 2):
        with engine_of(model, depth, max_requests=2, block_count=40) as engine:
            tokens.append(tokens_of(engine.generate(PROMPTS[:2], PARAMS[:2])))
    assert tokens[0] == tokens[1]
    assert all(mask is not None for mask in seen) and any(mask.any() for mask in seen)
    # Its parameters are what is computed with, whoever changes them in place.
    wrapper = GPTNetwork(model)
    read_weights(wrapper.model, {name: 2 * tensor for name, tensor in before.items()})()
    doubled = stock_model(CONFIG)
    for parameter in doubled.parameters():
        parameter.data.mul_(2)
    adapt_model(doubled)
    for layer, wanted in zip(model.decoder.layers, doubled.decoder.layers, strict=True):
        assert torch.equal(layer.mlp(hidden)[0], wanted.mlp(hidden)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "'sinkhorn' is not supported"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True is not supported"),
        ({"expert_model_parallel_size": 2}, "without expert parallelism"),
        (
            {"bias_activation_fusion": True, "activation_func_clamp_value": 0.5},
            "activation_func_clamp_value=0.5 is not .*set bias_activation_fusion to False",
        ),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_topk": 2},
            "moe_router_topk=2 is not .*moe_router_group_topk=3: choose from 3 to 6 experts",
        ),
        ({"activation_func": torch.tanh}, "activation_func=tanh is not supported with experts"),
    ],
)
def test_given_models_that_cannot_be_served_are_named(
    changes: dict[str, Any], message: str
) -> None:
    model = stock_model(changed(num_layers=1, moe_layer_freq=None))
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=message):
        adapt_model(model)


@pytest.mark.parametrize("part", ("router", "shared_experts"))
def test_parts_of_users_that_no_step_calls_are_refused(part: str) -> None:
    model = stock_model(changed(num_layers=1, moe_layer_freq=None))
    module = getattr(model.decoder.layers[0].mlp, part)
    module.__class__ = type("Own", (type(module),), {"__module__": "of_a_user"})
    with pytest.raises(ConfigError, match="layer 1 has Own, which steps do not call"):
        adapt_model(model)


def test_adapters_around_experts_are_refused() -> None:
    model = stock_model(changed(num_layers=1, moe_layer_freq=None))
    expert = model.decoder.layers[0].mlp.experts.local_experts[2]
    expert.linear_fc1 = torch.nn.Sequential(expert.linear_fc1)
    with pytest.raises(ConfigError, match=r"layer 1 has experts with Sequential, .* merge"):
        adapt_model(model)


@torch.no_grad()
def test_rows_that_are_padding_pass_shared_experts_alone() -> None:
    (layer,) = layers_of(model_of(changed(num_layers=1, moe_layer_freq=None)))
    hidden = torch.randn(8, 1, 64)
    mask = torch.tensor([[False, True, False, True, True, True, True, True]])
    expected, _ = layer(hidden)
    # An expert that padding alone chooses is not read: NaN in it would reach the output.
    logits = router_logits(hidden[:, 0], layer.router.weight)
    chosen = route(logits[~mask[0]], layer.settings).ids.unique().tolist()
    assert len(chosen) < 8
    for expert in set(range(8)) - set(chosen):
        layer.experts.linear_fc1.weight[expert] = float("nan")
    found, _ = layer(hidden, padding_mask=mask)
    assert torch.equal(found[~mask[0]], expected[~mask[0]])
    assert torch.equal(found[mask[0], 0], layer.shared_experts(hidden[:, 0])[mask[0]])
    assert not torch.equal(found[mask[0]], expected[mask[0]])


@pytest.mark.parametrize("chosen", (1, 2))
@torch.no_grad()
def test_latent_projections_and_biases(chosen: int) -> None:
    """megatron-core needs Transformer Engine for the first, and ties the second to all linears. It
    refuses a softmax over one chosen expert, which is 1."""
    config = changed(
        num_layers=1, moe_layer_freq=None, moe_latent_size=24, mlp_bias=True, moe_router_bias=True,
        moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False,
        moe_router_topk=chosen,
    )  # fmt: skip
    (layer,) = layers_of(model_of(config))
    x = torch.randn(5, 64)
    weights = (x @ layer.router.weight.T + layer.router.bias).topk(chosen)
    latent = x @ layer.fc1_latent_proj.weight.T + layer.fc1_latent_proj.bias
    w1, w2, b1, b2 = layer.weights
    assert w1.shape == (8, 64, 24) and b2.shape == (8, 24)
    rows = []
    for row, ids, scores in zip(latent, weights.indices, weights.values.softmax(-1), strict=True):
        total = torch.zeros(24)
        for expert, score in zip(ids, scores, strict=True):
            gate, up = (w1[expert] @ row + b1[expert]).chunk(2)
            total += score * (w2[expert] @ (torch.nn.functional.silu(gate) * up) + b2[expert])
        rows.append(total)
    expected = torch.stack(rows) @ layer.fc2_latent_proj.weight.T + layer.fc2_latent_proj.bias
    torch.testing.assert_close(layer(x[:, None])[0][:, 0], expected, atol=2e-5, rtol=1e-4)


# --- engines -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(changed(**ROUTERS["groups and a bias"]))


def engine_of(model: Any, depth: int, **values: Any) -> DynamicInferenceEngine:
    config = config_at(depth, block_size_tokens=4, prefill_chunk_tokens=16, debug=True, **values)
    wrapper = GPTNetwork(model)
    return DynamicInferenceEngine(ServedModel(network=wrapper), config)


PROMPTS = [[(7 * n + 3 * i) % 96 for i in range(5 + 9 * (n % 4))] for n in range(7)]
PARAMS = [
    SamplingParams(
        temperature=n % 2 * 0.8, seed=n, num_tokens_to_generate=14 + n, termination_id=79
    )
    for n in range(7)
]


def tokens_of(requests: list[DynamicInferenceRequest]) -> list[list[int]]:
    return [request.generated_tokens for request in requests]


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    """Each request by itself, serially."""
    with engine_of(model, 0, max_requests=1, block_count=40) as engine:
        found = tokens_of(engine.generate(PROMPTS, PARAMS))
    assert len({token for tokens in found for token in tokens}) > 20
    assert {len(tokens) for tokens in found} > {14}
    return found


@pytest.mark.parametrize("depth", (0, 4))
def test_tokens_do_not_depend_on_neighbours(depth: int, model: Any, alone: list[list[int]]) -> None:
    with engine_of(model, depth, max_requests=4, block_count=90) as engine:
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == alone
        assert (engine.counters.tokens_discarded > 0) == (depth > 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_evicted_and_paused_requests_go_on_with_the_same_tokens(
    depth: int, model: Any, alone: list[list[int]]
) -> None:
    with engine_of(model, depth, max_requests=4, block_count=18) as engine:
        assert tokens_with_pauses(engine, PROMPTS, PARAMS) == alone
        assert engine.counters.evictions > 0 and engine.counters.pauses > 0


# --- what is kept ------------------------------------------------------------------------------


def test_bias_of_experts_stays_in_fp32(tmp_path: Path) -> None:
    """A rounded one chooses other experts."""
    config = changed(**ROUTERS["groups and a bias"])
    model = model_of(config, torch.bfloat16)
    save_native(tmp_path, model, config)
    again = load_pretrained(tmp_path, dtype=torch.bfloat16).model
    for before, after in zip(layers_of(model), layers_of(again), strict=True):
        bias = after.router.expert_bias
        assert bias.dtype == torch.float32 and after.router.weight.dtype == torch.bfloat16
        assert torch.equal(bias, before.router.expert_bias)
        assert not torch.equal(bias, bias.bfloat16().float())


@pytest.mark.parametrize(
    "pattern",
    ["local_experts.{}.{}.weight", "{1}.weight{0}"],
    ids=["SequentialMLP", "TEGroupedMLP"],
)
def test_new_weights_may_come_expert_by_expert(pattern: str) -> None:
    model, new = model_of(CONFIG), {}
    wanted = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, tensor in wanted.items():
        prefix, found, linear = name.partition("experts.linear_")
        if not found or "shared" in prefix + found:
            new[name] = tensor
        elif name.endswith("weight"):
            kind = "linear_" + linear.removesuffix(".weight")
            for expert, part in enumerate(tensor):
                new[prefix + "experts." + pattern.format(expert, kind)] = part
    assert len(new) > len(wanted)
    read_weights(model, new)()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_an_expert_comes_once() -> None:
    """It was copied over that of the stacked weights, or under it, as their order had it."""
    model = model_of(CONFIG)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stacked = next(name for name in before if name.endswith(".experts.linear_fc1.weight"))
    prefix = stacked.removesuffix("linear_fc1.weight")
    one = torch.zeros_like(before[stacked][1])
    names = (f"{prefix}local_experts.1.linear_fc1.weight", f"{prefix}linear_fc1.weight1")
    for given in ((stacked, names[0]), (names[1], stacked), names):
        new = {name: before[stacked] + 1 if name == stacked else one for name in given}
        with pytest.raises(CheckpointError, match="the same values of the model") as raised:
            read_weights(model, new)
        assert all(name in str(raised.value) for name in given)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_features_name_what_is_there() -> None:
    config = changed(**ROUTERS["groups and a bias"], moe_latent_size=16)
    assert features(config) == [
        "8 experts of 32 in 2 of 3 layers, 4 a token by sigmoid with a bias, times 2.5",
        "experts of 2 of 4 groups",
        "shared experts of 48",
        "experts of a projection of 16 elements",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_ffn_hidden_size": None}, "num_moe_experts=8 needs moe_ffn_hidden_size"),
        ({"moe_router_topk": 9}, "moe_router_topk=9 must be at most num_moe_experts=8"),
        ({"moe_layer_freq": (1, 0)}, "a 0 or a 1 for each of num_layers=3"),
        ({"moe_layer_freq": (1, 0, 2)}, "a 0 or a 1 for each of num_layers=3"),
        ({"moe_router_enable_expert_bias": True}, "needs moe_router_score_function='sigmoid'"),
        ({"moe_shared_expert_intermediate_size": None}, "moe_shared_expert_gate needs"),
        ({"moe_router_num_groups": 2}, "moe_router_group_topk need each other"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "a multiple of"),
        ({"moe_router_num_groups": 8, "moe_router_group_topk": 1}, "hold so many experts"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 3}, "at most moe_router_topk=2"),
        ({"moe_router_score_function": "tanh"}, "one of softmax, sigmoid"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        changed(**changes)


@pytest.mark.parametrize(
    ("tensor", "expert", "config", "reason"),
    [
        (
            2,
            1,
            dataclasses.replace(CONFIG, moe_ffn_hidden_size=33),
            "moe_ffn_hidden_size=33 does not divide by the tensor .* size 2: .* for whole experts",
        ),
        (
            2,
            2,
            dataclasses.replace(CONFIG, moe_shared_expert_intermediate_size=35),
            "moe_shared_expert_intermediate_size=35 does not divide by the tensor parallel size",
        ),
        (1, 3, CONFIG, "num_moe_experts=8 does not divide by expert_model_parallel_size=3"),
        (
            1,
            2,
            dataclasses.replace(CONFIG, num_moe_experts=None),
            "the model has no experts; leave it out",
        ),
    ],
)
def test_ranks_that_experts_cannot_be_divided_over_are_refused(
    tensor: int, expert: int, config: ModelConfig, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "megatron.core.parallel_state.get_{}_model_parallel_world_size"
    monkeypatch.setattr(name.format("tensor"), lambda: tensor)
    monkeypatch.setattr(name.format("expert"), lambda: expert)
    monkeypatch.setattr(name.format("pipeline"), lambda: 1)
    with pytest.raises(ConfigError, match=reason):
        transformer_config(config, torch.float32, "cpu")

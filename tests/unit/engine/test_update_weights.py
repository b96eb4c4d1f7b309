"""New weights in place, while requests are being decoded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint import save_native
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt import GPTModel
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from megatron_async.weights.place import read_weights
from tests.support.engines import DEPTHS, config_at, hash_engine, sampling_params
from tests.support.oracle import Ask, decode_with_salts

pytestmark = pytest.mark.sweep

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=64,
    max_sequence_length=64,
    tie_word_embeddings=True,
)
UNTIED = dataclasses.replace(CONFIG, tie_word_embeddings=False, mtp_num_layers=1)
PROMPTS = [[1, 2, 3], [9] * 20, [5]]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=24, termination_id=-1)


def model(seed: int, config: ModelConfig = CONFIG) -> GPTModel:
    torch.manual_seed(seed)
    built = build_model(config, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.5)
    return built


def engine_over(weights: GPTModel, depth: int) -> DynamicInferenceEngine:
    wrapper = GPTNetwork(weights)
    config = config_at(depth, max_requests=2, block_size_tokens=4, debug=True)
    return DynamicInferenceEngine(ServedModel(network=wrapper), config)


def continuation(seed: int, tokens: list[int], count: int) -> list[int]:
    with engine_over(model(seed), 0) as engine:
        params = SamplingParams(temperature=0, num_tokens_to_generate=count, termination_id=-1)
        return engine.generate([tokens], params)[0].generated_tokens


@pytest.mark.parametrize("kind", ("state dict", "directory", "file"))
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_after_an_update_come_from_the_new_weights_alone(
    depth: int, kind: str, tmp_path: Path
) -> None:
    source: Path | dict[str, torch.Tensor] = model(2).state_dict()
    if kind != "state dict":
        save_native(tmp_path, model(2), CONFIG, dtype=torch.float32)
        source = tmp_path if kind == "directory" else tmp_path / "model.safetensors"
    with engine_over(model(1), depth) as engine:
        futures = [engine.add_request(i, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
        for _ in range(12):
            engine.step_modern()
        assert engine.update_weights(source) == engine.weight_version == 1
        assert not engine.in_flight_count
        while engine.has_unfinished_requests():
            engine.step_modern()
    switched = 0
    for prompt, future in zip(PROMPTS, futures, strict=True):
        request = future.result(timeout=0)
        spans = request.weight_spans
        assert [span.version for span in spans] in ([0, 1], [1])
        start = spans[-1].start
        switched += 0 < start < 24
        old, new = request.generated_tokens[:start], request.generated_tokens[start:]
        assert old == continuation(1, prompt, 24)[:start]
        assert new == continuation(2, prompt + old, 24 - start)
    assert switched == 2, "two requests were under way, the third was waiting"


@pytest.mark.parametrize("depth", (0, 2))
def test_without_recomputing_requests_go_on_over_their_old_keys(depth: int) -> None:
    with engine_over(model(1), depth) as engine:
        future = engine.add_request(0, PROMPTS[1], GREEDY)
        for _ in range(12):
            engine.step_modern()
        engine.update_weights(model(2).state_dict(), recompute_kv_cache=False)
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result(timeout=0)
        assert request.counters.evictions == 0
        start = request.weight_spans[1].start
        old = request.generated_tokens[:start]
        assert old == continuation(1, PROMPTS[1], 24)[:start]
        assert request.generated_tokens[start:] != continuation(1, PROMPTS[1], 24)[start:]
        # The prefix computed by the old weights is not found again.
        (again,) = engine.generate([PROMPTS[1]], GREEDY)
        assert again.generated_tokens == continuation(2, PROMPTS[1], 24)


def test_a_block_that_fills_after_an_update_keeps_its_old_keys_to_itself() -> None:
    """Its first tokens were computed by the old weights: no later request may share it."""
    with hash_engine(1, max_requests=2, block_size_tokens=4, block_count=40) as engine:
        ask = Ask(prompt=(1, 2, 3), max_new=20)
        future = engine.add_request(0, list(ask.prompt), sampling_params(ask))
        engine.step_modern()
        engine.update_weights({"salt": 2}, recompute_kv_cache=False)
        while engine.has_unfinished_requests():
            engine.step_modern()
        longer = Ask(prompt=(*ask.prompt, *future.result().generated_tokens[:6]), max_new=8)
        (request,) = engine.generate([list(longer.prompt)], sampling_params(longer))
        assert request.counters.cached == 0
        assert request.generated_tokens == decode_with_salts(longer, [(0, 2)])[0]
        (again,) = engine.generate([list(longer.prompt)], sampling_params(longer))
        assert again.counters.cached > 0


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({}, "empty"),
        ({"decoder.final_layernorm.weight": torch.ones(3)}, "(3,)"),
        ({"decoder.no_such.weight": torch.ones(3)}, "decoder.no_such.weight"),
        (None, "NoneType; give a model directory"),
        (7, "int; give a model directory"),
        ([("decoder.final_layernorm.weight", torch.ones(32))], "list; give a model directory"),
        ("no/such/directory", "no/such/directory"),
        (__file__, ".safetensors"),
    ],
)
def test_weights_that_do_not_fit_leave_the_old_ones(source: object, named: str) -> None:
    with engine_over(model(1), 1) as engine:
        future = engine.add_request(0, PROMPTS[0], GREEDY)
        for _ in range(6):
            engine.step_modern()
        with pytest.raises(CheckpointError) as error:
            engine.update_weights(source)  # type: ignore[arg-type]
        assert named in str(error.value)
        assert engine.weight_version == 0
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert future.result(timeout=0).generated_tokens == continuation(1, PROMPTS[0], 24)


def copied(weights: GPTModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in weights.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"norm_epsilon": 1e-6},
        {"rope_theta": 5e5, "norm_epsilon": 1e-6},
        {"tie_word_embeddings": True},
        {"mtp_num_layers": 0},
        {"hidden_size": 64},
    ],
)
def test_a_directory_of_another_model_is_refused_and_its_fields_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    served = model(1, UNTIED)
    config = dataclasses.replace(UNTIED, **changes)
    save_native(tmp_path, model(2, config), config)
    before = copied(served)
    with pytest.raises(CheckpointError) as raised:
        read_weights(served, tmp_path)()
    for name, value in changes.items():
        assert f"{name}={value!r} (served: {getattr(UNTIED, name)!r})" in str(raised.value)
    assert same(copied(served), before)


def test_a_directory_for_longer_sequences_gives_its_weights(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, max_sequence_length=128)
    save_native(tmp_path, model(2, config), config)
    served = model(1)
    read_weights(served, tmp_path)()
    assert same(copied(served), copied(model(2)))


def test_a_model_that_its_user_built_has_no_config_to_compare(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, norm_epsilon=1e-6)
    save_native(tmp_path, model(2, config), config)
    served = model(1)
    served.model_config = None
    read_weights(served, tmp_path)()
    assert same(copied(served), copied(model(2)))


NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NORM, torch.ones(32).numpy(), "is a ndarray; give a torch.Tensor"),
        (NORM, None, "is a NoneType"),
        (NORM, torch.ones(32).to_sparse(), "is a torch.sparse_coo tensor"),
        (NORM, torch.ones(32, device="meta"), "is a meta tensor; give one with all its values"),
        (NORM, torch.ones(32, dtype=torch.int8), "has dtype torch.int8, the model's has torch.fl"),
        (NORM, torch.ones(32, dtype=torch.bool), "has dtype torch.bool"),
        (NORM, torch.ones(32, dtype=torch.complex64), "has dtype torch.complex64"),
        (NORM, torch.ones(32).to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn"),
        (OUTPUT, torch.ones(3, 5), "has shape (3, 5), the model's has (64, 32)"),
        (OUTPUT, torch.ones(64, 32), f"differs from the new {EMBEDDING}"),
    ],
)
def test_one_tensor_that_does_not_fit_leaves_all_as_they_are(
    name: str, value: object, message: str
) -> None:
    served = model(1)
    before = copied(served)
    with pytest.raises(CheckpointError) as raised:
        read_weights(served, {EMBEDDING: torch.zeros(64, 32), name: value})()
    assert message in str(raised.value) and name in str(raised.value)
    assert same(copied(served), before)


@pytest.mark.parametrize("depth", (0, 2))
@pytest.mark.parametrize("inside", ("neither", "new weights", "update", "both"))
def test_a_model_built_in_inference_mode_gets_new_weights_outside_of_it(
    inside: str, depth: int
) -> None:
    """It raised a RuntimeError, and the engine was dead."""
    with torch.inference_mode():
        served = model(1)
    assert all(parameter.is_inference() for parameter in served.parameters())
    with torch.inference_mode(inside in ("new weights", "both")):
        new = copied(model(2))
    with engine_over(served, depth) as engine:
        (before,) = engine.generate([PROMPTS[0]], GREEDY)
        with torch.inference_mode(inside in ("update", "both")):
            assert engine.update_weights(new) == 1
        assert same(copied(served), copied(model(2)))
        (after,) = engine.generate([PROMPTS[0]], GREEDY)
    assert before.generated_tokens == continuation(1, PROMPTS[0], 24)
    assert after.generated_tokens == continuation(2, PROMPTS[0], 24)


def test_a_model_built_in_inference_mode_takes_its_own_parameters_by_other_names() -> None:
    """One that is overwritten before it is read is copied first."""
    with torch.inference_mode():
        served = model(1)
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1)]
    first, second = (copied(served)[name] for name in names)
    parameters = dict(served.named_parameters())
    read_weights(served, {names[0]: parameters[names[1]], names[1]: parameters[names[0]]})()
    assert torch.equal(parameters[names[0]], second) and torch.equal(parameters[names[1]], first)


class Unwritable(torch.nn.Parameter):
    """A parameter whose first values cannot be replaced."""

    refused = 0

    def copy_(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        type(self).refused += 1
        raise RuntimeError("no room\nfor this")


def test_an_error_before_the_first_copy_leaves_the_engine_alive() -> None:
    served = model(1)
    new = {NORM: torch.ones(32), **copied(model(2))}  # in this order
    layer = served.decoder
    layer.final_layernorm.weight = Unwritable(layer.final_layernorm.weight.detach())
    before = copied(served)
    with engine_over(served, 1) as engine:
        future = engine.add_request(0, PROMPTS[0], GREEDY)
        for _ in range(6):
            engine.step_modern()
        with pytest.raises(CheckpointError) as raised:
            engine.update_weights(new)
        assert f"{NORM} cannot be copied, and nothing was: no room for this" in str(raised.value)
        assert Unwritable.refused == 1 and same(copied(served), before)
        assert engine.weight_version == 0
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert future.result(timeout=0).generated_tokens == continuation(1, PROMPTS[0], 24)


@pytest.mark.parametrize("names", [{EMBEDDING}, {OUTPUT}, {EMBEDDING, OUTPUT}])
def test_a_tied_weight_is_taken_by_either_name(names: set[str]) -> None:
    served = model(1)
    new = torch.randn(64, 32)
    # Equal once both are in the model's dtype.
    stored = {EMBEDDING: new, OUTPUT: new.double() * (1 + 1e-12)}
    read_weights(served, {name: stored[name] for name in names})()
    assert torch.equal(copied(served)[EMBEDDING], new)


def test_other_floats_are_converted_and_extra_states_are_no_weights() -> None:
    served = model(1)
    new = {name: tensor.bfloat16() for name, tensor in copied(model(2)).items()}
    read_weights(served, {**new, "decoder.layers.0.mlp.linear_fc1._extra_state": None})()
    assert same(copied(served), {name: tensor.float() for name, tensor in new.items()})


def test_its_own_state_dict_always_fits() -> None:
    for config in (CONFIG, UNTIED):
        served = model(1, config)
        before = copied(served)
        read_weights(served, served.state_dict())()
        assert same(copied(served), before)

"""Linear layers that multiply e4m3 by e4m3: what their numbers are, which scales they have, and
that tokens stay what they are at all depths."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.quantized import inputs
from megatron_async.models.quantized.activations import linears_in_e4m3
from megatron_async.models.quantized.inputs import quantize_inputs
from megatron_async.models.quantized.linear import quantized
from megatron_async.models.quantized.values import E4M3
from tests.support.fp8_models import NEURAL_MAGIC, compressed, set_config, write
from tests.support.huggingface_models import random_model
from tests.support.sweeps import some

MODELS = ("llama", "qwen3_moe", "deepseek_v2")
ACTIVATIONS = {"quantization": "fp8", "quantize_activations": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models in float32."""
    root = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    for name in MODELS:
        random_model(name).save_pretrained(root / name)
    return root


def served(path: Path | str, **options: Any) -> Any:
    return load_pretrained(path, **ACTIVATIONS | options).model


def e4m3_numbers(count: int, k: int, groups: int) -> tuple[Tensor, Tensor]:
    """All numbers of e4m3, subnormal ones too, and scales."""
    bits = torch.randint(0, 256, (count, k), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 1
    return bits.view(E4M3), torch.rand(count, groups) * 3e-3 + 1e-4


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("groups", (1, 3))
def test_a_product_is_that_of_the_numbers_times_their_scales(
    groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (x, x_scale), (w, w_scale) = e4m3_numbers(16, 96, groups), e4m3_numbers(40, 96, groups)
    found = inputs.product(inputs.Inputs(x, x_scale), w, w_scale, dtype)
    assert found.dtype == dtype
    wide = [
        (each.double().view(len(each), groups, -1) * scale.double()[..., None]).view(each.shape)
        for each, scale in ((x, x_scale), (w, w_scale))
    ]
    meant = wide[0] @ wide[1].t()
    size = wide[0].abs() @ wide[1].abs().t()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert ((found.double() - meant).abs() <= rounding * meant.abs() + 2e-6 * size).all()


def test_inputs_are_quantized_by_token_by_group_or_by_a_scale_that_is_given() -> None:
    x = torch.tensor([[448.0, 17.0, 19.0, -0.5], [1.0, -2.0, 0.0, 4.0]]).bfloat16()
    by_token = quantize_inputs(x, 1)
    assert by_token.scale.tolist() == [[1.0], [torch.tensor(4 / 448).item()]]
    assert by_token.numbers.float().tolist() == [
        [448.0, 16.0, 20.0, -0.5], [112.0, -224.0, 0.0, 448.0]
    ]  # fmt: skip
    by_group = quantize_inputs(x, 2)
    assert by_group.numbers[1].float().tolist() == [224.0, -448.0, 0.0, 448.0]
    given = quantize_inputs(x, 2, torch.tensor([0.5]))
    assert given.numbers[0].float().tolist() == [448.0, 32.0, 40.0, -1.0]
    assert given.scale.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("static", (None, torch.tensor([0.25])))
@pytest.mark.parametrize("groups", (1, 2))
def test_what_is_no_number_stays_none(bad: float, static: Tensor | None, groups: int) -> None:
    """In its own row: no other one has anything of it."""
    x = torch.ones(8, 8)
    x[3, 5] = bad
    w, w_scale = e4m3_numbers(4, 8, groups)
    w.view(torch.uint8)[:, 5] = 0  # NaN times zero is NaN too
    found = inputs.product(quantize_inputs(x, groups, static), w, w_scale, torch.float32)
    assert found[3].isnan().all() and found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 160).bfloat16()
    w, w_scale = e4m3_numbers(72, 160, 5)
    whole = quantize_inputs(x, 5)
    product_of_all = inputs.product(whole, w, w_scale, torch.bfloat16)
    for begin, end in ((0, 8), (8, 32), (16, 64), (40, 56)):
        part = quantize_inputs(x[begin:end], 5)
        assert part.numbers.view(torch.uint8).equal(whole.numbers[begin:end].view(torch.uint8))
        assert part.scale.equal(whole.scale[begin:end])
        found = inputs.product(part, w, w_scale, torch.bfloat16)
        assert found.equal(product_of_all[begin:end])


def engine_over(path: Path | str, **values: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {
        "device": "cpu", "max_requests": 4, "block_size_tokens": 8, "block_count": 40,
        "max_sequence_length": 96, "prefill_chunk_tokens": 16, "debug": True,
    }  # fmt: skip
    return DynamicInferenceEngine.from_pretrained(path, EngineConfig(**sizes | values))


def found_by(engine: DynamicInferenceEngine, evict: bool) -> list[Any]:
    prompts = [[5, 6, 7], [9] * 21, [11, 12], [9] * 21]
    params = [
        SamplingParams(
            temperature=temperature, seed=n, num_tokens_to_generate=12, return_log_probs=True,
            termination_id=-1,
        )
        for n, temperature in enumerate((0.0, 1.0, 0.7, 0.0))
    ]  # fmt: skip
    done = [
        engine.add_request(n, *each) for n, each in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in range(7):
        engine.step_modern()
    if evict:
        engine.evict_request(1)
    while engine.has_unfinished_requests():
        engine.step_modern()
    results = [each.result() for each in done]
    return [(each.generated_tokens, each.generated_log_probs) for each in results]


@pytest.mark.parametrize(
    ("model", "kind", "dtype"),
    some(list(product(MODELS, ("deepseek", "neural-magic", None), ("bfloat16", "float32"))), 2),
)
def test_depths_change_no_token_and_evictions_none_where_results_do_not_depend_on_the_batch(
    model: str, kind: str | None, dtype: str, plain: Path, tmp_path: Path
) -> None:
    path = plain / model if kind is None else write(tmp_path / "model", plain / model, kind)
    options: dict[str, Any] = {**ACTIVATIONS, "dtype": dtype}
    meant = None
    for depth in (0, 1, 2, 4):
        with engine_over(path, **options, depth=depth, enable_prefix_caching=False) as engine:
            found = found_by(engine, evict=False)
        meant = meant or found
        assert found == meant, depth
    options["batch_invariant"] = True
    with engine_over(path, **options, enable_prefix_caching=False) as engine:
        assert linears_in_e4m3(engine.model.weights_owner)
        meant = found_by(engine, evict=False)
    for depth, drafts in ((2, 0), (1, 2)):
        drafting = {"num_speculative_tokens": drafts, "speculative_method": "ngram"}
        with engine_over(path, **options, depth=depth, **drafting if drafts else {}) as engine:
            assert found_by(engine, evict=True) == meant, (depth, drafts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ("deepseek", "neural-magic", None))
def test_on_a_gpu_nothing_changes_a_token_where_results_do_not_depend_on_the_batch(
    kind: str | None, plain: Path, tmp_path: Path
) -> None:
    path = plain / "llama" if kind is None else write(tmp_path / "model", plain / "llama", kind)
    options: dict[str, Any] = {**ACTIVATIONS, "dtype": "bfloat16", "device": "cuda"}
    options |= {"batch_invariant": True, "block_size_tokens": 16}
    with engine_over(path, **options, enable_prefix_caching=False) as engine:
        meant = found_by(engine, evict=False)
    for depth in (0, 2):
        with engine_over(path, **options, depth=depth) as engine:
            assert found_by(engine, evict=True) == meant, depth


def test_activations_change_logits_a_little(plain: Path) -> None:
    """They are quantized: logits differ from those of the same weights by e4m3's rounding."""
    ids, at = torch.arange(16)[None], torch.arange(16)[None]
    with torch.inference_mode():
        exact = load_pretrained(plain / "llama", quantization="fp8").model(ids, at, None)
        found = served(plain / "llama")(ids, at, None)
    error = float((found - exact).norm() / exact.norm())
    assert 3e-3 < error < 0.2


def test_experts_quantize_their_inputs_too(plain: Path) -> None:
    """By token, in both of their layers; a router chooses by what came."""
    wide = load_pretrained(plain / "qwen3_moe", quantization="fp8").model
    model = served(plain / "qwen3_moe")
    assert all(each.quantizes_input for each in quantized(model).values())
    names = quantized(model).keys() - linears_in_e4m3(model).keys()
    assert len(names) == 4 and all(".mlp.experts." in name for name in names)
    torch.manual_seed(0)
    with torch.inference_mode():
        x = torch.randn(24, 1, model.config.hidden_size)
        exact, found = (m.decoder.layers[0].mlp(x)[0] for m in (wide, model))
        assert 5e-3 < float((found - exact).norm() / exact.norm()) < 0.1
        assert torch.equal(model.decoder.layers[0].mlp(x[3:9])[0], found[3:9])
        model.decoder.layers[0].mlp.experts.linear_fc2.quantizes_input = False
        assert torch.equal(model.decoder.layers[0].mlp(x)[0], exact)


def static_model(path: Path, plain: Path, kind: str, change: Any = None) -> Path:
    """A directory whose config says that activations are quantized statically."""
    write(path, plain / "llama", kind)
    if kind == "compressed-channel":
        config = compressed("channel")
        config["config_groups"]["group_0"]["input_activations"] |= {
            "dynamic": False, "strategy": "tensor"
        }  # fmt: skip
        set_config(path, config)
    tensors = load_file(path / "model.safetensors")
    names = [name for name, each in tensors.items() if each.dtype == E4M3]
    for number, name in enumerate(names, start=1):
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5 + number / 8)
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", ("neural-magic", "modelopt", "compressed-channel"))
def test_scales_that_a_checkpoint_brings_are_those_of_inputs(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    """The largest one of q, k and v, whose inputs are the same."""
    path = static_model(tmp_path / "model", plain, kind)
    stored = load_file(path / "model.safetensors")
    model = served(path)
    of_layer = "model.layers.1."
    for layer, parts in (
        ("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attention.linear_proj", ("self_attn.o_proj",)),
        ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.linear_fc2", ("mlp.down_proj",)),
    ):
        meant = max(stored[f"{of_layer}{part}.input_scale"].item() for part in parts)
        found = model.get_submodule(f"decoder.layers.1.{layer}").input_scale
        assert found.tolist() == [meant] and found.dtype == torch.float32
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if config == NEURAL_MAGIC:
        set_config(path, {**NEURAL_MAGIC, "activation_scheme": "dynamic"})
        layers = linears_in_e4m3(served(path)).values()
        assert len(layers) == 8 and all(layer.input_scale is None for layer in layers)


NAME = "model.layers.1.mlp.up_proj.input_scale"


@pytest.mark.parametrize(
    ("value", "says"),
    (
        (None, "is missing, and quantization_config says that activations are"),
        (torch.tensor(0.0), "has 1 of 1 scales that are no positive normal numbers, such as 0.0"),
        (torch.tensor(float("nan")), "such as nan"),
        (torch.tensor(-1.0), "such as -1.0"),
        (torch.tensor(float("inf")), "such as inf"),
        (torch.ones(2), r"has shape \[2\] and dtype F32; one number is read"),
        (torch.tensor(1), r"has shape \[\] and dtype I64; one number is read"),
    ),
)
def test_scales_that_are_none_are_refused_by_name(
    value: Tensor | None, says: str, plain: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[NAME]
        if value is not None:
            tensors[NAME] = value

    path = static_model(tmp_path / "model", plain, "neural-magic", change)
    with pytest.raises(CheckpointError, match=f"{NAME}.*{says}"):
        served(path)
    assert load_pretrained(path, quantization="fp8")  # which does not read them


def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    says = "quantize_activations=True is for weights in e4m3; set quantization='fp8'"
    with pytest.raises(ConfigError, match=says):
        EngineConfig(quantize_activations=True)
    with pytest.raises(ConfigError, match=says):
        load_pretrained("tiny", quantize_activations=True)
    says = "quantize_activations is done with loading; give"
    with (
        engine_over(plain / "llama", quantization="fp8") as engine,
        pytest.raises(ConfigError, match=says),
    ):
        engine.with_config(EngineConfig(**ACTIVATIONS, block_count=20))
    path = write(tmp_path / "model", plain / "llama", "compressed-channel")
    groups = compressed("channel")
    one = groups["config_groups"]["group_0"]
    inputs_of_it = {**one["input_activations"], "dynamic": False}
    groups["config_groups"]["group_1"] = {**one, "input_activations": inputs_of_it}
    set_config(path, groups)
    with pytest.raises(CheckpointError, match="in part dynamically and in part statically"):
        served(path)
    assert load_pretrained(path, quantization="fp8")


def test_a_gpu_without_products_of_e4m3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async.models.quantized import activations

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8.9 .* has 8.6"):
        activations.check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    activations.check_device(torch.device("cuda"))

"""Weights that a model keeps as e4m3: the stored numbers and scales, or the nearest of what is
given, and never a second copy in 16 bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import load_pretrained, save_native
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.build import build_model, build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.quantized.linear import quantized, weight_of
from megatron_async.models.quantized.values import E4M3, multiply_out, quantize
from megatron_async.training import exact_numerics
from megatron_async.weights.place import read_weights
from tests.support.fp8_models import FORMATS, MODELS, set_config, write
from tests.support.huggingface_models import random_model
from tests.support.sweeps import some


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models in float32."""
    root = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    for name in MODELS:
        random_model(name).save_pretrained(root / name)
    return root


def write_other(path: Path, plain: Path) -> None:
    """The model of ``plain`` with other weights."""
    shutil.copytree(plain, path)
    stored = load_file(plain / "model.safetensors")
    save_file(
        {name: each.roll(1, 0) * 1.3 for name, each in stored.items()}, path / "model.safetensors"
    )


def kept(path: Path | str) -> Any:
    return load_pretrained(path, quantization="fp8").model


def values_of(model: Any) -> dict[str, Tensor]:
    """What all parameters stand for."""
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    layers = quantized(model).items()
    return values | {f"{name}.weight": weight_of(m, torch.float32) for name, m in layers}


def check_equal(found: dict[str, Tensor], meant: dict[str, Tensor]) -> None:
    assert found.keys() == meant.keys()
    differ = [name for name in meant if not found[name].equal(meant[name])]
    assert not differ, differ


@pytest.mark.parametrize(("model", "kind"), some(list(product(MODELS, FORMATS)), 9))
def test_stored_numbers_and_scales_are_kept(
    model: str, kind: str, plain: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", plain / model, kind)
    served = kept(path)
    layers = quantized(served)
    assert len(layers) >= 6
    check_equal(values_of(served), values_of(load_pretrained(path / "meant").model))
    stored = load_file(path / "model.safetensors")
    if model in ("llama", "phi3"):  # of others some layers are multiplied out
        numbers = [each for each in stored.values() if each.dtype == E4M3]
        assert counts(layer.weight for layer in layers.values()) == counts(numbers)


def counts(numbers: Iterable[Tensor]) -> list[int]:
    """How often each of the 256 is there."""
    each = torch.cat([tensor.view(torch.uint8).flatten() for tensor in numbers])
    return torch.bincount(each, minlength=256).tolist()


def test_layers_that_a_checkpoint_has_in_16_bits_stay_so(plain: Path, tmp_path: Path) -> None:
    """And one of which a part is: q, k and v are one parameter here."""
    path = write(tmp_path / "model", plain / "llama", "compressed-channel")
    stored = load_file(path / "model.safetensors")
    meant = load_file(path / "meant" / "model.safetensors")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        stored[name] = meant[name]
        del stored[f"{name}_scale"]
    save_file(stored, path / "model.safetensors")
    served = kept(path)
    names = quantized(served)
    assert "decoder.layers.0.mlp.linear_fc2" not in names
    assert "decoder.layers.1.self_attention.linear_qkv" not in names
    assert len(names) == 2 * 4 - 2
    check_equal(values_of(served), values_of(load_pretrained(path / "meant").model))


def test_of_latent_attention_and_drafts_one_projection_stays(tmp_path: Path) -> None:
    """The one whose weight attention reads: it would be multiplied out in each step."""
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_kv_heads=4, head_dim=16,
        vocab_size=64, ffn_hidden_size=96, max_sequence_length=32, mtp_num_layers=1,
        latent_attention=LatentAttention(
            kv_lora_rank=32, q_lora_rank=48, qk_pos_emb_head_dim=8, v_head_dim=12
        ),
    )  # fmt: skip
    torch.manual_seed(4)
    model = build_model(config, device="cpu", dtype=torch.float32).eval()
    save_native(tmp_path, model, config)
    served = kept(tmp_path)
    linear = {
        name.removesuffix(".weight")
        for name, each in served.named_parameters()
        if each.dim() == 2 and not name.startswith(("embedding", "output_layer"))
    }
    left = linear - quantized(served).keys()
    assert left == {name for name in linear if name.endswith("linear_kv_up_proj")} and left
    ids = torch.arange(20)[None]
    widened = build_model(config, device="cpu", dtype=torch.float32).eval()
    widened.load_state_dict(values_of(served), strict=False)
    with torch.no_grad():
        found, meant = served(ids, ids, None), widened(ids, ids, None)
        assert (
            (found - meant).abs().max() < 1e-5 < 1e-3 < (found - model(ids, ids, None)).abs().max()
        )


def test_other_weights_are_quantized_as_they_are_read(plain: Path) -> None:
    """Each row by its largest value, to the nearest; what is no linear layer stays."""
    for model in ("llama", "qwen3_moe"):
        meant, served = load_pretrained(plain / model).model, kept(plain / model)
        layers, values = quantized(served), dict(meant.named_parameters())
        assert len(layers) >= 6
        for name, each in served.named_parameters():
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None:
                assert each.equal(values[name]), name
                continue
            value = values[name].double()
            scale = value.abs().amax(-1, keepdim=True).float().double() / 448
            assert torch.allclose(layer.weight_scale.double(), scale, rtol=1e-6)
            found = multiply_out(each, layer.weight_scale, torch.float64)
            # Half of the last of four bits, or of the smallest step of a scale.
            bound = torch.maximum(value.abs() / 16, scale * 2.0**-10)
            assert ((found - value).abs() <= bound * 1.0001).all(), name
            assert (found - value).abs().max() > bound.max() / 4, "it was not quantized"


def test_values_halfway_go_to_the_even_one_and_a_row_of_zeros_stays() -> None:
    numbers, scale = quantize(torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-10], [0.0] * 5]), 1)
    assert numbers[0].float().tolist() == [448.0, 16.0, 20.0, -16.0, 0.0]
    assert scale[0].item() == 1 and numbers[1].float().tolist() == [0.0] * 5
    assert multiply_out(numbers, scale, torch.float32)[1].tolist() == [0.0] * 5
    by_group, scales = quantize(torch.tensor([[448.0, 1.0, 0.5, 0.25]]), 2)
    assert scales.shape == (1, 2) and by_group.float().tolist() == [[448.0, 1.0, 448.0, 224.0]]


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_weights_that_are_no_numbers_are_refused(bad: float, plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "llama" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    (tmp_path / "config.json").write_text((plain / "llama" / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight has .* NaN or infinite"):
        kept(tmp_path)
    served = kept(plain / "llama")
    before = values_of(served)
    with pytest.raises(CheckpointError, match=r"up_proj.weight has 1 of .* NaN or infinite"):
        read_weights(served, tmp_path)
    check_equal(values_of(served), before)


def engine_over(path: Path | str, **values: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {
        "device": "cpu", "max_requests": 4, "block_size_tokens": 8, "block_count": 40,
        "max_sequence_length": 96, "prefill_chunk_tokens": 16, "debug": True,
    }  # fmt: skip
    return DynamicInferenceEngine.from_pretrained(path, EngineConfig(**sizes | values))


def found_by(engine: DynamicInferenceEngine) -> list[Any]:
    prompts = [[5, 6, 7], [9] * 21, [11, 12]]
    params = [
        SamplingParams(
            temperature=temperature, seed=n, num_tokens_to_generate=18, return_log_probs=True,
            termination_id=-1,
        )
        for n, temperature in enumerate((0.0, 1.0, 0.7))
    ]  # fmt: skip
    done = [
        engine.add_request(n, *each) for n, each in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in range(7):
        engine.step_modern()
    engine.evict_request(1)
    while engine.has_unfinished_requests():
        engine.step_modern()
    results = [each.result() for each in done]
    return [(each.generated_tokens, each.generated_log_probs) for each in results]


@pytest.mark.parametrize(
    ("model", "invariant"),
    some(list(product(("llama", "qwen3_moe", "deepseek_v2"), (False, True))), 2),
)
def test_an_engine_has_the_tokens_of_the_weights_that_are_meant(
    model: str, invariant: bool, plain: Path, tmp_path: Path
) -> None:
    """And their log-probabilities, bit for bit, at all depths: the general path multiplies each
    weight out as the loader does."""
    path = write(tmp_path / "model", plain / model, "deepseek")
    for depth in (0, 1, 2, 4):
        config: dict[str, Any] = {"batch_invariant": invariant, "depth": depth}
        with engine_over(path, **config) as engine:
            assert not quantized(engine.model.weights_owner)
            meant = found_by(engine)
        with engine_over(path, **config, quantization="fp8") as engine:
            assert quantized(engine.model.weights_owner)
            assert found_by(engine) == meant, depth


def test_new_weights_are_quantized_in_place(plain: Path, tmp_path: Path) -> None:
    """Under megatron-core's names and Hugging Face's, experts stacked or each by itself, and from
    directories; addresses stay, and no layer goes back to 16 bits."""
    write_other(tmp_path / "new", plain / "qwen3_moe")
    served, other = kept(plain / "qwen3_moe"), load_pretrained(tmp_path / "new").model
    meant = values_of(kept(tmp_path / "new"))
    addresses = {name: each.data_ptr() for name, each in served.named_parameters()}
    scales = {name: layer.weight_scale.data_ptr() for name, layer in quantized(served).items()}
    old = dict(load_pretrained(plain / "qwen3_moe").model.named_parameters())
    ways: dict[str, Any] = {
        "state dict": dict(other.named_parameters()),
        "bfloat16": {name: each.bfloat16() for name, each in other.named_parameters()},
        "directory": tmp_path / "new",
        "theirs": load_file(tmp_path / "new" / "model.safetensors"),
    }
    for way, new in ways.items():
        read_weights(served, old, all_parameters=True)()
        read_weights(served, new, all_parameters=True)()
        if way == "bfloat16":
            rounded = {k: v.bfloat16().float() for k, v in other.named_parameters()}
            numbers, found = quantize(rounded["decoder.layers.0.mlp.experts.linear_fc1.weight"], 1)
            layer = quantized(served)["decoder.layers.0.mlp.experts.linear_fc1"]
            assert layer.weight.view(torch.uint8).equal(numbers.view(torch.uint8))
            assert layer.weight_scale.equal(found)
        else:
            check_equal(values_of(served), meant)
    assert {name: each.data_ptr() for name, each in served.named_parameters()} == addresses
    now = {name: layer.weight_scale.data_ptr() for name, layer in quantized(served).items()}
    assert now == scales


@pytest.mark.parametrize("kind", ("deepseek", "compressed-channel"))
def test_new_fp8_weights_keep_their_numbers_where_scales_fit(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    write_other(tmp_path / "other", plain / "llama")
    path = write(tmp_path / "model", plain / "llama", kind)
    new = write(tmp_path / "new", tmp_path / "other", kind)
    served = kept(path)
    read_weights(served, new)()
    check_equal(values_of(served), values_of(load_pretrained(new / "meant").model))
    rows = kept(plain / "llama")  # has a scale for each row
    read_weights(rows, new)()
    if kind == "deepseek":  # multiplied out and quantized again
        check_equal(values_of(rows), values_of(kept(new / "meant")))
    else:
        check_equal(values_of(rows), values_of(load_pretrained(new / "meant").model))


def test_a_part_of_a_parameter_takes_new_weights_alone(plain: Path, tmp_path: Path) -> None:
    served = kept(plain / "llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(plain / "llama" / "model.safetensors")
    tensors[name] = tensors[name].flip(0) * 3
    before = values_of(served)
    read_weights(served, {name: tensors[name]})()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain / "llama" / "config.json").read_text())
    check_equal(values_of(served), values_of(kept(tmp_path)))
    assert not all(each.equal(before[name]) for name, each in values_of(served).items())


def test_numbers_without_scales_are_no_new_weights(plain: Path) -> None:
    served = kept(plain / "llama")
    before = values_of(served)
    state = dict(served.named_parameters())
    with pytest.raises(CheckpointError, match=r"has dtype torch.float8_e4m3fn.*give a float of"):
        read_weights(served, state)
    check_equal(values_of(served), before)


def test_updates_and_sleep_of_an_engine(plain: Path) -> None:
    old = dict(load_pretrained(plain / "llama").model.named_parameters())
    new = {name: each * 0.5 for name, each in old.items()}
    with engine_over(
        plain / "llama", quantization="fp8", enable_sleep_mode=True, depth=2
    ) as engine:
        first = found_by(engine)
        engine.update_weights(new)
        assert found_by(engine) != first
        engine.sleep(level=2)
        engine.wake_up(["weights"])
        engine.update_weights(old)
        engine.wake_up(["kv_cache"])
        assert found_by(engine) == first
        engine.sleep(level=1)
        engine.wake_up()
        assert found_by(engine) == first


def test_random_weights_and_what_is_refused(plain: Path, tmp_path: Path) -> None:
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16,
        vocab_size=64, ffn_hidden_size=96, max_sequence_length=32,
    )  # fmt: skip
    device, dtype = torch.device("cpu"), torch.bfloat16
    drawn = build_random_model(config, device=device, dtype=dtype, seed=3)
    made = build_random_model(config, device=device, dtype=dtype, seed=3, quantize=True)
    layers = quantized(made)
    assert len(layers) == 2 * 4
    for name, each in drawn.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            assert layer.weight.view(torch.uint8).equal(quantize(each, 1)[0].view(torch.uint8))
    with pytest.raises(CheckpointError, match="keeps FP8 or MXFP4 weights is not saved"):
        save_native(tmp_path / "saved", made, config)
    with pytest.raises(ConfigError, match="keeps FP8 or MXFP4 weights, which have no gradients"):
        exact_numerics(made)
    with pytest.raises(ConfigError, match="quantization='int4' must be 'fp8', 'mxfp4' or None"):
        EngineConfig(quantization="int4")
    with pytest.raises(ConfigError, match="quantization='awq' must be 'fp8', 'mxfp4' or None"):
        load_pretrained("tiny", quantization="awq")


def test_an_engine_over_weights_that_are_there_does_not_quantize_them(plain: Path) -> None:
    """The option had no effect, and nobody said so. The cache is each engine's own."""
    with engine_over(plain / "llama") as engine:
        with pytest.raises(ConfigError, match="quantization is done with loading; give it to from"):
            engine.with_config(EngineConfig(quantization="fp8", block_count=20))
        with engine.with_config(EngineConfig(kv_cache_dtype="fp8", block_count=20)) as other:
            assert other.cache.kv.dtype == E4M3 and engine.cache.kv.dtype == torch.float32


def test_a_format_that_is_not_known_is_refused_as_without(plain: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", plain / "llama", "deepseek")
    set_config(path, {"quant_method": "fp8", "fmt": "e5m2"})
    with pytest.raises(CheckpointError, match="fmt='e5m2' is not supported"):
        kept(path)

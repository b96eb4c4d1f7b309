"""Experts of GPT-OSS that a model keeps as MXFP4: the stored numbers and scales, or the nearest of
what is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import load_pretrained, save_native
from megatron_async.checkpoint.huggingface.interleaved_experts import apart
from megatron_async.checkpoint.quantized.packed import PackedTarget
from megatron_async.cli.main import main
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.kernels.moe.mxfp4 import NOT_A_NUMBER, arrange, pack, unpack
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.memory_traffic import MXFP4_BYTES, weight_bytes
from megatron_async.models.description.shapes import SHAPES, kept_of_shape
from megatron_async.models.quantized.linear import quantized
from megatron_async.models.quantized.mxfp4 import packed_layers
from megatron_async.models.quantized.values import E4M3
from megatron_async.training import exact_numerics
from megatron_async.weights.place import read_weights
from tests.support.mxfp4_models import write_packed, write_plain
from tests.support.sweeps import some
from tests.unit.checkpoint.test_kept_fp8 import check_equal, engine_over, found_by, values_of

EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_packed(tmp_path_factory.mktemp("packed"))


def kept(path: Path | str, quantization: str = "mxfp4", **options: Any) -> Any:
    return load_pretrained(path, quantization=quantization, **options).model


def names_of(model: Any) -> set[str]:
    return {
        f"decoder.layers.{n}.{name}" for n in range(len(model.decoder.layers)) for name in EXPERTS
    }


def test_stored_numbers_and_scales_are_kept(packed: Path) -> None:
    """In this model's order of rows, and all other layers as they are stored."""
    served, meant = kept(packed), load_pretrained(packed).model
    assert packed_layers(served).keys() == names_of(served) == quantized(served).keys()
    check_equal(values_of(served), values_of(meant))
    stored = load_file(packed / "model.safetensors")
    theirs = "model.layers.1.mlp.experts"
    fc1, fc2 = (packed_layers(served)[f"decoder.layers.1.{name}"] for name in EXPERTS)
    assert fc1.weight.equal(arrange(apart(stored[f"{theirs}.gate_up_proj_blocks"].flatten(-2))))
    assert fc1.weight_scale.equal(apart(stored[f"{theirs}.gate_up_proj_scales"]))
    assert fc2.weight.equal(arrange(stored[f"{theirs}.down_proj_blocks"].flatten(-2)))
    assert fc2.weight_scale.equal(stored[f"{theirs}.down_proj_scales"])


def test_a_rank_takes_its_experts(packed: Path) -> None:
    """The second of two that have half of them each."""
    served = kept(packed)
    for name, layer in packed_layers(served).items():
        stored = torch.randint(0, 256, (6, *layer.weight.shape[1:-1], 4, 16), dtype=torch.uint8)
        view, scales = torch.empty_like(layer.weight[3:, :, :64]), layer.weight_scale[3:, :, :2]
        target = PackedTarget(view[..., :32], (), lambda x: x[:, 32:], kind="blocks", first=3)
        target.copy_from(stored)
        assert view[..., :32].equal(arrange(stored[3:].flatten(-2))[..., 32:]), name
        assert target.equals(stored) and not target.equals(stored.flip(0))
        theirs = torch.randint(0, 255, (6, *scales.shape[1:-1], 4), dtype=torch.uint8)
        PackedTarget(scales, (), lambda x: x[:, 2:], kind="scales", first=3).copy_from(theirs)
        assert scales.equal(theirs[3:, :, 2:])


def test_no_second_copy_of_experts_is_made(packed: Path) -> None:
    """What the layers hold is what is stored; nothing else of their size is left."""
    served = kept(packed)
    stored = load_file(packed / "model.safetensors")
    experts = sum(x.nbytes for name, x in stored.items() if name.endswith(("_blocks", "_scales")))
    layers = packed_layers(served).values()
    assert sum(each.weight.nbytes + each.weight_scale.nbytes for each in layers) == experts
    assert sum(each.weight.untyped_storage().nbytes() for each in layers) == experts * 16 // 17


def test_info_counts_the_bytes_that_are_there(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = packed_layers(kept(packed)).values()
    command = ["info", "--model", str(packed), "--quantization", "mxfp4"]
    assert main([*command, "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights.keys() == {"mxfp4", "float32", "scales"}
    assert weights["mxfp4"] == sum(layer.weight.nbytes for layer in layers)
    assert weights["scales"] == sum(layer.weight_scale.nbytes for layer in layers)
    assert main(command) == 0
    assert f"{sum(weights.values()):,} bytes: " in capsys.readouterr().out


def test_fp8_keeps_other_layers_in_e4m3_beside(packed: Path) -> None:
    served = kept(packed, "fp8")
    assert packed_layers(served).keys() == names_of(served)
    others = {name: m for name, m in quantized(served).items() if name not in names_of(served)}
    assert len(others) == 2 * len(served.decoder.layers)
    assert all(layer.weight.dtype == E4M3 for layer in others.values())
    meant = values_of(load_pretrained(packed).model)
    found = values_of(served)
    check_equal(*({k: x[k] for k in x if ".experts." in k} for x in (found, meant)))


@pytest.mark.parametrize("invariant", some([False, True], 1))
def test_an_engine_has_the_tokens_of_the_weights_that_are_meant(
    packed: Path, invariant: bool
) -> None:
    """And their log-probabilities, bit for bit, at all depths: the general path multiplies each
    weight out as the loader does."""
    for depth in (0, 1, 2, 4):
        config: dict[str, Any] = {"batch_invariant": invariant, "depth": depth}
        with engine_over(packed, **config) as engine:
            assert not quantized(engine.model.weights_owner)
            meant = found_by(engine)
        with engine_over(packed, **config, quantization="mxfp4") as engine:
            assert packed_layers(engine.model.weights_owner)
            assert found_by(engine) == meant, depth


def test_an_mxfp4_directory_is_taken_in_place(packed: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    new = write_packed(tmp_path / "new")
    served = kept(packed)
    before = addresses(served)
    copy = read_weights(served, new)
    copy()
    copy.check()  # type: ignore[attr-defined]
    check_equal(values_of(served), values_of(load_pretrained(new).model))
    assert addresses(served) == before
    layer = packed_layers(served)[f"decoder.layers.0.{EXPERTS[0]}"]
    layer.weight_scale[0, 0, 0] += 1
    with pytest.raises(Exception, match="does not have the new values"):
        copy.check()  # type: ignore[attr-defined]


def addresses(model: Any) -> dict[str, int]:
    layers = packed_layers(model).items()
    found = {name: each.data_ptr() for name, each in model.named_parameters()}
    return found | {f"{name}.weight_scale": m.weight_scale.data_ptr() for name, m in layers}


def test_new_weights_are_packed_in_place(packed: Path, tmp_path: Path) -> None:
    """Under megatron-core's names and Hugging Face's, experts stacked or each by itself, and from
    directories."""
    torch.manual_seed(1)
    new = write_plain(tmp_path / "new")
    served, other = kept(packed), load_pretrained(new).model
    given = {name: each.detach() for name, each in other.named_parameters()}
    before, meant = addresses(served), dict(given)
    for name in names_of(served):
        meant[f"{name}.weight"] = unpack(*pack(given[f"{name}.weight"]))
    old = load_pretrained(packed).model
    each_alone = {name: x for name, x in given.items() if ".experts." not in name}
    for name in names_of(served):
        for kind in ("weight", "bias"):
            for n, expert in enumerate(given[f"{name}.{kind}"]):
                each_alone[f"{name}.{kind}{n}"] = expert
    ways: dict[str, Any] = {
        "state dict": given,
        "each": each_alone,
        "theirs": load_file(new / "model.safetensors"),
        "directory": new,
        "native": tmp_path / "native",
    }
    save_native(tmp_path / "native", other, other.model_config)
    for way, weights in ways.items():
        read_weights(served, dict(old.named_parameters()), all_parameters=True)()
        check_equal(values_of(served), values_of(old))  # exact: these can be packed
        copy = read_weights(served, weights, all_parameters=True)
        copy()
        copy.check()  # type: ignore[attr-defined]
        check_equal(values_of(served), meant)
        assert addresses(served) == before, way


def test_scales_and_weights_that_are_no_numbers_are_refused(packed: Path, tmp_path: Path) -> None:
    stored = load_file(packed / "model.safetensors")
    bad = dict(stored)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    bad[name] = stored[name].clone()
    bad[name][1, 2, 0] = NOT_A_NUMBER
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    save_file(bad, tmp_path / "model.safetensors")
    refused = r"layers.1.mlp.experts.linear_fc2.weight_scale has 1 of .* NaN or infinite"
    with pytest.raises(CheckpointError, match=refused):
        kept(tmp_path)
    assert kept(tmp_path, allow_non_finite_weights=True)
    served = kept(packed)
    before = values_of(served)
    with pytest.raises(CheckpointError, match=r"down_proj_scales has 1 of .* NaN or infinite"):
        read_weights(served, tmp_path)
    new = dict(load_pretrained(packed).model.named_parameters())
    new[f"decoder.layers.0.{EXPERTS[0]}.weight"].data[0, 0, 0] = torch.inf
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight has 1 of .* NaN or infinite"):
        read_weights(served, new)
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight: a state dict has no packed num"):
        read_weights(served, dict(served.named_parameters()))
    check_equal(values_of(served), before)


def test_updates_and_sleep_of_an_engine(packed: Path) -> None:
    old = dict(load_pretrained(packed).model.named_parameters())
    new = {name: each * 0.5 for name, each in old.items()}
    options: dict[str, Any] = {"enable_sleep_mode": True, "depth": 2}
    with engine_over(packed, quantization="mxfp4", **options) as engine:
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


def test_what_is_refused(packed: Path, tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="keeps weights that are stored as MXFP4, and none"):
        kept(plain)
    with pytest.raises(ConfigError, match="is for experts, and the model has none"):
        load_pretrained("random:llama1b", quantization="mxfp4")
    served = kept(packed)
    with pytest.raises(CheckpointError, match="keeps FP8 or MXFP4 weights is not saved"):
        save_native(tmp_path / "saved", served, served.model_config)
    with pytest.raises(ConfigError, match="keeps FP8 or MXFP4 weights, which have no gradients"):
        exact_numerics(served)


CONFIG = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=64, ffn_hidden_size=96, max_sequence_length=32, num_moe_experts=4,
    moe_ffn_hidden_size=32, moe_router_topk=2,
)  # fmt: skip


@pytest.mark.parametrize("quantize", [False, True])
def test_random_weights_are_packed_as_they_are_drawn(quantize: bool) -> None:
    device, dtype = torch.device("cpu"), torch.bfloat16
    drawn = dict(build_random_model(CONFIG, device=device, dtype=dtype, seed=3).named_parameters())
    made = build_random_model(
        CONFIG, device=device, dtype=dtype, seed=3, quantize=quantize, pack=True
    )
    assert packed_layers(made).keys() == names_of(made)
    assert len(quantized(made)) == 2 * (4 if quantize else 2)
    for name, layer in packed_layers(made).items():
        numbers, scales = pack(drawn[f"{name}.weight"])
        assert layer.weight.equal(numbers) and layer.weight_scale.equal(scales)


def test_a_shape_keeps_what_its_model_would() -> None:
    assert kept_of_shape("gpt-oss-20b", None) == {"quantize": False, "pack": False}
    assert kept_of_shape("gpt-oss-20b", "mxfp4") == {"quantize": False, "pack": True}
    assert kept_of_shape("random:gpt-oss-20b", "fp8") == {"quantize": True, "pack": True}
    assert kept_of_shape("qwen3-30b-a3b", "fp8") == {"quantize": True, "pack": False}


def test_bytes_of_a_step_are_those_of_packed_experts() -> None:
    """Numbers and scales, as :func:`test_no_second_copy_of_experts_is_made` counts them."""
    shape = SHAPES["gpt-oss-20b"]
    experts = 24 * 3 * 2880 * 2880
    for count in (4.0, 32.0):
        plain = weight_bytes(shape, 2, count)
        packed = weight_bytes(shape, 2, count, expert_itemsize=MXFP4_BYTES)
        assert plain - packed == round(experts * count * (2 - 17 / 32))
        both = weight_bytes(shape, 2, count, 1, MXFP4_BYTES)
        assert weight_bytes(shape, 2, count, 1) - both == round(experts * count * (1 - 17 / 32))

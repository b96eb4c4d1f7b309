"""Further ways in which directories say that they are FP8, and scales that are too large."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.quantized.fp8 import Fp8Target
from megatron_async.checkpoint.quantized.kept import have_one_scale
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.linear import quantized, weight_of
from megatron_async.weights.place import read_weights
from tests.support.fp8_models import (
    BLOCK,
    FORMATS,
    MODELOPT,
    compressed,
    kept_bytes,
    set_config,
    write,
)
from tests.support.huggingface_models import random_model
from tests.unit.checkpoint.test_checkpoint_mtp import write_mimo


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    for name in ("llama", "qwen3_moe", "deepseek_v2"):
        random_model(name).save_pretrained(root / name)
    return root


def rewrite(path: Path, field: str, config: dict[str, Any]) -> None:
    values = json.loads((path / "config.json").read_text())
    values.pop("quantization_config")
    (path / "config.json").write_text(json.dumps({**values, field: config}))


def values_of(model: Any) -> dict[str, Tensor]:
    layers = quantized(model).items()
    values = {name: each.detach() for name, each in model.named_parameters()}
    return values | {f"{name}.weight": weight_of(m, torch.float32) for name, m in layers}


def mixed(of_group: dict[str, Any]) -> dict[str, Any]:
    """Two groups that say their format themselves."""
    config = compressed("channel")
    group = {**config["config_groups"]["group_0"], "format": "float-quantized"}
    groups = {"group_0": group, "group_1": {**group, "targets": ["re:.*lm_head"], **of_group}}
    return {**config, "format": "mixed-precision", "config_groups": groups}


OWN = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]}
SPELLINGS = {
    "former field": ("deepseek_v2", "compressed-tensor", "compression_config",
                     compressed("tensor")),
    "sizes in one word": ("qwen3_moe", "compressed-block", "quantization_config",
                          compressed("block", block_structure=f"{BLOCK[0]}x{BLOCK[1]}")),
    "ModelOpt's own file inside": ("llama", "modelopt-channel", "quantization_config",
                                   {"quant_method": "modelopt", "quantization": OWN}),
    "formats of groups": ("qwen3_moe", "compressed-channel", "quantization_config", mixed({})),
}  # fmt: skip


@pytest.mark.parametrize("quantization", (None, "fp8"))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_read(
    spelling: str, quantization: str | None, plain: Path, tmp_path: Path
) -> None:
    model, kind, field, config = SPELLINGS[spelling]
    path = write(tmp_path / "model", plain / model, kind)
    rewrite(path, field, config)
    found = values_of(load_pretrained(path, quantization=quantization).model)
    meant = values_of(load_pretrained(path / "meant").model)
    assert not [name for name in meant if not found[name].equal(meant[name])]


@pytest.mark.parametrize(
    ("field", "config", "message"),
    [
        ("compression_config", {"format": "float-quantized"}, "compression_config=.*not supported"),
        ("compression_config", compressed("group"), "strategy='group' is not supported"),
        ("quantization_config", compressed("block", block_structure="48x"), "two sizes of 1 to"),
        ("quantization_config", compressed("block", block_structure="0x32"), "two sizes of 1 to"),
        ("quantization_config", mixed({"format": "nvfp4-pack-quantized"}), "format='nvfp4-pack"),
        ("quantization_config", {**MODELOPT, "quantization": {"quant_algo": "NVFP4"}}, "'NVFP4'"),
    ],
)
def test_what_they_ask_for_besides_is_refused(
    field: str, config: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", plain / "llama", "compressed-channel")
    rewrite(path, field, config)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(path, quantization="fp8")


NAME = "model.layers.0.self_attn.o_proj.weight"


def edit(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "scale", "dtype"),
    [
        ("compressed-channel", 3.3e38, torch.float32),
        ("deepseek", 2e36, torch.bfloat16),
        ("compressed-tensor", 150.0, torch.float16),
    ],
)
def test_scales_whose_products_are_infinite_are_refused(
    kind: str, scale: float, dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    """The numbers themselves are finite, and so are the scales."""
    path = write(tmp_path / "model", plain / "llama", kind)
    served = load_pretrained(path, dtype=dtype, quantization="fp8").model
    rows = load_pretrained(plain / "llama", dtype=dtype, quantization="fp8").model
    suffix = "_scale_inv" if kind == "deepseek" else "_scale"
    edit(path, NAME + suffix, lambda found: torch.full_like(found, scale))
    message = rf"o_proj.weight: a scale of .* NaN or infinite as {str(dtype)[6:]}"
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(path, dtype=dtype, quantization="fp8")
    for model in (served, rows):
        before = {name: each.clone() for name, each in kept_bytes(model).items()}
        with pytest.raises(CheckpointError, match=message):
            read_weights(model, path)
        assert all(each.equal(before[name]) for name, each in kept_bytes(model).items())


def test_weights_that_are_infinite_in_the_models_dtype_are_refused(
    plain: Path, tmp_path: Path
) -> None:
    """As without quantization: what e4m3 with a scale keeps would be infinite when it is used."""
    (tmp_path / "config.json").write_text((plain / "llama" / "config.json").read_text())
    tensors = load_file(plain / "llama" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    served = load_pretrained(tmp_path, dtype=torch.float16, quantization="fp8").model
    before = {name: each.clone() for name, each in kept_bytes(served).items()}
    for value, fits in ((65504.0, True), (7e4, False)):
        tensors[NAME][3, 5] = value
        save_file(tensors, tmp_path / "model.safetensors")
        if fits:
            found = load_pretrained(tmp_path, dtype=torch.float16, quantization="fp8").model
            layer = quantized(found)["decoder.layers.0.self_attention.linear_proj"]
            assert weight_of(layer, torch.float16)[3, 5] == value
            continue
        with pytest.raises(CheckpointError, match=r"linear_proj.weight: .* infinite as float16"):
            load_pretrained(tmp_path, dtype=torch.float16, quantization="fp8")
        for new in (tmp_path, tensors):
            with pytest.raises(CheckpointError, match=r"o_proj.weight has 1 of .* NaN or infinite"):
                read_weights(served, new)
    assert all(each.equal(before[name]) for name, each in kept_bytes(served).items())


@pytest.mark.parametrize("kind", ("compressed-channel", "deepseek", "modelopt"))
def test_scales_of_weights_that_are_stored_transposed(kind: str, tmp_path: Path) -> None:
    """GPT-2's have a scale for each input, or for blocks that lie across: rows of the model have
    none of their own, unless one is for all. Such were taken for those of rows."""
    torch.manual_seed(3)
    random_model("gpt2").save_pretrained(tmp_path / "plain")
    config, suffix, quantize = FORMATS[kind]
    shutil.copytree(tmp_path / "plain", tmp_path / "meant")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith(("c_proj.weight", "c_fc.weight"))]:
        scale, wide = quantize(tensors[name])
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * wide
        tensors[f"{name}{suffix}"] = scale.clone()
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    served = load_pretrained(tmp_path / "plain", quantization="fp8").model
    path = tmp_path / "model"
    shutil.copytree(tmp_path / "plain", path)
    save_file(tensors, path / "model.safetensors")
    set_config(path, config)
    wanted = values_of(load_pretrained(tmp_path / "meant").model)
    found = load_pretrained(path, quantization="fp8").model
    assert not [n for n, each in values_of(found).items() if not each.equal(wanted[n])]
    assert len(quantized(found)) == (6 if kind == "modelopt" else 0)
    read_weights(served, path)()
    again = values_of(load_pretrained(tmp_path / "meant", quantization="fp8").model)
    for name, each in values_of(served).items():
        if kind == "modelopt":
            assert each.equal(wanted[name] if name in wanted and "qkv" not in name else again[name])
        else:
            assert each.equal(again[name]), name


@pytest.mark.parametrize("columns", (16, 32, None))
def test_projections_of_drafts_whose_halves_are_swapped(
    columns: int | None, tmp_path: Path
) -> None:
    """MiMo stores the columns of the hidden state first, and megatron those of the embedding."""
    write_mimo(tmp_path / "plain", 5)
    shutil.copytree(tmp_path / "plain", tmp_path / "model")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith("input_proj.weight")]:
        blocks = tensors[name].split(columns or 64, 1)
        scale = torch.stack([each.abs().amax(1) / 448 for each in blocks], 1)
        wide = scale.repeat_interleave(columns or 64, 1)[:, :64]
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * wide
        tensors[f"{name}_scale"] = scale
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    block = compressed("block", block_structure=[1, columns])
    set_config(tmp_path / "model", compressed("channel") if columns is None else block)
    wanted = values_of(load_pretrained(tmp_path / "plain").model)
    found = load_pretrained(tmp_path / "model", quantization="fp8").model
    assert not [n for n, each in values_of(found).items() if not each.equal(wanted[n])]
    kept = {name.rpartition(".")[2] for name in quantized(found)}
    assert kept == ({"eh_proj"} if columns in (32, None) else set())


def halves_swapped(stored: Tensor) -> Tensor:
    return torch.cat(stored.chunk(2, 1)[::-1], 1)


@pytest.mark.parametrize(
    ("k", "block", "select", "fits"),
    [
        (192, (1, 64), halves_swapped, False),  # one lies across both halves
        (256, (1, 64), halves_swapped, True),
        (192, (1, 64), lambda stored: stored, True),
        (192, (2, 64), lambda stored: stored.flip(0), True),
        (192, (2, 64), lambda stored: stored[1:4], True),
        (192, (1, 64), lambda stored: stored.unflatten(0, (2, -1)).transpose(0, 1), True),
        (192, None, lambda stored: stored.t(), False),
        (192, None, halves_swapped, True),
    ],
)
def test_neighbours_in_the_model_have_one_scale(
    k: int, block: tuple[int, int] | None, select: Any, fits: bool
) -> None:
    scale = torch.ones(6, 1) if block is None else torch.ones(6 // block[0], k // block[1])
    target = Fp8Target(torch.empty(6, k), (6, k), select, scale=scale, block=block)
    assert have_one_scale(target, 64 if block is not None else 6) == fits
    whole = dataclasses.replace(target, scale=torch.ones(1))
    assert have_one_scale(whole, 64)


@pytest.mark.parametrize("ones", (False, True))
@pytest.mark.parametrize("suffix", ("_scale", "_scale_inv"))
def test_modelopts_blocks(suffix: str, ones: bool, plain: Path, tmp_path: Path) -> None:
    """Of 128 x 128, with or without a dimension for a block's own rows and columns."""
    tensors = load_file(plain / "qwen3_moe" / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = (-(-size // 128) for size in tensors[name].shape)
        scale = torch.rand(rows, columns) + 0.5
        wide = scale.repeat_interleave(128, 0)[: len(tensors[name])]
        wide = wide.repeat_interleave(128, 1)[:, : tensors[name].shape[1]]
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * wide
        tensors[f"{name}{suffix}"] = scale[:, None, :, None].clone() if ones else scale
    shutil.copytree(plain / "qwen3_moe", tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    shutil.copytree(plain / "qwen3_moe", tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    set_config(tmp_path / "model", {**MODELOPT, "quant_algo": "FP8_PB_WO", "group_size": 128})
    wanted = values_of(load_pretrained(tmp_path / "meant").model)
    found = load_pretrained(tmp_path / "model", quantization="fp8").model
    assert len(quantized(found)) == 12
    assert not [n for n, each in values_of(found).items() if not each.equal(wanted[n])]
    edit(tmp_path / "model", f"model.layers.0.self_attn.o_proj.weight{suffix}", lambda x: x[:0])
    with pytest.raises(CheckpointError, match=r"scales have shape .*each block of 128 x 128"):
        load_pretrained(tmp_path / "model")

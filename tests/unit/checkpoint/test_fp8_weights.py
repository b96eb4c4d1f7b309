"""FP8 weights of published formats: what they stand for is served, and what does not fit is named.

Each format is written here, next to the plain weights that it means, computed here too.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FbgemmFp8Config, FineGrainedFP8Config

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.quantized import scheme
from megatron_async.errors import CheckpointError
from megatron_async.weights.place import read_weights
from tests.support.fp8_models import (
    DEEPSEEK,
    FORMATS,
    MODELOPT,
    MODELS,
    compressed,
    kept_bytes,
    set_config,
    write,
)
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


def parameters_of(path: Path) -> dict[str, Tensor]:
    return dict(load_pretrained(path).model.named_parameters())


@pytest.mark.parametrize(("model", "kind"), some(list(product(MODELS, FORMATS)), 9))
def test_what_is_stored_times_its_scales_is_served(
    model: str, kind: str, plain: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", plain / model, kind)
    stored = load_file(path / "model.safetensors")
    assert sum(x.dtype == torch.float8_e4m3fn for x in stored.values()) > len(stored) / 5
    found, meant, before = map(parameters_of, (path, path / "meant", plain / model))
    assert all(found[name].equal(meant[name]) for name in meant)
    assert not all(found[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("quantization", (None, "fp8"))
def test_metas_form_has_a_scale_for_each_row(
    quantization: str | None, plain: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """As transformers writes it for its FBGEMM kernels."""
    path = write(tmp_path / "model", plain / "llama", "compressed-channel")
    wanted = load_pretrained(path, quantization=quantization).model
    quantizer = FbgemmFp8Config(activation_scale_ub=800.0, modules_to_not_convert=["lm_head"])
    set_config(path, quantizer.to_dict())
    found = load_pretrained(path, quantization=quantization).model
    assert not log.messages, "a field is unknown"
    one, two = kept_bytes(found), kept_bytes(wanted)
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def test_modelopts_own_file_is_read(plain: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", plain / "llama", "modelopt")
    shutil.copy(plain / "llama" / "config.json", path / "config.json")
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": own})
    (path / scheme.MODELOPT_FILE).write_text(text)
    found, meant = parameters_of(path), parameters_of(path / "meant")
    assert all(found[name].equal(meant[name]) for name in meant)
    (path / scheme.MODELOPT_FILE).write_text(text.replace('"FP8"', '"W4A16_AWQ"'))
    with pytest.raises(CheckpointError, match=r"quant_config.json: .*'W4A16_AWQ' is not supported"):
        load_pretrained(path)
    for other in ("[]", '{"quant_method": "fp8", "quant_algo": "NVFP4"}'):
        (path / scheme.MODELOPT_FILE).write_text(f'{{"quantization": {other}}}')
        with pytest.raises(
            CheckpointError, match=r"quant_config.json: .*(an object|'NVFP4' is not)"
        ):
            load_pretrained(path)
    (path / scheme.MODELOPT_FILE).unlink()
    (path / scheme.MODELOPT_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"quant_config.json: is a directory"):
        load_pretrained(path)


def test_new_weights_of_a_directory_are_taken(plain: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", plain / "llama", "compressed-channel")
    model: Any = load_pretrained(plain / "llama").model
    read_weights(model, path)()
    meant = parameters_of(path / "meant")
    assert all(x.equal(meant[name]) for name, x in model.named_parameters())


def nothing(scale: Tensor) -> Tensor | None:
    return None


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        changed = scale.clone()
        changed.view(-1)[0] = value
        return changed

    return change


SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nothing, r"up_proj.weight is F8_E4M3 and has no scales: .*_scale_inv or .* is missing"),
        (with_first(0.0), r"up_proj.weight_scale_inv has 1 of \d+ scales that are no positive"),
        (with_first(-1.0), r"no positive normal numbers, such as -1.0"),
        (with_first(float("nan")), r"no positive normal numbers, such as nan"),
        (with_first(float("inf")), r"no positive normal numbers, such as inf"),
        (with_first(1e-40), r"no positive normal numbers, such as 9.99\d*e-41"),
        (lambda x: x.new_ones(3, 3), r"scales have shape .*one for each block of 48 x 32"),
        (lambda x: x[..., None], "scales have shape"),
        (lambda x: x.double(), "_scale_inv has dtype F64; supported are F32, BF16, F16"),
    ],
)
def test_bad_scales_are_named(
    change: Callable[[Tensor], Tensor | None], message: str, plain: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", plain / "llama", "deepseek")
    tensors = load_file(path / "model.safetensors")
    scale = change(tensors.pop(SCALE))
    save_file(tensors | ({} if scale is None else {SCALE: scale}), path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(path)
    model: Any = load_pretrained(plain / "llama").model
    before = {name: x.clone() for name, x in model.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        read_weights(model, path)
    assert all(x.equal(before[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (SCALE.removesuffix("_inv"), "up_proj.weight has scales of two names: leave out .* or "),
        ("lm_head.weight_scale", "lm_head.weight is F32 and has scales, .*: store it as F8_E4M3"),
        ("lm_head.bias_scale", "unexpected tensor lm_head.bias_scale"),
    ],
)
def test_scales_that_are_too_many_are_named(
    name: str, message: str, plain: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", plain / "llama", "deepseek")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(path)


def test_a_weight_that_is_not_a_number_is_counted(plain: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", plain / "llama", "deepseek")
    tensors = load_file(path / "model.safetensors")
    name = SCALE.removesuffix("_scale_inv")
    tensors[name].view(torch.uint8)[0, :2] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 of [\d,]+ elements that are NaN or infinite"):
        load_pretrained(path)
    model: Any = load_pretrained(plain / "llama").model
    with pytest.raises(CheckpointError, match=r"has 2 of [\d,]+ elements that are NaN"):
        read_weights(model, path)


def test_plain_weights_in_fp8_are_refused(plain: Path, tmp_path: Path) -> None:
    """Where nothing says that they have scales."""
    path = write(tmp_path / "model", plain / "llama", "deepseek")
    shutil.copy(plain / "llama" / "config.json", path / "config.json")
    with pytest.raises(CheckpointError, match=r"unexpected tensor|has dtype F8_E4M3; "):
        load_pretrained(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DEEPSEEK, "fmt": "e5m2"}, "fmt='e5m2' is not supported; supported: 'e4m3'"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size=.* two sizes"),
        ({**DEEPSEEK, "weight_block_size": [0, 128]}, "weight_block_size=.* two sizes"),
        ({**DEEPSEEK, "weight_block_size": "128"}, "weight_block_size='128'.* two sizes"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported.*FP8"),
        ({"quant_method": "modelopt", "quant_algo": None}, "quant_algo=None is not supported"),
        ({**compressed("tensor"), "format": "pack-quantized"}, "format='pack-quantized' is not"),
        ({**compressed("tensor"), "config_groups": {}}, "config_groups={} is not supported"),
        ({**compressed("tensor"), "config_groups": {"a": 1}}, "config_groups.a=1 is not supported"),
        (compressed("group"), "strategy='group' is not supported; supported: tensor, channel"),
        (compressed("tensor", num_bits=4), "num_bits=4 is not supported; supported: 8"),
        (compressed("tensor", type="int"), "type='int' is not supported; supported: 'float'"),
        (compressed("tensor", symmetric=False), "symmetric=False is not supported"),
        ({**compressed("tensor"), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config="),
        ({"quant_method": "gptq", "bits": 4}, "supported: unquantized weights, or quant_method"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(
    config: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain / "llama", tmp_path / "model")
    set_config(tmp_path / "model", config)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path / "model")


def test_each_field_of_transformers_class_is_known() -> None:
    taken = inspect.signature(FineGrainedFP8Config.__init__).parameters.keys()
    assert taken - {"self", "kwargs"} <= scheme.FP8_FIELDS.names
    assert FineGrainedFP8Config().to_dict().keys() <= scheme.FP8_FIELDS.names

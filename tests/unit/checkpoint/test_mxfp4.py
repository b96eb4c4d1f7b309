"""MXFP4 weights: unpacked as transformers does it, and refused where they do not fit."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.huggingface.field_table import MXFP4
from megatron_async.errors import CheckpointError
from megatron_async.kernels.moe.mxfp4 import arrange, unpack
from tests.support.huggingface_models import CONFIGS, random_model
from tests.support.mxfp4_models import QUANTIZED, random_packed


def test_unpacked_is_what_transformers_makes_of_it() -> None:
    torch.manual_seed(1)
    blocks, scales = random_packed(3, 4, 64, scales=(0, 250))
    blocks[0, 0, 0] = torch.arange(16, dtype=torch.uint8) * 17  # each number in both places
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    numbers = arrange(blocks.flatten(-2))
    assert torch.equal(unpack(numbers, scales).mT, theirs)
    scales[1, 2, 0] = 255
    assert unpack(numbers, scales).isnan().sum() == 32


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and a directory of two files with its weights packed; blocks and scales
    are not in the same file."""
    torch.manual_seed(2)
    model = random_model("gpt_oss")
    path = tmp_path_factory.mktemp("packed")
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    state = model.state_dict()
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks, scales = random_packed(experts, rows, columns)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    write(path, tensors)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZED}))
    return model, path


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    files = {name: f"{2 - name.endswith('_scales')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({n: x for n, x in tensors.items() if files[n] == file}, path / file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


FIELDS: dict[str, tuple[Any, ...]] = {
    "modules_to_not_convert": (None, [], ["lm_head"], ["model.layers.*.mlp.experts"]),
    "dequantize": (None, False, True),
}
"""Each but the method's name, with values that change nothing: the names of tensors say what is
packed."""
MEANT = [QUANTIZED, {"quant_method": "mxfp4"}] + [
    {**QUANTIZED, field: value} for field, values in FIELDS.items() for value in values
]


@pytest.mark.parametrize("meant", MEANT, ids=str)
def test_packed_model_gives_transformers_logits(
    packed: tuple[Any, Path], tmp_path: Path, meant: dict[str, Any]
) -> None:
    theirs, path = packed
    folder = shutil.copytree(path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": meant}))
    ours = load_pretrained(folder).model
    ids = torch.randint(1, 100, (1, 45))
    with torch.no_grad():
        expected = theirs(ids).logits
        found = ours(ids, torch.arange(45)[None], None, runtime_gather_output=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_each_field_of_transformers_class_is_tried() -> None:
    taken = inspect.signature(Mxfp4Config.__init__).parameters.keys() - {"self", "kwargs"}
    assert taken == FIELDS.keys() == set(MXFP4.names) - {"quant_method"}
    assert Mxfp4Config().to_dict().keys() <= set(MXFP4.names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scales": None}, "tensor .*_scales.* is missing"),
        ({"_blocks": lambda x: x[..., :8].contiguous()}, r"_blocks has shape .*8\], expected"),
        ({"_scales": lambda x: x[:, 1:].contiguous()}, "_scales has shape .* expected"),
        ({"_scales": lambda x: x.float()}, "_scales has dtype F32; supported are U8"),
        ({"_blocks": None, "_scales": None}, "tensor .*down_proj is missing"),
    ],
)
def test_packed_weights_that_do_not_fit_are_named(
    packed: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    _, path = packed
    tensors = {**load_file(path / "1.safetensors"), **load_file(path / "2.safetensors")}
    for end, change in changes.items():
        for name in [
            name for name in tensors if name.endswith(f"layers.1.mlp.experts.down_proj{end}")
        ]:
            tensor = tensors.pop(name)
            if change is not None:
                tensors[name] = change(tensor)
    write(tmp_path, tensors)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("gpt_oss", {"quant_method": "awq"}, "unquantized weights, or quant_method .*, 'mxfp4'"),
        ("gpt_oss", {"bits": 4}, "unquantized weights, or quant_method .*, 'mxfp4'"),
        ("gpt_oss", {**QUANTIZED, "quant_method": None}, "unquantized weights, or quant_method"),
        ("llama", QUANTIZED, "unquantized weights, or quant_method 'fp8', .* 'modelopt'$"),
    ],
)
def test_other_quantization_is_refused(
    tmp_path: Path, name: str, method: dict[str, Any], message: str
) -> None:
    values = CONFIGS[name]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": method}))
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)

"""New weights that are files are compared with the served model by what their headers say: before
a tensor is read, and before another model is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch

from megatron_async.checkpoint.path import CONFIG_FILE
from megatron_async.checkpoint.reading.distributed_metadata import METADATA_FILE
from megatron_async.checkpoint.reading.files import INDEX_FILE, SINGLE_FILE, weight_files
from megatron_async.checkpoint.reading.header_size import check_file_bytes, check_header_bytes
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.errors import CheckpointError
from megatron_async.models import parallel
from megatron_async.weights.targets import Names
from megatron_async.weights.tensor_info import TensorInfo

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

LEAST_BYTES = 2**20
"""A header, or a config.json, may have as much for any model."""
BYTES_A_PARAMETER = 2**10
"""And as much more for each parameter, by as many names as it may be stored under."""
METADATA_SHARE = 16
"""A directory of ``dist_checkpointing`` says more of each tensor, and of optimizers."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def most_header_bytes(model: GPTModel) -> int:
    """The most bytes that headers of the weights of ``model`` have together. Experts may be stored
    each by itself."""
    names = sum(1 for _ in model.named_parameters())
    return LEAST_BYTES + BYTES_A_PARAMETER * names * (model.config.num_moe_experts or 1)


def check_directory_size(model: GPTModel, directory: Path) -> None:
    """Raises CheckpointError if a directory says far more than the weights of ``model`` need."""
    most = most_header_bytes(model)
    check_file_bytes(directory / CONFIG_FILE, LEAST_BYTES)
    check_file_bytes(directory / INDEX_FILE, most)
    check_file_bytes(directory / METADATA_FILE, METADATA_SHARE * most)
    if is_regular_file(directory / SINGLE_FILE) or is_regular_file(directory / INDEX_FILE):
        check_header_bytes(weight_files(directory)[0], most)


def check_file(model: GPTModel, path: Path) -> None:
    """Compare the header of a ``.safetensors`` file with ``model``.

    Raises:
        CheckpointError: the header is too large; a name, a shape or a dtype does not fit.
        OSError, safetensors.SafetensorError: it cannot be read.
    """
    check_header_bytes([path], most_header_bytes(model))
    infos = []
    with safetensors.safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            stored = file.get_slice(name)
            infos.append(TensorInfo(name, _dtype(path, stored), tuple(stored.get_shape())))
    weights = [info for info in infos if not info.name.endswith("_extra_state")]
    is_share = parallel.current() is not None
    names = Names.of(model, [info.name for info in weights], whole=is_share)
    names.shares(names.weights_of(weights), all_parameters=False)


def _dtype(path: Path, stored: object) -> torch.dtype:
    said: str = stored.get_dtype()  # type: ignore[attr-defined]
    if said not in _DTYPES:
        raise CheckpointError(f"{path}: dtype {said} is not supported; give floats")
    return _DTYPES[said]

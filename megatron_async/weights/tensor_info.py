"""What is said of a tensor before it is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from megatron_async.codec import from_plain
from megatron_async.errors import CheckpointError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
        torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    )
}  # fmt: skip
"""By their names."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
Shape = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_DIMENSIONS)]
Plain = tuple[str, str, Shape]
"""A :class:`TensorInfo` in the types of JSON."""


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, one after the other."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """The same in plain types."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape)]

    @classmethod
    def from_json(cls, data: Any) -> TensorInfo:
        """The inverse; raises CheckpointError for what is none."""
        try:
            name, dtype, shape = from_plain(data, Plain)
        except ValueError as error:
            raise CheckpointError(
                f"{str(data)[:80]!r} is no name, dtype and shape of a tensor: {error}"
            ) from None
        if dtype not in DTYPES:
            raise CheckpointError(
                f"the new {name} has dtype {dtype[:40]!r}; supported are {', '.join(DTYPES)}"
            )
        if math.prod(shape) > MAX_ELEMENTS:
            raise CheckpointError(f"the new {name} has {math.prod(shape):,} elements: too many")
        return cls(name, DTYPES[dtype], shape)


def announced(data: Any) -> list[TensorInfo]:
    """Each of a list in plain types; raises CheckpointError for what is none, or comes twice."""
    if not isinstance(data, (list, tuple)):
        raise CheckpointError(f"{str(data)[:80]!r} is no list of tensors")
    infos = [TensorInfo.from_json(each) for each in data]
    names: set[str] = set()
    for info in infos:
        if info.name in names:
            raise CheckpointError(f"the new {info.name} is announced twice; give it once")
        names.add(info.name)
    return infos


def infos_of(tensors: Mapping[str, Tensor]) -> list[TensorInfo]:
    """Return the info of each tensor, in their order; raises CheckpointError for a dtype that is
    not sent."""
    infos = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"the new {name} has dtype {tensor.dtype}; supported are {', '.join(DTYPES)}"
            )
        infos.append(TensorInfo(name, tensor.dtype, tuple(tensor.shape)))
    return infos


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a state dict: the extra states of megatron-core's layers are none.

    Raises:
        CheckpointError: it is none, or a key is no name.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(
            f"the new weights are a {type(state).__name__} that is no state dict; give parameters "
            "by their names"
        )
    return {
        name: value.detach()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }

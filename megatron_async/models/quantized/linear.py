"""Linear layers that may keep their weights as e4m3.

While a model is built inside of ``deferred.may_be_quantized``, its linear layers take no memory for
weights. What they keep is decided when it is known what is stored (:func:`keep`). A layer of e4m3
has ``weight`` ``[n, k]`` of that dtype and ``weight_scale`` fp32 ``[n, groups]``, see
``values.py``; with experts both have these in front. Its forward multiplies the weight out, or
reads it as it is for a few hundred rows on a GPU; so do the fused blocks (``models/fused``). With
``quantizes_input`` it multiplies e4m3 by e4m3 (``inputs.py``). Experts may keep MXFP4 instead
(``mxfp4.py``).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models import parallel
from megatron_async.models.quantized.inputs import product_of
from megatron_async.models.quantized.values import (
    E4M3,
    KEPT,
    is_packed,
    multiply_out,
    quantize,
)

from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
SCALE = "weight_scale"
INPUT_SCALE = "input_scale"


def weight_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight ``[n, k]``, or with experts in front, to compute with: multiplied out to ``dtype``
    where the layer keeps e4m3 or MXFP4."""
    weight: Tensor = layer.weight
    if weight.dtype not in KEPT:
        return weight
    if is_packed(weight):
        from megatron_async.models.quantized import mxfp4

        return mxfp4.multiply_out(weight, layer.weight_scale, dtype)
    if weight.is_cuda and HAS_TRITON:
        from megatron_async.kernels.gemm import e4m3

        return e4m3.multiply_out(weight, layer.weight_scale, dtype)
    return multiply_out(weight, layer.weight_scale, dtype)


def product(layer: Any, x: Tensor) -> Tensor:
    """``x [..., k]`` times the weight, ``[..., n]``: quantized where the layer does that, else by a
    kernel that reads e4m3 where ``wide_e4m3.takes`` says so."""
    weight: Tensor = layer.weight
    if layer.quantizes_input:
        return product_of(layer, x)
    if weight.dtype == E4M3 and x.is_cuda and x.dtype == torch.bfloat16 and HAS_TRITON:
        from megatron_async.kernels.gemm import wide_e4m3
        from megatron_async.kernels.gemm.invariant import mode as batch_invariant

        rows, depth = x.numel() // weight.shape[1], weight.shape[1]
        if wide_e4m3.takes(rows, depth, layer.weight_scale) and not batch_invariant.is_on():
            return wide_e4m3.multiply(x, weight, layer.weight_scale)
    return F.linear(x, weight_of(layer, x.dtype))


def is_one_linear(layer: Any) -> bool:
    """Whether all of a layer's forwards go through :func:`product`: it is none of experts."""
    return isinstance(layer, _Column | _Row) and not getattr(layer, "gather_output", False)


def plain_class(layer: Any) -> type:
    """The class of a layer, without what lets it keep e4m3."""
    found = type(layer)
    return found.__bases__[1] if issubclass(found, _Deferred) else found


def quantizable(model: Module) -> dict[str, Any]:
    """The layers that may keep e4m3, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, _Deferred)}


def make_quantizable(layer: Any, config: Any) -> None:
    """Let a layer that is there keep e4m3, as if megatron's ``config`` had built it so."""
    built: type = type(layer)
    layer.__class__ = quantizable_class(built)
    layer.defer(config)


def quantized(model: Module) -> dict[str, Any]:
    """The layers that do, or keep MXFP4, by name."""
    return {name: m for name, m in quantizable(model).items() if m.weight.dtype in KEPT}


def keep(layer: Any, groups: int | None) -> None:
    """Give a layer memory for its weight: e4m3 with ``groups`` scales a row, or None for the dtype
    that it was built with. Values that it had are lost."""
    shape, device = layer.weight.shape, layer.weights_device
    with torch.inference_mode(False):
        if groups is None:
            _take(layer, torch.empty(shape, dtype=layer.weight.dtype, device=device))
            return
        made = torch.empty(shape, dtype=E4M3, device=device)
        _take(layer, made, torch.ones(*shape[:-1], groups, dtype=torch.float32, device=device))


def quantize_in_place(layer: Any, groups: int = 1) -> None:
    """Keep the weight that a layer has as e4m3, with ``groups`` scales a row."""
    with torch.no_grad():
        _take(layer, *quantize(layer.weight.detach(), groups))


def _take(layer: Any, made: Tensor, scale: Tensor | None = None) -> None:
    weight = Parameter(made, requires_grad=scale is None and layer.weight.requires_grad)
    vars(weight).update(vars(layer.weight))  # what megatron says of it
    layer.weight = weight
    if scale is not None:
        layer.register_buffer(SCALE, scale)


class _Deferred:
    """Beside a class with a ``weight``: this is a meta tensor once it is built, unless values have
    been drawn.

    Attributes:
        quantizes_input: it multiplies e4m3 by e4m3.
        input_scale: fp32 ``[1]``, the scale of all inputs then; None chooses them by token.
        unit_scale: fp32 1 for the kernels on a GPU, a constant.
    """

    scratch: ClassVar[frozenset[str]] = frozenset({"unit_scale"})

    weight: Parameter
    weight_scale: Tensor
    weights_device: torch.device
    quantizes_input: bool = False
    input_scale: Tensor | None
    unit_scale: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = next(x for x in (*args, *kwargs.values()) if hasattr(x, "params_dtype"))
        self.defer(config)

    def defer(self, config: Any) -> None:
        """Give the weight's memory back, unless megatron's ``config`` has it drawn."""
        self.weights_device = self.weight.device
        cast(Module, self).register_buffer(INPUT_SCALE, None, persistent=False)
        if not config.perform_initialization:
            _take(self, torch.empty_like(self.weight, device="meta"))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A change of dtype or device is not for what has no memory, nor for e4m3.
        module = cast(Module, self)
        kept = None
        if self.weight.is_meta or self.weight.dtype == E4M3:
            buffers = module._buffers
            scales = {name: buffers.pop(name) for name in (SCALE, INPUT_SCALE) if name in buffers}
            kept = module._parameters.pop("weight"), scales
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        if kept is not None:
            module._parameters["weight"], scales = kept
            module._buffers.update(scales)
        return result


class _Column(_Deferred):
    """Beside :class:`ColumnParallelLinear`, for inference."""

    bias: Tensor | None
    skip_bias_add: bool
    gather_output: bool
    sequence_parallel: bool

    def forward(self, input_: Tensor, weight: Tensor | None = None, *args: Any, **kw: Any) -> Any:
        """As the class does, with the weight multiplied out or read as e4m3."""
        if weight is None and not (args or kw or self.gather_output or self.sequence_parallel):
            out = product(self, input_)
            if self.skip_bias_add:
                return out, self.bias
            return (out if self.bias is None else out + self.bias), None
        if weight is None:
            weight = weight_of(self, input_.dtype)
        return super().forward(input_, weight, *args, **kw)  # type: ignore[misc]


class _Row(_Deferred):
    """Beside :class:`RowParallelLinear`, for inference."""

    bias: Tensor | None
    skip_bias_add: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vars(self)["_ranks"] = parallel.current()

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[S, B, K]``, this rank's share of K, to the whole ``[S, B, N]``, and a bias that is yet
        to be added."""
        ranks: parallel.ModelParallel | None = vars(self)["_ranks"]
        total = product(self, input_)
        if ranks is not None:
            total = ranks.sum_rows(total)
        if self.skip_bias_add:
            return total, self.bias
        return (total if self.bias is None else total + self.bias), None


@cache
def quantizable_class(layer: type) -> type:
    """The subclass of ``layer`` that may keep e4m3."""
    kind: type = _Deferred
    if issubclass(layer, ColumnParallelLinear):
        kind = _Column
    elif issubclass(layer, RowParallelLinear):
        kind = _Row
    return type(layer.__name__, (kind, layer), {"__doc__": layer.__doc__})

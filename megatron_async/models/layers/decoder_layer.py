"""megatron's decoder layer, whose residual additions are one kernel with the norms behind them, and
its linear layers: they have a bias or none, and sums over the ranks that serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models import parallel
from megatron_async.models.batch import padding_mask
from megatron_async.models.layers.activation import SwiGLU
from megatron_async.models.layers.attention import PagedSelfAttention
from megatron_async.models.layers.norm import Norm, fusable

from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip
from megatron.core.tensor_parallel.layers import (  # isort: skip
    RowParallelLinear as MegatronRowParallelLinear,
)
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.scaled_e4m3 import Sums

AddProduct = Callable[[Any, Tensor, Any, Tensor], Tensor]
"""From a row-parallel layer, what it multiplies, the norm behind it and the residual stream to the
residual stream with the product."""
Inner = Callable[[Any, Tensor], Tensor | None]


# megatron has one ``add_bias_linear`` for the attention's output and the MLP. It stays off in our
# configs, and this class and that of row-parallel layers decide for each part alone.
class BiasedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel linear with a bias, whatever the config says."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class RowParallelLinear(MegatronRowParallelLinear):  # type: ignore[misc]
    """megatron's. Where it serves, several ranks add up by
    :meth:`~megatron_async.models.parallel.ModelParallel.sum_rows` in place of an all-reduce."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_ranks"] = parallel.current()

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[S, B, K]``, this rank's share of K, to the whole ``[S, B, N]``, and a bias that is yet
        to be added."""
        ranks: parallel.ModelParallel | None = self.__dict__["_ranks"]
        if ranks is None or torch.is_grad_enabled() or not self._sums_up:
            result: tuple[Tensor, Tensor | None] = super().forward(input_)
            return result
        total = ranks.sum_rows(F.linear(input_, self.weight))
        if self.skip_bias_add:
            return total, self.bias
        return (total if self.bias is None else total + self.bias), None

    @property
    def _sums_up(self) -> bool:
        """It has partial sums, and adds them up itself."""
        elsewhere = self.explicit_expert_comm or self.sequence_parallel
        return bool(self.input_is_parallel and not elsewhere)

    @property
    def leaves_bias(self) -> bool:
        """It adds up over ranks, and leaves its bias to the caller."""
        return bool(self.skip_bias_add and self._sums_up)


class BiasedRowParallelLinear(RowParallelLinear):
    """One with a bias, whatever the config says."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class DecoderLayer(TransformerLayer):  # type: ignore[misc]
    """megatron's layer; in inference on CUDA each residual addition is one kernel with the norm
    that follows it, the next layer's or the final one included."""

    @property
    def first_norm(self) -> torch.nn.Module:
        """The norm that reads the residual stream."""
        norm: torch.nn.Module = self.input_layernorm
        return norm

    def attach(self, next_norm: torch.nn.Module | None) -> None:
        """Take the norm that reads this layer's output; None leaves that addition alone."""
        # Not a submodule: it belongs to the layer that applies it.
        self.__dict__["next_norm"] = next_norm

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        hidden = args[0] if args else kwargs["hidden_states"]
        context = kwargs.get("inference_context")
        if context is None:
            context = kwargs.get("inference_params")
        norm = self.pre_mlp_layernorm
        mask = padding_mask(self, context)
        fuses = context is not None and fusable(hidden) and not self.training
        if context is None or not fuses or not isinstance(norm, Norm):
            result: tuple[Tensor, Any] = super().forward(*args, **kwargs | mask)
            return result
        if context.batch_invariant and not mask and self._joins_products():
            return self._in_parts(hidden, context, _add_product, _product_with_swiglu), None
        if not (context.batch_invariant or mask):
            if self._joins_sums(hidden):
                return self._in_parts(hidden, context, _add_sum, _swiglu), None
            if self._joins_scales():
                return self._in_parts(hidden, context, _add_scaled, _quantized_swiglu), None
        attended, bias = self.self_attention(
            self.input_layernorm(hidden), inference_context=context
        )
        hidden = norm.add(attended, bias, hidden)
        normed = norm(hidden)
        inner = None if context.batch_invariant else _swiglu_of_many(self.mlp, normed)
        if inner is None:
            output, bias = self.mlp(normed, **mask)
        else:
            output, bias = self.mlp.linear_fc2(inner)
        next_norm = self.__dict__.get("next_norm")
        if isinstance(next_norm, Norm):
            return next_norm.add(output, bias, hidden), None
        return (output if bias is None else output + bias) + hidden, None

    def _joins_products(self) -> bool:
        from megatron_async.kernels.gemm.invariant.mode import is_on

        return is_on() and self.may_join_products()

    def may_join_products(self) -> bool:
        """Whether products of batch-invariant mode may go together with what is behind them: nobody
        watches the modules."""
        attention, mlp = self.self_attention, self.mlp
        return type(attention) is PagedSelfAttention and not _watched(attention, mlp)

    def _joins_sums(self, hidden: Tensor) -> bool:
        """Whether sums over ranks go together with what is behind them, as products do."""
        ranks: parallel.ModelParallel | None = vars(self.self_attention.linear_proj).get("_ranks")
        joins = ranks is not None and ranks.norms_behind_sum(hidden) is not None
        return joins and self.may_join_products() and multiplies_with_swiglu(self.mlp)

    def _joins_scales(self) -> bool:
        """Whether scales of products may be applied by what is behind them."""
        quantizes: bool = getattr(self.self_attention.linear_proj, "quantizes_input", False)
        return quantizes and self.may_join_products()

    def _in_parts(self, hidden: Tensor, context: Any, add: AddProduct, inner_of: Inner) -> Tensor:
        """The layer with the same bits, whose row-parallel products go together with what is behind
        them.

        Args:
            add: adds such a product to the residual stream.
            inner_of: what the MLP's second layer gets; None where that is the module's business.
        """
        norm, next_norm = self.pre_mlp_layernorm, self.__dict__.get("next_norm")
        attention, mlp = self.self_attention, self.mlp
        attended = attention.attended(context, self.input_layernorm(hidden))
        hidden = add(attention.linear_proj, attended, norm, hidden)
        normed = norm(hidden)
        inner = inner_of(mlp, normed)
        if inner is None:
            return _add(mlp(normed), next_norm, hidden)
        return add(mlp.linear_fc2, inner, next_norm, hidden)


def _watched(*modules: Any) -> bool:
    return any(each._forward_hooks or each._forward_pre_hooks for each in modules)


def _add(output: tuple[Tensor, Tensor | None], norm: Any, hidden: Tensor) -> Tensor:
    """A part of a layer, and its bias, onto the residual stream, for the norm that comes next."""
    x, bias = output
    if isinstance(norm, Norm):
        return norm.add(x, bias, hidden)
    return (x if bias is None else x + bias) + hidden


def _add_product(linear: Any, x: Tensor, norm: Any, hidden: Tensor) -> Tensor:
    """:func:`_add` of a row-parallel layer, whose segments of K the norm adds up if it can."""
    parts = _segments_of(linear, x, norm)
    if parts is None:
        return _add(linear(x), norm, hidden)
    total: Tensor = norm.add(parts, linear.bias, hidden, in_segments=True)
    return total


def _add_sum(linear: Any, x: Tensor, norm: Any, hidden: Tensor) -> Tensor:
    """:func:`_add` of a row-parallel layer, whose sum over ranks goes together with the norm if it
    can."""
    is_plain = type(linear) in (RowParallelLinear, BiasedRowParallelLinear)
    joins = is_plain and linear.leaves_bias and not _watched(linear)
    if not joins or not isinstance(norm, Norm) or not norm.sums_over_ranks:
        return _add(linear(x), norm, hidden)
    ranks: parallel.ModelParallel | None = vars(linear)["_ranks"]
    sums = None if ranks is None else ranks.norms_behind_sum(hidden)
    if sums is None:
        return _add(linear(x), norm, hidden)
    return norm.add_over_ranks(F.linear(x, linear.weight), linear.bias, hidden, sums)


def _add_scaled(linear: Any, x: Tensor, norm: Any, hidden: Tensor) -> Tensor:
    """:func:`_add` of a row-parallel layer, whose scales the norm applies if it can."""
    sums = _sums_of(linear, x) if isinstance(norm, Norm) and norm.feeds is not None else None
    if sums is None:
        return _add(linear(x), norm, hidden)
    total: Tensor = norm.add_scaled(sums, linear.bias, hidden)
    return total


def _sums_of(linear: Any, x: Tensor) -> Sums | None:
    """A product that its scales are yet to be applied to; None where a module must be called."""
    from megatron_async.models.quantized.inputs import sums_by_kernels
    from megatron_async.models.quantized.linear import is_one_linear

    if not linear.quantizes_input or not is_one_linear(linear) or _watched(linear):
        return None
    adds_bias = linear.bias is not None and not linear.skip_bias_add
    return None if adds_bias or vars(linear)["_ranks"] is not None else sums_by_kernels(linear, x)


def _quantized_swiglu(mlp: Any, x: Tensor) -> Tensor | None:
    """What an MLP's second layer gets from an activation that quantizes for it."""
    if type(mlp) is not MLP or type(mlp.activation_func) is not SwiGLU:
        return None
    first, activation = mlp.linear_fc1, mlp.activation_func
    if activation.feeds is not mlp.linear_fc2 or first.bias is not None:
        return None
    if _watched(mlp, first, activation):
        return None
    inner: Tensor = activation(first(x)[0])
    return inner


def _swiglu(mlp: Any, x: Tensor) -> Tensor | None:
    """What an MLP's second layer gets, by one kernel if that is quicker."""
    inner = _swiglu_of_many(mlp, x)
    if inner is None:
        inner = mlp.activation_func(mlp.linear_fc1(x)[0])
    return inner


def _product_with_swiglu(mlp: Any, x: Tensor) -> Tensor | None:
    """What an MLP's second layer gets, by one kernel; None where that must be its modules'."""
    from megatron_async.kernels.gemm.invariant.mode import linear_swiglu

    return linear_swiglu(x, mlp.linear_fc1.weight) if multiplies_with_swiglu(mlp) else None


def _swiglu_of_many(mlp: Any, x: Tensor) -> Tensor | None:
    """The same in steps of many rows, whose sums have no one order."""
    if not multiplies_with_swiglu(mlp) or _watched(mlp):
        return None
    from megatron_async.kernels.gemm.gated import swiglu_of_many

    return swiglu_of_many(x, mlp.linear_fc1.weight)


def multiplies_with_swiglu(mlp: Any) -> bool:
    """Whether a module is an MLP whose first product and activation may be one kernel."""
    if type(mlp) is not MLP or type(mlp.activation_func) is not SwiGLU:
        return False
    first, activation = mlp.linear_fc1, mlp.activation_func
    plain = type(first) is ColumnParallelLinear and first.bias is None
    return plain and activation.feeds is None and not _watched(first, activation)


def _segments_of(linear: Any, x: Tensor, norm: Any) -> Tensor | None:
    """What a product leaves for the norm behind it to add up, see ``linear_in_segments``; None
    where a module must be called."""
    from megatron_async.kernels.gemm.invariant.mode import linear_in_segments

    plain = type(linear) in (RowParallelLinear, BiasedRowParallelLinear)
    if not plain or linear.config.tensor_model_parallel_size > 1 or not linear.skip_bias_add:
        return None
    if not isinstance(norm, Norm) or norm.feeds is not None or _watched(linear):
        return None
    return linear_in_segments(x, linear.weight)


def link_norms(layers: list[Any], final_norm: torch.nn.Module | None) -> None:
    """Tell each layer which norm reads its output."""
    norms = [layer.first_norm for layer in layers[1:]] + [final_norm]
    for layer, norm in zip(layers, norms, strict=True):
        layer.attach(norm)

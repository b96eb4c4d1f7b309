"""megatron ``ModuleSpec`` trees for the architectures of :class:`ModelConfig`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.megatron_compat import specs
from megatron_async.models import parallel
from megatron_async.models.batch import padding_mask
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.layers.activation import (
    GEGLU,
    GELU,
    ClampedSwiGLU,
    GEGLUTanh,
    GELUTanh,
    ReLU,
    SquaredReLU,
    SwiGLU,
)
from megatron_async.models.layers.attention import NoCoreAttention, PagedSelfAttention
from megatron_async.models.layers.norm import Norm, fusable, head_norm_classes, norm_class
from megatron_async.models.quantized.deferred import as_built

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip
from megatron.core.tensor_parallel.layers import (  # isort: skip
    RowParallelLinear as MegatronRowParallelLinear,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # isort: skip
from megatron.core.transformer.multi_token_prediction import (  # isort: skip
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    TransformerLayer,
    TransformerLayerSubmodules,
)

_ACTIVATIONS: dict[str, type[torch.nn.Module]] = {
    "swiglu": SwiGLU,
    "clamped_swiglu": ClampedSwiGLU,
    "geglu": GEGLU,
    "geglu_tanh": GEGLUTanh,
    "gelu": GELU,
    "gelu_tanh": GELUTanh,
    "relu": ReLU,
    "squared_relu": SquaredReLU,
}


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
            return self._with_products(hidden, context), None
        if not (context.batch_invariant or mask) and self._joins_sums(hidden):
            return self._with_sums(hidden, context), None
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

    def _with_products(self, hidden: Tensor, context: Any) -> Tensor:
        """The layer in batch-invariant mode, with the same bits."""
        norm, next_norm = self.pre_mlp_layernorm, self.__dict__.get("next_norm")
        attention, mlp = self.self_attention, self.mlp
        attended = attention.attended(context, self.input_layernorm(hidden))
        hidden = _add_product(attention.linear_proj, attended, norm, hidden)
        normed = norm(hidden)
        inner = _product_with_swiglu(mlp, normed)
        if inner is not None:
            return _add_product(mlp.linear_fc2, inner, next_norm, hidden)
        return _add(mlp(normed), next_norm, hidden)

    def _joins_sums(self, hidden: Tensor) -> bool:
        """Whether sums over ranks go together with what is behind them, as products do."""
        ranks: parallel.ModelParallel | None = vars(self.self_attention.linear_proj).get("_ranks")
        joins = ranks is not None and ranks.norms_behind_sum(hidden) is not None
        return joins and self.may_join_products() and multiplies_with_swiglu(self.mlp)

    def _with_sums(self, hidden: Tensor, context: Any) -> Tensor:
        """The layer with the same bits, where ranks have partial sums of it."""
        norm, next_norm = self.pre_mlp_layernorm, self.__dict__.get("next_norm")
        attention, mlp = self.self_attention, self.mlp
        attended = attention.attended(context, self.input_layernorm(hidden))
        hidden = _add_sum(attention.linear_proj, attended, norm, hidden)
        normed = norm(hidden)
        inner = _swiglu_of_many(mlp, normed)
        if inner is None:
            inner = mlp.activation_func(mlp.linear_fc1(normed)[0])
        return _add_sum(mlp.linear_fc2, inner, next_norm, hidden)


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


def _norm(config: ModelConfig, device: torch.device | str) -> type:
    return norm_class(
        config.normalization,
        torch.device(device),
        zero_centered=config.zero_centered_gamma,
        bias=config.norm_bias,
    )


def general_parts(config: ModelConfig, norm: type) -> dict[str, Any] | None:
    """Arguments of a ``GeneralDecoderLayer``; None where :class:`DecoderLayer` will do."""
    parts: dict[str, Any] = {}
    if config.norm_placement != "pre":
        parts["post_norm"] = norm
    if config.parallel_residual is not None:
        parts["parallel_residual"] = config.parallel_residual
    if config.residual_multiplier != 1:
        parts["residual_multiplier"] = config.residual_multiplier
    return parts or None


def mlp_spec(config: ModelConfig, layer: int) -> Any:
    """The MLP of ``layer``, counted from 0: dense, or a mixture of experts."""
    has_experts = config.has_experts(layer)
    # Shared experts have no bias in megatron.
    biased = config.mlp_bias and not has_experts
    submodules = MLPSubmodules(
        linear_fc1=as_built(BiasedColumnParallelLinear if biased else ColumnParallelLinear),
        linear_fc2=as_built(BiasedRowParallelLinear if biased else RowParallelLinear),
        activation_func=_ACTIVATIONS[config.activation],
    )
    if has_experts:
        from megatron_async.models.moe.layer import MoELayer

        return specs.moe_spec(MoELayer, {"model": config}, submodules)
    return specs.mlp_spec(submodules)


def _attention_spec(config: ModelConfig, norm: type) -> ModuleSpec:
    params = {"attn_mask_type": AttnMaskType.causal}
    column = as_built(ColumnParallelLinear)
    attention_row = as_built(
        BiasedRowParallelLinear if config.attention_output_bias else RowParallelLinear
    )
    q_norm, k_norm = IdentityOp, IdentityOp
    if config.qk_norm:
        # Norms of all heads are always ours.
        of_heads = norm if config.qk_norm_kind == "head" else _norm(config, "cpu")
        q_norm, k_norm = head_norm_classes(of_heads, config.qk_norm_kind)
    if config.latent_attention is not None:
        from megatron_async.models.layers.latent_attention import PagedLatentAttention

        from megatron.core.transformer.multi_latent_attention import (  # isort: skip
            MLASelfAttentionSubmodules,
        )

        latent = MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=ColumnParallelLinear,  # of these two attention makes others
            linear_q_up_proj=column,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,  # attention reads the weight itself
            core_attention=NoCoreAttention,
            linear_proj=attention_row,
            q_layernorm=norm,
            kv_layernorm=norm,
        )
        return ModuleSpec(module=PagedLatentAttention, params=params, submodules=latent)
    return ModuleSpec(
        module=PagedSelfAttention,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=NoCoreAttention,
            linear_proj=attention_row,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def gpt_layer_spec(
    config: ModelConfig, device: torch.device | str = "cpu", layer: int = 0
) -> ModuleSpec:
    """One transformer layer, counted from 0, with :class:`PagedSelfAttention` and megatron's own
    linears."""
    norm = _norm(config, device)
    has_input_norm = config.norm_placement != "post"
    has_mlp_norm = has_input_norm and config.parallel_residual != "one_norm"
    general = general_parts(config, norm)
    module: type = DecoderLayer
    if general is not None:
        from megatron_async.models.layers.general_layer import GeneralDecoderLayer

        module = GeneralDecoderLayer
    return ModuleSpec(
        module=module,
        params=general or {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if has_input_norm else IdentityOp,
            self_attention=_attention_spec(config, norm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if has_mlp_norm else IdentityOp,
            mlp=mlp_spec(config, layer),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def gpt_block_spec(
    config: ModelConfig, num_layers: int, device: torch.device | str = "cpu", first: int = 0
) -> TransformerBlockSubmodules:
    """The decoder: ``num_layers`` layers, those of this pipeline stage from ``first`` on, and the
    final norm."""
    norm = _norm(config, device)
    layers = range(first, first + num_layers)
    specs = [gpt_layer_spec(config, device, layer) for layer in layers]
    if config.hybrid_override_pattern is not None:
        from megatron_async.models.mamba.spec import hybrid_layer_specs

        specs = hybrid_layer_specs(config, norm, specs)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def mtp_block_spec(config: ModelConfig, device: torch.device | str = "cpu") -> ModuleSpec | None:
    """The multi-token prediction layers (DeepSeek-V3, arXiv:2412.19437); None if there are none."""
    if config.mtp_num_layers == 0:
        return None
    norm = _norm(config, device)
    layer = ModuleSpec(
        module=specs.MultiTokenPredictionLayer,
        submodules=specs.mtp_submodules(
            gpt_layer_spec(config, device, config.num_layers - 1),
            enorm=norm,
            hnorm=norm,
            eh_proj=as_built(ColumnParallelLinear),
            layer_norm=norm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers),
    )

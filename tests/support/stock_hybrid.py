"""Hybrid models as a megatron-core user has them, on each release, without Transformer Engine."""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_async import megatron_compat as compat
from megatron_async.megatron_compat import classes

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.multi_token_prediction import (  # isort: skip
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    TransformerLayer,
    TransformerLayerSubmodules,
)

VOCAB = 96
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}


class GatedNorm(torch.nn.Module):
    """As much of mamba_ssm's as building takes."""

    def __init__(self, size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps


def no_kernel(*_: Any, **__: Any) -> Any:
    raise AssertionError("building and serving call no kernel of mamba_ssm")


def _packages() -> dict[str, ModuleType]:
    names = ["einops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"]
    kernels = ("layernorm_gated", "ssd_combined", "selective_state_update")
    names += [f"mamba_ssm.ops.triton.{name}" for name in kernels]
    functions = (
        "rearrange", "repeat", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined",
        "selective_state_update",
    )  # fmt: skip
    packages = {name: ModuleType(name) for name in names}
    for package in packages.values():
        vars(package).update(dict.fromkeys(functions, no_kernel), RMSNorm=GatedNorm)
        vars(package)["__version__"] = "2.2.6"
    return packages


def stock_hybrid(pattern: str, cls: Any = classes.HYBRID_MODEL, **changes: Any) -> Any:
    """A model of ``cls`` with one layer for each letter of ``pattern``; ``changes`` are of its
    config. A pattern has ``/`` in front of the layers of each multi-token prediction layer."""
    compat.ensure_parallel_state()
    with mock.patch.dict(sys.modules, _packages()):
        from megatron.core.ssm import mamba_layer, mamba_mixer
    block: Any = sys.modules[classes.HYBRID_STACK.__module__]
    torch.manual_seed(0)
    main, *predicting = pattern.split("/")
    config = TransformerConfig(
        num_layers=len(main), hidden_size=64, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=96, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2,
        **({"mtp_num_layers": len(predicting)} if predicting else {}), **changes,
    )  # fmt: skip
    whole = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    norm, add = whole.input_layernorm, whole.self_attn_bda
    linears = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer, submodules=mamba_mixer.MambaMixerSubmodules(*linears)
    )

    def layer(**parts: Any) -> ModuleSpec:
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    parts = {
        "mamba_layer": ModuleSpec(
            mamba_layer.MambaLayer,
            submodules=mamba_layer.MambaLayerSubmodules(norm, mixer, add),
        ),
        "attention_layer": layer(
            input_layernorm=norm, self_attention=whole.self_attention, self_attn_bda=add
        ),
        "mlp_layer": layer(pre_mlp_layernorm=norm, mlp=whole.mlp, mlp_bda=add),
    }
    if config.num_moe_experts:
        experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
        parts["moe_layer"] = layer(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add)
    if predicting:
        one = MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=linears[0], layer_norm=norm
        )
        specs = [ModuleSpec(MultiTokenPredictionLayer, submodules=one)]
        parts["mtp_block_spec"] = ModuleSpec(
            MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(specs)
        )
    submodules = getattr(block, "HybridStackSubmodules", None) or block.MambaStackSubmodules
    spec = ModuleSpec(classes.HYBRID_STACK, submodules=submodules(**parts))
    # A mixer draws its parameters in a random state of each rank, on a GPU.
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    with (
        mock.patch.object(block, "TENorm", norm),
        mock.patch.object(mamba_mixer, "get_cuda_rng_tracker", lambda: tracker),
    ):
        names = ("hybrid_layer_pattern", "hybrid_override_pattern")
        known = inspect.signature(classes.HYBRID_MODEL.__init__).parameters
        name = next(name for name in names if name in known)
        model = cls(config, spec, VOCAB, 128, parallel_output=False, **{name: pattern})
    return model.eval()

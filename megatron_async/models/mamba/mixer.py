"""Mamba-2 (arXiv:2405.21060) with the parameter names of megatron-core's ``MambaMixer``.

megatron-core's own needs packages that are often not there. What is between the two projections is
in ``kernels/mamba``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.kernels.mamba.layer import GatedNorm, MambaParameters, MambaSizes
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.recurrent_state_spec import StateTensor
from megatron_async.models.mamba.sequence import mix_sequences
from megatron_async.models.mamba.shards import mixer_shards
from megatron_async.models.mamba.states import mix_step, state_tensors
from megatron_async.models.quantized.deferred import as_built

from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.module import MegatronModule  # isort: skip

LEAST_STEP, LARGEST_STEP = 0.001, 0.1
LARGEST_DECAY = 16.0
"""Initial values: steps (dt) from ``LEAST_STEP``, decays of a step of 1 from 1; as megatron's."""
_KEPT_IN_FP32 = ("dt_bias", "A_log", "D")


class ScanNorm(torch.nn.Module):
    """The weight of the gated RMSNorm behind the scan."""

    def __init__(self, channels: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=dtype, device=device))


class Mixing:
    """A Mamba-2 mixer: over whole sequences, or through an inference context, whose pool holds the
    state of each request.

    Attributes:
        sizes: of the mixer.
        state_layer: its number among the recurrent layers.
        norm_before_gate: see :class:`~megatron_async.kernels.mamba.layer.GatedNorm`.
    """

    sizes: MambaSizes
    epsilon: float
    state_layer: int = 0
    norm_before_gate: bool = False
    in_proj: Any
    out_proj: Any
    norm: Any
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor

    @property
    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """Its weight ``[channels, 1, width]``, and its bias."""
        raise NotImplementedError

    @property
    def parameters_between(self) -> MambaParameters:
        """What is between the projections."""
        group = self.sizes.inner // self.sizes.groups
        return MambaParameters(
            self.sizes,
            *self.convolution,
            self.dt_bias,
            self.A_log,
            self.D,
            GatedNorm(self.norm.weight, self.epsilon, group, self.norm_before_gate),
        )

    @property
    def state_tensors(self) -> tuple[StateTensor, ...]:
        """What it keeps of a request."""
        return state_tensors(self.sizes, self.convolution[0].dtype)

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix tokens with those before them.

        Args:
            hidden_states: without a context ``[S, B, hidden]``, positions 0 to S - 1; with one
                ``[T, 1, hidden]``, the tokens that its ``states.step`` is about.

        Returns:
            Hidden states of the same shape, and the bias still to be added.
        """
        projected, _ = self.in_proj(hidden_states)
        if inference_context is None:
            mixed = mix_sequences(projected, self.parameters_between)
        else:
            mixed = mix_step(
                projected.squeeze(1), self.parameters_between, inference_context, self.state_layer
            ).unsqueeze(1)
        result: tuple[Tensor, Tensor | None] = self.out_proj(mixed)
        return result


class MambaMixer(Mixing, MegatronModule):  # type: ignore[misc]
    """A mixer that we build.

    Args:
        config: megatron's.
        model: the model's.
    """

    def __init__(self, config: Any, model: ModelConfig, layer_number: int = 1, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.sizes = sizes = model.mamba
        self.epsilon = model.mamba_norm_epsilon
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        dtype = config.params_dtype
        linear = {"config": config, "bias": model.mamba_proj_bias}
        self.in_proj = as_built(ColumnParallelLinear)(
            config.hidden_size,
            sizes.projection,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.conv1d = torch.nn.Conv1d(
            sizes.conv_channels,
            sizes.conv_channels,
            sizes.conv_width,
            groups=sizes.conv_channels,
            bias=model.mamba_conv_bias,
            dtype=dtype,
            device=device,
        )
        share = torch.rand(sizes.heads, device=device)
        steps = LEAST_STEP * (LARGEST_STEP / LEAST_STEP) ** share
        self.dt_bias = torch.nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        decays = 1 + (LARGEST_DECAY - 1) * torch.rand(sizes.heads, device=device)
        self.A_log = torch.nn.Parameter(decays.log())
        self.D = torch.nn.Parameter(torch.ones(sizes.heads, device=device))
        self.norm = ScanNorm(sizes.inner, dtype, device)
        self.out_proj = as_built(RowParallelLinear)(
            sizes.inner,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A change of dtype is for the others: a rounded decay adds up over all tokens.
        kept = {name: getattr(self, name).detach() for name in _KEPT_IN_FP32}
        result = super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = getattr(self, name)
            parameter.data = value.to(parameter.device)
        return result

    @property
    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """Its weight ``[channels, 1, width]``, and its bias."""
        return self.conv1d.weight, self.conv1d.bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the parameters as megatron's mixer stores its own, see :func:`mixer_shards`."""
        return mixer_shards(self, prefix, sharded_offsets)

"""megatron-core's own Mamba-2 mixers, made to run without packages of their own, in place."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.megatron_compat.hybrid import mixer_convolution
from megatron_async.models.mamba.mixer import Mixing

_DEFAULT_EPSILON = 1e-5


class _AdaptedMixing(Mixing):
    """megatron's mixer, with its weights as they are, computed as ``MambaMixer`` of this package
    does; in training as megatron's."""

    training: bool

    @property
    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """Its weight ``[channels, 1, width]``, and its bias."""
        return mixer_convolution(self)

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix as :class:`Mixing` does; in training as megatron's mixer does."""
        if self.training:
            theirs: Any = super(Mixing, self)
            trained: tuple[Tensor, Tensor | None] = theirs.forward(
                hidden_states, inference_context=inference_context, **kwargs
            )
            return trained
        return super().forward(hidden_states, inference_context)


@functools.cache
def _adapted(theirs: type) -> type:
    return type(f"Adapted{theirs.__name__}", (_AdaptedMixing, theirs), {})


def is_mamba_layer(layer: Any) -> bool:
    """Whether a layer of a hybrid model has a mixer."""
    return hasattr(layer, "mixer")


def check_mixer(layer: Any) -> None:
    """Check a layer that has a mixer.

    Raises:
        ConfigError: it is one that cannot be served; the message names it.
    """
    mixer = layer.mixer
    name = f"layer {layer.layer_number} has {type(mixer).__name__}"
    if type(mixer).__name__ != "MambaMixer":
        raise ConfigError(f"{name}: build it with megatron.core's MambaMixer")
    if not mixer.rmsnorm:
        raise ConfigError(f"{name} with rmsnorm=False: build it with the norm")
    if mixer.D_has_hdim:
        raise ConfigError(f"{name} with D_has_hdim=True: build it with one D for each head")
    if getattr(layer, "residual_in_fp32", False):
        raise ConfigError(f"{name} and residual_in_fp32=True: build it without")


def adapt_mixer(layer: Any) -> None:
    """Turn megatron's mixer into one that this package computes."""
    mixer = layer.mixer
    theirs: Any = type(mixer)
    mixer.__class__ = _adapted(theirs)
    mixer.sizes = MambaSizes(
        heads=mixer.nheads, head_dim=mixer.headdim, groups=mixer.ngroups,
        state_size=mixer.d_state, conv_width=mixer.d_conv,
    )  # fmt: skip
    mixer.epsilon = float(getattr(mixer.norm, "eps", None) or _DEFAULT_EPSILON)

"""STAND-IN."""

import torch.nn.functional as F


class FusedLayerNormAffineFunction:
    """Layer norm; ``forward`` is looked at for its arguments, and ``apply`` is called."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        raise NotImplementedError

    @staticmethod
    def apply(input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)

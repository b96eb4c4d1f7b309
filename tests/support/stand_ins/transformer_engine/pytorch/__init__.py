"""STAND-IN: the modules that megatron-core derives its own from, with their parameters' names."""

import torch
import torch.nn.functional as F

from tests.support.stand_ins.transformer_engine.pytorch import distributed, fp8  # noqa: F401


def _norm(x, kind, weight, bias, eps):
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _Norm(torch.nn.Module):
    kind = "LayerNorm"

    def __init__(self, hidden_size, eps=1e-5, params_dtype=torch.float32, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))

    def forward(self, x):
        return _norm(x, self.kind, self.weight, getattr(self, "bias", None), self.eps)


class LayerNorm(_Norm):
    pass


class RMSNorm(_Norm):
    kind = "RMSNorm"


class Linear(torch.nn.Module):
    def __init__(
        self, in_features, out_features, init_method=None, bias=True, return_bias=False,
        params_dtype=torch.float32, parallel_mode=None, **_,
    ):  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        init_method(self.weight.data)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
        else:
            self.bias = None

    def forward(self, x, is_first_microbatch=None):
        if self.return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, eps=1e-5, normalization="LayerNorm", **options):
        super().__init__(in_features, out_features, **options)
        self.eps, self.normalization = eps, normalization
        dtype = self.weight.dtype
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))

    def forward(self, x, is_first_microbatch=None):
        norm = (self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(_norm(x, *norm))


class DotProductAttention(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        """Causal, over [sequence, batch, heads, size]; returns [sequence, batch, heads * size]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

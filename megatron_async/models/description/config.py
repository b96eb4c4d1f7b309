"""What a decoder-only model looks like, independent of where its weights come from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_async.errors import CheckpointError
from megatron_async.models.description.config_fields import check_fields
from megatron_async.models.description.latent_config import LatentAttention, check_latent
from megatron_async.models.mamba.sizes import EXPERTS, check_hybrid, mamba_sizes

if TYPE_CHECKING:
    from megatron_async.kernels.mamba.layer import MambaSizes

_NEEDED_BY: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
MOST_ROTATIONS = 2**20
"""The largest border of the ramp of "yarn"; one over it is the smallest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of the frequencies of rotary position embeddings, computed in
    ``models/layers/rope.py``.

    Args:
        kind: "linear" divides positions by ``factor``. "dynamic" (NTK-aware) raises theta with
            the position, from ``original_max_position_embeddings`` on. "yarn" (arXiv:2309.00071)
            interpolates long wavelengths, between ``beta_fast`` and ``beta_slow`` rotations.
            "longrope" (arXiv:2402.13753) has a factor for each pair: ``short_factor`` for requests
            of up to ``original_max_position_embeddings`` tokens, else ``long_factor``. "llama3"
            stretches wavelengths above ``original_max_position_embeddings / low_freq_factor`` by
            ``factor``, keeps those below the same over ``high_freq_factor``, and interpolates.
        attention_factor: cosines and sines are multiplied by it.
        truncate: "yarn" rounds the border of its ramp to whole pairs.

    Raises:
        CheckpointError: a value is missing, out of range, or two values contradict each other.
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _NEEDED_BY[self.kind]:
            if getattr(self, name) is None:
                raise CheckpointError(f"model config: rope scaling {self.kind} needs {name}")
        for name in ("beta_fast", "beta_slow"):
            if not 1 / MOST_ROTATIONS <= getattr(self, name) <= MOST_ROTATIONS:
                raise CheckpointError(
                    f"model config: {name}={getattr(self, name)} must be between "
                    f"{1 / MOST_ROTATIONS} and {MOST_ROTATIONS}"
                )
        if self.kind == "llama3":
            assert self.low_freq_factor is not None and self.high_freq_factor is not None
            if self.high_freq_factor <= self.low_freq_factor:
                raise CheckpointError(
                    f"model config: high_freq_factor={self.high_freq_factor} must be above "
                    f"low_freq_factor={self.low_freq_factor}"
                )


GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh")
"""Activations of which the first linear layer holds a gate and an up projection."""


def _check_rotated(config: ModelConfig) -> None:
    """Raises CheckpointError unless a head has the pairs that are rotated."""
    span, head_dim = config.rotary_span, config.head_dim
    of = f" of which {span} are rotated" if config.rotary_fraction < 1 else ""
    if not span or config.rotary_dim > head_dim:
        raise CheckpointError(
            f"model config: head_dim={head_dim}{of} must be even for rotary embeddings"
        )
    for scaling in (config.rope_scaling, config.sliding_rope_scaling):
        if span % 2 and scaling is not None and scaling.kind != "linear":
            raise CheckpointError(
                f"model config: head_dim={head_dim}{of} must be even for rope scaling "
                f"{scaling.kind}"
            )


def _json_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a megatron-core model: ``GPTModel``, or one with Mamba-2 layers.

    ``head_dim`` is megatron's ``kv_channels``, ``num_kv_heads`` its ``num_query_groups``.
    ``vocab_size`` counts the rows of the embedding. All sizes are in elements, windows in tokens.
    Layers count from 0.

    Args:
        norm_bias: LayerNorm has a bias.
        zero_centered_gamma: norms multiply by 1 + their weight.
        norm_placement: norms stand in front of attention and MLP ("pre"), behind them, before the
            residual addition ("post"), or at both places.
        parallel_residual: attention and MLP read the same hidden states: each through a norm of
            its own ("two_norms"), or both through the first ("one_norm").
        qk_norm_kind: what ``qk_norm`` norms: each head by the same weights ("head"), each by its
            own ("each_head"), all heads as one vector ("projection"), or each without weights
            ("l2").
        attention_scale: of the scores; None is 1 / sqrt(head_dim).
        attention_soft_cap: scores s become cap * tanh(s / cap); likewise ``logit_soft_cap``.
        sliding_window: tokens that a layer of ``sliding_layers`` attends to, its own included;
            None is full attention. ``sliding_layers`` None means all layers.
        rotary_fraction: share of each head that is rotated (megatron's ``rotary_percent``).
        nope_layers: layers without rotation.
        sliding_rope_theta: of layers with a window; None takes ``rope_theta`` and
            ``rope_scaling``. Their own scaling is ``sliding_rope_scaling``.
        attention_sinks: each head has a logit of its own in the softmax, of a token without a value
            (GPT-OSS; megatron's ``softmax_type`` "learnable").
        latent_attention: keys and values come from a latent, which alone is kept; ``head_dim`` is
            that of queries and keys, rotated part included.
        activation_limit: of "clamped_swiglu", ``x * sigmoid(1.702 x) * (up + 1)``: x is at most the
            limit, ``up`` from minus to plus the limit.
        query_scaling_beta: the query of position p is multiplied by 1 + beta *
            log(1 + floor(p / query_scaling_tokens)) (Llama 4, Ministral 3). Without
            ``query_scaling_tokens`` these are the ``original_max_position_embeddings`` of
            ``rope_scaling``, or ``max_sequence_length``.
        residual_multiplier: of what attention and MLP add to the residual stream.
        num_moe_experts: experts of a mixture-of-experts layer; None has none. Its other fields have
            megatron's names: ``moe_*``.
        moe_layer_freq: one number a layer, 1 for a layer of experts, 0 for a dense one, of
            ``ffn_hidden_size``; None makes all layers such of experts.
        moe_ffn_hidden_size: of an expert.
        moe_router_topk: experts of a token.
        moe_router_pre_softmax: scores are a softmax over all experts; else over the chosen ones.
            Sigmoid scores are divided by their sum over the chosen ones.
        moe_router_num_groups, moe_router_group_topk: a token's experts are of the
            ``moe_router_group_topk`` groups with the largest sum of the best ``moe_router_topk /
            moe_router_group_topk`` scores in a group (DeepSeek-V3, arXiv:2412.19437), or, with
            ``moe_router_group_max``, with the largest score (DeepSeek-V2).
        moe_router_topk_scaling_factor: of the weights of the chosen experts.
        moe_router_enable_expert_bias: a bias of each expert is added to sigmoid scores, for the
            choice alone.
        moe_router_bias: the router's linear layer has a bias.
        moe_shared_expert_intermediate_size: of an MLP that each token passes; None has none.
            ``moe_shared_expert_gate`` multiplies its output by a sigmoid.
        moe_latent_size: experts read and write a projection of this many elements; None has none.
        position_embedding: "none" leaves the order of tokens to the causal mask and to Mamba.
        hybrid_override_pattern: a letter for each layer, which is one part behind one norm: "M" a
            Mamba-2 mixer (arXiv:2405.21060), "*" attention, "-" an MLP, "E" experts. None for
            layers of attention and MLP.
        mamba_num_heads: None is twice the hidden size over ``mamba_head_dim``. The next fields
            are megatron's too; ``mamba_conv_kernel`` is its mixer's ``d_conv``.

    Raises:
        CheckpointError: a value is out of range or two values contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_sequence_length: int
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    norm_bias: bool = True
    zero_centered_gamma: bool = False
    norm_placement: Literal["pre", "post", "both"] = "pre"
    parallel_residual: Literal["one_norm", "two_norms"] | None = None
    activation: Literal[
        "swiglu", "clamped_swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu",
        "squared_relu",
    ] = "swiglu"  # fmt: skip
    activation_limit: float | None = None
    qk_norm: bool = False
    qk_norm_kind: Literal["head", "each_head", "projection", "l2"] = "head"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    latent_attention: LatentAttention | None = None
    logit_soft_cap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    position_embedding: Literal["rope", "learned_absolute", "none"] = "rope"
    rotary_fraction: float = 1.0
    nope_layers: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_rope_theta: float | None = None
    sliding_rope_scaling: RopeScaling | None = None
    query_scaling_beta: float | None = None
    query_scaling_tokens: int | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    mtp_num_layers: int = 0
    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_max: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_latent_size: int | None = None
    hybrid_override_pattern: str | None = None
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    mamba_conv_kernel: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self, may_be_zero=("mtp_num_layers",))
        if self.hybrid_override_pattern is not None:
            check_hybrid(self)
        if self.num_attention_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: num_attention_heads={self.num_attention_heads} must be a multiple "
                f"of num_kv_heads={self.num_kv_heads}"
            )
        if self.rotary_fraction > 1:
            raise CheckpointError(
                f"model config: rotary_fraction={self.rotary_fraction} must be at most 1"
            )
        if self.position_embedding == "rope":
            _check_rotated(self)
        for scaling in (self.rope_scaling, self.sliding_rope_scaling):
            if scaling is None:
                continue
            if scaling.kind == "yarn" and 1 in (self.rope_theta, self.sliding_rope_theta):
                raise CheckpointError("model config: rope scaling yarn needs a theta other than 1")
            if scaling.kind == "dynamic" and self.rotary_dim < 4:
                raise CheckpointError(
                    f"model config: rope scaling dynamic needs more than {self.rotary_dim} rotated "
                    "elements of a head"
                )
            for factors in (scaling.short_factor, scaling.long_factor):
                if factors is not None and (len(factors) != self.rotary_dim // 2 or 0 in factors):
                    raise CheckpointError(
                        f"model config: short_factor and long_factor must have "
                        f"{self.rotary_dim // 2} elements above 0, one for each rotated pair"
                    )
        if (self.activation == "clamped_swiglu") != (self.activation_limit is not None):
            raise CheckpointError(
                "model config: activation='clamped_swiglu' and activation_limit need each other"
            )
        if self.latent_attention is not None:
            check_latent(self, self.latent_attention)
        if self.qk_norm_kind == "l2" and self.normalization != "RMSNorm":
            raise CheckpointError("model config: qk_norm_kind='l2' needs normalization='RMSNorm'")
        if self.num_moe_experts is not None:
            from megatron_async.models.moe.check import check_experts

            check_experts(self)

    @property
    def gated(self) -> bool:
        """Whether the MLP's first linear layer holds a gate and an up projection."""
        return self.activation in GATED

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated: the first ones, or, with latents, the last. They
        are whole pairs, where ``rotary_fraction`` makes an odd number too."""
        return self.rotary_span + self.rotary_span % 2

    @property
    def rotary_span(self) -> int:
        """The number of elements by which the exponents of frequencies are divided."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_fraction)

    def layers_of(self, letter: str) -> tuple[int, ...]:
        """Layers of a kind of ``hybrid_override_pattern``; without one each layer attends ("*") and
        has an MLP ("-")."""
        if self.hybrid_override_pattern is None:
            return tuple(range(self.num_layers)) if letter in "*-" else ()
        return tuple(n for n, kind in enumerate(self.hybrid_override_pattern) if kind == letter)

    @property
    def mamba(self) -> MambaSizes:
        """Sizes of the Mamba-2 layers."""
        return mamba_sizes(self)

    def attention_window(self, layer: int) -> int | None:
        """Tokens that ``layer`` attends to; None for all."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    @property
    def expert_layer_count(self) -> int:
        """Layers of the decoder with experts."""
        if self.hybrid_override_pattern is not None:
            return len(self.layers_of(EXPERTS))
        if self.num_moe_experts is None or self.moe_layer_freq is None:
            return 0 if self.num_moe_experts is None else self.num_layers
        return sum(self.moe_layer_freq)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of ``layer`` is a mixture of experts. Layers for multi-token prediction
        are like the last one."""
        if self.hybrid_override_pattern is not None:
            return self.hybrid_override_pattern[min(layer, self.num_layers - 1)] == EXPERTS
        if self.num_moe_experts is None or self.moe_layer_freq is None:
            return self.num_moe_experts is not None
        return self.moe_layer_freq[min(layer, self.num_layers - 1)] == 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of :meth:`from_dict`."""
        return dataclasses.asdict(self, dict_factory=_json_object)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from plain JSON types; unknown names are an error.

        Raises:
            CheckpointError: a name is unknown or missing, or a value is invalid.
        """
        values = dict(values)
        try:
            for name in ("rope_scaling", "sliding_rope_scaling"):
                if values.get(name) is not None:
                    values[name] = RopeScaling(**values[name])
            if values.get("latent_attention") is not None:
                values["latent_attention"] = LatentAttention(**values["latent_attention"])
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"model config: {error}") from error

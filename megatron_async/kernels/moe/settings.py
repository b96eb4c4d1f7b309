"""What a layer of experts computes, as data that the reference and the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.errors import ConfigError

SOFTMAX, SIGMOID = "softmax", "sigmoid"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How a router turns logits into experts and weights.

    Args:
        num_experts, top_k: experts of the layer, and how many a token gets.
        score_function: ``"softmax"`` or ``"sigmoid"``.
        pre_softmax: softmax over all experts, and then the choice; False takes the softmax over the
            logits of the chosen ones. A sigmoid is always taken before.
        normalize: weights of the chosen experts are divided by their sum. megatron-core does that
            with a sigmoid and more than one expert a token, never with a softmax.
        num_groups, kept_groups: of group-limited routing: experts are chosen from the groups with
            the highest scores; 1 and 1 choose from all.
        group_score_experts: a group's score is the sum of the scores of this many of its best
            experts: ``top_k // kept_groups`` in megatron-core and DeepSeek-V3, 1 in DeepSeek-V2.
        scaling_factor: weights are multiplied by it at the end.

    Raises:
        ConfigError: a field does not fit.
    """

    num_experts: int
    top_k: int
    score_function: str = SOFTMAX
    pre_softmax: bool = False
    normalize: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    group_score_experts: int = 1
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} must lie between 1 and num_experts={self.num_experts}"
            )
        if self.score_function not in (SOFTMAX, SIGMOID):
            raise ConfigError(
                f"score_function={self.score_function!r} must be {SOFTMAX!r} or {SIGMOID!r}"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}"
            )
        if not 1 <= self.kept_groups <= self.num_groups:
            raise ConfigError(
                f"kept_groups={self.kept_groups} must lie between 1 and "
                f"num_groups={self.num_groups}"
            )
        of_group = self.num_experts // self.num_groups
        if self.top_k > of_group * self.kept_groups:
            raise ConfigError(
                f"top_k={self.top_k} is more than the {of_group * self.kept_groups} experts of "
                f"kept_groups={self.kept_groups}"
            )
        if not 1 <= self.group_score_experts <= of_group:
            raise ConfigError(
                f"group_score_experts={self.group_score_experts} must lie between 1 and the "
                f"{of_group} experts of a group"
            )

    @property
    def chooses_scores(self) -> bool:
        """Whether experts are chosen by their scores; else by their logits."""
        return self.score_function == SIGMOID or self.pre_softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """What is between an expert's two linear layers.

    Args:
        function: one of :data:`ACTIVATIONS`; ``"quick_gelu"`` is ``x * sigmoid(1.702 x)``.
        gated: the first layer gives ``[gate, up]``, the gate in the first half, and the result is
            ``function(gate) * (up + offset)``.
        limit: the gate is at most ``limit``, ``up`` from ``-limit`` to ``limit``; None leaves both.
        offset: added to ``up``, 1 in GPT-OSS.

    Raises:
        ConfigError: the function is unknown, or a field needs ``gated``.
    """

    function: str = "silu"
    gated: bool = True
    limit: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.function not in ACTIVATIONS:
            raise ConfigError(f"function={self.function!r} must be one of {ACTIVATIONS}")
        if not self.gated and self.offset:
            raise ConfigError("offset needs gated=True: it is added to the second half")

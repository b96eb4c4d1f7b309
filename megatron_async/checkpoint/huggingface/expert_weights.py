"""Weights of experts in Hugging Face directories: which stored tensor goes where."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megatron_async.checkpoint.huggingface.interleaved_experts import interleaved_targets
from megatron_async.models.description.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How tensors of a layer of experts are named behind the layer's prefix, without ".weight".

    Args:
        expert: of expert n; the gate's and the up projection's name, or one for both, and the down
            projection's follow.
        stacked: prefix of the tensors of all experts in one, where they are stored so (in the
            memory of transformers 5): ``stacked_fc1`` and ``stacked_fc2``, ``[experts, out, in]``.
            The router's name is then ``stacked_router``.
        interleaved: experts are always stacked, gate and up projection in turns, see
            :mod:`~megatron_async.checkpoint.huggingface.interleaved_experts`.
        shared_fc1, shared_fc2, shared_gate: of the shared experts.
        expert_bias: the whole name of what is added to scores for the choice of experts.
        latent: prefix of the projections to and from experts of ``moe_latent_size``.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    fc1: tuple[str, ...] = ("gate_proj", "up_proj")
    fc2: str = "down_proj"
    stacked: str = "mlp.experts."
    stacked_fc1: str = "gate_up_proj"
    stacked_fc2: str = "down_proj"
    stacked_router: str = "mlp.gate"
    interleaved: bool = False
    shared_fc1: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_fc2: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    expert_bias: str = "mlp.gate.e_score_correction_bias"
    latent: str = "mlp."


def expert_targets(
    targets: Any,
    config: ModelConfig,
    names: ExpertNames,
    theirs: str,
    ours: str,
    stored: Collection[str],
) -> None:
    """Targets of a layer's experts, by the prefixes of its stored names and of its parameters.

    Args:
        targets: a ``huggingface_weights.Targets``.
        stored: names of the stored tensors, which may be a part; they decide whether experts are
            stacked.
    """
    stacked = f"{theirs}{names.stacked}"
    either = (f"{stacked}{name}" for name in (names.stacked_fc1, names.stacked_fc2))
    is_stacked = names.interleaved or any(name in stored for name in either)
    router = theirs + (names.stacked_router if is_stacked else names.router)
    targets.whole(f"{router}.weight", f"{ours}.mlp.router.weight")
    if config.moe_router_bias:
        targets.whole(f"{router}.bias", f"{ours}.mlp.router.bias")
    if config.moe_router_enable_expert_bias:
        targets.whole(f"{theirs}{names.expert_bias}", f"{ours}.mlp.router.expert_bias")
    if names.interleaved:
        interleaved_targets(targets, stacked, f"{ours}.mlp.experts", stored)
    elif is_stacked:
        fc1, groups = f"{ours}.mlp.experts.linear_fc1.weight", 2 if config.gated else 1
        targets.whole(f"{stacked}{names.stacked_fc1}", fc1, groups=groups)
        targets.whole(f"{stacked}{names.stacked_fc2}", f"{ours}.mlp.experts.linear_fc2.weight")
    else:
        _each(targets, config, names, theirs, f"{ours}.mlp.experts")
    if config.moe_latent_size is not None:
        for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
            targets.whole(f"{theirs}{names.latent}{name}", f"{ours}.mlp.{name}")
    if config.moe_shared_expert_intermediate_size is not None:
        _shared(targets, config, names, theirs, f"{ours}.mlp.shared_experts")


def _each(targets: Any, config: ModelConfig, names: ExpertNames, theirs: str, ours: str) -> None:
    """Place the weights of each expert by itself, biases included."""
    assert config.num_moe_experts is not None
    for number in range(config.num_moe_experts):
        expert = theirs + names.expert.format(number)
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            fc1 = [f"{expert}{name}.{kind}" for name in names.fc1]
            targets.parts(fc1, f"{ours}.linear_fc1.{kind}", number)
            targets.parts([f"{expert}{names.fc2}.{kind}"], f"{ours}.linear_fc2.{kind}", number)


def _shared(targets: Any, config: ModelConfig, names: ExpertNames, theirs: str, ours: str) -> None:
    fc1 = [f"{theirs}{name}.weight" for name in names.shared_fc1]
    targets.parts(fc1, f"{ours}.linear_fc1.weight")
    targets.whole(f"{theirs}{names.shared_fc2}.weight", f"{ours}.linear_fc2.weight")
    if config.moe_shared_expert_gate:
        targets.whole(f"{theirs}{names.shared_gate}.weight", f"{ours}.gate_weight")

"""Multi-latent attention as a configuration describes it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.errors import CheckpointError
from megatron_async.models.description.config_fields import check_fields
from megatron_async.models.description.config_protocol import ConfigFields

_NOT_WITH_LATENTS = (
    "qk_norm", "qkv_bias", "attention_sinks", "attention_soft_cap", "sliding_window",
    "query_scaling_beta",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434), in megatron's words.

    Args:
        kv_lora_rank: elements of the latent that all heads' keys and values are made of.
        q_lora_rank: likewise of queries; None projects them from the hidden state.
        qk_pos_emb_head_dim: rotated elements of queries, and of the one key that all heads share;
            pairs are neighbours.
        v_head_dim: of a head's value.
        norm_epsilon: of the latents' norms; None takes the model's.

    Raises:
        CheckpointError: a value is out of range.
    """

    kv_lora_rank: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    norm_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def cached(self) -> int:
        """Elements that a token takes in the cache of a layer."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


def check_latent(config: ConfigFields, latent: LatentAttention) -> None:
    """Raises CheckpointError for what does not go with latents."""
    if config.head_dim <= latent.qk_pos_emb_head_dim:
        raise CheckpointError(
            f"model config: head_dim={config.head_dim} must be above "
            f"qk_pos_emb_head_dim={latent.qk_pos_emb_head_dim}, which is a part of it"
        )
    if config.num_kv_heads != config.num_attention_heads:
        raise CheckpointError(
            f"model config: num_kv_heads={config.num_kv_heads} must be "
            f"num_attention_heads={config.num_attention_heads} with latent_attention"
        )
    if config.position_embedding != "rope":
        raise CheckpointError("model config: latent_attention needs position_embedding='rope'")
    for name in _NOT_WITH_LATENTS:
        value = getattr(config, name)
        if value not in (None, False):
            raise CheckpointError(
                f"model config: {name}={value!r} does not go with latent_attention"
            )

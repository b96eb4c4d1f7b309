"""What the checks of a configuration's parts read of it; ``config.py`` has the class, and says what
the fields are."""

from __future__ import annotations

from typing import Protocol


class ConfigFields(Protocol):
    """Fields of a :class:`~megatron_async.models.description.config.ModelConfig`."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def position_embedding(self) -> str: ...

    @property
    def hybrid_override_pattern(self) -> str | None: ...

    @property
    def mamba_num_heads(self) -> int | None: ...

    @property
    def mamba_head_dim(self) -> int: ...

    @property
    def mamba_num_groups(self) -> int: ...

    @property
    def mamba_state_dim(self) -> int: ...

    @property
    def mamba_conv_kernel(self) -> int: ...

    @property
    def num_moe_experts(self) -> int | None: ...

    @property
    def moe_layer_freq(self) -> tuple[int, ...] | None: ...

    @property
    def moe_ffn_hidden_size(self) -> int | None: ...

    @property
    def moe_router_topk(self) -> int: ...

    @property
    def moe_router_score_function(self) -> str: ...

    @property
    def moe_router_enable_expert_bias(self) -> bool: ...

    @property
    def moe_router_num_groups(self) -> int | None: ...

    @property
    def moe_router_group_topk(self) -> int | None: ...

    @property
    def moe_shared_expert_gate(self) -> bool: ...

    @property
    def moe_shared_expert_intermediate_size(self) -> int | None: ...

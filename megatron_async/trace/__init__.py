"""``megatron-async trace``."""

"""``megatron-async verify``."""

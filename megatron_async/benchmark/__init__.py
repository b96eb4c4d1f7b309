"""``megatron-async bench``."""

"""Checkpoints of Megatron-LM's training and of dist_checkpointing."""

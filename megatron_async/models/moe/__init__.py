"""Mixture of experts under megatron-core's parameter names."""

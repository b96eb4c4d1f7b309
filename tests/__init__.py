"""Tests of megatron_async."""

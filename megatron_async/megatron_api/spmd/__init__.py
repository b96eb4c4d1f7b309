"""Engines whose ranks are all processes of a script (SPMD): each has its share of a model that
megatron-core has divided, and makes the same calls. See ``docs/scaling.md``."""

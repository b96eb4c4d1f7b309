"""Sampling whose tokens are a pure function of logits, parameters, seed and position."""

"""Weights on their way from a trainer's process to an engine's, without a file.

``DynamicInferenceEngine.update_weights`` takes what arrives: a state dict with megatron-core's
parameter names. It is checked as a whole before the first copy, so a transfer that fails on the way
leaves the old weights.
"""

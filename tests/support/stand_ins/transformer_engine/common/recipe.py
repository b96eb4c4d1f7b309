"""STAND-IN."""


class DelayedScaling:
    """A class that megatron-core derives one from; FP8 is not tested."""

"""STAND-IN."""


class CudaRNGStatesTracker:
    """A class that megatron-core derives one from."""


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    """Nothing is recomputed in inference."""
    raise NotImplementedError

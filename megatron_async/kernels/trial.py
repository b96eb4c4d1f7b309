"""Kernels on trial: proved in Triton's interpreter, in the emulator and by compiling them for
sm_90a, but not yet run on a GPU. Engines take the torch code and the modules instead; the tests
turn them on."""

MOE = False
"""Those of layers of experts in decode steps."""

LATENT = False
"""Multi-latent attention, in decode steps and in prefill."""

REASON = "on trial: it has not run on a GPU yet"
"""Why a block of a model does not run in one of them."""

"""Groups of kernels, and whether engines run them. A new group is on trial, False: proved in
Triton's interpreter, in the emulator and by compiling it for sm_90a, but not yet run on a GPU.
Engines then take the torch code and the modules instead; the tests turn it on. Tests also turn a
group off, to compare."""

MAMBA = True
"""Kernels of Mamba-2 layers: rows and windows, prefill chunks."""

MOE = True
"""Kernels of layers of experts in decode steps."""

MOE_ROW = True
"""Among these, the kernel for a few rows is used in place of the three."""

MOE_WIDENED = True
"""Also among them, those of experts in e4m3 and MXFP4, and of many rows in bfloat16, in CUDA, in
place of the Triton kernels."""

GROUPED_EXPERTS = True
"""Grouped GEMMs of layers of experts, for more tokens than those kernels take."""

LATENT = True
"""Multi-latent attention, in decode steps and in prefill."""

GUESSES = True
"""The kernel that makes guesses of the host the drafts of rows."""

REASON = "on trial: it has not run on a GPU yet"
"""Why a block of a model does not run in one of them."""

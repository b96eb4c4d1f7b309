"""Tests. Kernels on trial are on in them, but not in the processes that they start."""

from megatron_async.kernels import trial

trial.LATENT = True  # before the modules that look are imported
trial.MOE = True

"""The package's version, read by setup.py without importing anything else."""

__version__ = "0.1.0"

"""Models with Mamba-2 layers."""

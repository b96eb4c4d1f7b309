"""Mamba-2 layers, and hybrid models that have them next to attention, MLPs and experts."""

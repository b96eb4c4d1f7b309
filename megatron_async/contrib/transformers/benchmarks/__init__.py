"""Timings beside stock ``generate``, and their plots."""

"""The blocks of a decode step in fused kernels."""

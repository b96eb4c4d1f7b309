"""Attention in batch-invariant mode: a token has one order of sums, in rows and in chunks."""

"""Batches and requests of transformers over our engine."""

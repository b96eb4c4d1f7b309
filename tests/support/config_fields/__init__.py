"""Configs that differ in a field from a small one, loaded by transformers and by this package."""

"""Hugging Face directories: configuration and weights."""

"""Grammars as tables over bytes, for the device."""

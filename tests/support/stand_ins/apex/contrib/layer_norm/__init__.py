"""STAND-IN."""

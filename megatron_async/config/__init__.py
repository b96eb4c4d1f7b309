"""The configuration of an engine."""

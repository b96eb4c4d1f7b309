"""Recorded steps as events that Perfetto shows."""

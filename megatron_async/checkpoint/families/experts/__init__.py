"""Models with experts."""

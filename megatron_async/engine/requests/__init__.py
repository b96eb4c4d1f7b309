"""A request from its check to its finished record."""

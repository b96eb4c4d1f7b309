"""How long a test waits for what must come."""

PATIENCE_SECONDS = 900.0
"""Far longer than anything takes on a machine that others keep busy, so that no verdict depends on
speed: who waits so long is stuck. Less than the time limit of a test, so that it can say who."""

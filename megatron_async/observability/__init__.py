"""What the engine did: counters, and later traces and metrics."""

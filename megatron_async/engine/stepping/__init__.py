"""The step loop, and the threads that step it."""

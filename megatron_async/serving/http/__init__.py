"""HTTP itself: the process that serves it, what every request passes, and the rights of each."""

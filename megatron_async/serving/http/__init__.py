"""HTTP itself: the process that serves it, what every request passes, and who may what."""

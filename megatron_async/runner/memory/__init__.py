"""What lies on the device between steps, and what attention is told of it."""

"""What is measured: engines, loads, clients, and the host."""

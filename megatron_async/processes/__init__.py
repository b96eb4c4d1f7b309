"""Processes that other processes of ours start: the same kit under server, ranks and replicas."""

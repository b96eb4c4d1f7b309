"""Rollout engines for RL trainers: each class makes this server's engine what that trainer's code
calls.

A trainer's package is imported when its class is first used. The engine runs in a server of its
own (``megatron-async serve --server-dev-mode``), which the classes call, and may start.
"""

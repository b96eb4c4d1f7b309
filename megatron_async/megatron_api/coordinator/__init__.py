"""Megatron's inference coordinator and its client over one engine: messages of msgpack over ZMQ."""

"""What a user asks of an engine and gets back, with megatron-core's names."""

"""The modules of decoder layers, with megatron-core's constructors."""

"""What commands take: options, Megatron's flags, prompts, keys."""

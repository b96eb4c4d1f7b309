"""A front end: from prompts to the engine process, and from its outputs to text."""

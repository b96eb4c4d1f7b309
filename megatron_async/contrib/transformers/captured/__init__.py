"""``generate`` whose decode step is one captured graph; imports torch and transformers alone."""

"""``generate`` whose host does not wait for stop checks; imports torch and transformers alone."""

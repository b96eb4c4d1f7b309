"""Signs of life of several processes, and what starts them again."""

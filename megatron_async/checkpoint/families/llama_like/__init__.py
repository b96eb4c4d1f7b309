"""Dense models in the manner of Llama."""

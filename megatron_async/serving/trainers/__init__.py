"""What a trainer asks of the server: weights that it sends, and requests that it aborts."""

"""How the processes of a model's ranks find each other, and what they share."""

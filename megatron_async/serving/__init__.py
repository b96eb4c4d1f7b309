"""The text-generation server: an HTTP front end, and the engine in a process of its own."""

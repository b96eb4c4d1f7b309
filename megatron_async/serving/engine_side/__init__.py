"""The engine process: requests of all front ends, and what they ask of the engine."""

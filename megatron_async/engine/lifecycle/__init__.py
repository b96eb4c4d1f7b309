"""What an engine does between steps: new weights, sleep, events, its timeline."""

"""What a model looks like, independent of its weights."""

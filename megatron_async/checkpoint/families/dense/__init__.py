"""Other dense models."""

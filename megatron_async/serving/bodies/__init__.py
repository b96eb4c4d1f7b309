"""What clients send: the types of its fields, and those that several requests have."""

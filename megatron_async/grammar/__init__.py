"""Structured outputs: text that conforms to a JSON schema, a regular expression or a grammar."""

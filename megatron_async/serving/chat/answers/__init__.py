"""The texts of answers, parsed as they come: thoughts, content and calls of tools."""

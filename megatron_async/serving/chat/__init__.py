"""Chats: messages, templates, and tool calls in what a model writes."""

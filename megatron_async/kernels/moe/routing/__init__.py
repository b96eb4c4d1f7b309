"""Routers of experts: logits, and the choice among them."""

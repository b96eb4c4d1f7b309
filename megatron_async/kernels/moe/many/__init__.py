"""Experts of many tokens each: the order of their rows, and grouped GEMMs whose weights TMA
brings."""

"""Products whose rows have bits of their own, whatever their number."""

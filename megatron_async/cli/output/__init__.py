"""How commands show what they find."""

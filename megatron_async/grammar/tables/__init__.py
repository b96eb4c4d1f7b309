"""Tables of the last grammars, and the process that makes them."""

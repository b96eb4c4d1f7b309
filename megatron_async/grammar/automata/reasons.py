"""Why a request is not guided by a token automaton, where others than the grammar have to know."""

from __future__ import annotations

TOO_LARGE = "the table of the grammar is larger than the pool"
LATER = "the table of the grammar was not there when the request was added"
FAILED = "to make the table of the grammar failed"

"""The keys of a server: by options, else by variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_async.errors import ConfigError

KEY_VARIABLE = "MEGATRON_ASYNC_API_KEY"
ADMIN_KEY_VARIABLE = "MEGATRON_ASYNC_ADMIN_API_KEY"


def keys_of(given: Sequence[str], variable: str) -> tuple[str, ...]:
    """The keys of an option, or where that is not given those of a variable, with spaces between
    them; none where there is no such variable.

    Raises:
        ConfigError: the variable is blank, as one is whose secret was not found, or no list of
            keys.
    """
    if given:
        return tuple(given)
    text = os.environ.get(variable)
    if text is None:
        return ()
    if not text.strip():
        raise ConfigError(f"{variable} is set and blank; set it to a key, or unset it")
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(
            f"{variable} must be keys of printable ASCII characters, with spaces between them, and "
            "no line breaks"
        )
    return tuple(text.split())

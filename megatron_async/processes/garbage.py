"""When Python looks for garbage: seldom while modules are imported, whose millions of objects stay,
and in a process that serves among what came later alone."""

from __future__ import annotations

import gc

WHILE_IMPORTING = 200_000
"""New objects until Python looks for garbage. Its own 700 make a quarter of the time that torch and
megatron-core take to be imported."""
_DEFAULT = gc.get_threshold()


def expect_imports() -> None:
    """Look seldom from now on."""
    gc.set_threshold(WHILE_IMPORTING)


def imports_are_over() -> None:
    """Look as often as Python does."""
    gc.set_threshold(*_DEFAULT)


def keep_all() -> None:
    """What is there now stays for good, and is not looked at again while requests wait."""
    gc.collect()
    gc.freeze()
    imports_are_over()

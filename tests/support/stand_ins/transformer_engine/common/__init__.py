"""STAND-IN."""

from . import recipe  # noqa: F401

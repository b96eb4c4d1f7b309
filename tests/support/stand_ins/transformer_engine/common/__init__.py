"""STAND-IN."""

from tests.support.stand_ins.transformer_engine.common import recipe  # noqa: F401

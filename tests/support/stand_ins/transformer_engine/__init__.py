"""STAND-IN for Transformer Engine, for tests: see the README next to it."""

from tests.support.stand_ins.transformer_engine import common, pytorch  # noqa: F401

__version__ = "1.8.0"
IS_STAND_IN = True

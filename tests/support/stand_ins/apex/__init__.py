"""STAND-IN for Apex, for tests: see the README next to it."""

IS_STAND_IN = True

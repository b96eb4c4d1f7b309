"""The package's version, which pyproject.toml reads without importing anything."""

__version__ = "0.1.0"

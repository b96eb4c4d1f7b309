"""A stand-in, see the README beside it."""

__version__ = "0.30.0"


class LLM:
    """Imported, and not used by the client."""


class RequestOutput:
    """Imported, and not used by the client."""


class SamplingParams:
    """Imported, and not used by the client."""

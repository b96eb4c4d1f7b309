"""A stand-in."""


class StructuredOutputsParams:
    """Imported, and not used by the client."""

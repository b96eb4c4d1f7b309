"""STAND-IN."""


def cast_to_fp8(*arguments, **options):
    """FP8 is not tested."""
    raise NotImplementedError

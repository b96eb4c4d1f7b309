"""What the path of a model names, and its tokenizer: what a front end needs, without torch."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from megatron_async.errors import CheckpointError
from megatron_async.models.config import ModelConfig
from megatron_async.models.made_up_tokenizer import made_up_tokenizer
from megatron_async.models.shapes import SHAPES
from megatron_async.tokenizer import Tokenizer

EMBEDDED = "tiny"
RANDOM = "random:"
"""Before the name of a shape: random weights, and a tokenizer of random words."""

SUPPORTED = (
    "supported are Hugging Face directories with safetensors weights of the types in "
    "docs/models.md, this package's own, and megatron dist_checkpointing ones with this package's "
    "config.json"
)


def random_shape(path: str | Path) -> ModelConfig | None:
    """The shape that "random:NAME" names; None for any other path.

    Raises:
        CheckpointError: there is no such shape.
    """
    if not isinstance(path, str) or not path.startswith(RANDOM):
        return None
    name = path.removeprefix(RANDOM)
    if name not in SHAPES:
        raise CheckpointError(f"{path}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """That of a model directory, of "tiny", or of "random:NAME"; raises CheckpointError."""
    shape = random_shape(path)
    if shape is not None:
        return made_up_tokenizer(shape.vocab_size)
    return Tokenizer.from_directory(model_directory(path))


def model_directory(path: str | Path) -> Path:
    if path != EMBEDDED:
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{path}: not a directory; {SUPPORTED}")
        return directory
    embedded = importlib.resources.files("megatron_async") / "assets" / EMBEDDED
    if not isinstance(embedded, Path) or not embedded.is_dir():
        raise CheckpointError(
            f"{EMBEDDED}: this installation has no embedded model ({embedded}); for a directory "
            f"of that name write ./{EMBEDDED}"
        )
    return embedded

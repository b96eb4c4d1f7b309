"""What the path of a model names, and its tokenizer: what a front end needs, without torch."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from megatron_async.checkpoint.megatron.megatron_root import (
    BACKEND_FILE,
    checkpoint_directory,
    tokenizer_directories,
)
from megatron_async.checkpoint.reading.regular_files import is_directory, is_regular_file
from megatron_async.errors import CheckpointError
from megatron_async.models.description.config import ModelConfig
from megatron_async.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer

CONFIG_FILE = "config.json"
IN_PACKAGE = ("tiny",)
"""The names of the models that are part of the package."""
IN_CHECKOUT = ("tiny-moe", "tiny-hybrid")
"""Models that only a checkout has, under ``tests/assets/``: they are there for tests."""
EMBEDDED = (*IN_PACKAGE, *IN_CHECKOUT)
RANDOM = "random:"
"""Before the name of a shape: random weights, and a tokenizer of random words."""

SUPPORTED = (
    "supported are Hugging Face directories with safetensors weights of the types in "
    "docs/models.md, this package's own, and megatron dist_checkpointing ones with the arguments "
    "of Megatron-LM's training or this package's config.json"
)


def random_shape(path: str | Path) -> ModelConfig | None:
    """The shape that "random:NAME" names; None for any other path.

    Raises:
        CheckpointError: there is no such shape.
    """
    if not isinstance(path, str) or not path.startswith(RANDOM):
        return None
    from megatron_async.models.description.shapes import SHAPES

    name = path.removeprefix(RANDOM)
    if name not in SHAPES:
        raise CheckpointError(f"{path}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def load_tokenizer(path: str | Path, tokenizer_model: str | Path | None = None) -> Tokenizer:
    """The tokenizer that is given, or that of a model directory, of an embedded model or of
    "random:NAME"; raises CheckpointError."""
    shape = random_shape(path)
    if shape is not None and tokenizer_model is None:
        from megatron_async.models.description.made_up_tokenizer import made_up_tokenizer

        return made_up_tokenizer(shape.vocab_size)
    directory = Path() if shape is not None else model_directory(path)
    return Tokenizer.from_directory(tokenizer_directory(directory, tokenizer_model) or directory)


def tokenizer_directory(directory: Path, given: str | Path | None = None) -> Path | None:
    """The directory of a model's ``tokenizer.json``: the one that was ``given``, as a directory or
    as that file; the model's own; or one that a checkpoint of Megatron-LM keeps or names. None if
    there is none.

    Raises:
        CheckpointError: the given one is not there, or a file is no regular file.
    """
    if given is not None:
        place = Path(given) if is_directory(Path(given)) else Path(given).parent
        named = place == Path(given) or Path(given).name == TOKENIZER_FILE
        if not named or not is_regular_file(place / TOKENIZER_FILE):
            raise CheckpointError(
                f"tokenizer_model={given}: no {TOKENIZER_FILE}, and no directory that has one"
            )
        return place
    for place in tokenizer_directories(directory):
        if is_regular_file(place / TOKENIZER_FILE):
            return place
    if not is_regular_file(directory / BACKEND_FILE) or is_regular_file(directory / CONFIG_FILE):
        return None
    from megatron_async.checkpoint.megatron.megatron_tokenizer import stored_tokenizer

    return stored_tokenizer(directory)


def model_directory(path: str | Path) -> Path:
    """The directory of a model's files: of the last iteration, for the root of a training.

    Raises:
        CheckpointError: there is none.
    """
    if path not in EMBEDDED:
        directory = Path(path)
        if not is_directory(directory):
            raise CheckpointError(f"{path}: not a directory; {SUPPORTED}")
        return checkpoint_directory(directory)
    package = importlib.resources.files("megatron_async")
    if path in IN_PACKAGE:
        embedded, why = package / "assets" / str(path), "this installation has no embedded model"
    else:
        embedded = package / ".." / "tests" / "assets" / str(path)
        why = "this test model is not installed; it is in a checkout of megatron-async"
    if not isinstance(embedded, Path) or not embedded.is_dir():
        raise CheckpointError(
            f"{path}: {why} ({embedded}). Run from a checkout, or give its directory; for a "
            f"directory of that name write ./{path}"
        )
    return embedded.resolve()

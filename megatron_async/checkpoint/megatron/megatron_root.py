"""Directories that Megatron-LM's training saves to: which of them is the model."""

from __future__ import annotations

from pathlib import Path

from megatron_async.checkpoint.reading.regular_files import is_directory, is_regular_file, read_file
from megatron_async.errors import CheckpointError, shown

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MOST_TRACKER_BYTES = 64
BACKEND_FILE = "metadata.json"
TOKENIZER_FOLDER = "tokenizer"


def checkpoint_directory(directory: Path) -> Path:
    """The directory of the last iteration, where ``directory`` is the root of a training;
    ``directory`` itself where it is none.

    Raises:
        CheckpointError: the root names an iteration that is not there, or what is there is of the
            format before ``dist_checkpointing``.
    """
    tracker = directory / TRACKER_FILE
    if is_regular_file(tracker):
        latest = directory / _folder(tracker)
        if not is_directory(latest):
            raise CheckpointError(f"{tracker}: names {latest.name}, which is not there")
        directory = latest
    _check_not_legacy(directory)
    return directory


def _folder(tracker: Path) -> str:
    text = read_file(tracker, MOST_TRACKER_BYTES).decode("ascii", "replace").strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise CheckpointError(f"{tracker}: {shown(text)} is neither an iteration nor release")
    return f"iter_{int(text):07d}"


def _check_not_legacy(directory: Path) -> None:
    # One folder for each rank, with tensor- and pipeline-parallel numbers.
    found = sorted(path.name for path in directory.glob("mp_rank_*"))
    if found and not is_regular_file(directory / BACKEND_FILE):
        raise CheckpointError(
            f"{directory}: {found[0]}/model_optim_rng.pt is of Megatron-LM's legacy format "
            "(--ckpt-format torch), a pickle that can run code; convert it: start the training "
            "that wrote it with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and give "
            "DIR/torch_dist"
        )


def tokenizer_directories(directory: Path) -> list[Path]:
    """Where a checkpoint may have its tokenizer: next to its weights, next to its iterations."""
    places = [directory, directory / TOKENIZER_FOLDER]
    if is_regular_file(directory.parent / TRACKER_FILE):
        places += [directory.parent, directory.parent / TOKENIZER_FOLDER]
    return places

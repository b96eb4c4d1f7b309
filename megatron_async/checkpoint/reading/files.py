"""Reading the files of a model directory, with every way they can be broken as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron_async.checkpoint.megatron.padded_vocabulary import PaddedVocabulary
from megatron_async.checkpoint.reading.json_file import one_line, read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.checkpoint.targets import Target, same_values
from megatron_async.config.engine_config import MAX_COUNT
from megatron_async.errors import CheckpointError
from megatron_async.models.description.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_INDEX_BYTES = 2**27
FP8 = "F8_E4M3"
"""In safetensors' words."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Description:
    """What a model directory says about itself, apart from the weights.

    ``vocabulary``: what it says of ids that are padding; None where it has none.
    """

    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: PaddedVocabulary | None = None


def parse_dtype(path: Path, value: Any) -> torch.dtype:
    """The dtype ``path`` names, bfloat16 where it names none."""
    if value is None:
        return torch.bfloat16
    if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
        raise CheckpointError(f"{path}: dtype={value!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[value.removeprefix("torch.")]


def dtype_name(dtype: torch.dtype) -> str:
    """The inverse of :func:`parse_dtype`."""
    return str(dtype).removeprefix("torch.")


def parse_token_ids(path: Path, name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the vocabulary, given as null, one int or a list of ints; each once."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_COUNT:
            raise CheckpointError(
                f"{path}: {name}={value!r} must be a token id or a list of token ids, "
                f"each of at most {MAX_COUNT}"
            )
        if token_id >= vocab_size:
            raise CheckpointError(
                f"{path}: {name}={token_id} is not one of the vocabulary's {vocab_size} tokens; "
                "correct it, or set it to null"
            )
    return tuple(dict.fromkeys(ids))


def weight_files(directory: Path) -> tuple[list[Path], frozenset[str]]:
    """The safetensors files of ``directory`` and the tensors its index, if any, promises.

    Raises:
        CheckpointError: there are no safetensors weights, or the index is corrupt.
    """
    if is_regular_file(directory / SINGLE_FILE):
        return [directory / SINGLE_FILE], frozenset()
    index = directory / INDEX_FILE
    if not is_regular_file(index):
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{directory}: {pickles[0]} is a pickle, which is never loaded because it can "
                f"run code; convert the weights to {SINGLE_FILE}"
            )
        raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be a non-empty object")
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file:
            raise CheckpointError(f"{index}: {file!r} is not a safetensors file beside the index")
    return [directory / file for file in sorted(set(weight_map.values()))], frozenset(weight_map)


def _stored_tensors(files: list[Path]) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, safetensors slice) of each stored tensor; one file is open at a time."""
    for file in files:
        if not is_regular_file(file):
            raise CheckpointError(f"{file}: no such file")
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield file, name, opened.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: truncated or corrupt: {one_line(error)}") from error


class StoredTensor(NamedTuple):
    """What the header of a file says; ``dtype`` in safetensors' words."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_headers(directory: Path) -> dict[str, StoredTensor]:
    """What the headers of the files of ``directory`` say of the stored tensors."""
    files, _ = weight_files(directory)
    return {
        name: StoredTensor(file, tuple(stored.get_shape()), stored.get_dtype())
        for file, name, stored in _stored_tensors(files)
    }


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors, from the headers of the files of ``directory``."""
    return {name: stored.shape for name, stored in stored_headers(directory).items()}


@dataclass(frozen=True, slots=True)
class SafetensorsWeights:
    """Safetensors files of a directory, and where their tensors go.

    Attributes:
        copies: names that may also be stored, and the targets that they must then equal.
        ignore: whether a name is of no weights of this rank.
    """

    directory: Path
    targets: dict[str, Target]
    copies: dict[str, str]
    ignore: Callable[[str], bool]

    def check(self) -> None:
        """Compare the headers of the files with the targets; no tensor is read.

        Raises:
            CheckpointError: a file is missing or corrupt; a tensor is missing, unexpected, stored
                twice, of the wrong shape or of a dtype that is not a plain float.
        """
        _check_headers(self.directory, self.targets, self.copies, self.ignore)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors that have targets, over the files' memory: a page is read when it is
        first looked at. Copies of them are looked at here.

        Raises:
            CheckpointError: as :meth:`check`, and where a copy differs.
        """
        self.check()
        files, _ = weight_files(self.directory)
        found = {
            name: stored[...]
            for _, name, stored in _stored_tensors(files)
            if name in self.targets or name in self.copies
        }
        for name in self.copies.keys() & found.keys():
            copied = self.copies[name]
            target, copy = self.targets[copied], found.pop(name)
            as_served = (
                target.select(each).to(target.view.dtype) for each in (copy, found[copied])
            )
            if not same_values(*as_served):
                raise _differs(self.directory, name, copied)
        return found

    def load(self) -> None:
        """Copy the weights into the targets, one tensor in memory at a time; raises as
        :meth:`check`, before the first of them, and where a copy differs."""
        self.check()
        files, _ = weight_files(self.directory)
        targets, copies = self.targets, self.copies
        for _, name, stored in _stored_tensors(files):
            if name in targets:
                targets[name].copy_from(stored[...])
        if not copies:
            return
        for file, name, stored in _stored_tensors(files):
            if name in copies and not targets[copies[name]].equals(stored[...]):
                raise _differs(file, name, copies[name])


def _differs(where: Path, name: str, tied: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name} differs from the tied {tied}; if both are meant, set "
        "tie_word_embeddings to false in config.json"
    )


def _check_headers(
    directory: Path,
    targets: dict[str, Target],
    copies: dict[str, str],
    ignore: Callable[[str], bool],
) -> None:
    files, promised = weight_files(directory)
    seen: set[str] = set()
    for file, name, stored in _stored_tensors(files):
        if name in seen:
            raise CheckpointError(f"{file}: {name} is stored in another file too")
        seen.add(name)
        if name not in targets and name not in copies:
            if ignore(name):
                continue
            raise CheckpointError(f"{file}: unexpected tensor {name}")
        target = targets[copies.get(name, name)]
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != target.shape:
            raise CheckpointError(
                f"{file}: {name} has shape {list(shape)}, expected {list(target.shape)}"
            )
        if dtype not in target.dtypes:
            fault = f"{name} has dtype {dtype}; supported are {', '.join(target.dtypes)}"
            if name in copies:
                fault += (
                    f", as {copies[name]} has it, to which config.json ties it: leave it out, or "
                    "set tie_word_embeddings to false"
                )
            elif dtype == FP8:
                fault += "; FP8 is read where quantization_config says so, in config.json"
            raise CheckpointError(f"{file}: {fault}")
    missing = (set(targets) | promised) - seen
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {min(missing)}{more} is missing")

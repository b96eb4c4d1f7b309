"""Round the weights of an embedded model, so that the wheel, which is a zip archive, is smaller.

Training does the same at its end. A step of 2^-9 takes a quarter off the packed size and leaves
loss and drafts as they were. This script measures before and after, and writes the model and its
``training.json`` again::

    PYTHONPATH=. python scripts/tiny/rounding.py tiny
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from corpus import read_corpus
from report import report
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.reading.files import SINGLE_FILE

STEP = 2.0**-9
LENGTH, ROWS, NEW_TOKENS, TOKENS_PER_BATCH = 2048, 64, 1024, 65536
"""The sizes of the evaluation are those of training."""


@torch.no_grad()
def round_to(weights: Iterable[Tensor], step: float) -> None:
    """Move each value to the nearest multiple of ``step``, a power of two, in place; a step of 0
    leaves all as it is. Large values, whose own dtype is coarser, do not move."""
    for weight in weights if step else ():
        weight.copy_((weight.float() / step).round() * step)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="of the model, written again")
    parser.add_argument("--step", type=float, default=STEP, help="a power of two")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Measure, round, write, measure again."""
    args = parse_arguments()
    directory, device = args.directory, torch.device(args.device)
    documents = read_corpus(LENGTH - 2).validation

    def measured() -> dict[str, Any]:
        model = load_pretrained(directory, device=device, dtype=torch.bfloat16).model
        return report(
            model, directory, documents, length=LENGTH, rows=ROWS,
            new_tokens=NEW_TOKENS, tokens_per_batch=TOKENS_PER_BATCH,
        )  # fmt: skip

    before = measured()
    weights = load_file(directory / SINGLE_FILE)
    round_to(weights.values(), args.step)
    save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})
    figures = json.loads((directory / "training.json").read_text())
    figures["evaluation"] = measured()
    figures["rounding"] = {
        "step": args.step,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "before": {name: before[name] for name in before.keys() - {"greedy", "sampled"}},
    }
    (directory / "training.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

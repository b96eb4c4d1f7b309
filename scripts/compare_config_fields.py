"""Compare every field of every type of config with transformers, one value at a time.

A config is right if log-probabilities are within 1e-4 of transformers', or if loading refuses it by
the name of the field. All types take about an hour of one core:

    python scripts/compare_config_fields.py
    python scripts/compare_config_fields.py --types bamba gpt_oss --share 0.1 --seed 3
    python scripts/compare_config_fields.py --pairs 40   # two fields at a time, 40 pairs a type
    python scripts/compare_config_fields.py --paths      # through the engine, and stored again

``--paths`` takes a config of each type through the engine: in chunks, with prefix hits, evicted,
paused, with drafts of each kind. ``--page`` writes the tables of docs/models.md instead.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_async.errors import MegatronAsyncError
from tests.support.config_fields.bases import BASES
from tests.support.config_fields.cases import Case, cases
from tests.support.config_fields.compare import RIGHT, TOLERANCE, Result, compare
from tests.support.config_fields.page import rows, rows_beside
from tests.support.config_fields.pairs import pairs
from tests.support.config_fields.routes import (
    ROUTES,
    SAVE,
    Subject,
    difference_on,
    is_stored_exactly,
    values_of,
)


def drawn(types: list[str], share: float, seed: int, pair_count: int) -> list[Case]:
    """The cases of some types, a share of them, or ``pair_count`` pairs of each."""
    if pair_count:
        rng = random.Random(seed)
        return [case for kind in types for case in pairs(kind, pair_count, rng)]
    found = [case for kind in types for case in cases(kind)]
    count = len(found) if share >= 1 else round(share * len(found))
    return random.Random(seed).sample(found, count) if share < 1 else found


def report(results: list[Result]) -> str:
    """How many cases of each type came out how."""
    verdicts = sorted({result.verdict for result in results})
    lines = [f"| type | {' | '.join(verdicts)} |", f"|---{'|---' * len(verdicts)}|"]
    for kind in dict.fromkeys(result.case.model_type for result in results):
        counts = Counter(r.verdict for r in results if r.case.model_type == kind)
        numbers = " | ".join(str(counts[verdict]) for verdict in verdicts)
        lines.append(f"| {kind} | {numbers} |")
    return "\n".join(lines)


def on_paths(kind: str) -> list[str]:
    """What came of a type on each way through the engine, and of storing it: a difference, "yes" or
    "no", or the refusal."""
    said = []
    with tempfile.TemporaryDirectory() as name:
        subject = Subject.of(values_of(kind), Path(name))
        for number, route in enumerate(ROUTES.values()):
            try:
                folder = Path(name) / str(number)
                folder.mkdir()
                said.append(f"{difference_on(subject, route, folder):.1e}")
            except MegatronAsyncError as error:
                said.append(f"refused: {error}")
        for stored in SAVE:
            is_same = is_stored_exactly(subject.ours, stored, Path(name) / stored)
            said.append("yes" if is_same else "no")
    return said


def compare_paths(types: list[str]) -> int:
    """Print a table of all types; the exit status is 1 if one is wrong."""
    columns = [*ROUTES, *(f"stored by {stored}" for stored in SAVE)]
    print(f"| type | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|", sep="\n")
    wrong = 0
    for kind in types:
        said = on_paths(kind)
        wrong += "no" in said or any(
            not float(each) < TOLERANCE for each in said[: len(ROUTES)] if "refused" not in each
        )
        print(f"| {kind} | {' | '.join(said)} |", flush=True)
    return int(wrong > 0)


def main() -> int:
    """Run; the exit status is 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=sorted(BASES), default=sorted(BASES))
    parser.add_argument("--share", type=float, default=1.0, help="of all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the share")
    parser.add_argument("--pairs", type=int, default=0, help="random pairs of fields of each type")
    parser.add_argument("--paths", action="store_true", help="take each type through the engine")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/models.md")
    args = parser.parse_args()
    if args.page:
        print("\n".join([*rows(), "", *rows_beside()]))
        return 0
    torch.set_num_threads(1)
    if args.paths:
        return compare_paths(args.types)
    results = []
    for case in tqdm(drawn(args.types, args.share, args.seed, args.pairs), unit="config"):
        results.append(result := compare(case))
        if result.verdict not in RIGHT:
            tqdm.write(f"{case.model_type} {case.field} {case.shown}: {result.said}")
    print(report(results))
    return int(any(result.verdict not in RIGHT for result in results))


if __name__ == "__main__":
    sys.exit(main())

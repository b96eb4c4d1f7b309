"""Compare every field of every type of config with transformers, one value at a time.

A config is right if log-probabilities are within 1e-4 of transformers', or if loading refuses it by
the name of the field. All types take about an hour of one core:

    python scripts/compare_config_fields.py
    python scripts/compare_config_fields.py --types bamba gpt_oss --share 0.1 --seed 3

``--page`` writes the table of docs/models.md instead.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.config_fields.bases import BASES
from tests.support.config_fields.cases import Case, cases
from tests.support.config_fields.compare import RIGHT, Result, compare
from tests.support.config_fields.page import rows


def drawn(types: list[str], share: float, seed: int) -> list[Case]:
    """The cases of some types, or a share of them."""
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


def main() -> int:
    """Run; the exit status is 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=sorted(BASES), default=sorted(BASES))
    parser.add_argument("--share", type=float, default=1.0, help="of all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the share")
    parser.add_argument("--page", action="store_true", help="write the table of docs/models.md")
    args = parser.parse_args()
    if args.page:
        print("\n".join(rows()))
        return 0
    torch.set_num_threads(1)
    results = []
    for case in tqdm(drawn(args.types, args.share, args.seed), unit="config"):
        results.append(result := compare(case))
        if result.verdict not in RIGHT:
            tqdm.write(f"{case.model_type} {case.field} {case.shown}: {result.said}")
    print(report(results))
    return int(any(result.verdict not in RIGHT for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""The code in docs/transformers.md runs, and the benchmark says what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs_in_order() -> None:
    page = (ROOT / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/transformers.md", "exec"), names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_reports_nothing_without_a_gpu() -> None:
    script = ROOT / "scripts" / "bench_transformers.py"
    ran = subprocess.run(
        [sys.executable, script, "random:gpt2"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 1 and "needs a GPU" in ran.stderr and not ran.stdout

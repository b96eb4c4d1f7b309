"""The Triton kernels without a GPU: their tests in a process where Triton interprets kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import HAS_TRITON, INTERPRETED
from tests.support.patience import PATIENCE_SECONDS

HERE = Path(__file__)
FILES = {
    "test_batch_invariant_products.py": 1,
    "test_extras_kernels.py": 1,
    "test_fused_kernels.py": 3,
    "test_paged_attention_kernel.py": 1,
    "test_paged_prefill.py": 1,
    "test_sample_kernel.py": 1,
    "test_step_state.py": 3,
}
"""Each with the number of its parts: these are tests of their own, which run side by side."""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested")
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize(
    ("file", "part"), [(file, part) for file, parts in FILES.items() for part in range(parts)]
)
def test_kernels_in_tritons_interpreter(file: str, part: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, f"--part={part}/{FILES[file]}", str(HERE.with_name(file))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 3, result.stdout[-5000:]


def test_no_file_is_forgotten() -> None:
    users = {
        path.name
        for path in HERE.parent.glob("test_*.py")
        if path != HERE and "tests.support.interpreter import" in path.read_text()
    }
    assert users == FILES.keys()

"""The Triton kernels without a GPU: their tests in a process where Triton interprets kernels. What
was launched there is compiled for a GPU then."""

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
from tests.support.recorded_launches import compile_recorded

HERE = Path(__file__)
RUNS = (
    (
        "test_step_state.py",
        "test_fused_kernels.py",
        "test_moe_kernels.py",
        "test_moe_e4m3.py",
        "test_moe_mxfp4.py",
        "test_moe_widened.py",
        "test_grouped_experts.py",
        "test_wide_router.py",
        "test_token_log_prob.py",
        "test_mamba_kernels.py",
        "test_end_check.py",
        "test_finite_kernel.py",
        "test_row_kernels.py",
        "test_e4m3.py",
        "test_wide_e4m3.py",
        "test_scaled_e4m3.py",
        "test_graph_memory.py",
    ),
    (
        "test_sample_kernel.py",
        "test_window_kernels.py",
        "test_extras_kernels.py",
        "test_paged_attention_kernel.py",
        "test_paged_prefill.py",
        "test_invariant_attention.py",
        "test_sliding_window.py",
        "test_latent_attention.py",
        "test_batch_invariant_products.py",
        "test_mtp_kernels.py",
        "test_e4m3_cache.py",
        "test_fused_inputs.py",
    ),
)
"""Files of each process, which starts for some seconds. They run side by side."""


FILES = {path.name: path for path in HERE.parents[1].rglob("test_*.py")}
MARKED = re.compile(r"^\s*(@interpreted|@on_devices|.*marks=\[?interpreted)", re.MULTILINE)
"""In files with tests that are interpreted."""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested")
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("files", RUNS, ids=lambda files: files[0])
def test_kernels_in_tritons_interpreter(
    files: tuple[str, ...], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    launches = tmp_path / "launches"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [option for option in ("--all", "--turns") if pytestconfig.getoption(option)]
    result = subprocess.run(
        [*command, *(str(FILES[file]) for file in files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "TEST_RECORDS_LAUNCHES": str(launches)},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 3, result.stdout[-5000:]
    assert len(compile_recorded(launches, whole=pytestconfig.getoption("--all"))) >= 10


def test_no_file_is_forgotten() -> None:
    users = {
        path.name for path in FILES.values() if path != HERE and MARKED.search(path.read_text())
    }
    assert users == {file for files in RUNS for file in files}

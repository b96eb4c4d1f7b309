"""New weights come by a collective from a trainer's process while an engine's requests run, over
gloo, and over NCCL between two GPUs (``tests/support/group_updates.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.two_gpus import both_gpus

__all__ = ["both_gpus"]

ROOT = Path(__file__).parents[3]
PROJECTION = "decoder.layers.1.self_attention.linear_proj.weight"
NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_requests_go_on_with_weights_of_another_process(
    backend: str, tmp_path: Path, both_gpus: None
) -> None:
    """Whole tensors, received while the engine decodes, and shards, with checksums and in many
    buckets: as with the same weights given, to the bit. A NaN is refused on both sides, and the
    group is as good as before."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.group_updates", tmp_path, backend],
        # Both are forked, and after CUDA's own count of GPUs they could not use them.
        env=child_environment(OMP_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    given = found["given"]
    assert given["tokens"] != found["old"] and found["given bits"]
    assert [len(spans) for spans in given["spans"]] == [2, 2, 1]
    assert found["whole"] == found["shards"] == given
    assert found["whole bits"] == found["shard bits"] == [True, ""]
    assert found["meanwhile"] and all(each == found["old"] for each in found["meanwhile"])
    ours, theirs, is_unchanged = found["nan"]
    assert f"{PROJECTION} has 1 of 65,536 elements that are NaN" in ours
    assert theirs.startswith("rank 0 of the engine refuses them") and PROJECTION in theirs
    assert is_unchanged

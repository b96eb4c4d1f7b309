"""Scales of an FP8 cache whose layers lie in pipeline stages: those of one process, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.child_environment import child_environment
from tests.support.fp8_models import cache_scales
from tests.support.programs import run_program
from tests.unit.runner.test_fp8_cache import with_cache_scales

PROGRAM = """
import os, sys
from pathlib import Path
import torch
from megatron_async import megatron_compat as compat
from megatron_async.models import parallel
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks.layout import Layout
from tests.support.fp8_models import cache_scales
from megatron.core import parallel_state

other = os.fork()
rank, root = int(other == 0), Path(sys.argv[1])
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
parallel_state.initialize_model_parallel(
    pipeline_model_parallel_size=2, create_gloo_process_groups=False)
parallel.set_current(ModelParallel(Layout(pipeline=2), rank))
torch.save([cache_scales(path) for path in sys.argv[2:]], root / f"{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.slow
def test_each_stage_has_the_scales_of_its_layers(tmp_path: Path) -> None:
    """Chosen by tokens that go through all stages, or brought by a checkpoint."""
    stored = {(0, "k"): 0.03, (0, "v"): 0.5, (1, "k"): 0.26, (1, "v"): 3.0}
    paths = ["tiny", str(with_cache_scales(tmp_path, "compressed", stored))]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_program(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path), *paths],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
    )
    by_stage = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for path, first, second in zip(paths, *by_stage, strict=True):
        whole = cache_scales(path)
        if path == "tiny":  # layers that draft are in no stage
            whole = whole[: len(first) + len(second)]
        assert torch.cat((first, second)).equal(whole) and len(first) and len(second)
        assert not whole[0].equal(whole[-1]), "one for all"

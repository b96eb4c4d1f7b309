"""The kernel that looks for end tokens, against the torch code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton", reason="the kernel needs triton")

from megatron_async.contrib.transformers.stopping import end_check
from tests.support.interpreter import on_devices


@on_devices
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (3, 0), (16, 3), (37, 11)])
def test_the_kernel_gives_what_the_torch_code_gives(batch: int, count: int, device: str) -> None:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, 20, (batch, 5), generator=generator)
    ends = torch.randperm(20, generator=generator)[:count]
    unfinished = torch.randint(0, 2, (batch,), generator=generator)
    wanted = end_check.after_ends(ids[:, -1], unfinished, ends)
    got = end_check.launch(ids.to(device)[:, -1], unfinished.to(device), ends.to(device))
    assert torch.equal(got.cpu(), wanted)
    assert torch.equal(wanted[0], ids[:, -1])
    if count == 11:
        assert 0 < wanted[1].sum() < unfinished.sum()

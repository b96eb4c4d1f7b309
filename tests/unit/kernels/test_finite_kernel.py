"""The kernel that looks for elements that are not finite, against the torch code."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from megatron_async.kernels import finite
from tests.support.interpreter import on_devices


@on_devices
@pytest.mark.parametrize("served", finite.DTYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_marks_what_the_torch_code_finds(
    dtype: torch.dtype, served: torch.dtype, device: str
) -> None:
    most = torch.finfo(served).max
    edges = [0.0, -1.5, most, -most, finite.BELOW[served], -finite.BELOW[served]]
    edges += [math.nextafter(finite.BELOW[served], 0.0), math.inf, -math.inf, math.nan]
    for number, edge in enumerate(torch.tensor(edges, dtype=torch.float64).to(dtype).tolist()):
        tensor = torch.zeros(2, finite.BLOCK // 2 + 5, dtype=dtype, device=device)
        tensor[number % 2, -1 - number] = edge
        bad = not bool(tensor.to(served).isfinite().all())
        for given in (tensor, tensor.t()):
            assert finite.takes(given, served)
            mark = torch.zeros(3, dtype=torch.int32, device=device)
            finite.mark_not_finite(given, served, mark[1])
            assert mark.tolist() == [0, int(bad), 0], edge


def test_what_the_kernel_does_not_take() -> None:
    assert not finite.takes(torch.zeros(4, 4, dtype=torch.float64), torch.float32)
    assert not finite.takes(torch.zeros(4, 4), torch.float64)
    assert not finite.takes(torch.zeros(4, 6)[:, :3], torch.float32)

"""E4m3 weights times their scales: the kernel has the reference's bits."""

from __future__ import annotations

import pytest
import torch

from megatron_async.models.quantized.values import E4M3, multiply_out
from tests.support.interpreter import HAS_TRITON, on_devices

if HAS_TRITON:
    from megatron_async.kernels.gemm import e4m3

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@on_devices
@pytest.mark.parametrize("groups", (1, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_each_number_is_multiplied_out(device: str, groups: int, dtype: torch.dtype) -> None:
    """All 254 numbers, subnormal ones and both zeros among them, in rows longer than a block and of
    several experts."""
    torch.manual_seed(0)
    rows, columns = 2, 3 * (e4m3.BLOCK // 3 + 40)
    bits = torch.arange(2 * rows * columns).remainder(256).to(torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 1
    weight = bits.view(E4M3).view(2, rows, columns).to(device)
    scale = torch.rand(2, rows, groups, device=device) * 3e-3 + 1e-4
    meant = multiply_out(weight.cpu(), scale.cpu(), dtype)
    found = e4m3.multiply_out(weight, scale, dtype).cpu()
    as_bits = torch.int32 if dtype == torch.float32 else torch.int16
    apart = (found.view(as_bits).long() - meant.view(as_bits).long()).abs().max()
    # The interpreter cuts bfloat16 off where a GPU rounds.
    assert apart <= (device == "cpu" and dtype == torch.bfloat16)
    assert found.shape == weight.shape and len(meant.unique()) > 120

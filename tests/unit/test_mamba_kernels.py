"""Kernels of Mamba-2 layers against the reference in torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.kernels.mamba.layer import MambaSizes, StateRows
from megatron_async.kernels.mamba.reference import mix_rows
from tests.support.interpreter import HAS_TRITON, mend_interpreter, on_devices
from tests.support.mamba_cases import parameters_of, pool_of, rows_of

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.mamba.mix_triton import MixTile, MixWorkspace, mix_rows_triton

    mend_interpreter()

EVEN = MambaSizes(heads=2, head_dim=8, groups=2, state_size=16)
ODD = MambaSizes(heads=4, head_dim=6, groups=2, state_size=5, conv_width=3)


@on_devices
@pytest.mark.parametrize(
    ("sizes", "window", "norm", "wide_d", "dtype", "state_dtype", "channels"),
    (
        (EVEN, 1, "after", False, torch.float32, torch.float32, 8),
        (EVEN, 3, "after", True, torch.bfloat16, torch.float32, 4),
        (ODD, 3, "before", False, torch.float32, torch.bfloat16, 8),
        (ODD, 1, "none", True, torch.float32, torch.float32, 16),
    ),
)
def test_rows_and_windows_are_those_of_the_reference(
    device: str,
    sizes: MambaSizes,
    window: int,
    norm: str,
    wide_d: bool,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    channels: int,
) -> None:
    torch.manual_seed(window)
    kinds = {"dtype": dtype, "state_dtype": state_dtype, "device": device}
    parameters = parameters_of(
        sizes, norm=norm, wide_d=wide_d, conv_bias=norm != "before", dtype=dtype, device=device,
        dt_limits=(0.1, 2.0) if wide_d else (0.0, float("inf")),
    )  # fmt: skip
    slots = 5
    wanted, got = (pool_of(slots, sizes, window=window, **kinds) for _ in range(2))
    for pool in (wanted, got):
        torch.manual_seed(7)
        pool.inputs[:slots] = torch.randn(pool.inputs[:slots].shape).to(device, dtype)
        pool.ssm[:slots] = torch.randn(pool.ssm[:slots].shape).to(device, state_dtype)
        pool.ssm[3] = float("nan")  # of a row that begins at 0
    behind = window - 1
    rows = rows_of(
        (2, 0, window, 17, behind, 1),
        (slots, 9, window, 4, 0, 1),
        (0, 3 * window, 1, 2, behind // 2, 1),
        (3, 4 * window, window, behind, behind, 1),
        device=device,
    )
    tokens = 6 * window
    projected = torch.randn(tokens, sizes.projection).to(device, dtype)
    outs = [torch.full((tokens, sizes.inner), 9.0).to(device, dtype) for _ in range(2)]
    workspace = MixWorkspace(tokens, 4, sizes.inner, projected.device)
    mix_rows(projected, parameters, wanted, rows, outs[0], most=window)
    tile = MixTile(channels, 4)
    mix_rows_triton(
        projected, parameters, got, rows, outs[1], most=window, workspace=workspace, tile=tile
    )
    exact = dtype is state_dtype is torch.float32
    bounds = dict.fromkeys(("rtol", "atol"), 2e-5 if exact else 5e-2)
    torch.testing.assert_close(outs[1], outs[0], **bounds)
    live = slice(0, slots)
    if state_dtype is torch.bfloat16:
        bounds = {"rtol": 3e-2, "atol": 1e-2}
    torch.testing.assert_close(got.ssm[live], wanted.ssm[live], **bounds, equal_nan=True)
    assert got.inputs[live].equal(wanted.inputs[live])
    assert not workspace.arrived.any()
    assert got.ssm[slots].isnan().all() and got.inputs[slots].isnan().all()

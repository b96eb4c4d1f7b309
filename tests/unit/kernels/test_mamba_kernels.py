"""Kernels of Mamba-2 layers against the reference in torch."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.kernels.mamba.reference import mix_rows, scan_chunks
from tests.support.compiled_kernels import HOPPER, compiles, compiling_for
from tests.support.interpreter import HAS_TRITON, mend_interpreter, on_devices
from tests.support.launches import mix
from tests.support.mamba_cases import parameters_of, pool_of, rows_of

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.mamba.mix_triton import (
        MixTile,
        MixWorkspace,
        mix_rows_triton,
        scan_tokens_triton,
    )
    from megatron_async.kernels.mamba.scan_triton import ScanTile, scan_chunks_triton

    mend_interpreter()

EVEN = MambaSizes(heads=2, head_dim=8, groups=2, state_size=16)
ODD = MambaSizes(heads=4, head_dim=6, groups=2, state_size=5, conv_width=3)
FEW = MambaSizes(heads=2, head_dim=6, groups=2, state_size=5, conv_width=3)


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
    workspace = MixWorkspace(4 * window, 4, sizes, projected.device)
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


@on_devices
@pytest.mark.parametrize(
    ("norm", "wide_d", "dtype"),
    (("after", False, torch.bfloat16), ("before", True, torch.float32)),
)
def test_chunks_are_those_of_the_reference(
    device: str, norm: str, wide_d: bool, dtype: torch.dtype
) -> None:
    """One from the beginning, one from the midst, one that is shorter than the convolution."""
    torch.manual_seed(3)
    parameters = parameters_of(
        FEW, norm=norm, wide_d=wide_d, conv_bias=not wide_d, dtype=dtype, device=device
    )
    slots, tokens = 3, 40
    rows = rows_of(
        (1, 2, 21, 0, 0, 21), (0, 23, 14, 23, 0, 14), (2, 37, 1, 9, 0, 1), (slots, 39, 0, 0, 0, 0),
        device=device,
    )  # fmt: skip
    wanted, got = (pool_of(slots, FEW, dtype=dtype, device=device) for _ in range(2))
    for pool in (wanted, got):
        torch.manual_seed(7)
        pool.inputs[:slots] = torch.randn(pool.inputs[:slots].shape).to(device, dtype)
        pool.ssm[0::2] = torch.randn(pool.ssm[0::2].shape).to(device)
    projected = torch.randn(tokens, FEW.projection).to(device, dtype)
    outs = [torch.full((tokens, FEW.inner), 9.0).to(device, dtype) for _ in range(2)]
    scan_chunks(projected, parameters, wanted, rows, outs[0])
    scan_chunks_triton(projected, parameters, got, rows, outs[1], tile=ScanTile(16, 16, 4))
    bounds = dict.fromkeys(("rtol", "atol"), 5e-5 if dtype is torch.float32 else 4e-2)
    torch.testing.assert_close(outs[1], outs[0], **bounds)
    torch.testing.assert_close(got.ssm[:slots], wanted.ssm[:slots], **bounds)
    for slot, end in ((1, 21), (0, 37), (2, 10)):
        last = [(end - 1) % 3, (end - 2) % 3]
        assert got.inputs[slot, last].equal(wanted.inputs[slot, last])


@on_devices
def test_chunks_that_begin_at_multiples_of_a_piece_give_the_same_bits(device: str) -> None:
    torch.manual_seed(4)
    parameters = parameters_of(FEW, device=device)
    projected = torch.randn(36, FEW.projection).to(device)
    found = []
    for borders in ((0, 36), (0, 16, 32, 36)):
        states, out = pool_of(1, FEW, device=device), projected.new_zeros(36, FEW.inner)
        for start, end in itertools.pairwise(borders):
            rows = rows_of((0, start, end - start, start, 0, end - start), device=device)
            scan_chunks_triton(projected, parameters, states, rows, out, tile=ScanTile(16, 16, 4))
        found.append((out, states.ssm[0]))
    for out, state in found[1:]:
        assert out.equal(found[0][0]) and state.equal(found[0][1])


@on_devices
def test_tokens_of_chunks_have_the_bits_of_decoding(device: str) -> None:
    """Chunks of five and of one, then a window, against rows of one token."""
    torch.manual_seed(5)
    sizes = MambaSizes(heads=1, head_dim=4, groups=1, state_size=4)
    parameters = parameters_of(sizes, device=device)
    projected = torch.randn(8, sizes.projection).to(device)
    workspace = MixWorkspace(2, 1, sizes, projected.device)
    outs = [projected.new_zeros(8, sizes.inner) for _ in range(2)]
    alone, together = (pool_of(1, sizes, window=2, device=device) for _ in range(2))
    for token in range(8):
        rows = rows_of((0, token, 1, token, 0, 1), device=device)
        mix_rows_triton(projected, parameters, alone, rows, outs[0], most=1, workspace=workspace)
    for start, end in ((0, 5), (5, 6)):
        rows = rows_of((0, start, end - start, start, 0, end - start), device=device)
        scan_tokens_triton(projected, parameters, together, rows, outs[1])
    rows = rows_of((0, 6, 2, 6, 0, 1), device=device)
    mix_rows_triton(projected, parameters, together, rows, outs[1], most=2, workspace=workspace)
    assert outs[1].equal(outs[0])


@compiles
@pytest.mark.parametrize("chunks", (False, True))
def test_states_are_updated_alike_in_all_places_of_a_kernel(chunks: bool) -> None:
    """An accepted draft, a row's first token and the further ones have code of their own. What a
    state decays by, an exponential, is multiplied and added to in one rounding in all of them."""
    with compiling_for(HOPPER) as found:
        mix(EVEN, torch.float32, chunks=chunks)
    ptx = found[0].ptx
    decays = set(re.findall(r"ex2\.approx\.f32\s+(%\w+)", ptx))
    fused, apart = (
        [pair for pair in re.findall(rf"{kind}\s+%\w+, (%\w+), (%\w+)", ptx) if decays & {*pair}]
        for kind in (r"fma\.rn\.f32", r"mul\.f32")
    )
    assert len(decays) >= 3 and len(fused) >= 3 and not apart

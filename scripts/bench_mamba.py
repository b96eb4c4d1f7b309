"""Time the kernels of Mamba-2 layers on a GPU, for several tiles, next to what memory allows.

    python scripts/bench_mamba.py
    python scripts/bench_mamba.py --heads 48 --head-dim 64 --groups 1 --state-size 128

Each number is the mean of calls in a CUDA graph that goes round as many layers as the model has, so
that states come from memory. A row or window reads and writes its state once; ``floor`` is that
traffic over the bandwidth of a copy. Each result is compared with the reference in torch; above
``ERROR_LIMIT`` the exit status is 1. The default shape is that of Nemotron-H-8B. Where
``mamba_ssm`` is installed, its state update and its chunked scan are timed on the same sizes: these
leave out the convolution, the gate and its norm, which the kernels here include.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import torch

from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.kernels.mamba.layer import (
    GatedNorm,
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.mamba.mix_triton import MixTile, MixWorkspace, mix_rows_triton
from megatron_async.kernels.mamba.reference import mix_rows, scan_pieces
from megatron_async.kernels.mamba.scan_triton import ScanTile, scan_chunks_triton

MIX_TILES = (
    MixTile(64, 4), MixTile(64, 8), MixTile(64, 8, 128), MixTile(32, 4), MixTile(32, 4, 96),
    MixTile(32, 8), MixTile(16, 4), MixTile(16, 2), MixTile(16, 4, 128), MixTile(8, 2),
)  # fmt: skip
SCAN_TILES = (
    ScanTile(64, 16, 4), ScanTile(32, 16, 4), ScanTile(16, 16, 4), ScanTile(32, 32, 4),
    ScanTile(64, 32, 8), ScanTile(32, 16, 4, 3),
)  # fmt: skip
CASES = ((1, 1), (8, 1), (32, 1), (64, 1), (1, 4), (32, 2), (32, 4))
"""Rows, and tokens of a window, all of them accepted."""
CHUNKS = ((256,), (1024,), (256, 256, 256, 256))
LAYERS = 24
ERROR_LIMIT = 2e-2


def microseconds(call: Callable[[int], object]) -> float:
    """Mean device time of ``call(0)``, ``call(1)`` and so on, captured together."""
    from triton.testing import do_bench_cudagraph

    numbers = itertools.count()
    return 1e3 * float(do_bench_cudagraph(lambda: call(next(numbers) % LAYERS)))


def parameters_of(sizes: MambaSizes) -> MambaParameters:
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    inner, wide = sizes.inner, torch.float32
    return MambaParameters(
        sizes, draw(sizes.conv_channels, sizes.conv_width) / 2, draw(sizes.conv_channels),
        draw(sizes.heads, dtype=wide) - 3, draw(sizes.heads, dtype=wide).abs(),
        draw(sizes.heads, dtype=wide), GatedNorm(draw(inner), 1e-5, inner // sizes.groups),
    )  # fmt: skip


def pool_of(
    sizes: MambaSizes, slots: int, window: int, state: torch.dtype, layers: int = LAYERS
) -> list[LayerStates]:
    shape = (sizes.heads, sizes.head_dim, sizes.state_size)
    return [
        LayerStates(
            torch.randn(slots + 1, sizes.ring(window), sizes.input_width, device="cuda").bfloat16(),
            torch.randn(slots + 1, *shape, device="cuda").to(state),
        )
        for _ in range(layers)
    ]


def rows_of(lengths: Sequence[int], start: int, behind: int, *, keep_all: bool) -> StateRows:
    count = torch.tensor(lengths, device="cuda")
    slots = torch.arange(len(lengths), device="cuda")
    keeps = count if keep_all else torch.ones_like(count)
    first = count.cumsum(0) - count
    return StateRows(
        slots, first, count, torch.full_like(slots, start), torch.full_like(slots, behind), keeps
    )


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of all elements together."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def bench_rows(
    sizes: MambaSizes, rows_count: int, window: int, state: torch.dtype, bandwidth: float
) -> float:
    """Print the tiles of one case; the largest error."""
    parameters = parameters_of(sizes)
    pools = pool_of(sizes, rows_count, window, state)
    rows = rows_of([window] * rows_count, 100, window - 1, keep_all=False)
    tokens = rows_count * window
    projected = torch.randn(tokens, sizes.projection, device="cuda").bfloat16()
    out = torch.zeros(tokens, sizes.inner, device="cuda", dtype=torch.bfloat16)
    workspace = MixWorkspace(tokens, rows_count, sizes, projected.device)
    moved = 2.0 * rows_count * pools[0].ssm[0].nbytes + projected.nbytes + out.nbytes
    floor = 1e6 * moved / bandwidth
    print(
        f"{rows_count} rows of {window}, {str(state)[6:]} state: floor {floor:.1f} us a layer, "
        f"{floor * LAYERS / 1e3:.2f} ms for {LAYERS}", flush=True,
    )  # fmt: skip
    worst, before = 0.0, LayerStates(*(each.clone() for each in pools[0]))
    for tile in MIX_TILES:
        wanted, own = torch.zeros_like(out), LayerStates(*(each.clone() for each in before))
        mix_rows(projected, parameters, own, rows, wanted, most=window)
        got = LayerStates(*(each.clone() for each in before))
        mix_rows_triton(
            projected, parameters, got, rows, out, most=window, workspace=workspace, tile=tile
        )
        off = max(error(out, wanted), error(got.ssm[:-1], own.ssm[:-1]))
        off = max(off, 1.0 * bool(workspace.arrived.any()))
        worst = max(worst, off)

        def call(layer: int, tile: MixTile = tile) -> None:
            mix_rows_triton(
                projected, parameters, pools[layer], rows, out, most=window, workspace=workspace,
                tile=tile,
            )  # fmt: skip

        us = microseconds(call)
        print(
            f"  {tile}: {us:.1f} us, {moved / us / 1e3:.0f} GB/s, {floor / us:.0%} of the floor, "
            f"error {off:.1e}", flush=True,
        )  # fmt: skip
    return worst


def bench_chunks(sizes: MambaSizes, lengths: Sequence[int]) -> float:
    """Print the tiles of one case; the largest error."""
    parameters, tokens = parameters_of(sizes), sum(lengths)
    pool = pool_of(sizes, len(lengths), 1, torch.float32, 1)[0]
    rows = rows_of(lengths, 256, 0, keep_all=True)
    projected = torch.randn(tokens, sizes.projection, device="cuda").bfloat16()
    out = torch.zeros(tokens, sizes.inner, device="cuda", dtype=torch.bfloat16)
    wanted, own = torch.zeros_like(out), LayerStates(*(each.clone() for each in pool))
    scan_pieces(projected, parameters, own, rows, wanted)
    print(f"chunks of {', '.join(map(str, lengths))} tokens", flush=True)
    worst = 0.0
    for tile in SCAN_TILES:
        got = LayerStates(*(each.clone() for each in pool))
        scan_chunks_triton(projected, parameters, got, rows, out, tile=tile)
        off = max(error(out, wanted), error(got.ssm[:-1], own.ssm[:-1]))
        worst = max(worst, off)

        def call(_: int, got: LayerStates = got, tile: ScanTile = tile) -> None:
            scan_chunks_triton(projected, parameters, got, rows, out, tile=tile)

        us = microseconds(call)
        print(f"  {tile}: {us:.1f} us, {us / tokens * 1e3:.0f} ns a token, error {off:.1e}")
    return worst


def state_error(sizes: MambaSizes, tokens: int) -> None:
    """Print what a bfloat16 state costs after ``tokens`` tokens."""
    parameters = parameters_of(sizes)
    pools = [pool_of(sizes, 1, 1, dtype, 1)[0] for dtype in (torch.float32, torch.bfloat16)]
    outs = [torch.zeros(1, sizes.inner, device="cuda").bfloat16() for _ in pools]
    workspace = MixWorkspace(1, 1, sizes, outs[0].device)
    for position in range(tokens):
        projected = torch.randn(1, sizes.projection, device="cuda").bfloat16()
        rows = rows_of([1], position, 0, keep_all=False)
        for pool, out in zip(pools, outs, strict=True):
            mix_rows_triton(projected, parameters, pool, rows, out, most=1, workspace=workspace)
    off = error(outs[1], outs[0]), error(pools[1].ssm[:1], pools[0].ssm[:1])
    print(f"bfloat16 state after {tokens} tokens: output off by {off[0]:.1e}, state {off[1]:.1e}")


def bench_mamba_ssm(sizes: MambaSizes, bandwidth: float) -> None:
    """Print what mamba_ssm's kernels take, where it is installed."""
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        print(f"mamba_ssm is not measured: {error}")
        return
    heads, of_group = sizes.heads, (sizes.groups, sizes.state_size)
    decay, skip, bias = (torch.randn(heads, device="cuda") for _ in range(3))
    decay = -decay.abs() - 0.1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    def update(rows: int) -> float:
        states = [pool.ssm[:rows] for pool in pool_of(sizes, rows, 1, torch.float32)]
        x, dt = draw(rows, heads, sizes.head_dim), draw(rows, heads)
        b, c = draw(rows, *of_group), draw(rows, *of_group)
        wide, wide_skip, wide_bias = (
            each[..., None].expand(*each.shape, sizes.head_dim) for each in (dt, skip, bias)
        )
        wide_decay = decay[:, None, None].expand(heads, sizes.head_dim, sizes.state_size)
        return microseconds(
            lambda layer: selective_state_update(
                states[layer], x, wide, wide_decay, b, c, wide_skip, dt_bias=wide_bias,
                dt_softplus=True,
            )
        )  # fmt: skip

    def scan(tokens: int) -> float:
        x, dt = draw(1, tokens, heads, sizes.head_dim), draw(1, tokens, heads)
        b, c = draw(1, tokens, *of_group), draw(1, tokens, *of_group)
        start = pool_of(sizes, 1, 1, torch.float32, 1)[0].ssm[:1]
        return microseconds(
            lambda _: mamba_chunk_scan_combined(
                x, dt, decay, b, c, 256, D=skip, dt_bias=bias, initial_states=start,
                dt_softplus=True, return_final_states=True,
            )
        )  # fmt: skip

    state_bytes = 4.0 * heads * sizes.head_dim * sizes.state_size
    for rows in (1, 32):
        us = update(rows)
        share = 2e6 * rows * state_bytes / bandwidth / us
        print(f"mamba_ssm's state update, {rows} rows: {us:.1f} us, {share:.0%} of the floor")
    for tokens in (256, 1024):
        us = scan(tokens)
        print(f"mamba_ssm's scan, {tokens} tokens: {us:.1f} us, {us / tokens * 1e3:.0f} ns a token")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the kernels of Mamba-2 layers.")
    for name, default in (("heads", 128), ("head-dim", 64), ("groups", 8), ("state-size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = MambaSizes(args.heads, args.head_dim, args.groups, args.state_size)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    with torch.inference_mode():
        worst = max(bench_rows(sizes, *case, torch.float32, bandwidth) for case in CASES)
        # bfloat16 rounds some elements of a state the other way.
        bench_rows(sizes, 32, 1, torch.bfloat16, bandwidth)
        worst = max(worst, *(bench_chunks(sizes, lengths) for lengths in CHUNKS))
        state_error(sizes, 1000)
        bench_mamba_ssm(sizes, bandwidth)
    return int(not worst < ERROR_LIMIT)


if __name__ == "__main__":
    sys.exit(main())

"""The arithmetic of Mamba-2 layers: right, and the same bits however tokens come."""

from __future__ import annotations

import pytest
import torch

from megatron_async.kernels.mamba.layer import LayerStates, MambaParameters, MambaSizes
from megatron_async.kernels.mamba.reference import mix_rows, scan_chunks, scan_pieces
from megatron_async.kernels.mamba.rows import WindowRows, rows_of_chunks
from tests.support.mamba_cases import SIZES, expected, parameters_of, pool_of, rows_of


def whole(
    projected: torch.Tensor, parameters: MambaParameters, states: LayerStates, slot: int = 0
) -> torch.Tensor:
    out = projected.new_zeros(len(projected), parameters.sizes.inner)
    scan_chunks(projected, parameters, states, rows_of((slot, 0, len(out), 0, 0, len(out))), out)
    return out


@pytest.mark.parametrize("norm", ("after", "before", "none"))
@pytest.mark.parametrize(
    ("wide_d", "conv_bias", "dt_limits"),
    ((False, True, (0.0, float("inf"))), (True, False, (0.2, 0.9))),
)
def test_tokens_are_those_of_the_recurrence_in_float64(
    norm: str, wide_d: bool, conv_bias: bool, dt_limits: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    parameters = parameters_of(norm=norm, wide_d=wide_d, conv_bias=conv_bias, dt_limits=dt_limits)
    projected, states = torch.randn(11, SIZES.projection), pool_of(2)
    out = whole(projected, parameters, states, slot=1)
    wanted, state = expected(projected, parameters)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.ssm[1].double(), state, rtol=1e-4, atol=1e-5)
    assert states.ssm[0].isnan().all()


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bits_depend_neither_on_chunks_nor_on_windows_nor_on_other_rows(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Chunks of a prompt, then windows of which some drafts stay, next to others of all kinds."""
    torch.manual_seed(1)
    sizes = MambaSizes(heads=6, head_dim=5, groups=3, state_size=7)
    parameters = parameters_of(sizes, dtype=dtype)
    tokens, window, slots = 29, 3, 4
    projected = torch.randn(slots, tokens, sizes.projection).to(dtype)
    kinds = {"dtype": dtype, "state_dtype": state_dtype}
    wanted = [whole(x, parameters, pool_of(1, sizes, **kinds)) for x in projected]

    states = pool_of(slots, sizes, window=window, **kinds)
    got = [torch.zeros_like(x) for x in wanted]
    for slot in range(slots):  # prompts of 13 tokens
        border = 3 * slot + 1
        for start, end in ((0, border), (border, 13)):
            out = torch.zeros_like(wanted[slot])
            length = end - start
            chunk = rows_of((slot, 2, length, start, 0, length), (slots, 29, 0, 0, 0, 0))
            scan_chunks(projected[slot, start - 2 :] if start > 2 else torch.cat(
                [projected[slot, :2], projected[slot, start:]]
            ), parameters, states, chunk, out)  # fmt: skip
            got[slot][start:end] = out[2 : 2 + end - start]
    starts, behind = [13] * slots, [0] * slots
    while min(starts) < tokens:
        taken, rows = [], []
        live = [slot for slot in range(slots) if starts[slot] < tokens]
        for slot in live:
            real = min(int(torch.randint(1, window + 1, ())), tokens - starts[slot])
            drafts = torch.randn(window - real, sizes.projection).to(dtype)  # refused ones
            taken.append(torch.cat([projected[slot, starts[slot] : starts[slot] + real], drafts]))
            rows.append((slot, (len(rows) + 1) * window, window, starts[slot], behind[slot], 1))
            got[slot][starts[slot]] = real  # until the tokens are there
        rows += [(slots, 0, window, 5, 1, 1)]  # the row in front is padding
        step = torch.cat([torch.full((window, sizes.projection), float("nan")).to(dtype), *taken])
        out = torch.full((len(step), sizes.inner), -1.0).to(dtype)
        mix_rows(step, parameters, states, rows_of(*rows), out, most=window)
        assert (out[:window] == -1).all()
        for row, slot in enumerate(live):
            real = int(got[slot][starts[slot], 0])
            at = (row + 1) * window
            got[slot][starts[slot] : starts[slot] + real] = out[at : at + real]
            starts[slot] += real
            behind[slot] = real - 1
    for one, other in zip(got, wanted, strict=True):
        assert one.equal(other)


def test_pieces_are_the_recurrence() -> None:
    """Chunks from the beginning, from the midst of a piece, of one token, and none."""
    torch.manual_seed(5)
    parameters = parameters_of()
    rows = rows_of(
        (1, 3, 30, 0, 0, 30), (0, 33, 12, 13, 0, 12), (2, 45, 1, 7, 0, 1), (3, 0, 0, 0, 0, 0)
    )
    projected = torch.randn(46, SIZES.projection)
    pools, outs = [], []
    for scan in (scan_chunks, lambda *args: scan_pieces(*args, piece=8)):
        torch.manual_seed(6)
        pool, out = pool_of(3), torch.full((46, SIZES.inner), 9.0)
        pool.inputs[0::2] = torch.randn(pool.inputs[0::2].shape)
        pool.ssm[0::2] = torch.randn(pool.ssm[0::2].shape)
        scan(projected, parameters, pool, rows, out)
        pools.append(pool)
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[1].ssm[:3], pools[0].ssm[:3], rtol=1e-4, atol=1e-4)
    assert pools[1].inputs[:3].equal(pools[0].inputs[:3])


def test_rows_of_tables_are_contiguous_as_the_kernels_read_them() -> None:
    """They come from columns of packets. The second row has no token, the third one of two."""
    table = torch.tensor([[1, 4, 3, 8], [2, 9, 0, 0]])
    positions = torch.arange(10, 17)
    chunks = rows_of_chunks(table[:, 0], table[:, 1], table[:, 2], positions)
    assert chunks.starts.tolist() == [14, 16] and chunks.keeps.tolist() == [3, 0]
    tokens = torch.tensor([[0, 1], [7, 7], [2, 7]])
    windows = WindowRows()(table.T[:3, 0], table.T[:3, 1], positions, 2, tokens)
    assert windows.lengths.tolist() == [2, 0, 1] and windows.starts.tolist() == [10, 16, 12]
    plain = WindowRows()(table.T[:3, 0], table.T[:3, 1], positions, 2)
    assert plain.first.tolist() == [0, 2, 4] and plain.starts.tolist() == [10, 12, 14]
    for rows in (chunks, windows, plain):
        assert all(column.is_contiguous() for column in rows)

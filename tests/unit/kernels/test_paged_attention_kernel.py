"""Paged decode attention: the Triton kernel, the reference, and what a row may depend on.

On a GPU the kernel is compiled. Without one, ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_decode
from megatron_async.kernels.attention.tiles import SplitTile
from tests.support.interpreter import compiled, interpreted
from tests.support.paged_cases import Case, make_case

try:
    from megatron_async.kernels.attention import paged_decode_triton as paged_attention_triton
except ImportError:
    paged_attention_triton = None  # type: ignore[assignment]

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_close(case: Case, out: Tensor) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    assert out.dtype == case.query.dtype
    torch.testing.assert_close(out.double(), case.expected(), rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 2, 64, 16), (3, 1, 24, 3), (2, 2, 128, 64), (16, 1, 16, 1)],
)
def test_interpreted_kernel_equals_float64(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(
        [1, 257, block_size, 600],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cpu",
        table_dtype=torch.int32,
    )
    out = case.run()
    assert_close(case, out)
    rows = torch.tensor([3, 1])
    assert torch.equal(case.run(rows, by_slot=True), out[rows])


@interpreted
def test_interpreted_kernel_takes_many_rows_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        [5, 257, 1, 30, 64],
        heads=4,
        kv_heads=2,
        head_dim=32,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    rows = torch.tensor([4, 1, 0, 2, 3])
    whole, by_slot = case.run(), case.run(rows, by_slot=True)
    monkeypatch.setattr(paged_attention_triton, "MOST_ROWS", 2)
    assert_close(case, case.run())
    assert torch.equal(case.run(), whole)
    assert torch.equal(case.run(rows, by_slot=True), by_slot)


@interpreted
def test_interpreted_kernel_splits_long_rows_into_longer_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention_triton, "MAX_SPLITS", 2)
    case = make_case(
        [511, 513, 1100],
        heads=2,
        kv_heads=1,
        head_dim=16,
        block_size=32,
        dtype=torch.float32,
        device="cpu",
    )
    assert_close(case, case.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", (1, 2))
def test_programs_may_share_a_head_of_keys(
    device: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs whose blocks have too little shared memory for all of its query heads."""
    tile = SplitTile(share, 16, 2)
    monkeypatch.setattr(paged_attention_triton, "split_tile", lambda heads, limit: tile)
    case = make_case(
        [1, 40], heads=8, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32,
        device=device,
    )  # fmt: skip
    assert_close(case, case.run())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_reference_gives_a_row_its_own_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, threads: int
) -> None:
    lengths = [70] * 41 + [3, 500, 128]
    case = make_case(
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        block_size=4,
        dtype=dtype,
        device="cpu",
    )

    def attend(rows: list[int]) -> Tensor:
        return paged_decode.paged_decode_attention_by_length(
            case.query[rows],
            case.keys,
            case.values,
            case.table[rows],
            [lengths[row] for row in rows],
            case.scale,
        )

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = attend(list(range(len(lengths))))
        for rows in ([0], [40, 7], [43, 42, 1, 9, 5], list(range(43, 0, -1))):
            assert torch.equal(attend(rows), out[rows])
    finally:
        torch.set_num_threads(before)
    assert_close(case, out)


@pytest.mark.parametrize("tokens", (2, 5, 16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_tokens_of_a_sequence_have_the_same_bits_together_as_alone(
    dtype: torch.dtype, tokens: int
) -> None:
    """Also where their padded lengths differ, and where one of them is NaN."""
    starts = [1, 3, 61, 64, 120, 510]
    case = make_case(
        [start + tokens for start in starts],
        heads=6,
        kv_heads=2,
        head_dim=16,
        block_size=4,
        dtype=dtype,
        device="cpu",
    )
    sequences = [row for row in range(len(starts)) for _ in range(tokens)]
    lengths = [start + token for start in starts for token in range(tokens)]
    query = torch.randn(
        len(lengths), *case.query.shape[1:], generator=torch.Generator().manual_seed(1)
    ).to(dtype)

    def attend(names: list[int] | None) -> Tensor:
        return paged_decode.paged_decode_attention_by_length(
            query, case.keys, case.values, case.table[sequences], lengths, case.scale, names
        )

    assert torch.equal(attend(sequences), attend(None))
    block, offset = divmod(lengths[-1] - 1, 4)
    case.values[case.table[-1, block], offset] = float("nan")
    out = attend(sequences)
    assert torch.equal(out.isnan(), attend(None).isnan())
    assert out[-1].isnan().all()
    assert not out[:-1].isnan().any()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
class TestOnGpu:
    @pytest.mark.parametrize("dtype", list(TOLERANCE))
    @pytest.mark.parametrize(
        ("head_dim", "block_size", "group"),
        [
            (64, 1, 1),
            (64, 64, 4),
            (96, 3, 2),
            (96, 256, 4),
            (128, 1, 4),
            (128, 3, 1),
            (128, 16, 4),
            (128, 64, 1),
            (256, 16, 1),
            (256, 256, 4),
        ],
    )
    def test_kernel_equals_float64(
        self, dtype: torch.dtype, head_dim: int, block_size: int, group: int, device: str
    ) -> None:
        self.check([1, 63, 64, 257, 812, 1500], 2, group, head_dim, block_size, dtype, device)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("group", (2, 3, 7, 8, 16))
    def test_all_groups_equal_float64(self, dtype: torch.dtype, group: int, device: str) -> None:
        self.check([5, 300, 1025], 3, group, 128, 16, dtype, device)
        self.check([5, 300, 1025], 1, group, 80, 64, dtype, device)

    def check(
        self,
        lengths: list[int],
        kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        case = make_case(
            lengths,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        out = case.run()
        assert_close(case, out)
        reference = paged_decode.paged_decode_attention_reference(
            case.query, case.keys, case.values, case.table, case.lengths, case.scale
        )
        tolerance = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(out, reference, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_rows_longer_than_the_most_splits(self, dtype: torch.dtype, device: str) -> None:
        longest = paged_attention_triton.MIN_SPLIT * paged_attention_triton.MAX_SPLITS
        lengths = [longest - 1, longest, longest + 1, 2 * longest + 77, 9]
        self.check(lengths, 1, 4, 64, 64, dtype, device)

    @pytest.mark.parametrize("dtype", list(TOLERANCE))
    def test_a_row_has_bits_of_its_own(self, dtype: torch.dtype, device: str) -> None:
        lengths = [1 + 37 * row for row in range(48)]
        case = make_case(
            lengths,
            heads=8,
            kv_heads=2,
            head_dim=128,
            block_size=16,
            dtype=dtype,
            device=device,
        )
        out = case.run()
        generator = torch.Generator().manual_seed(0)
        for count in (1, 2, 4, 8, 33, 48):
            rows = torch.randperm(48, generator=generator)[:count].to(device)
            assert torch.equal(case.run(rows), out[rows])
            assert torch.equal(case.run(rows, by_slot=True), out[rows])
        # A wider block table changes the grid and the workspace, not the bits.
        wide = torch.cat((case.table, case.table.new_zeros(48, 700)), dim=1)
        wider = Case(case.query, case.keys, case.values, wide, case.lengths, case.scale)
        assert torch.equal(wider.run(), out)

    def test_captured_kernel_follows_its_inputs(self, device: str) -> None:
        case = make_case(
            [700, 1, 64, 300],
            heads=8,
            kv_heads=2,
            head_dim=64,
            block_size=16,
            dtype=torch.bfloat16,
            device=device,
        )
        expected = case.run()
        lengths = case.lengths.clone()
        case.lengths.fill_(1)
        case.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run()
        case.lengths.copy_(lengths)
        graph.replay()
        assert torch.equal(out, expected)

    def test_kernel_does_not_synchronise(self, device: str) -> None:
        case = make_case(
            [70, 1],
            heads=4,
            kv_heads=2,
            head_dim=64,
            block_size=16,
            dtype=torch.bfloat16,
            device=device,
        )
        case.run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

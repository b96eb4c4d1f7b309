"""Attention of decode steps that the model's own forward takes: one kernel where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention as cuda_attention
from megatron_async.kernels.attention import paged_decode, rope_append
from tests.support import emulator
from tests.support.batches import new_batch
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both, relative_error

pytestmark = pytest.mark.sweep

__all__ = ["device"]

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 32


class Case:
    """A context whose rows have ``lengths`` tokens each, and a step's packed projection."""

    def __init__(
        self,
        device: torch.device,
        lengths: list[int],
        *,
        group: int = 3,
        norm: bool = True,
        rotated: int = HEAD_DIM,
        dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
    ) -> None:
        rows, columns = len(lengths), max(lengths) // BLOCK_SIZE + 1
        self.context = new_batch(
            params_dtype=dtype,
            num_layers=2,
            kv_channels=HEAD_DIM,
            num_attention_heads=KV_HEADS,
            max_sequence_length=columns * BLOCK_SIZE,
            block_count=rows * columns,
            max_requests=rows,
            block_size_tokens=BLOCK_SIZE,
            device=device,
            batch_invariant=batch_invariant,
        )
        generator = torch.Generator(device).manual_seed(rows)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        self.context.kv_cache.copy_(draw(*self.context.kv_cache.shape))
        order = torch.randperm(rows * columns, generator=generator, device=device) + 1
        self.context.block_table[:rows] = order.view(rows, columns)
        self.slots = torch.arange(rows, device=device).flip(0)
        self.positions = torch.tensor(lengths, device=device)
        table = self.context.block_table[self.slots, self.positions // BLOCK_SIZE]
        self.mapping = table * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.packed = draw(rows, KV_HEADS * (group + 2) * HEAD_DIM)
        self.norms = (draw(HEAD_DIM) + 1, draw(HEAD_DIM) + 1) if norm else (None, None)
        shape = (columns * BLOCK_SIZE, 2, rotated // 2)
        self.cos_sin = None
        if rotated:
            self.cos_sin = torch.randn(*shape, generator=generator, device=device)
        self.begin()

    def begin(self) -> None:
        lengths = self.positions + 1
        self.context.begin_decode(self.slots, self.positions, self.mapping, lengths)

    @property
    def heads(self) -> cuda_attention.Heads | None:
        """What one kernel takes the step's attention as; None if none does."""
        context = self.context
        return context.attention.heads_of_decode(
            context.metadata, self.packed, self.cos_sin, *self.norms
        )

    def attended(self) -> torch.Tensor:
        out = self.context.attend_packed(1, self.packed, 0.2, self.cos_sin, *self.norms, 1e-6)
        assert out.shape == (len(self.slots), self.packed.shape[1] // HEAD_DIM - 4, HEAD_DIM)
        return out

    def wanted(self) -> torch.Tensor:
        """In float64, into a copy of the cache."""
        keys, values = self.context.kv_cache[1].double()
        query = rope_append.rope_append_reference(
            self.packed.double(), keys, values, self.mapping, self.positions, self.cos_sin,
            *(None if x is None else x.double() for x in self.norms), 1e-6,
        )  # fmt: skip
        out = paged_decode.paged_decode_attention_reference(
            query, keys, values, self.context.block_table, self.positions + 1, 0.2, self.slots
        )
        self.keys, self.values = keys, values
        return out


_ROWS = [(37 * row) % 61 for row in range(40)]


@on_both("lengths", gpu=((n,) for n in (_ROWS, _ROWS * 3, _ROWS * 8)), small=((_ROWS[:34],),))
class TestWide:
    def test_equals_float64_and_leaves_other_tokens_alone(
        self, device: torch.device, lengths: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if device.type == "cpu":
            emulator.install(monkeypatch, sm_count=5)
            monkeypatch.setattr(cuda, "unavailable", lambda index: None)
            monkeypatch.setattr(cuda_attention, "WIDE_SPLIT_TOKENS", 32)
        case = Case(device, lengths)
        assert case.heads is not None
        wanted, before = case.wanted(), case.context.kv_cache.clone()
        attended = case.attended()
        assert relative_error(attended, wanted) < LIMIT
        assert torch.equal(case.attended(), attended), "what one launch counts is gone"
        keys, values = case.context.kv_cache[1]
        assert relative_error(keys, case.keys) < LIMIT
        assert torch.equal(values.double(), case.values)
        assert torch.equal(case.context.kv_cache[0], before[0])
        untouched = torch.ones(keys.shape[:2], dtype=torch.bool, device=device).flatten()
        untouched[case.mapping] = False
        assert torch.equal(keys.flatten(0, 1)[untouched], before[1, 0].flatten(0, 1)[untouched])
        made = case.context.attention._decode_attentions._made
        assert len(made) == 1, "one for all layers and steps"


@emulated
@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("if (taken == items - min((int)gridDim.x, items) - 1) *all_taken = 0;", ";"),
        ("gridDim.x + taken;", "gridDim.x + taken + 1;"),
        ("goes_on && threadIdx.x == 0,", "goes_on && threadIdx.x < 2,"),
        ("(shared + NEXT_AT) = 2 * gridDim.x + taken;", "(shared + NEXT_AT) = items;"),
        ("item.row = owner * LANE_ROWS + j;", "item.row = owner * LANE_ROWS;"),
        ("item.split = which - before - ", "item.split = 0 * "),
    ],
)
def test_the_emulator_notices(there: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail: CTAs take KV splits of many rows, each once a launch."""
    text = emulator.source_text("attention")
    assert there in text
    emulator.install(monkeypatch, sm_count=5)
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        cuda_attention, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )
    monkeypatch.setattr(cuda_attention, "WIDE_SPLIT_TOKENS", 32)
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    case = Case(torch.device("cpu"), _ROWS[:34])
    wanted = case.wanted()
    assert case.heads is not None
    kernel = cuda_attention.DecodeAttention(case.heads, 34, 64, torch.device("cpu"))
    with pytest.raises(AssertionError):
        for _ in range(2):
            kernel(
                case.packed, *case.context.kv_cache[1], case.context.block_table, case.slots,
                case.positions, case.mapping, out := torch.full_like(wanted, math.nan).bfloat16(),
                scale=0.2, cos_sin=case.cos_sin, q_weight=case.norms[0], k_weight=case.norms[1],
                eps=1e-6,
            )  # fmt: skip
            assert relative_error(out, wanted) < LIMIT


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"norm": False, "rotated": 0}, True),
        ({"rotated": HEAD_DIM // 2}, False),
        ({"dtype": torch.float32}, False),
        ({"batch_invariant": True}, False),
        ({"group": 17}, False),
        ({"lengths": [1] * (cuda_attention.MOST_ROWS + 1)}, False),
    ],
)
def test_only_what_the_kernel_computes_goes_to_it(
    change: dict[str, Any], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    case = Case(torch.device("cpu"), **{"lengths": [3, 1], **change})
    assert (case.heads is not None) == takes


def test_chunks_and_lengths_on_the_host_do_not_go_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    case = Case(torch.device("cpu"), [3, 1])
    chunks = torch.zeros(1, 4, dtype=torch.int32)
    for values in ({"chunks": chunks}, {"read_lengths": True}):
        case.context.begin_forward(case.slots, case.positions, decode_rows=2, **values)
        assert case.heads is None
    monkeypatch.setattr(cuda, "unavailable", lambda index: "there is no GPU")
    case.begin()
    assert case.heads is None


def test_kernels_for_fewer_rows_share_the_memory_of_those_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_attention, "kernel", lambda *_: None)
    monkeypatch.setattr(cuda, "sm_count", lambda device_index: 132)
    heads = cuda_attention.Heads(HEAD_DIM, 3, KV_HEADS, BLOCK_SIZE, norm=True, rope=True)
    for sizes, shared in (((300, 100, 40), True), ((40, 100, 300), False)):
        attentions = cuda_attention.DecodeAttentions(torch.device("cpu"))
        kernels = [attentions.get(heads, rows, 2000) for rows in sizes]
        assert attentions.get(heads, sizes[0] - 1, 2000) is kernels[0]
        assert all((kernel.workspace is kernels[0].workspace) == shared for kernel in kernels[1:])
        sums, statistics, counts = kernels[0 if shared else -1].workspace
        assert counts.numel() == 512 * KV_HEADS + 1 and not counts.any()
        assert sums.numel() == statistics.numel() // 2 * HEAD_DIM == 512 * 6 * 2 * HEAD_DIM

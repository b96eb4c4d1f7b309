"""Kernels of drafts, by MTP layers and of what the host has guessed, against their references in
torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.drafting.mtp import MtpDrafter
from megatron_async.drafting.mtp_rows import DraftShape, draft_rows
from megatron_async.runner.drafter import SampledRows
from megatron_async.runner.guided_drafts import follow_guesses, packed
from megatron_async.runner.memory.slot_state import SlotState
from megatron_async.step.plan import Guess
from tests.support.batches import new_batch
from tests.support.interpreter import HAS_TRITON, on_devices

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.drafting.guesses import follow_guesses_gpu
    from megatron_async.kernels.drafting.mtp_input import (
        DraftInput,
        NormParameters,
        hidden_before,
    )
    from megatron_async.kernels.drafting.mtp_norms import (
        mtp_input,
        mtp_input_reference,
        mtp_output,
        mtp_output_reference,
        norm_rows,
    )
    from megatron_async.kernels.drafting.mtp_rows import rows_kernel, take_draft
    from megatron_async.kernels.sampling.sample_cuda import Taken

SLOTS, COLUMNS, BLOCK_SIZE, HIDDEN = 9, 6, 4, 24


def integers(low: int, high: int, *shape: int, device: str) -> torch.Tensor:
    return torch.randint(low, high, shape).to(device)


def state_of(device: str, drafts: int) -> SlotState:
    """Slots in the midst of requests of up to COLUMNS * BLOCK_SIZE tokens; the last is null."""
    sizes = {"max_blocks_per_request": COLUMNS, "num_drafts": drafts}
    state = SlotState(SLOTS, sizes, torch.device(device))
    state.block_table[:SLOTS] = integers(1, 99, SLOTS, COLUMNS, device=device)
    state.finished[:SLOTS] = integers(0, 3, SLOTS, device=device) == 0
    state.computed_from[:SLOTS] = integers(0, 6, SLOTS, device=device)
    state.max_total[:SLOTS] = integers(12, COLUMNS * BLOCK_SIZE + 1, SLOTS, device=device)
    state.inverse_temperature[:SLOTS] = torch.rand(SLOTS).to(device)
    state.top_k[:SLOTS] = integers(0, 9, SLOTS, device=device).int()
    state.top_p[:SLOTS] = torch.rand(SLOTS).to(device)
    state.seed[:SLOTS] = integers(0, 2**62, SLOTS, device=device)
    return state


def sampled_rows(device: str, rows: int, window: int) -> SampledRows:
    slots = torch.randperm(SLOTS)[:rows].to(device)
    slots[1::3] = SLOTS
    tokens = integers(0, 500, window, rows, device=device).T  # strided, as S may have them
    last = integers(0, window, rows, device=device)
    return SampledRows(slots, tokens, last, integers(1, 14, rows, device=device))


@on_devices
@pytest.mark.parametrize(
    ("rows", "window", "layers", "count"),
    ((1, 2, 1, 1), (7, 4, 3, 3), (7, 5, 2, 4), (4, 5, 1, 3)),
)
def test_rows_of_drafts_are_those_of_the_reference(
    device: str, rows: int, window: int, layers: int, count: int
) -> None:
    torch.manual_seed(rows + window)
    state, sampled = state_of(device, count), sampled_rows(device, rows, window)
    shape = DraftShape(rows, window, layers, count)
    wanted = draft_rows(
        sampled, state, shape, block_size=BLOCK_SIZE, null_slot=SLOTS, read_lengths=False
    )
    kernel = rows_kernel(*sampled, state, layers, count, BLOCK_SIZE, SLOTS)
    kernel()
    got = kernel.outputs
    spans = [shape.span(draft) for draft in range(count)]
    assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]
    assert shape.size == spans[-1].stop == len(got[1])
    # Behind the last token there is room for drafts, which holds anything.
    assert got[0][:, :window].equal(wanted.tokens[:, :window])
    for name, one, other in zip(wanted._fields[1:-1], got[1:], wanted[1:-1], strict=True):
        assert one.dtype == other.dtype and one.equal(other), name
    assert (wanted.slots != SLOTS).any() and (wanted.slots == SLOTS).any()


@on_devices
@pytest.mark.parametrize("learns_positions", (False, True))
@pytest.mark.parametrize(("rows", "center"), ((1, False), (7, True)))
def test_the_first_input_fills_the_rows_of_drafts_too(
    device: str, rows: int, center: bool, learns_positions: bool
) -> None:
    torch.manual_seed(rows)
    window, layers, count = 4, 2, 3
    state, sampled = state_of(device, count), sampled_rows(device, rows, window)
    sampled = sampled._replace(tokens=sampled.tokens % 50)
    hidden = torch.randn(rows, window, HIDDEN).bfloat16().to(device)
    table, learned = torch.randn(2, 50, HIDDEN).bfloat16().to(device)
    tails = torch.zeros(SLOTS + 1, layers, HIDDEN).bfloat16().to(device)
    norms, found = (norm_of(device, center=center), norm_of(device, center=center)), []
    for begins in (False, True):
        kernel = rows_kernel(*sampled, state, layers, count, BLOCK_SIZE, SLOTS)
        for each in kernel.outputs:
            each.zero_()
        if not begins:
            kernel()
        tokens, positions = kernel.outputs[0][:, :window], kernel.outputs[2][: rows * window]
        of = DraftInput(
            0, 0, tokens, positions, hidden, sampled.last, sampled.slots, tails,
            begin=kernel if begins else None,
        )  # fmt: skip
        out = torch.empty(rows * window, 2 * HIDDEN).bfloat16().to(device)
        mtp_input(of, table, learned if learns_positions else None, *norms, out)
        found.append([out, *kernel.outputs])
    for one, other in zip(*found, strict=True):
        assert one.equal(other) and one.any()


@on_devices
def test_a_draft_is_the_best_of_its_row(device: str) -> None:
    scores = torch.tensor([[3, 9, 9], [5, 1, 2], [2**31 - 1, 0, 1]])
    ids = torch.tensor([[7, 5, 6], [8, 9, 4], [1, 2, 3]])
    packed = ((scores << 32) | (ids ^ (2**31 - 1))).to(device)
    tokens = torch.full((3, 4), -7, device=device)
    by_slot = torch.full((6, 2), -7, device=device)
    taken = Taken(tokens[:, 2], by_slot[:, 1], torch.tensor([4, 0, 3], device=device), tokens)
    take_draft(packed, taken)
    assert tokens[:, 2].tolist() == [5, 8, 0], "a row with a NaN has token 0"
    assert by_slot[:, 1].tolist() == [8, -7, -7, 0, 5, -7]
    assert (tokens[:, [0, 1, 3]] == -7).all() and (by_slot[:, 0] == -7).all()


def norm_of(device: str, *, center: bool) -> Any:
    weight, bias = torch.randn(2, HIDDEN).bfloat16().to(device)
    return NormParameters(weight, bias if center else None, 1e-5)


def draft_input(device: str, draft: int, layer: int, rows: int, window: int) -> Any:
    width = window if draft == layer else 1
    before = window if draft <= layer + 1 else 1
    tokens = integers(0, 50, rows, 2 * window, device=device)
    hidden = torch.randn(rows, before, HIDDEN).bfloat16().to(device)
    tails = torch.randn(SLOTS + 1, layer + 1, HIDDEN).bfloat16().to(device)
    rows_ = sampled_rows(device, rows, window)
    # Dead rows share the null slot: whose tail it gets, nobody knows.
    slots = torch.randperm(SLOTS)[:rows].to(device)
    positions = integers(0, 30, rows * width, device=device)
    chosen = tokens[:, draft : draft + width]
    return DraftInput(draft, layer, chosen, positions, hidden, rows_.last, slots, tails)


@on_devices
@pytest.mark.parametrize("final", (None, False, True))
@pytest.mark.parametrize(
    ("draft", "layer", "window", "center"),
    ((0, 0, 3, False), (1, 1, 3, True), (2, 2, 4, False), (2, 1, 4, False), (3, 1, 5, True)),
)
def test_the_input_of_a_layer_and_the_tails_are_those_of_the_reference(
    device: str, draft: int, layer: int, window: int, center: bool, final: bool | None
) -> None:
    if draft == 0 and final is not None:
        pytest.skip("the decoder norms by itself")
    torch.manual_seed(10 * draft + layer)
    given = draft_input(device, draft, layer, 8, window)
    if final is not None:
        given = given._replace(norm=norm_of(device, center=final), hidden=2 * given.hidden)
    kept = given._replace(tails=given.tails.clone())
    table, learned = torch.randn(2, 50, HIDDEN).bfloat16().to(device)
    norms = norm_of(device, center=center), norm_of(device, center=center)
    outs = [torch.empty(given.token_count, 2 * HIDDEN).bfloat16().to(device) for _ in range(2)]
    before = given.tails.clone()
    mtp_input(given, table, learned if center else None, *norms, outs[0])
    mtp_input_reference(kept, table, learned if center else None, *norms, outs[1])
    assert torch.allclose(outs[0].float(), outs[1].float(), rtol=1e-2, atol=1e-2)
    assert torch.allclose(given.tails.float(), kept.tails.float(), rtol=1e-2, atol=1e-2)
    assert final is not None or given.tails.equal(kept.tails)
    assert given.tails.equal(before) == (draft != layer or draft == 0)


@on_devices
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("width", (1, 3))
def test_the_output_of_a_layer_is_that_of_the_reference(
    device: str, width: int, center: bool
) -> None:
    torch.manual_seed(width)
    rows = 4
    x = torch.randn(rows * width, HIDDEN).bfloat16().to(device)
    norm, found = norm_of(device, center=center), []
    for output in (mtp_output, mtp_output_reference):
        out, chosen = torch.empty_like(x), x.new_empty(rows, HIDDEN)
        statistics = torch.empty(rows, 1, 2, device=device)
        output(x, norm, out, chosen, statistics)
        found.append((out.float(), chosen.float(), statistics))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-3)


@on_devices
@pytest.mark.parametrize("center", (False, True))
def test_rows_are_normed_as_the_reference_does(device: str, center: bool) -> None:
    x, norm = torch.randn(3, HIDDEN).bfloat16().to(device), norm_of(device, center=center)
    out = torch.empty_like(x)
    norm_rows(x, norm, out)
    assert torch.allclose(out.float(), norm(x).float(), rtol=1e-2, atol=1e-3)


class Wrapper:
    """A model whose layers mix what they get, as torch does it on any device."""

    vocab_size = 60

    def __init__(self, device: str, layers: int) -> None:
        config = SimpleNamespace(hidden_size=HIDDEN)
        mtp = SimpleNamespace(layers=[None] * layers)
        self.table, self.head = torch.randn(2, 64, HIDDEN).to(device)
        self.model = SimpleNamespace(
            config=config, mtp=mtp, parameters=lambda: iter([self.table]),
            position_embedding_type="rope",
        )  # fmt: skip
        self.parallel, self.fused_mtp = None, lambda: None

    def mtp_forward(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, _: Any, context: Any
    ) -> torch.Tensor:
        places = context.slot_mapping + context.position_ids + context.token_slots
        out: torch.Tensor = (hidden.roll(layer + 1, 1) + self.table[ids] + places[:, None]).sin()
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 3 * hidden @ self.head.T
        return out


class Blocks:
    """Stands for the fused layers of a model: their input begins a step, and what they put out has
    a norm to pass."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def begins(self, *_: Any) -> bool:
        return True

    takes = begins

    def forward(self, of: Any, context: Any) -> Any:
        assert (of.begin is not None) == (of.draft == 0) == (of.norm is None)
        if of.begin is not None:
            of.begin()
        before = hidden_before(of)
        hidden = self._wrapper.mtp_forward(
            of.layer, before.flatten(0, 1), of.tokens.flatten(), of.position_ids, context
        ).view(before.shape)
        return hidden / 2, self._wrapper.logits(hidden[:, -1]), lambda x: 2 * x


@on_devices
def test_drafts_of_the_kernels_are_those_of_torch(device: str) -> None:
    torch.manual_seed(1)
    wrapper, rows, window, found = Wrapper(device, layers=2), 5, 4, []
    context = new_batch(
        params_dtype=torch.float32, num_layers=1, kv_channels=8, num_attention_heads=1,
        max_sequence_length=COLUMNS * BLOCK_SIZE, block_count=4, max_requests=rows,
        slot_count=SLOTS, num_speculative_tokens=window - 1, block_size_tokens=BLOCK_SIZE,
        device=device,
    )  # fmt: skip
    context.slots = state_of(device, window - 1)
    # Filters are the sampler's business, and take long where kernels are interpreted.
    context.slots.top_k.zero_(), context.slots.top_p.zero_()
    steps = [sampled_rows(device, rows, window) for _ in range(2)]
    steps = [each._replace(tokens=each.tokens % 60) for each in steps]
    pending = torch.randn(2, rows * window, HIDDEN).to(device)
    for has_kernels, blocks in ((False, None), (True, None), (True, Blocks(wrapper))):
        drafter = MtpDrafter(wrapper, context, rows)
        drafter._has_kernels, drafter._fused = has_kernels, blocks
        drafts = []
        for hidden, step in zip(pending, steps, strict=True):
            drafter._pending[:] = hidden
            drafted = drafter.draft(step, window - 1)
            assert (drafted is None) == has_kernels
            kept = context.slots.drafts[step.slots] if drafted is None else drafted
            drafts.append(kept.where((step.slots != SLOTS)[:, None], 0).clone())
        found.append((torch.stack(drafts), drafter._tails[:SLOTS]))
    (drafts, tails), *others = found
    assert drafts.unique().numel() > 5
    for other in others:
        assert drafts.equal(other[0]) and tails.equal(other[1])


@on_devices
@pytest.mark.parametrize("count", (1, 3, 4))
def test_guesses_that_are_followed_are_those_of_the_reference(device: str, count: int) -> None:
    torch.manual_seed(count)
    followed = 0
    for guessed in (1, 5, SLOTS):
        drafts = integers(0, 99, SLOTS + 1, count, device=device)
        last_token = integers(0, 2, SLOTS + 1, device=device)
        kv_length = integers(20, 24, SLOTS + 1, device=device)
        guesses = [
            Guess(slot, int(torch.randint(19, 23, ())), tuple(
                tuple(torch.randint(0, 2, (length,)).tolist())
                for length in torch.randint(0, count + 3, (3,)).tolist()
            ))
            for slot in torch.randperm(SLOTS)[:guessed].tolist()
        ]  # fmt: skip
        words = torch.from_numpy(packed(guesses, 1 + count)).to(device)
        got, wanted = drafts.clone(), drafts.clone()
        follow_guesses_gpu(got, last_token, kv_length, words)
        follow_guesses(wanted, last_token, kv_length, words)
        assert torch.equal(got, wanted)
        followed += int((wanted != drafts).any(1).sum())
    assert followed

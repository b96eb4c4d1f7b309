"""Decode attention of windows: several tokens of a row in one kernel, next to each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_attention import Heads, head_shares, unsupported
from megatron_async.kernels.gemm.tile_config import SHARED_BYTES
from megatron_async.runner.memory.attention_metadata import AttentionMetadata
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.sampling_params import SamplingParams
from tests.support import emulator
from tests.support.batches import new_batch
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.decode_rig import small
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import hash_engine, sampling_params
from tests.support.oracle import Ask
from tests.support.window_cases import Row, WindowCase, bits
from tests.unit.models.test_forward_accuracy import TOLERANCE, Rig

pytestmark = pytest.mark.sweep

__all__ = ["device"]

MakeRows = Callable[[int, list[int]], list[Row]]


def rows_of(window: int, lengths: list[int]) -> list[Row]:
    """Whole windows, windows of which less and less is left, a dead row, and padding."""
    rows = [Row(length, window) for length in lengths]
    rows += [Row(length, 1 + n % window) for n, length in enumerate(lengths[:window])]
    return [*rows, Row(lengths[-1], window, dead=True), Row(0, 0), Row(lengths[-1], 0)]


def rows_with_gaps(window: int, lengths: list[int]) -> list[Row]:
    """Rows behind gaps of all sizes, some with padding behind them too, some left out."""
    rows = rows_of(window, lengths)
    for gap in range(1, window):
        left = window - gap
        rows += [Row(length, left - n % left, gap=gap) for n, length in enumerate(lengths)]
        rows.append(Row(lengths[-1], left, dead=True, gap=gap))
    return [*rows, Row(0, 0, gap=1)]


_LENGTHS = [0, 1, 15, 16, 17, 63, 64, 200, 700, 1]
_BORDERS = [0, 13, 15, 16, 127, 128, 129, 260]
"""Of blocks and tiles, and of KV splits of 128 tokens; a window of 4 crosses each of them."""
_WIDE = [(37 * row) % 611 for row in range(90)]
_GPU = [
    ((head_dim, group, block_size, norm, True), window, cluster, split_tokens, lengths)
    for head_dim, group, block_size, norm in (
        (64, 1, 16, True),
        (64, 8, 64, False),
        (80, 2, 16, True),
        (80, 4, 64, False),
        (128, 2, 64, True),
        (128, 4, 16, False),
        (128, 8, 64, False),
        (256, 1, 16, False),
    )
    for window in (1, 2, 3, 4, 5)
    for cluster, split_tokens, lengths in (
        *((1, 2048, _LENGTHS), (8, 2048, _LENGTHS), (2, 64, _BORDERS), (1, 64, _WIDE)),
    )
]
_STEPS = [(1, 2048, _LENGTHS), (8, 2048, _LENGTHS), (2, 64, _BORDERS), (1, 64, _WIDE)]
_GPU_E4M3 = [
    ((head_dim, group, block_size, norm, True), window, *_STEPS[(n + window) % 4])
    for n, (head_dim, group, block_size, norm) in enumerate([
        (64, 1, 16, True), (64, 8, 64, False), (80, 2, 16, True), (96, 3, 32, False),
        (112, 4, 64, True), (128, 2, 64, True), (128, 4, 16, False), (128, 8, 64, False),
        (192, 4, 16, True), (256, 1, 16, False),
    ])
    for window in (1, 2, 4, 5)
]  # fmt: skip
LIMITS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 17},
    {"window": 96},
    {"window": 500, "soft_cap": 2.5},
    {"soft_cap": 0.7},
]
"""Attention windows smaller and larger than contexts, drafted windows and tiles."""
CAPPED: dict[str, Any] = {"window": 17, "soft_cap": 0.7}
CLOSE = 5e-3
"""Error that rounding of the weights and of the output brings."""
SMALL = (32, 3, 16, True, True)
LONG, MANY = (80, 8, 64, False, False), (64, 1, 32, False, True)
WIDE_SMALL, WIDE_LENGTHS = (32, 1, 16, False, True), [(7 * row) % 33 for row in range(31)]


@on_both(
    *("shape", "window", "cluster", "split_tokens", "lengths", "make_rows", "limits", "e4m3"),
    gpu=[(*each, rows_of, {}, False) for each in _GPU]
    + [(*each, rows_with_gaps, {}, False) for each in _GPU if each[1] > 1]
    + [
        (*each, rows_with_gaps if n % 2 and each[1] > 1 else rows_of, limits, False)
        for n, each in enumerate(_GPU[::3])
        for limits in [LIMITS[n % len(LIMITS)]]
    ]
    + [
        (*each, rows_with_gaps if n % 3 and each[1] > 1 else rows_of, limits, True)
        for n, each in enumerate(_GPU_E4M3)
        for limits in [({}, *LIMITS)[n % 6]]
    ],
    small=[
        ((128, 4, 16, False, True), 4, 2, 2048, [33], rows_of, {}, False),
        (LONG, 5, 1, 64, [126], rows_of, {}, False),
        (SMALL, 4, 4, 16, [14, 63], rows_of, {}, False),
        (WIDE_SMALL, 2, 1, 1024, WIDE_LENGTHS, rows_of, {}, False),
        (LONG, 3, 1, 64, [0, 126], rows_with_gaps, {}, False),
        (SMALL, 4, 4, 16, [0, 63], rows_with_gaps, {}, False),
        (WIDE_SMALL, 2, 1, 1024, WIDE_LENGTHS[:20], rows_with_gaps, {}, False),
        (MANY, 1, 2, 16, [0, 15, 16, 69, 70, 200], rows_of, {"window": 70}, False),
        (LONG, 3, 1, 64, [0, 126], rows_with_gaps, {"window": 2}, False),
        (WIDE_SMALL, 2, 1, 1024, WIDE_LENGTHS[:20], rows_of, CAPPED, False),
        ((128, 4, 16, True, True), 1, 2, 2048, [0, 1, 15, 17, 200], rows_of, {}, True),
        ((80, 3, 16, False, True), 1, 1, 64, [0, 15, 16, 200], rows_of, {"window": 70}, True),
        ((256, 1, 16, True, True), 2, 2, 64, [0, 70], rows_of, {}, True),
        (LONG, 5, 1, 64, [126], rows_of, {}, True),
        (SMALL, 4, 4, 16, [0, 63], rows_with_gaps, {}, True),
        (LONG, 3, 1, 64, [0, 126], rows_with_gaps, {"window": 2}, True),
        (WIDE_SMALL, 2, 1, 1024, WIDE_LENGTHS[:20], rows_of, CAPPED, True),
    ],
)
class TestWindows:
    def test_equal_float64_and_append_what_counts(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        window: int,
        cluster: int,
        split_tokens: int,
        lengths: list[int],
        make_rows: MakeRows,
        limits: dict[str, Any],
        e4m3: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if device.type == "cpu":  # each cluster has one item after the other
            monkeypatch.setattr(cuda, "sm_count", lambda index: 1)
        case = WindowCase(
            device, shape, window, make_rows(window, lengths), limits=limits, e4m3=e4m3
        )
        before, (wanted, cache) = case.cache.clone(), case.wanted()
        out, counted = case.attend(case.kernel(cluster, split_tokens)), case.counted
        assert out.isfinite().all(), "padding too"
        if e4m3:  # a key that is rounded to the number next to it is read as that
            wanted = case.wanted_over(case.cache)
        for token in counted.nonzero().flatten().tolist():
            assert relative_error(out[token], wanted[token]) < CLOSE, token
        mapping = case.mapping[counted]
        flat, before, cache = (bits(each).flatten(1, 2) for each in (case.cache, before, cache))
        found, meant = flat[:, mapping], cache[:, mapping]
        assert not e4m3 or torch.equal(found[1], meant[1]), "bytes of values"
        assert not e4m3 or (found != meant).float().mean() < 0.05
        found, meant = (each.view(case.cache.dtype).double() for each in (found, meant))
        assert relative_error(found, meant) < (5 * CLOSE if e4m3 else CLOSE)
        untouched = torch.ones(flat.shape[1], dtype=torch.bool, device=device)
        untouched[mapping] = untouched[: shape[2]] = False
        assert torch.equal(flat[:, untouched], before[:, untouched])

    def test_bits_of_a_token_are_its_own(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        window: int,
        cluster: int,
        split_tokens: int,
        lengths: list[int],
        make_rows: MakeRows,
        limits: dict[str, Any],
        e4m3: bool,
    ) -> None:
        """Neither another row nor a token behind it in its window can change them, not with NaN."""
        case = WindowCase(
            device, shape, window, make_rows(window, lengths), limits=limits, e4m3=e4m3
        )
        kernel = case.kernel(cluster, split_tokens)
        first = case.attend(kernel)
        assert torch.equal(case.attend(kernel), first), "what one launch counts is gone"
        token = torch.arange(len(case.packed), device=device)
        row, place = token // window, token % window
        changed = (row % 3 == 1) & (place > 0) | (row % 3 == 2) | ~case.valid
        group = shape[1]
        parts = case.packed.unflatten(1, (2, group + 2, -1))
        for part in (slice(None), slice(group + 1, group + 2)):
            kept = parts.clone()
            parts[changed, :, part] = math.nan
            case.positions[row % 3 == 2] //= 2
            again = case.attend(kernel)
            parts.copy_(kept)
            assert torch.equal(again[~changed], first[~changed])
            broken = changed & case.counted & (row % 3 == 1)
            assert again[broken].isnan().all()


@on_both("window", gpu=[(1,), (2,)], small=[(2,)])
def test_a_value_behind_the_attention_window_reaches_nobody(
    device: torch.device, window: int
) -> None:
    """A window of drafts that is longer than the attention window."""
    case = WindowCase(device, SMALL, 4, rows_of(4, [20]), limits={"window": window})
    kernel = case.kernel(1, 2048)
    first = case.attend(kernel)
    case.packed.unflatten(1, (2, 5, -1))[0, :, 4] = math.nan
    again = case.attend(kernel)
    assert again[:window].isnan().all()
    assert torch.equal(again[window:], first[window:])


def test_a_window_that_is_never_full_takes_the_kernel_without_one() -> None:
    plain = Heads(128, 4, 8, 64, norm=False, rope=True)
    limited = plain.limited({"window": 4096, "soft_cap": 50.0})
    assert plain.limited({"window": 4096}).defines(1, 4096, 132) == plain.defines(1, 4096, 132)
    macros = limited.defines(1, 8192, 132)
    assert (macros["SLIDING_WINDOW"], macros["SOFT_CAP"]) == (4096, 0x42480000)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 33, 100, 500])
def test_splits_have_room_for_what_a_window_reads(window: int) -> None:
    heads = Heads(128, 4, 8, 64, norm=False, rope=True, sliding_window=window)
    for capacity in (64, 320):
        tiles = [-(-n // 16) - max(0, n + 1 - window) // 16 for n in range(capacity)]
        assert 16 * max(tiles) <= heads.read_tokens(capacity) <= capacity


def test_windows_of_a_step_are_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot a row, consecutive positions, padding behind them: also at the ends of requests."""
    window, steps, padding = 3, [], []
    begin = ForwardBatch.begin_forward

    def begin_forward(self: ForwardBatch, each: Tensor, at: Tensor, **values: Any) -> None:
        if values.get("chunks") is None:
            assert values["window"] == window
            whole = len(each) // window * window
            slots, positions = each[:whole].view(-1, window), at[:whole].view(-1, window)
            inside = slots != self.null_slot
            assert torch.equal(inside, inside.sum(1, keepdim=True) > torch.arange(window))
            assert (slots[inside] == slots[:, :1].expand_as(slots)[inside]).all()
            expected = positions[:, :1] + torch.arange(window)
            assert torch.equal(positions[inside], expected[inside])
            assert (positions[~inside] < self.max_sequence_length).all()
            padding.append(int((~inside)[inside[:, 0]].sum()))
            steps.append(1)
        begin(self, each, at, **values)

    monkeypatch.setattr(ForwardBatch, "begin_forward", begin_forward)
    asks = [Ask(prompt=(1, 2, 3), max_new=20 + n) for n in range(3)]
    with hash_engine(1, model=DraftingHashModel(window - 1, 0.3), max_requests=3) as engine:
        engine.generate([list(ask.prompt) for ask in asks], [*map(sampling_params, asks)])
    assert len(steps) > 5 and sum(padding) > 0


@on_both(
    *("lengths", "limits"),
    gpu=[(_WIDE, {}), (_WIDE, LIMITS[1]), (_WIDE, {"sinks": True})],
    small=[(WIDE_LENGTHS, LIMITS[1]), (WIDE_LENGTHS[:20], {"window": 17, "sinks": True})],
)
def test_a_models_own_forward_takes_windows_to_the_kernel(
    device: torch.device,
    lengths: list[int],
    limits: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of more tokens than the fused GEMMs take."""
    if device.type == "cpu":
        emulator.install(monkeypatch, sm_count=2)
        monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    case = WindowCase(device, WIDE_SMALL, 2, rows_of(2, lengths), limits=limits)
    limits = case.limits
    context = new_batch(
        params_dtype=torch.bfloat16, num_layers=1, kv_channels=32, num_attention_heads=2,
        max_sequence_length=case.capacity, block_count=1, block_size_tokens=16, device=device,
        num_speculative_tokens=1,
    )  # fmt: skip
    context.block_table = case.table
    context.take_cache(case.cache[None])
    metadata = AttentionMetadata(
        case.positions, case.slots, case.mapping, len(case.packed), case.positions + 1, window=2
    )
    given = case.packed, case.cos_sin, None, None

    def heads(*arguments: Any) -> Heads | None:
        return context.attention.heads_of_decode(context.metadata, *arguments)

    context.begin(metadata._replace(window=None))
    assert heads(*given) is None, "tokens of a row in another way"
    context.begin(metadata)
    sinks = torch.ones(2, dtype=torch.bfloat16, device=device)
    assert heads(*given, {**limits, "sinks": sinks}) == case.heads._replace(sinks=True)
    assert heads(*given, {"sinks": sinks.float()}) is None
    assert heads(*given, limits) == case.heads
    with monkeypatch.context() as patch:
        patch.setattr(decode_attention, "FUSED_WINDOWS", False)
        assert heads(*given) is None
    wanted, _ = case.wanted()
    out = context.attend_packed(0, case.packed, case.scale, case.cos_sin, None, None, 0.0, **limits)
    assert relative_error(out[case.counted], wanted[case.counted]) < CLOSE


@on_both("window", gpu=[(2,), (3,), (5,)], small=[])
def test_an_engine_with_drafts_decodes_its_windows_in_fused_kernels(
    device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured graphs: each token is the best one of a float64 forward, or next to it."""
    windows, attend = set(), decode_attention.DecodeAttention.__call__

    def noted(self: decode_attention.DecodeAttention, *values: Any, **given: Any) -> None:
        windows.add(self._window)
        attend(self, *values, **given)

    monkeypatch.setattr(decode_attention.DecodeAttention, "__call__", noted)
    drafts = {"num_speculative_tokens": window - 1, "speculative_method": "ngram"}
    rig = Rig(small("qwen3"), torch.bfloat16, str(device), 3, num_cuda_graphs=1, **drafts)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, rig.vocab_size, (9 + n,), generator=generator).repeat(2) for n in range(3)
    ]
    params = [
        SamplingParams(temperature=0, num_tokens_to_generate=n, termination_id=-1)
        for n in (14, 17, 12)
    ]
    with rig.engine as engine:
        requests = engine.generate([prompt.tolist() for prompt in prompts], params)
        assert engine.counters.tokens_accepted > 0
    assert windows == {1, window}  # graphs of both are captured
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = request.generated_tokens
        sequence = torch.tensor([*prompt.tolist(), *tokens[:-1]], device=device)
        logits = rig.reference.logits(sequence)[len(prompt) - 1 :]
        short = logits.amax(1) - logits[range(len(tokens)), tokens]
        assert (short < TOLERANCE[torch.bfloat16] * logits.norm(dim=1)).all()


@emulated
@pytest.mark.parametrize(
    ("there", "instead", "limits"),
    [
        ("(e * 8 + 2 * t + j) / HEADS + 1 : valid", "WINDOW : valid", {}),
        ("rotate(i, own_position,", "rotate(i, position,", {}),
        ("if (is_broken) x = y = 0;", ";", {}),
        ("const int edge = before +", "const int edge =", {"window": 9}),
        ("- FINITE(most[e][j % 2])", "- most[e][j % 2]", {"window": 26}),
    ],
)
def test_the_emulator_notices(
    there: str, instead: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tests above can fail."""
    text = emulator.source_text("attention")
    assert there in text
    emulator.install(monkeypatch, sm_count=1)
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    build = emulator.EmulatedKernel
    monkeypatch.setattr(decode_attention, "kernel", lambda source, macros, _: build(source, macros))
    case = WindowCase(torch.device("cpu"), SMALL, 2, rows_of(2, [14, 40]), limits=limits)
    wanted, _ = case.wanted()
    case.packed.unflatten(1, (2, 5, -1))[1, :, 4] = math.nan
    counted = case.counted.clone()
    counted[1] = False
    kernel = case.kernel(1, 2048)
    out = case.attend(kernel)
    assert not relative_error(out[counted], wanted[counted]) < 2 * CLOSE


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "shares"),
    [(128, 4, 4, 1), (128, 8, 3, 1), (128, 8, 4, 2), (128, 7, 5, 7), (256, 16, 1, 1)],
)
def test_heads_are_divided_where_a_windows_queries_are_many(
    head_dim: int, group: int, window: int, shares: int
) -> None:
    assert head_shares(head_dim, group, window) == shares


def test_windows_that_are_not_taken_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported(128, 4, 64, 128, window=16) is None
    assert "17 tokens, more than 16" in str(unsupported(128, 4, 64, 128, window=17))
    assert "does not fit" in str(unsupported(256, 4, 64, 256, window=16))
    assert "block size 8" in str(unsupported(128, 4, 8, 128, window=2))
    monkeypatch.setattr(decode_attention, "FUSED_WINDOWS", False)
    assert "turned off" in str(unsupported(128, 4, 64, 128, window=2))
    assert unsupported(128, 4, 64, 128) is None


@emulated
def test_every_window_fits_into_shared_memory() -> None:
    defines = [
        Heads(head_dim, group, 8, 16, norm=True, rope=True, window=window).defines(
            rows, 131072, emulator.SM_COUNT, cluster=cluster
        )
        for head_dim in (64, 80, 128, 256)
        for group in (1, 4, 8, 16)
        for window in (2, 4, 5, 16)
        for rows, cluster in ((1, 8), (64, 1))
        if unsupported(head_dim, group, 16, head_dim, window) is None
    ]
    assert max(emulator.shared_bytes("attention", defines)) <= SHARED_BYTES
    ours = [each for each in defines if each["D"] == 128 and each["GROUP"] == 4]
    ours = [each for each in ours if each["WINDOW"] <= 4]
    two = SHARED_BYTES // 2
    assert max(emulator.shared_bytes("attention", ours)) <= two, "two CTAs on an SM"

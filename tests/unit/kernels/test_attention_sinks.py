"""Sinks in decode attention: one more score of each query, whatever shares its tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_arguments import AttentionArguments, SinkArguments
from megatron_async.kernels.attention.decode_attention import Heads
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.window_cases import KV_HEADS, Row, WindowCase
from tests.unit.kernels.test_kernel_arguments import fields, parameters_of
from tests.unit.kernels.test_window_attention import (
    CLOSE,
    WIDE_LENGTHS,
    WIDE_SMALL,
    MakeRows,
    rows_of,
    rows_with_gaps,
)

pytestmark = pytest.mark.sweep

__all__ = ["device"]

GPT_OSS = (64, 8, 16, False, True)
FOUR, THREE, TWO = (32, 4, 16, False, True), (32, 3, 16, True, True), (64, 2, 32, False, True)
LIMITS: list[dict[str, Any]] = [
    {},
    {"window": 17},
    {"window": 128},
    {"soft_cap": 0.7},
    {"window": 96, "soft_cap": 2.5},
]
_LENGTHS = [0, 1, 15, 16, 17, 127, 128, 200, 700, 1]
_WIDE = [(37 * row) % 611 for row in range(90)]
_STEPS = [(1, 2048, _LENGTHS), (8, 2048, _LENGTHS), (2, 64, _LENGTHS), (1, 64, _WIDE)]
_SHAPES = [GPT_OSS, (64, 8, 64, False, True), (128, 4, 16, True, True), (80, 3, 32, False, False)]


@on_both(
    *("shape", "window", "cluster", "split_tokens", "lengths", "make_rows", "limits", "e4m3"),
    gpu=[
        (shape, window, *_STEPS[n % 4], make_rows, limits, e4m3)
        for n, (shape, limits) in enumerate((s, limits) for s in _SHAPES for limits in LIMITS)
        for window, make_rows in ((1, rows_of), (4, rows_with_gaps), (16, rows_of))
        for e4m3 in (False, True)
    ],
    small=[
        (GPT_OSS, 1, 1, 2048, [0, 1, 15, 17, 200], rows_of, {}, False),
        (GPT_OSS, 1, 2, 64, [0, 16, 130, 260], rows_of, {"window": 170}, False),
        (GPT_OSS, 4, 1, 64, [0, 126], rows_with_gaps, {"window": 17, "soft_cap": 0.7}, False),
        (GPT_OSS, 16, 1, 64, [70], rows_of, {"window": 30}, False),
        (FOUR, 16, 4, 16, [14, 63], rows_of, {}, False),
        (WIDE_SMALL, 2, 1, 1024, WIDE_LENGTHS[:20], rows_of, {"window": 17}, False),
        (GPT_OSS, 1, 4, 16, [0, 31, 64, 330], rows_of, {}, True),
        (GPT_OSS, 1, 1, 64, [0, 200], rows_of, {"window": 128, "soft_cap": 0.7}, True),
        (THREE, 4, 1, 64, [14, 200], rows_with_gaps, {"soft_cap": 0.7}, True),
        (TWO, 16, 2, 64, [70], rows_of, {"window": 17}, True),
    ],
)
class TestSinks:
    def test_equal_float64(
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
        limits, rows = {**limits, "sinks": True}, make_rows(window, lengths)
        case = WindowCase(device, shape, window, rows, limits=limits, e4m3=e4m3)
        wanted, kernel = case.wanted()[0], case.kernel(cluster, split_tokens)
        out = case.attend(kernel)
        assert out.isfinite().all(), "padding too"
        if e4m3:
            wanted = case.wanted_over(case.cache)
        for token in case.counted.nonzero().flatten().tolist():
            assert relative_error(out[token], wanted[token]) < CLOSE, token
        assert torch.equal(case.attend(kernel), out), "nothing of a launch stays"


@on_both(
    *("window", "cluster", "split_tokens", "e4m3"),
    gpu=[(w, *c, e) for w in (1, 4) for c in ((1, 2048), (8, 16)) for e in (False, True)],
    small=[(1, 1, 2048, False), (4, 2, 16, True)],
)
def test_any_sink_is_taken(
    device: torch.device, window: int, cluster: int, split_tokens: int, e4m3: bool
) -> None:
    """One whose exponential no float holds leaves nothing of its head's values; one far below all
    scores changes nothing, and neither does minus infinity; NaN gives NaN to its head alone."""
    case, plain = (
        WindowCase(device, FOUR, window, rows_of(window, [0, 70]), limits=limits, e4m3=e4m3)
        for limits in ({"sinks": True}, {})
    )
    kernel = case.kernel(cluster, split_tokens)
    without = plain.attend(plain.kernel(cluster, split_tokens))[case.counted]
    sinks = case.limits["sinks"]
    sinks[1], sinks[2], sinks[5], sinks[6] = 200.0, -200.0, -math.inf, math.nan
    out = case.attend(kernel)[case.counted]
    assert (out[:, 1] == 0).all() and out[:, 6].isnan().all()
    assert relative_error(out[:, [2, 5]], without[:, [2, 5]].double()) < CLOSE
    for head in (0, 3, 4, 7):
        assert relative_error(out[:, head], without[:, head].double()) > CLOSE, "it matters"


def test_a_layers_sinks_are_part_of_what_is_compiled() -> None:
    plain = Heads(64, 8, 8, 64, norm=False, rope=True)
    heads = plain.limited({"window": 128, "sinks": torch.ones(64)})
    assert heads == plain._replace(sliding_window=128, sinks=True)
    macros = heads._replace(sliding_window=0).defines(8, 8192, 132)
    assert macros == {**plain.defines(8, 8192, 132), "SINKS": 1}, "nothing else differs"


def test_the_sinks_come_behind_all_other_arguments() -> None:
    found = fields(AttentionArguments) + fields(SinkArguments)
    assert found == parameters_of("attention", sinks=True)


@emulated
@pytest.mark.parametrize("macros", [{"WINDOW": 1}, {"WINDOW": 4, "GAPS": 1, "E4M3": 1}])
def test_a_kernel_without_sinks_has_no_code_of_theirs(macros: dict[str, int]) -> None:
    defines = Heads(64, 8, 8, 64, norm=False, rope=True).defines(8, 8192, 132) | macros
    without, sinks_off, on = (
        emulator.preprocessed("attention", defines | more)
        for more in ({}, {"SINKS": 0}, {"SINKS": 1})
    )
    assert without == sinks_off and "sink" not in without.lower()
    assert on.count("own_sinks") == 3, "their code is found by that name"


_OF, _MASS = "widen(own_sinks[e][j]) * 1.4426950408889634f;", "g == 0 ? 1.f : 0.f;"
_WHERE, _HEAD = "counts_sinks = takes_new && warp == WARPS - 1;", "item.share * HEADS + (e * 8 +"
_ALONE, _SPLITS, _CLUSTERS, _SHARES = (1, 1, 2048), (1, 1, 16), (1, 4, 2048), (16, 1, 2048)
FAULTS: dict[str, tuple[str, str, tuple[int, int, int], dict[str, Any]]] = {
    "forgotten": (_WHERE, "counts_sinks = false;", _ALONE, {}),
    "in base e": (_OF, "widen(own_sinks[e][j]);", _ALONE, {}),
    "once per split": (
        _WHERE, "counts_sinks = rank == CLUSTER - 1 && warp == WARPS - 1;", _SPLITS, {},
    ),
    "once per CTA": (
        _WHERE, "counts_sinks = item.split == item.splits - 1 && warp == WARPS - 1;", _CLUSTERS, {},
    ),
    "once per warp": (_WHERE, "counts_sinks = takes_new;", _ALONE, {}),
    "once per lane": (_MASS, "1.f;", _ALONE, {}),
    "of another KV head": ("sinks[item.head * GROUP +", "sinks[", _ALONE, {}),
    "of another share": (_HEAD, "(e * 8 +", _SHARES, {}),
    "of the first head": (f"{_HEAD} 2 * t + j)", "0", _ALONE, {}),
    "capped": (_OF, f"SCORE({_OF[:-1]});", _ALONE, {"soft_cap": 0.7}),
    "divided by the values' scale": (
        _MASS, "(g == 0 ? 1.f : 0.f) / VALUE_FACTOR;", _ALONE, {"e4m3": True},
    ),
}  # fmt: skip
"""Text and what takes its place, window, cluster and tokens of a split."""


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    there, instead, (window, cluster, split_tokens), limits = FAULTS[fault]
    text = emulator.source_text("attention")
    assert text.count(there) == 1
    limits = {**limits, "sinks": True}
    e4m3 = limits.pop("e4m3", False)
    rows = [Row(0, window), Row(70, window)]
    case = WindowCase(torch.device("cpu"), FOUR, window, rows, limits=limits, e4m3=e4m3)
    assert len(case.limits["sinks"].unique()) == 4 * KV_HEADS

    def error() -> float:
        out = case.attend(case.kernel(cluster, split_tokens))
        return relative_error(out, case.wanted_over(case.cache))

    emulator.install(monkeypatch, sm_count=1)
    assert error() < CLOSE
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    build = emulator.EmulatedKernel
    monkeypatch.setattr(decode_attention, "kernel", lambda source, macros, _: build(source, macros))
    assert not error() < 2 * CLOSE

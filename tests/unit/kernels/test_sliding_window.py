"""Sliding windows, soft caps and sinks: the references and the Triton kernels against float64.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_decode, paged_prefill
from tests.support.interpreter import HAS_TRITON, on_devices
from tests.support.paged_cases import make_case as make_decode
from tests.unit.kernels.test_paged_prefill import UNTOUCHED
from tests.unit.kernels.test_paged_prefill import make_case as make_prefill

LIMITS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 40, "soft_cap": 0.7},
    {"window": 300},
    {"sinks": True},
    {"sinks": True, "window": 40},
]
limits_of_all_kinds = pytest.mark.parametrize("limits", LIMITS, ids=str)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


def with_sinks(limits: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    """A sink of each head in place of True; the scores lie between -1 and 1 mostly."""
    if "sinks" not in limits:
        return limits
    return {**limits, "sinks": torch.linspace(-1, 8, heads, device=device)}


def expected(query: Tensor, keys: Tensor, values: Tensor, scale: float, limits: Any) -> Tensor:
    """float64 attention of the last token's query ``[H, D]`` over keys ``[T, Hkv, D]``."""
    window, cap = limits.get("window", len(keys)), limits.get("soft_cap")
    group = query.shape[0] // keys.shape[1]
    keys, values = (
        x[max(len(x) - window, 0) :].double().repeat_interleave(group, dim=1)
        for x in (keys, values)
    )
    scores = torch.einsum("hd,thd->ht", query.double(), keys) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if (sinks := limits.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    return torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(keys)], values)


def forget(cache: Tensor, blocks: Tensor, tokens: int) -> None:
    """NaN in the first ``tokens`` of a sequence, which nobody may read any more."""
    gone = torch.arange(max(tokens, 0), device=cache.device)
    cache[blocks[gone // cache.shape[1]], gone % cache.shape[1]] = torch.nan


def check_decode(
    attend: Callable[..., Tensor],
    limits: Any,
    dtype: torch.dtype,
    device: str,
    lengths: tuple[int, ...] = (1, 45, 257, 300, 301, 700),
) -> None:
    case = make_decode(
        list(lengths), heads=6, kv_heads=2, head_dim=24, block_size=16, dtype=dtype, device=device
    )
    limits = with_sinks(limits, 6, device)
    wanted = []
    for row, length in enumerate(lengths):
        blocks = case.table[row]
        keys, values = (x[blocks].flatten(0, 1)[:length] for x in (case.keys, case.values))
        wanted.append(expected(case.query[row], keys, values, case.scale, limits))
    for row, length in enumerate(lengths):
        for cache in (case.keys, case.values):
            forget(cache, case.table[row], length - limits.get("window", length))
    out = attend(case.query, case.keys, case.values, case.table, case.lengths, case.scale, **limits)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), torch.stack(wanted), rtol=tolerance, atol=tolerance)
    for row in (0, 1):
        alone = attend(
            case.query[[row, -1]], case.keys, case.values, case.table[[row, -1]],
            case.lengths[[row, -1]], case.scale, **limits,
        )  # fmt: skip
        assert torch.equal(alone[0], out[row])


def check_prefill(
    attend: Callable[..., None],
    limits: Any,
    dtype: torch.dtype,
    device: str,
    pieces: tuple[tuple[int, int], ...] = ((0, 1), (70, 33), (400, 70), (5, 64), (39, 2)),
) -> None:
    case = make_prefill(
        list(pieces), group=3, head_dim=24, block_size=16, dtype=dtype, device=device
    )
    limits = with_sinks(limits, case.query.shape[1], device)
    wanted = torch.full_like(case.query, UNTOUCHED, dtype=torch.float64)
    for slot, first, length, start in case.chunks.tolist():
        blocks = case.table[slot]
        keys, values = (x[blocks].flatten(0, 1) for x in (case.keys, case.values))
        for token in range(length):
            until = start + token + 1
            wanted[first + token] = expected(
                case.query[first + token], keys[:until], values[:until], case.scale, limits
            )
    for slot, _, length, start in case.chunks.tolist():
        for cache in (case.keys, case.values):
            seen = limits.get("window", start + 1)
            forget(cache, case.table[slot], start + 1 - seen if length else 0)
    out = torch.full_like(case.query, UNTOUCHED)
    attend(case.query, case.keys, case.values, case.table, case.chunks, case.scale, out, **limits)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@limits_of_all_kinds
def test_references_equal_float64(limits: dict[str, Any]) -> None:
    check_decode(paged_decode.paged_decode_attention_reference, limits, torch.float32, "cpu")
    check_prefill(paged_prefill.paged_mixed_attention_reference, limits, torch.float32, "cpu")


@limits_of_all_kinds
def test_attention_by_length_equals_the_reference(limits: dict[str, Any]) -> None:
    def attend(*arguments: Any, **limits: Any) -> Tensor:
        *some, lengths, scale = arguments
        return paged_decode.paged_decode_attention_by_length(
            *some, lengths.tolist(), scale, **limits
        )

    check_decode(attend, limits, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need triton")
@on_devices
@limits_of_all_kinds
def test_kernels_equal_float64(limits: dict[str, Any], device: str) -> None:
    from megatron_async.kernels.attention import paged_decode_triton, paged_prefill_triton

    decode = paged_decode_triton.paged_decode_attention_triton
    prefill = paged_prefill_triton.paged_mixed_attention_triton
    if device == "cpu":
        check_decode(decode, limits, torch.float32, device, (45, 310))
        check_prefill(prefill, limits, torch.float32, device, ((0, 1), (60, 13), (39, 2)))
        return
    for dtype in (torch.float32, torch.bfloat16):
        check_decode(decode, limits, dtype, device)
        check_prefill(prefill, limits, dtype, device)


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need triton")
@on_devices
def test_long_rows_behind_a_window_are_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async.kernels.attention import paged_decode_triton

    monkeypatch.setattr(paged_decode_triton, "MAX_SPLITS", 2)
    check_decode(
        paged_decode_triton.paged_decode_attention_triton,
        {"window": 600},
        torch.float32,
        device,
        (45, 800),
    )

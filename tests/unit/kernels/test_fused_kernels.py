"""Fused kernels: each against its reference, the model through them and around them.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.gemm.skinny_gemm import statistics_of
from megatron_async.kernels.gemm.tile_config import LAYER_NORM, NO_NORM, RMS_NORM
from megatron_async.models.layers import activation, attention, decoder_layer, norm
from tests.support.interpreter import compiled, interpreted, on_devices
from tests.unit.models.test_batch_invariant import MODELS, Rig

try:
    from megatron_async.kernels.attention.rope_append import rope_append, rope_append_reference
    from megatron_async.kernels.norm.add_norm import add_norm, add_norm_reference
    from megatron_async.kernels.norm.add_statistics import (
        add_statistics,
        add_statistics_reference,
    )
    from megatron_async.kernels.norm.swiglu import swiglu, swiglu_reference
except ImportError:  # without triton what follows is skipped, but for the model's own tests
    pass

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)


def assert_close(out: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * scale)


def draw(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


class PackedCase:
    """Tokens to append at random places of a cache; the last two are padding."""

    def __init__(
        self, tokens: int, group: int, head_dim: int, pairs: int, has_norm: bool,
        dtype: torch.dtype, device: str,
    ) -> None:  # fmt: skip
        kv_heads, blocks, block_size = 2, 9, 4
        self.packed = draw(tokens, kv_heads * (group + 2) * head_dim, dtype=dtype, device=device)
        self.cache = torch.zeros(
            2, blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device
        )
        generator = torch.Generator().manual_seed(tokens)
        slots = torch.randperm((blocks - 1) * block_size, generator=generator)[:tokens] + block_size
        slots[-2:] = 0
        self.slots = slots.to(device)
        self.positions = (torch.arange(tokens) * 7 % 50).to(device)
        angles = torch.outer(torch.arange(50.0), 0.1 ** torch.arange(pairs))
        self.cos_sin = None
        if pairs:
            self.cos_sin = torch.stack((angles.cos(), angles.sin()), 1).to(device)
        self.q_weight = self.k_weight = None
        if has_norm:
            self.q_weight = draw(head_dim, dtype=dtype, device=device)
            self.k_weight = self.q_weight.flip(0)

    def run(self, reference: bool = False, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Queries, and the cache without the null block."""
        append = rope_append_reference if reference else rope_append
        cache = self.cache.clone()
        query = append(
            self.packed[rows], cache[0], cache[1], self.slots[rows], self.positions[rows],
            self.cos_sin, self.q_weight, self.k_weight, 1e-6,
        )  # fmt: skip
        return query, cache[:, 1:]


# Head dimension and rotated pairs: whole heads, a part of them, none.
_HEADS = ((64, 32), (96, 48), (128, 64), (96, 24), (64, 0), (256, 128))
_GROUPS = (1, 3, 4, 16)
_APPENDS = list(itertools.product(_HEADS, _GROUPS, (False, True), DTYPES))
_EVERY_TWO = [
    (heads, group, bool((h + g) % 2), DTYPES[(h + g) % 3])
    for h, heads in enumerate(_HEADS)
    for g, group in enumerate(_GROUPS)
]
"""Every two values of different parameters, together."""
_ADDED = ("nothing", "residual", "residual and bias")
_SHAPES = ((1, 48), (7, 1000), (33, 4096))
_NORM_SHAPES = ((1, 48), (7, 1, 1000), (33, 4096))
_NORMS = (NO_NORM, RMS_NORM, LAYER_NORM)
_SQUARE = [(i, j, (i + j) % 3, (i + 2 * j) % 3) for i in range(3) for j in range(3)]
_ADD_NORMS = list(itertools.product(DTYPES, _NORM_SHAPES, _ADDED, (False, True)))
_TWO_OF_ADD_NORMS = [
    (DTYPES[i], _NORM_SHAPES[j], _ADDED[k], last == 1) for i, j, k, last in _SQUARE
]
_STATISTICS = list(itertools.product(DTYPES, _SHAPES, _ADDED, _NORMS))
_TWO_OF_STATISTICS = [(DTYPES[i], _SHAPES[j], _ADDED[k], _NORMS[last]) for i, j, k, last in _SQUARE]


@pytest.mark.parametrize(
    ("chosen", "cases"),
    (
        (_EVERY_TWO, _APPENDS),
        (_TWO_OF_ADD_NORMS, _ADD_NORMS),
        (_TWO_OF_STATISTICS, _STATISTICS),
    ),
    ids=("append", "norm", "statistics"),
)
def test_interpreted_cases_hold_every_two_values(
    chosen: list[tuple[object, ...]], cases: list[tuple[object, ...]]
) -> None:
    for one, other in itertools.combinations(range(4), 2):
        assert {(case[one], case[other]) for case in chosen} == {
            (case[one], case[other]) for case in cases
        }


def interpreted_or_all(chosen: list[tuple[Any, ...]], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Parameters behind a device: ``chosen`` ones where Triton interprets, all on a GPU."""
    return [pytest.param("cpu", *case, marks=interpreted) for case in chosen] + [
        pytest.param("cuda", *case, marks=compiled) for case in cases
    ]


@pytest.mark.parametrize(
    ("device", "heads", "group", "has_norm", "dtype"),
    interpreted_or_all(_EVERY_TWO, _APPENDS),
)
def test_rope_append_equals_its_reference(
    device: str, heads: tuple[int, int], group: int, has_norm: bool, dtype: torch.dtype
) -> None:
    head_dim, pairs = heads
    case = PackedCase(13, group, head_dim, pairs, has_norm, dtype, device)
    query, cache = case.run()
    expected_query, expected_cache = case.run(reference=True)
    assert query.is_contiguous()
    # A norm rounds before the rotation, which may make a small value of two large ones.
    scale = max(1.0, expected_query.abs().max().item()) if has_norm else 1.0
    assert_close(query, expected_query, scale)
    assert_close(cache, expected_cache, scale)
    assert cache.count_nonzero() > 0
    lone, _ = case.run(rows=slice(5, 6))
    assert torch.equal(lone, query[5:6])


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (7, 1, 2 * 1100), (33, 2 * 4096)])
def test_swiglu_equals_its_reference(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = draw(*shape, dtype=dtype, device=device) * 5
    x[0, ..., :2] = torch.tensor([-1000.0, 1000.0])
    out = swiglu(x)
    assert_close(out, swiglu_reference(x))
    assert torch.equal(swiglu(x[-1:]), out[-1:])


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "added", "centered"),
    interpreted_or_all(_TWO_OF_ADD_NORMS, _ADD_NORMS),
)
def test_add_norm_equals_its_reference(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], added: str, centered: bool
) -> None:
    x = draw(*shape, dtype=dtype, device=device)
    weight = draw(shape[-1], dtype=dtype, device=device)
    residual = None if added == "nothing" else x.flip(0) * 3
    bias = weight.flip(0) if centered else None
    x_bias = weight * 2 if added == "residual and bias" else None
    hidden, normed = add_norm(x, residual, weight, bias, 1e-5, x_bias)
    expected_hidden, expected = add_norm_reference(x, residual, weight, bias, 1e-5, x_bias)
    assert_close(hidden, expected_hidden)
    # What rounding did to the sum is not the norm's error.
    assert_close(normed, add_norm_reference(hidden, None, weight, bias, 1e-5)[1])
    assert_close(expected, add_norm_reference(expected_hidden, None, weight, bias, 1e-5)[1])
    last = residual if residual is None else residual[-1:]
    lone = add_norm(x[-1:], last, weight, bias, 1e-5, x_bias)
    assert torch.equal(lone[0], hidden[-1:])
    assert torch.equal(lone[1], normed[-1:])


class Added:
    """What ``add_statistics`` leaves."""

    def __init__(self, x: Tensor, residual: Tensor | None, bias: Tensor | None, norm: int) -> None:
        rows, columns = x.shape
        # A row more than may be written: it must stay as it is.
        self.hidden = torch.full((rows + 1, columns), 7.0, dtype=x.dtype, device=x.device)
        self.scaled = torch.full_like(self.hidden, 7.0)
        self.statistics = torch.full((rows + 1, 1, 2), 7.0, device=x.device)
        self._norm, self._bias = norm, bias
        self._x, self._residual = x, residual
        self._weight = 1 + x[0] / 4

    def run(self, reference: bool = False, in_place: bool = False) -> Added:
        rows = self._x.shape[0]
        hidden, residual = self.hidden[:rows], self._residual
        if in_place and residual is not None:
            residual = hidden.copy_(residual)
        (add_statistics_reference if reference else add_statistics)(
            self._x, residual, hidden, x_bias=self._bias,
            statistics=None if self._norm == NO_NORM else self.statistics[:rows],
            scaled=(self._weight, self.scaled[:rows]) if self._norm == RMS_NORM else None,
        )  # fmt: skip
        return self


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "added", "norm"),
    interpreted_or_all(_TWO_OF_STATISTICS, _STATISTICS),
)
def test_add_statistics_equals_its_reference(
    device: str, dtype: torch.dtype, shape: tuple[int, int], added: str, norm: int
) -> None:
    x = draw(*shape, dtype=dtype, device=device)
    residual = None if added == "nothing" else x.flip(0) * 3
    bias = x[0].flip(0) * 2 if added == "residual and bias" else None
    found = Added(x, residual, bias, norm).run(in_place=True)
    expected = Added(x, residual, bias, norm).run(reference=True)
    assert_close(found.hidden, expected.hidden)
    rows = shape[0]
    assert torch.all(found.hidden[rows:] == 7) and torch.all(found.scaled[rows:] == 7)
    assert torch.all(found.statistics[rows:] == 7)
    # The statistics are those of what was rounded.
    if norm == NO_NORM:
        assert torch.all(found.statistics == 7) and torch.all(found.scaled == 7)
    else:
        wanted = statistics_of(found.hidden[:rows], norm, shape[1])
        torch.testing.assert_close(found.statistics[:rows], wanted, rtol=1e-5, atol=1e-5)
    if norm == RMS_NORM:
        scaled = found.hidden[:rows] * found._weight
        assert_close(found.scaled[:rows], scaled)
        # Triton's interpreter does not round to the nearest.
        assert device == "cpu" or torch.equal(found.scaled[:rows], scaled)
    lone = Added(x[-1:], residual if residual is None else residual[-1:], bias, norm)
    lone._weight = found._weight
    lone.run()
    assert torch.equal(lone.hidden[0], found.hidden[rows - 1])
    assert torch.equal(lone.statistics[0], found.statistics[rows - 1])


def fuse(monkeypatch: pytest.MonkeyPatch, choice: bool) -> list[bool]:
    """Decide for all modules; what they are told is recorded in the list that is returned."""
    asked: list[bool] = []

    def decide(x: torch.Tensor) -> bool:
        asked.append(choice)
        return choice

    for module in (activation, attention, norm, decoder_layer):
        monkeypatch.setattr(module, "fusable", decide)
    return asked


@on_devices
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_computes_the_same_with_and_without_fused_kernels(
    device: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(name, dtype, device)
    chunks = [9, 1, 5, 1]
    asked = fuse(monkeypatch, True)
    fused = rig.compute(chunks, others=2)
    assert asked
    fuse(monkeypatch, False)
    plain = rig.compute(chunks, others=2)
    for one, other in zip(fused, plain, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < (1e-5 if dtype is torch.float32 else 2e-2)
    if device == "cuda" and dtype is torch.float32:
        assert not torch.equal(fused[0], plain[0]), "both took the same way"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_fused_model_gives_a_row_its_own_bits(device: str, dtype: torch.dtype, name: str) -> None:
    rig = Rig(name, dtype, device)
    alone = rig.compute([11, 1, 1, 1])
    for chunks, others in [([11, 1, 1, 1], 5), ([11, 1, 1, 1], 40)]:
        for one, other in zip(rig.compute(chunks, others), alone, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_decode_layer_runs_few_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    def kernels(layers: int) -> int:
        small = replace(MODELS["llama"], qkv_bias=False, num_layers=layers)
        monkeypatch.setitem(MODELS, "small", small)
        rig = Rig("small", torch.bfloat16, device)
        context = rig.context(8)
        rig.forward(context, [(slot, 0, 1) for slot in range(8)])
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            rig.forward(context, [(slot, 1, 1) for slot in range(8)])
            torch.cuda.synchronize()
        return sum(event.device_type == DeviceType.CUDA for event in trace.events())

    # Four products, RoPE and append, attention, its combine and lengths, SwiGLU, two additions.
    assert (kernels(4) - kernels(2)) / 2 <= 12

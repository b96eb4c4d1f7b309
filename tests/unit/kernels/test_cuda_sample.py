"""The sampling kernel in CUDA C++ against the torch reference, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import SHARED_BYTES
from megatron_async.kernels.sampling import sample_cuda as sample
from megatron_async.sampling.sample import MAX_VOCAB_SIZE, SampleInputs, sample_tokens_reference
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both
from tests.unit.kernels.test_sample_kernel import (
    on,
    random_logits,
    random_parameters,
    rows_with_nan,
)

pytestmark = pytest.mark.sweep

__all__ = ["device"]

ID_MASK = NAN_KEY = 2**31 - 1


Cut = tuple[int, int, int]
"""Clusters, blocks, threads."""


def tokens_of(
    logits: Tensor,
    parameters: tuple[Tensor, ...],
    cut: Cut | None,
    index: Tensor | None = None,
    window: int = 1,
) -> Tensor:
    clusters, blocks, threads = cut or (None, sample.BLOCKS, sample.THREADS)
    best = sample.best_of_rows(
        logits, parameters, index, window=window, clusters=clusters, blocks=blocks,
        threads=threads,
    )  # fmt: skip
    packed = best.amax(1)
    ids = (packed & ID_MASK) ^ ID_MASK
    return torch.where(packed >> 32 == NAN_KEY, -1, ids).cpu()


_SMALL = [
    (1, (1, 2, 64), torch.bfloat16), (5, (2, 4, 32), torch.float32),
    (264, (1, 8, 32), torch.bfloat16), (2049, (3, 4, 32), torch.float32),
    (2049, (2, 2, 64), torch.bfloat16), (6000, (1, 2, 64), torch.bfloat16),
]  # fmt: skip
_LARGE = [
    (vocabulary, cut, dtype)
    for vocabulary, cut in (
        (1, None), (5, None), (32_000, None), (50_257, (3, 4, 256)), (128_256, None),
        (128_256, (1, 8, 512)), (151_936, None), (262_144, (8, 8, 1024)),
    )
    for dtype in sample.DTYPES
]  # fmt: skip


@on_both("vocabulary", "cut", "dtype", gpu=_LARGE, small=_SMALL)
@pytest.mark.parametrize("rows", [1, 14])
def test_equals_reference(
    rows: int, vocabulary: int, cut: Cut | None, dtype: torch.dtype, device: torch.device
) -> None:
    for seed in range(1 if device.type == "cpu" else 5):
        generator = torch.Generator().manual_seed(vocabulary + seed)
        logits = random_logits(rows, vocabulary, dtype, generator)
        parameters = random_parameters(rows, vocabulary, generator)
        expected = sample_tokens_reference(logits, SampleInputs(*parameters))
        assert torch.equal(tokens_of(logits.to(device), on(device, parameters), cut), expected)


def rows_with_filters(rows: int, vocabulary: int, seed: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits with many ties and few, and filters that keep one of them, a few, or nearly all."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    logits = torch.randn(rows, vocabulary, generator=generator)
    logits = logits * pick([0.01, 1.0, 1.0, 5.0, 30.0])[:, None]
    logits[::3] = (logits[::3] * 4).round() / 4
    logits[2::4] = 1 + torch.randn(logits[2::4].shape, generator=generator) / 50  # a dozen keys
    logits[1, ::3] = -torch.inf
    return logits.bfloat16(), (
        pick([1.0, 1.25, 3.0]),
        pick([0, 0, 1, 2, 40, vocabulary - 1]).int(),
        pick([0.0, 1e-12, 0.25, 0.5, 0.75, 0.9, 0.999]),
        torch.arange(rows),
        torch.arange(rows) * 1000 + seed,
    )


@on_both(
    "vocabulary", "seed",
    gpu=[(v, s) for v in (300, 40_000, 151_936) for s in range(4)],
    small=[(300, 0), (700, 1)],
)  # fmt: skip
def test_filters_equal_reference(vocabulary: int, seed: int, device: torch.device) -> None:
    logits, parameters = rows_with_filters(12, vocabulary, seed)
    expected = sample_tokens_reference(logits, SampleInputs(*parameters))
    cut = (2, 4, 32) if device.type == "cpu" else None
    assert torch.equal(tokens_of(logits.to(device), on(device, parameters), cut), expected)


@on_both(
    "vocabulary", "dtype",
    gpu=[(v, dtype) for v in (5, 50_257, 151_936) for dtype in sample.DTYPES],
    small=[(5, torch.float32), (301, torch.bfloat16), (304, torch.float32)],
)  # fmt: skip
def test_a_nan_anywhere_in_a_row_is_no_token(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits, parameters, expected = rows_with_nan(vocabulary, dtype)
    assert torch.equal(sample_tokens_reference(logits, SampleInputs(*parameters)), expected)
    cut = (1, 2, 64) if device.type == "cpu" else None
    assert torch.equal(tokens_of(logits.to(device), on(device, parameters), cut), expected)


@on_both(
    "vocabulary", "cut", "rows",
    gpu=[(v, None, rows) for v in (5, 4_000, 50_257, 151_936) for rows in (1, 14, 40)],
    small=[(601, (2, 4, 32), 7)],
)  # fmt: skip
def test_tokens_go_where_they_belong(
    vocabulary: int, cut: Cut | None, rows: int, device: torch.device
) -> None:
    """In every launch of several; 0 of a row with a NaN."""
    clusters, blocks, threads = cut or (None, sample.BLOCKS, sample.THREADS)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)) + 1
    arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
    for seed in range(2):
        generator = torch.Generator().manual_seed(vocabulary + seed)
        logits = random_logits(rows, vocabulary, torch.bfloat16, generator)
        parameters = random_parameters(rows, vocabulary, generator)
        expected = sample_tokens_reference(logits, SampleInputs(*parameters)).clamp(min=0)
        tokens, by_slot = (torch.full((rows + 2, 3), -7).to(device) for _ in range(2))
        taken = sample.Taken(tokens[:rows, 1], by_slot[:, 2], slots.to(device), arrivals)
        sample.best_of_rows(
            logits.to(device), on(device, parameters), clusters=clusters, blocks=blocks,
            threads=threads, taken=taken,
        )  # fmt: skip
        assert torch.equal(tokens[:rows, 1].cpu(), expected)
        assert torch.equal(by_slot.cpu()[slots, 2], expected)
        assert int((tokens == -7).sum()) == int((by_slot == -7).sum()) == 2 * rows + 6
        assert not arrivals.any()


@on_both("vocabulary", "window", gpu=[(4_001, 1), (4_000, 3)], small=[(601, 1), (600, 3)])
def test_strided_rows_and_parameters_by_index(
    vocabulary: int, window: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows, slots = 6, 11
    padded = torch.full((rows * window, vocabulary + 7), 100.0).bfloat16()
    padded[:, :vocabulary] = torch.randn(len(padded), vocabulary, generator=generator).bfloat16()
    parameters = random_parameters(slots, vocabulary, generator)
    records = torch.randint(slots, (rows, 3), generator=generator, dtype=torch.int32)
    index = records[:, 1]
    *others, positions = (p[index.long()].repeat_interleave(window) for p in parameters)
    positions = positions + torch.arange(window).repeat(rows)
    expected = sample_tokens_reference(padded[:, :vocabulary], SampleInputs(*others, positions))
    cut = (1, 2, 64) if device.type == "cpu" else None
    got = tokens_of(
        padded.to(device)[:, :vocabulary], on(device, parameters), cut, records.to(device)[:, 1],
        window,
    )  # fmt: skip
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", sample.DTYPES)
def test_every_part_of_a_row_that_is_taken_fits(dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    taken = [v for v in (1, 128_256, 262_144, MAX_VOCAB_SIZE) if sample.fits(v, size)]
    assert 262_144 in taken and (MAX_VOCAB_SIZE in taken) == (dtype == torch.bfloat16)


@emulated
def test_shared_memory_is_what_the_wrapper_thinks() -> None:
    for vocabulary in (1, 50_257, 151_936, 262_144):
        for wide in (0, 1):
            defines = {
                "WIDE": wide, "VECTORS": sample.pieces(vocabulary), "LEAST": 0,
                "C": sample.BLOCKS, "G": 1, "THREADS": sample.THREADS, "WINDOW": 1,
            }  # fmt: skip
            (taken,) = emulator.shared_bytes("sample", [defines])
            assert taken <= SHARED_BYTES and sample.fits(vocabulary, 4 if wide else 2)
            assert taken <= sample.shared_bytes(vocabulary, 4 if wide else 2)


def replace_source(there: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample with ``instead`` in place of ``there`` in the kernel's source."""
    text = emulator.source_text("sample")
    assert there in text
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    mutant: dict[int, emulator.EmulatedKernel] = {}

    def kernel(source: str, defines: dict[str, int], _: torch.device) -> emulator.EmulatedKernel:
        return mutant.setdefault(0, emulator.EmulatedKernel(source, defines))

    monkeypatch.setattr(sample, "kernel", kernel)


@emulated
@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("  await_cluster();\n", ""),
        ("    await_sent(all_sent, passed);\n", ""),
        ("turn ^= 1;", ""),
        ("passed ^= turn == 0;", ""),
        ("expect_bytes(all_sent, C * CUTS * 16);", ";"),
        ("(i64)1);", "(i64)0);"),
        ("low_count - high_count > 1", "low_count - high_count > 2"),
        ("best.id ^ MOST_KEY", "best.id"),
        ("key >= beyond", "key > beyond"),
    ],
)
def test_these_tests_notice(there: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_source(there, instead, monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(30):
            logits, parameters = rows_with_filters(8, 250, seed)
            expected = sample_tokens_reference(logits, SampleInputs(*parameters))
            assert torch.equal(tokens_of(logits, parameters, (1, 4, 32)), expected)


@emulated
@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("if (is_nan_key(best.key)) packed = NAN_PACKED;", ""),
        ("? NAN_KEY :", "? INFINITE_KEY :"),
        ("#define NAN_KEY (MOST_KEY & (int)KEPT)", "#define NAN_KEY 0x7f800000"),
    ],
)
def test_the_test_of_nan_notices(there: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_source(there, instead, monkeypatch)
    logits, parameters, expected = rows_with_nan(301, torch.bfloat16)
    assert not torch.equal(tokens_of(logits, parameters, (1, 2, 64)), expected)


@pytest.mark.parametrize(
    ("logits", "index", "reason"),
    [
        ((torch.bfloat16, 64), None, None),
        ((torch.float16, 64), None, "float16"),
        ((torch.float32, 64), torch.int64, "an index of torch.int64"),
        ((torch.float32, 600_000), torch.int32, "a row of 600000 logits does not fit"),
    ],
)
def test_a_fallback_to_the_triton_kernel_has_its_reason(
    logits: tuple[torch.dtype, int], index: torch.dtype | None, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dtype, vocabulary = logits
    given = SimpleNamespace(
        is_cuda=True, dtype=dtype, shape=(1, vocabulary), device=SimpleNamespace(index=0),
        element_size=lambda: dtype.itemsize,
    )  # fmt: skip
    monkeypatch.setattr(sample.cuda, "unavailable", lambda index: None)
    found = sample.why_not(given, None if index is None else torch.zeros(1, dtype=index))
    assert found is None if reason is None else reason in str(found)
    assert sample.why_not(torch.zeros(1, 4), None) == "the logits are not on a GPU"

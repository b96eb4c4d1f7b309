"""The sampling kernels against the torch reference, bit for bit.

On a GPU they are compiled. Without one, ``TRITON_INTERPRET=1`` runs the Triton kernel on the CPU,
and ``test_cuda_sample.py`` the other one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from tests.support.interpreter import compiled, interpreted

pytest.importorskip("triton", reason="the kernel needs triton")

from megatron_async.kernels.sampling.sample_triton import (
    BLOCK,
    sample_shard,
    sample_tokens_gpu,
    sample_tokens_triton,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(
    params=[pytest.param("cuda", marks=compiled), pytest.param("cpu", marks=interpreted)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def random_logits(
    rows: int, vocab_size: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Rows of different spread, some with ties, NaN, infinities or nothing finite."""
    x = torch.randn(rows, vocab_size, generator=generator)
    x *= torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0])[torch.arange(rows) % 5, None]
    kind = torch.arange(rows) % 7
    rare = torch.rand(rows, vocab_size, generator=generator) < 0.05
    x[kind == 1] = x[kind == 1].round()
    x[(kind == 2)[:, None] & rare] = torch.nan
    x[(kind == 3)[:, None] & rare] = -torch.inf
    x[(kind == 4)[:, None] & rare] = -0.0
    x[(kind == 5) & (torch.arange(rows) >= 21)] = -torch.inf
    x[(kind == 6)[:, None] & rare] = 1e-40
    return x.to(dtype)


def random_parameters(
    rows: int, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        index = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    return (
        pick([0.0, 0.1, 1.0, 1.0, 1 / 0.7, 20.0, torch.inf, torch.nan], torch.float32),
        pick([0, 0, 0, 1, 2, 50, vocab_size - 1, vocab_size, 1 << 30, -1], torch.int32),
        pick([0.0, 0.0, 1e-9, 0.3, 0.9, 0.95, 0.9999, 1.0, torch.nan], torch.float32),
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        torch.randint(-5, 1 << 40, (rows,), generator=generator),
    )


def on(device: torch.device, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 5, 264, BLOCK + 1])
def test_kernel_equals_reference(dtype: torch.dtype, vocab_size: int, device: torch.device) -> None:
    rows = 70 if device.type == "cuda" else 14 if vocab_size < BLOCK else 7
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(rows, vocab_size, dtype, generator)
    arguments = random_parameters(rows, vocab_size, generator)
    expected = sample_tokens_reference(logits, SampleInputs(*arguments))
    tokens = sample_tokens_triton(logits.to(device), SampleInputs(*on(device, arguments)))
    assert torch.equal(tokens.cpu(), expected)


def rows_with_nan(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Logits of rows greedy, sampled, cut off by count and by mass, three of each with a NaN and
    one without, and what they give. Beyond the vocabulary all is NaN."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 16
    padded = torch.randn(rows, vocabulary + 8, generator=generator).to(dtype)
    padded[:, vocabulary:] = torch.nan
    kind = torch.arange(rows) % 4
    parameters = (
        torch.where(kind == 0, 0.0, 1.25),
        torch.where(kind == 2, 3, 0).int(),
        torch.where(kind == 3, 0.75, 0.0),
        torch.arange(rows),
        torch.arange(rows) + 7,
    )
    expected = sample_tokens_reference(padded[:, :vocabulary], SampleInputs(*parameters))
    assert (expected >= 0).all()
    places = (0, vocabulary - 1, vocabulary // 2, 1)
    for row in range(12):
        place = places[row % len(places) - row // len(places)]
        padded[row, place] = torch.nan if row % 3 else -torch.nan
        if row > 8:
            padded[row, (place + 1) % vocabulary] = torch.inf
    return padded[:, :vocabulary], parameters, expected.index_fill(0, torch.arange(12), -1)


def kernels_on(device: torch.device) -> list[Callable[..., Tensor]]:
    """Triton's kernel, and what is taken on a GPU; without one that is Triton's again."""
    return (
        [sample_tokens_triton, sample_tokens_gpu] if device.type == "cuda" else [sample_tokens_gpu]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5, BLOCK + 1])
def test_a_nan_anywhere_in_a_row_is_no_token(
    dtype: torch.dtype, vocab_size: int, device: torch.device
) -> None:
    logits, arguments, expected = rows_with_nan(vocab_size, dtype)
    for sample in kernels_on(device):
        tokens = sample(logits.to(device), SampleInputs(*on(device, arguments)))
        assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_kernel_reads_strided_rows_split_over_programs(rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    padded = torch.randn(rows, 3 * BLOCK, generator=generator)
    padded[:, 2 * BLOCK + 17 :] = 100.0
    logits = padded[:, : 2 * BLOCK + 17]
    for inverse_temperature in (0.0, 1.0):
        arguments = random_parameters(rows, logits.shape[1], generator)
        arguments = (torch.full((rows,), inverse_temperature), *arguments[1:])
        expected = sample_tokens_reference(logits, SampleInputs(*arguments))
        on_device = padded.to(device)[:, : logits.shape[1]]
        for sample in kernels_on(device):
            tokens = sample(on_device, SampleInputs(*on(device, arguments)))
            assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize(("ranks", "padding"), [(2, 0), (3, 101)])
def test_the_best_of_all_ranks_is_the_token_of_the_whole_row(
    ranks: int, padding: int, device: torch.device
) -> None:
    """Each rank's columns by themselves, of rows without filters; some ids may be padding."""
    generator = torch.Generator().manual_seed(ranks)
    rows, width = 16, 132
    vocab_size = ranks * width - padding
    logits = random_logits(rows, ranks * width, torch.bfloat16, generator)
    temperature, _, _, *noise = random_parameters(rows, vocab_size, generator)
    off = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    parameters = (temperature, *off, *noise)
    expected = sample_tokens_reference(logits, SampleInputs(*parameters), vocab_size=vocab_size)
    best = []
    for first_id in range(0, ranks * width, width):
        count = min(width, vocab_size - first_id)
        columns = logits[:, first_id : first_id + count].to(device)
        packed = sample_shard(columns, SampleInputs(*on(device, parameters)), first_id=first_id)
        best.append(packed.amax(1).cpu() - first_id)
    key = torch.stack(best).amax(0)
    tokens = (2**31 - 1) - (key & (2**31 - 1))
    assert torch.equal(torch.where(key >> 32 == 2**31 - 1, -1, tokens), expected)
    assert len(expected.unique()) > 5


class TestOnGpu:
    pytestmark = compiled

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("rows", "vocab_size"),
        [(1, 32_000), (8, 32_000), (64, 32_000), (1, 151_936), (28, 151_936), (300, 1_000)],
    )
    def test_large_cases_equal_reference(
        self, dtype: torch.dtype, rows: int, vocab_size: int
    ) -> None:
        for case in range(8 if rows == 1 else 2):
            generator = torch.Generator().manual_seed(case)
            logits = random_logits(rows, vocab_size, dtype, generator)
            arguments = random_parameters(rows, vocab_size, generator)
            device_arguments = on(torch.device("cuda"), arguments)
            expected = sample_tokens(logits, SampleInputs(*arguments))
            for sample in (sample_tokens, sample_tokens_triton, sample_tokens_reference):
                got = sample(logits.cuda(), SampleInputs(*device_arguments))
                assert torch.equal(got.cpu(), expected), sample.__name__

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = random_logits(64, 5_000, torch.bfloat16, generator).cuda()
        arguments = on(torch.device("cuda"), random_parameters(64, 5_000, generator))
        tokens = sample_tokens(logits, SampleInputs(*arguments))
        for rows in (torch.randperm(64).cuda(), torch.tensor([13]).cuda()):
            subset = sample_tokens(logits[rows], SampleInputs(*arguments).of_rows(rows))
            assert torch.equal(subset, tokens[rows])

    @pytest.mark.parametrize("sample", [sample_tokens, sample_tokens_reference])
    def test_captured_graph_equals_reference(self, sample: Callable[..., Tensor]) -> None:
        rows, columns, vocab_size = 16, 4_096, 4_001
        cuda = torch.device("cuda")

        def case(seed: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(seed)
            logits = random_logits(rows, columns, torch.float32, generator)
            return (logits, *random_parameters(rows, vocab_size, generator))

        static = on(cuda, case(0))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sample(static[0], SampleInputs(*static[1:]), vocab_size=vocab_size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = sample(static[0], SampleInputs(*static[1:]), vocab_size=vocab_size)
        for seed in range(1, 6):
            inputs = case(seed)
            for target, source in zip(static, inputs, strict=True):
                target.copy_(source)
            graph.replay()
            expected = sample_tokens_reference(
                inputs[0], SampleInputs(*inputs[1:]), vocab_size=vocab_size
            )
            assert torch.equal(tokens.cpu(), expected)

    def test_sampling_does_not_synchronise(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = random_logits(8, 3_000, torch.float32, generator).cuda()
        arguments = on(torch.device("cuda"), random_parameters(8, 3_000, generator))
        for sample in (sample_tokens, sample_tokens_reference):
            sample(logits, SampleInputs(*arguments))
            torch.cuda.set_sync_debug_mode("error")
            try:
                sample(logits, SampleInputs(*arguments))
            finally:
                torch.cuda.set_sync_debug_mode("default")

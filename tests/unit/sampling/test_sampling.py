"""Sampling on the CPU: the generator, the exact functions, the filters and the distribution."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling import exact_math, filters, noise, philox
from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference


def parameters(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    seed: int = 7,
    position: Tensor | None = None,
) -> SampleInputs:
    return SampleInputs(
        torch.full((rows,), 1.0 / temperature if temperature else 0.0),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), seed, dtype=torch.int64),
        torch.arange(rows) if position is None else position,
    )


def mixed_parameters(rows: int, vocab_size: int, generator: torch.Generator) -> SampleInputs:
    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        index = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    return SampleInputs(
        pick([0.0, 0.5, 1.0, 1.7, 8.0], torch.float32),
        pick([0, 0, 1, 3, 50, vocab_size, 1 << 30], torch.int32),
        pick([0.0, 0.0, 1e-9, 0.3, 0.9, 0.999, 1.0], torch.float32),
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        torch.randint(0, 1 << 40, (rows,), generator=generator),
    )


# Philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox.philox4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
    assert words[:, 0].tolist() == expected


def test_noise_bits_follow_the_documented_counter() -> None:
    seed, position, token_id = -(3 << 40) + 5, (9 << 32) + 0xFFFFFFFE, 1003
    counter = [token_id // 4, position & 0xFFFFFFFF, position >> 32, philox.TOKEN_STREAM]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    words = philox.philox4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    assert philox.noise_bits(seeds, positions, 1004)[0, token_id] == words[token_id % 4, 0]


def test_noise_bits_of_single_ids_equal_those_of_rows() -> None:
    seed, position = torch.tensor([1, -2, 1 << 40]), torch.tensor([0, 1 << 33, 7])
    rows, ids = torch.meshgrid(torch.arange(3), torch.arange(37), indexing="ij")
    single = philox.noise_bits_at(seed[rows.ravel()], position[rows.ravel()], ids.ravel())
    assert torch.equal(single.view(3, 37), philox.noise_bits(seed, position, 37))


def test_seeds_and_positions_differing_in_any_half_give_other_noise() -> None:
    values = torch.tensor([0, 1, 1 << 32, -1])
    seed, position = (t.ravel() for t in torch.meshgrid(values, values, indexing="ij"))
    bits = philox.noise_bits(seed, position, 8)
    assert len({tuple(row) for row in bits.tolist()}) == 16


# Exact functions


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected) / expected).abs().nan_to_num(0.0).max())


def test_log_is_accurate() -> None:
    x = torch.cat(
        (torch.logspace(-37, 38, 100_000).clamp(max=3e38), torch.linspace(0.5, 2, 99_999))
    )
    assert relative_error(exact_math.log(x), x.double().log()) < 3e-7
    assert exact_math.log(torch.tensor([1.0])).item() == 0.0


def test_log1p_is_accurate() -> None:
    largest = noise.UNIFORM_MAX
    v = torch.cat((torch.logspace(-10, -1e-7, 100_000), torch.linspace(1e-9, largest, 99_999)))
    v = v.clamp(max=largest)
    assert relative_error(exact_math.log1p(-v), torch.log1p(-v.double())) < 3e-7
    assert exact_math.log1p(torch.tensor([-(2.0**-33)])).item() == -(2.0**-33)


def test_exp2_mass_is_accurate_to_a_unit_and_exact_at_integers() -> None:
    x = -torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 45
    unit = 2.0**exact_math.MASS_BITS
    error = (exact_math.exp2_mass(x).double() - torch.exp2(x.double()) * unit).abs()
    assert bool((error <= 3e-7 * torch.exp2(x.double()) * unit + 1).all())
    whole = exact_math.exp2_mass(-torch.arange(44.0))
    assert whole.tolist() == [1 << (43 - n) for n in range(44)]
    assert exact_math.exp2_mass(torch.tensor([-44.0, -1e30, -torch.inf])).tolist() == [0, 0, 0]


def test_gumbel_of_extreme_bits_is_finite_and_as_documented() -> None:
    values = noise.gumbel_from_bits(torch.tensor([0, 1, 1 << 31, 0xFFFFFF00, 0xFFFFFFFF]))
    v = [0.5 / 2**32, 1.5 / 2**32, 0.5, noise.UNIFORM_MAX, noise.UNIFORM_MAX]
    expected = [-math.log(-math.log1p(-x)) for x in v]
    assert values.tolist() == pytest.approx(expected, rel=1e-6)


# Filters


def kept_by_definition(
    logits: list[float], factor: float, top_k: int, top_p: float
) -> tuple[set[int], bool]:
    """Top-k and top-p with rational numbers, and whether rounding could not change the result."""
    ids = range(len(logits))
    kept, clear = set(ids), True
    if 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        kept = {i for i in ids if logits[i] >= kth}
    if 0.0 < top_p < 1.0:
        largest = max(logits)
        weight = {i: Fraction(math.exp((logits[i] - largest) * factor)) for i in kept}
        need = Fraction(top_p) * sum(weight.values())
        for threshold in sorted({logits[i] for i in kept}, reverse=True):
            nucleus = {i for i in kept if logits[i] >= threshold}
            mass = sum((weight[i] for i in nucleus), Fraction(0))
            clear = clear and abs(mass - need) > need / 100_000
            if mass >= need:
                return nucleus, clear
    return kept, clear


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.integers(-12, 12).map(float), st.floats(-20, 20, width=16)),
        min_size=1,
        max_size=24,
    ),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]),
    top_k=st.integers(0, 26),
    top_p=st.one_of(st.just(0.0), st.floats(0.015625, 1.0, width=32)),
)
def test_filters_keep_what_the_definition_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected, clear = kept_by_definition(logits, 1.0 / temperature, top_k, top_p)
    assume(clear)
    x = torch.tensor([logits])
    factor, k, p, _, _ = parameters(1, temperature, top_k, top_p)
    threshold = filters.filter_threshold(x, factor, k, p)
    assert set((x[0] >= threshold).nonzero()[:, 0].tolist()) == expected


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 1 << 62), top_p=st.floats(2.0**-7, 1.0, width=32))
def test_nucleus_mass_is_the_exact_ceiling(total: int, top_p: float) -> None:
    mass = filters.nucleus_mass(torch.tensor([total]), torch.tensor([top_p]))
    assert mass.item() == math.ceil(Fraction(top_p) * total)


def test_largest_vocabulary_of_equal_logits_does_not_overflow() -> None:
    x = torch.zeros(1, 1 << 19)
    threshold = filters.filter_threshold(x, *parameters(1, top_p=0.99)[:3])
    assert threshold.tolist() == [0.0]
    mass = filters.probability_mass(x, torch.ones(1), torch.zeros(1))
    assert mass.sum().item() == 1 << 62


def test_ties_at_a_threshold_are_kept() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]]).expand(4000, -1)
    assert set(sample_tokens(x, parameters(4000, 2.0, top_k=2)).tolist()) == {
        1,
        2,
        3,
        4,
    }
    assert set(sample_tokens(x, parameters(4000, 1.0, top_p=0.5)).tolist()) == {
        1,
        2,
        3,
        4,
    }
    assert set(sample_tokens(x, parameters(4000, 1.0, top_k=1)).tolist()) == {1}


# Distribution


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 0.0), (0.5, 0, 0.0), (3.0, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.8), (2.0, 8, 0.7)],
)
def test_draws_follow_the_softmax(temperature: float, top_k: int, top_p: float) -> None:
    draws, vocab_size = 200_000, 12
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 1.5
    kept, _ = kept_by_definition(logits.tolist(), 1.0 / temperature, top_k, top_p)
    tokens = sample_tokens(
        logits.expand(draws, -1),
        parameters(draws, temperature, top_k, top_p, seed=11),
    )
    counts = tokens.bincount(minlength=vocab_size).double()
    index = torch.tensor(sorted(kept))
    expected = (logits[index].double() / temperature).softmax(0) * draws
    assert counts.sum() == counts[index].sum()
    chi_square = float(((counts[index] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    # Wilson and Hilferty's cube-root normal at 3.1 standard deviations: p = 0.001.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.1 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


def test_seeds_are_as_good_as_positions() -> None:
    draws = 100_000
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0]).expand(draws, -1)
    factor, top_k, top_p, _, position = parameters(draws)
    tokens = sample_tokens(
        logits, SampleInputs(factor, top_k, top_p, position, torch.zeros_like(position))
    )
    counts = tokens.bincount(minlength=5).double()
    assert float(((counts - draws / 5) ** 2 / (draws / 5)).sum()) < 18.5


# Purity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 264, 1500])
def test_cpu_path_equals_the_reference(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for scale in (0.0, 1.0, 6.0):
        logits = (torch.randn(24, vocab_size, generator=generator) * scale).to(dtype)
        arguments = mixed_parameters(24, vocab_size, generator)
        expected = sample_tokens_reference(logits, arguments)
        assert torch.equal(sample_tokens(logits, arguments), expected)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 500, generator=generator) * 3
    arguments = mixed_parameters(32, 500, generator)
    tokens = sample_tokens(logits, arguments)
    order = torch.randperm(32, generator=generator)
    for rows in (order, order[:5], order[7:8], torch.arange(32).repeat(2)):
        subset = sample_tokens(logits[rows], arguments.of_rows(rows))
        assert torch.equal(subset, tokens[rows])


def test_padding_the_vocabulary_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 101, generator=generator)
    padded = torch.cat((logits, torch.full((32, 27), 1e4)), 1)
    arguments = mixed_parameters(32, 101, generator)
    for sample in (sample_tokens, sample_tokens_reference):
        expected = sample(logits, arguments)
        assert torch.equal(sample(padded, arguments, vocab_size=101), expected)


# Values at the edge


def test_greedy_takes_the_lowest_id_of_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [-0.0, 0.0, -1.0], [1.0, torch.inf, torch.inf]])
    tokens = sample_tokens(logits, parameters(3, temperature=0.0, top_k=2, top_p=0.1))
    assert tokens.tolist() == [1, 0, 1]


KINDS = [(0.0, 0, 0.0), (1.0, 0, 0.0), (1.0, 2, 0.0), (1.0, 0, 0.5), (1.0, 2, 0.5)]
"""Greedy, sampled, top-k, top-p, both: temperature, top_k, top_p."""


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), KINDS)
def test_infinite_logits(temperature: float, top_k: int, top_p: float) -> None:
    inf = torch.inf
    rows = [
        [-inf, -inf, -inf, -inf],
        [-inf, -inf, -3e38, -inf],
        [1.0, -inf, inf, 5.0],
        [-inf, 3e38, -3e38, -inf],
    ]
    arguments = parameters(len(rows), temperature, top_k, top_p)
    for sample in (sample_tokens, sample_tokens_reference):
        assert sample(torch.tensor(rows), arguments).tolist() == [0, 2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), KINDS)
def test_a_nan_anywhere_in_a_row_is_no_token(
    temperature: float, top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    """Whatever else is there: an infinity, nothing finite, all of it NaN, of either sign; and rows
    next to it are sampled as ever."""
    vocab_size = 37
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2 * vocab_size, vocab_size, generator=generator).to(dtype)
    arguments = parameters(2 * vocab_size, temperature, top_k, top_p)
    expected = sample_tokens_reference(logits, arguments)
    assert (expected >= 0).all()
    column = torch.arange(vocab_size)
    for nan in (torch.nan, -torch.nan):
        failing = logits.clone()
        failing[2 * column, column] = nan
        failing[0, 5] = torch.inf
        failing[2, 2:] = -torch.inf
        failing[4] = nan
        for sample in (sample_tokens, sample_tokens_reference):
            tokens = sample(failing, arguments)
            assert tokens[::2].tolist() == [-1] * vocab_size
            assert torch.equal(tokens[1::2], expected[1::2])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), KINDS)
def test_a_nan_beyond_the_vocabulary_does_not_matter(
    temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(20, 37, generator=generator)
    padded = torch.cat((logits, torch.full((20, 27), torch.nan)), 1)
    arguments = parameters(20, temperature, top_k, top_p)
    for sample in (sample_tokens, sample_tokens_reference):
        assert torch.equal(
            sample(padded, arguments, vocab_size=37),
            sample(logits, arguments),
        )


def test_minus_infinity_is_never_sampled() -> None:
    logits = torch.full((5000, 8), -torch.inf)
    logits[:, [2, 5]] = 0.0
    for arguments in (parameters(5000), parameters(5000, 1.0, 7, 0.99)):
        assert set(sample_tokens(logits, arguments).tolist()) == {2, 5}


def test_extreme_temperatures_are_defined() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(3, -1)
    factor = torch.tensor([torch.inf, 3e38, torch.nan])
    arguments = parameters(3, top_p=0.5)._replace(inverse_temperature=factor)
    for sample in (sample_tokens, sample_tokens_reference):
        assert sample(logits, arguments).tolist() == [1, 1, 1]


def test_no_rows_give_no_tokens() -> None:
    for sample in (sample_tokens, sample_tokens_reference):
        assert sample(torch.empty(0, 9), parameters(0)).shape == (0,)


def test_unsupported_arguments_are_errors() -> None:
    logits = torch.zeros(2, 4)
    arguments = parameters(2)
    with pytest.raises(ValueError, match="float64"):
        sample_tokens(logits.double(), arguments)
    with pytest.raises(ValueError, match="vocab_size 5"):
        sample_tokens(logits, arguments, vocab_size=5)
    with pytest.raises(ValueError, match=r"seed must be torch\.int64"):
        sample_tokens(logits, arguments._replace(seed=arguments.seed.int()))
    with pytest.raises(ValueError, match=r"of shape \[1\]"):
        sample_tokens(logits[:1], arguments)

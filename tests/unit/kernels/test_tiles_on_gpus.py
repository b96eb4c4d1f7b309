"""Tiles on a GPU: embedded models at all numbers of rows, what kernels take of shared memory, and
what takes the place of those that do not fit."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.kernels import compile as cuda
from megatron_async.kernels import shared_memory
from megatron_async.kernels.attention import tiles as attention_tiles
from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.kernels.moe import tiles
from megatron_async.kernels.moe.tiles import MoeTiles, Tile
from megatron_async.kernels.sampling import sample_cuda
from megatron_async.kernels.shared_memory import block_limit
from megatron_async.sampling.sample import SampleInputs
from megatron_async.sampling_params import SamplingParams
from tests.support import launches
from tests.support.compiled_kernels import compiling_for, empty
from tests.support.engines import config_at
from tests.support.paged_cases import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ("tiny", "tiny-moe", "tiny-hybrid")
ROWS = (1, 4, 32, 64, 128)
TOKENS = 12
PROMPTS = [
    f"{begin}{end} {number}"
    for number, (begin, end) in enumerate(
        itertools.product(
            (
                "def fibonacci(n):",
                "class Stack:\n    ",
                "import os\n\n",
                "for x in",
                "return",
                "x =",
            ),
            (
                "",
                "\n    if",
                " self.",
                "\n\ndef",
                " 'a",
                "(",
                " + 1",
                "[0]",
                ", y",
                "\n#",
                ":",
                " not",
            ),
        )
    )
]
PROMPTS = (PROMPTS * 2)[: max(ROWS)]
WORST = {"float32": 2e-3, "bfloat16": 0.5}
"""Differences of log-probabilities to those of the CPU in fp32. What a wrong tile gives has others
of 1 and more."""
HALF = torch.bfloat16


class Decoded(NamedTuple):
    """Greedy tokens of a request in plain steps; in extended ones, with log-probabilities."""

    plain: list[int]
    tokens: list[int]
    log_probs: list[float]


@pytest.fixture(autouse=True)
def _full_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def decode(engine: DynamicInferenceEngine, prompts: Sequence[str]) -> list[Decoded]:
    """Twice: in plain steps, and in extended ones."""
    plain = SamplingParams(temperature=0, num_tokens_to_generate=TOKENS, termination_id=-1)
    asking = SamplingParams(
        temperature=0, num_tokens_to_generate=TOKENS, termination_id=-1, return_log_probs=True,
        skip_prompt_log_probs=True,
    )  # fmt: skip
    first, second = (engine.generate(list(prompts), each) for each in (plain, asking))
    return [
        Decoded(a.generated_tokens, b.generated_tokens, b.generated_log_probs or [])
        for a, b in zip(first, second, strict=True)
    ]


@functools.cache
def expected(model: str) -> list[Decoded]:
    """On the CPU, in fp32."""
    config = config_at(0, device="cpu", dtype="float32", max_requests=16)
    with DynamicInferenceEngine.from_pretrained(model, config) as engine:
        return decode(engine, PROMPTS)


def common(mine: list[int], its: list[int]) -> int:
    """Tokens that two have in common from the beginning on."""
    pairs = zip(mine, its, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), TOKENS)


def check(found: list[Decoded], model: str, dtype: str) -> None:
    """Tokens are the CPU's up to where two are about equally likely. Mostly that is nowhere, though
    a few rows alone may differ from their first tokens on."""
    same = 0
    for mine, its in zip(found, expected(model), strict=False):
        until = common(mine.tokens, its.tokens)
        for own, wanted in list(zip(mine.log_probs, its.log_probs, strict=True))[: until + 1]:
            assert abs(own - wanted) < WORST[dtype], (mine, its)
        same += until + common(mine.plain, its.tokens)
    share = 0.99 if dtype == "float32" else 0.7
    assert len(found) < 32 or same >= share * 2 * TOKENS * len(found)


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize("dtype", WORST)
@pytest.mark.parametrize("model", MODELS)
def test_embedded_models_decode_at_all_numbers_of_rows(
    model: str, dtype: str, invariant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_at(
        1, device="cuda", dtype=dtype, max_requests=max(ROWS), batch_invariant=invariant
    )
    found = {}
    with DynamicInferenceEngine.from_pretrained(model, config) as engine:
        for rows in ROWS:
            found[rows] = decode(engine, PROMPTS[:rows])
        wrapper: Any = engine.model.network
        fuses = dtype == "bfloat16" and not invariant and cuda.unavailable(0) is None
        assert (wrapper.fused_decode_off is None) == fuses
    for rows in ROWS:
        check(found[rows], model, dtype)
        if invariant:
            assert found[rows] == found[max(ROWS)][:rows]
            assert all(each.plain == each.tokens for each in found[rows])
    said = [r.getMessage() for r in caplog.records if r.name == "megatron_async.kernels.fitting"]
    assert not said, "what is chosen fits"


def test_generate_runs_the_model_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny-moe", "--dtype", "bfloat16", "--device", "cuda"]
    assert (
        main(["generate", *arguments, "--prompt", "def f(x):", "--num-tokens-to-generate", "8"])
        == 0
    )
    assert capsys.readouterr().out


# --- bounds --------------------------------------------------------------------------------------


def bounded(found: list[Any], bounds: dict[str, int], *, chosen: bool) -> None:
    """Kernels take no more than their bounds; what was chosen fits."""
    limit, seen = block_limit(torch.device("cuda", 0)), set()
    for name, taken in found:
        if name in bounds:
            seen.add(name)
            assert taken <= bounds[name], (name, taken, bounds[name])
            assert not chosen or bounds[name] <= limit
    assert seen == bounds.keys()


@pytest.mark.parametrize("dtype", (HALF, torch.float32))
@pytest.mark.parametrize("sizes", [(256, 64), (2048, 768), (2880, 2880), (80, 48)])
@pytest.mark.parametrize("rows", (4, 32, 64))
def test_experts_take_no_more_than_their_bound(
    rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    limit, size = block_limit(torch.device("cuda", 0)), dtype.itemsize
    for small in (False, True):
        kernels, _ = launches.experts(*sizes, rows, dtype, device="cuda")
        chosen, most = kernels.tiles(rows), tiles.padded_rows(rows)
        given = None
        if small:
            given = MoeTiles(*(list(tiles.smaller(each))[-1] for each in (chosen.up, chosen.down)))
            chosen = given
        _, launch = launches.experts(*sizes, rows, dtype, device="cuda", tiles=given)
        with compiling_for(None) as found:
            launch(routes=not small)
        bounds = {
            "up_kernel": tiles.shared_bytes(chosen.up, most, size, limit),
            "down_kernel": tiles.shared_bytes(chosen.down, most, size, limit),
        }
        if not small:
            router = tiles.router_tile(rows, 8, element_size=size, limit=limit)
            bounds["router_kernel"] = tiles.router_shared_bytes(router, most, 8, size)
        bounded(found, bounds, chosen=True)


@pytest.mark.parametrize("dtype", (HALF, torch.float32))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "latent"),
    [
        *((4, 2, 64, None), (32, 8, 128, None), (16, 1, 256, None), (71, 1, 64, None)),
        *((32, 32, 80, None), (4, 4, 16, None), (16, 1, 576, 512), (4, 1, 80, 64)),
    ],
)
def test_attention_takes_no_more_than_its_bound(
    heads: int, kv_heads: int, head_dim: int, latent: int | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from megatron_async.kernels.attention import paged_decode_triton, paged_prefill_triton

    limit = block_limit(torch.device("cuda", 0))
    shape = attention_tiles.Heads(
        heads, kv_heads, latent or head_dim, None if latent is None else head_dim - latent,
        dtype.itemsize,
    )  # fmt: skip
    split = attention_tiles.split_tile(shape, limit)
    prefill = attention_tiles.prefill_tile(shape, limit)
    for small in (False, True):
        if small:
            split = list(attention_tiles.smaller_splits(split))[-1]
            prefill = list(attention_tiles.smaller_prefills(prefill))[-1]
            monkeypatch.setattr(paged_decode_triton, "split_tile", lambda *_, tile=split: tile)
            monkeypatch.setattr(paged_prefill_triton, "prefill_tile", lambda *_, tile=prefill: tile)
        with compiling_for(None) as found:
            for prefills in (False, True):
                launches.attention(
                    heads, kv_heads, head_dim, dtype, latent=latent, prefill=prefills,
                    device="cuda",
                )  # fmt: skip
        bounds = {
            "_split_kernel": shape.shared_bytes(split, limit),
            "_prefill_kernel": shape.shared_bytes(prefill, limit),
        }
        bounded(found, bounds, chosen=True)


@pytest.mark.parametrize("dtype", (HALF, torch.float16, torch.float32))
def test_products_and_scans_take_no_more_than_their_bound(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels.gemm.invariant import products_triton as products
    from megatron_async.kernels.mamba import scan_triton

    limit, size = block_limit(torch.device("cuda", 0)), dtype.itemsize
    monkeypatch.setattr(products, "_same", {})
    for columns, depth in ((264, 256), (4096, 100)):
        with compiling_for(None) as found:
            launches.product(65, depth, columns, dtype, device="cuda")
        tile = products.tile_of(dtype, columns, limit)
        bounded(found, {"_matmul_kernel": products.shared_bytes(tile, size, limit)}, chosen=True)
        for small in list(products.smaller(tile))[1::6]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(products, "tile_of", lambda *_, tile=small: tile)
                with compiling_for(None) as found:
                    launches.product(65, depth, columns, dtype, device="cuda")
            taken = products.shared_bytes(small, size, limit)
            bounded(found, {"_matmul_kernel": taken}, chosen=True)
    if dtype is torch.float16:
        return
    for sizes in (MambaSizes(8, 64, 1, 32), MambaSizes(4, 64, 1, 256), MambaSizes(4, 16, 2, 96)):
        with compiling_for(None) as found:
            launches.scan(sizes, dtype, device="cuda")
        tile = scan_triton.scan_tile(sizes, size, limit)
        bounded(found, {"_scan_kernel": scan_triton.shared_bytes(tile, sizes, size)}, chosen=True)


def test_kernels_whose_tiles_nobody_chooses_take_little() -> None:
    """Less than every GPU gives without being asked."""
    from megatron_async.contrib.transformers.captured import row_kernels
    from megatron_async.kernels.attention.rope_append import rope_append
    from megatron_async.kernels.norm.add_norm import MAX_COLUMNS, add_norm
    from megatron_async.kernels.sampling import sample_triton

    def of(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return empty(*shape, dtype=dtype, device="cuda")

    wide, whole = torch.float32, torch.int64
    parameters = [of(4, dtype=dtype) for dtype in (wide, whole, wide, whole, whole)]
    with compiling_for(None) as found:
        add_norm(of(2, MAX_COLUMNS), of(2, MAX_COLUMNS), of(MAX_COLUMNS), of(MAX_COLUMNS), 1e-5)
        for vocabulary in (264, 262_144):
            sample_triton.sample_tokens_triton(of(4, vocabulary), SampleInputs(*parameters))
        rope_append(
            of(2, 18 * 256), of(3, 16, 1, 256), of(3, 16, 1, 256), of(2, dtype=whole),
            of(2, dtype=whole), of(9, 2, 128, dtype=wide), of(256), of(256), 1e-5,
        )  # fmt: skip
        row_kernels.launch_attention(
            *(of(1, heads, 1, 512) for heads in (4, 2, 2)), of(1, 2, 64, 512), of(1, 2, 64, 512),
            of(1, 1, 1, 64, dtype=torch.bool), of(1, dtype=whole), 0.1,
        )  # fmt: skip
    assert len(found) >= 6 and max(each.shared for each in found) <= 48 * 1024


# --- fallbacks -----------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Triton thinks that a block has less shared memory than the choosers do."""
    from triton.compiler import compiler

    from megatron_async.kernels import fitting
    from megatron_async.kernels.attention import paged_decode_triton
    from megatron_async.kernels.gemm.invariant import products_triton
    from megatron_async.kernels.moe import decode

    kernels: list[Any] = [
        paged_decode_triton._split_kernel, products_triton._matmul_kernel,
        decode.router_kernel, decode.up_kernel, decode.down_kernel,
    ]  # fmt: skip
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 36_000)
    monkeypatch.setattr(products_triton, "_same", {})
    fitting._warn.cache_clear()
    for kernel in kernels:
        kernel.device_caches.clear()
    yield 36_000
    for kernel in kernels:
        kernel.device_caches.clear()


def test_launches_fall_back_and_are_captured(little: int, caplog: pytest.LogCaptureFixture) -> None:
    from megatron_async.kernels.gemm.invariant.products_triton import matmul_by_row

    case = make_case(
        [1, 300, 700], heads=8, kv_heads=2, head_dim=128, block_size=16, dtype=HALF, device="cuda"
    )
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=2e-2, atol=2e-2)
    x = torch.randn(70, 512, device="cuda", dtype=HALF)
    weight = torch.randn(300, 512, device="cuda", dtype=HALF) / 22
    out = matmul_by_row(x, weight.t())
    torch.testing.assert_close(out, x @ weight.t(), rtol=2e-2, atol=2e-2)
    assert torch.equal(matmul_by_row(x[3:4], weight.t()), out[3:4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul_by_row(x, weight.t())
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, out)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(f"of {little}" in line for line in said)
    assert said[0].startswith("decode attention runs with")


def test_the_tiles_that_did_not_fit_run_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_async.kernels import fitting
    from megatron_async.kernels.moe import decode as experts

    fitting._warn.cache_clear()
    first = MoeTiles(Tile(64, 128, 3, swap=True), Tile(16, 128, 12))
    monkeypatch.setattr(experts, "choose_tiles", lambda *_, **__: first)
    config = config_at(1, device="cuda", dtype="bfloat16", max_requests=64)
    with DynamicInferenceEngine.from_pretrained("tiny-moe", config) as engine:
        check(decode(engine, PROMPTS[:64]), "tiny-moe", "bfloat16")
    said = [r.getMessage() for r in caplog.records if r.name == fitting.__name__]
    if cuda.unavailable(0) is None and block_limit(torch.device("cuda", 0)) < 245_760:
        assert len(said) == 1 and "245760" in said[0]


@pytest.mark.parametrize("limit", (101_376, 65_536))
@pytest.mark.parametrize("model", MODELS)
def test_models_run_as_on_a_gpu_with_less_shared_memory(
    model: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "gpu_limit", lambda index: limit)
    monkeypatch.setattr(sample_cuda, "gpu_limit", lambda index: limit)
    cuda._kernel.cache_clear()
    config = config_at(1, device="cuda", dtype="bfloat16", max_requests=64)
    try:
        with DynamicInferenceEngine.from_pretrained(model, config) as engine:
            check(decode(engine, PROMPTS[:64]), model, "bfloat16")
    finally:
        cuda._kernel.cache_clear()


@pytest.mark.skipif(
    torch.cuda.is_available() and cuda.unavailable(0) is not None,
    reason="the CUDA kernels need compute capability 9.0 and cuda.bindings",
)
def test_cuda_kernels_that_are_too_large_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Choosers count with all of the GPU's shared memory, and the kernels find less of it."""
    monkeypatch.setattr(cuda, "block_limit", lambda device: 60_000)
    cuda._kernel.cache_clear()
    config = config_at(1, device="cuda", dtype="bfloat16", max_requests=32)
    try:
        with (
            caplog.at_level(logging.WARNING),
            DynamicInferenceEngine.from_pretrained("tiny-moe", config) as engine,
        ):
            wrapper: Any = engine.model.network
            reasons = [each.reason for each in wrapper.decode_coverage().fallbacks]
            assert any("of 60000 bytes of shared memory" in reason for reason in reasons)
            check(decode(engine, PROMPTS[:32]), "tiny-moe", "bfloat16")
    finally:
        cuda._kernel.cache_clear()

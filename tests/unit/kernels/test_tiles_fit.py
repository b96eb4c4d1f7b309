"""What is chosen fits into the shared memory of a block, on GPUs that have much of it and little.

Each chooser of tiles is asked for the shapes of models, and odd ones. Its bound is compared with
what Triton's compiler says: here of a few kernels, on a GPU of many (``test_tiles_on_gpus.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_async.kernels import shared_memory
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention import tiles as attention_tiles
from megatron_async.kernels.gemm.skinny_gemm import defines
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import RMS_NORM
from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.kernels.moe import row, tiles
from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings
from megatron_async.kernels.moe.shape import MoeShape, ScaleColumns
from megatron_async.kernels.moe.tiles import MoeTiles, Tile
from megatron_async.kernels.sampling import sample_cuda
from megatron_async.kernels.shared_memory import HOPPER_BYTES
from megatron_async.models.description.shapes import SHAPES
from tests.support import emulator, launches
from tests.support.compiled_kernels import (
    AMPERE,
    HOPPER,
    LIMIT_OF,
    LIMITS,
    compiles,
    compiling_for,
)
from tests.support.cuda_kernels import emulated
from tests.support.interpreter import HAS_TRITON
from tests.support.kernel_shapes import (
    DTYPES,
    KERNEL_ROWS,
    MODELS,
    ROWS,
    expert_sizes,
    gemm_shapes,
    head_shapes,
    mamba_sizes,
)

pytestmark = pytest.mark.sweep

SMS = 132
on_limits = pytest.mark.parametrize("gpu", LIMITS)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this platform")


def test_the_shapes_are_those_of_all_models() -> None:
    assert len(MODELS) == len(SHAPES) + 3
    assert (256, 64) in set(expert_sizes()) and (2048, 768) in set(expert_sizes())
    assert (4, 2, 64, None) in set(head_shapes()) and (16, 1, 512, 64) in set(head_shapes())
    assert MambaSizes(8, 64, 1, 32) in set(mamba_sizes())


def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(
            shared_memory_per_block=49_152, shared_memory_per_block_optin=101_376
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    shared_memory.gpu_limit.cache_clear()
    try:
        for _ in range(2):
            assert shared_memory.block_limit(torch.device("cuda", 3)) == 101_376
        assert shared_memory.block_limit(torch.device("cpu")) == HOPPER_BYTES
    finally:
        shared_memory.gpu_limit.cache_clear()
    assert asked == [3]


@on_limits
def test_tiles_of_experts_in_mxfp4_fit(gpu: str) -> None:
    limit = LIMITS[gpu]
    for (hidden, inner), rows in itertools.product(set(expert_sizes()), (16, 32, 64)):
        found = tiles.choose_tiles(hidden, inner, rows, SMS, limit=limit, weight_size=0.5)
        for tile in (found.up, found.down):
            assert tiles.shared_bytes(tile, rows, 2, limit, 0.5) <= limit, (hidden, inner, tile)


@on_limits
def test_tiles_of_experts_in_e4m3_fit_and_have_one_scale_a_step(gpu: str) -> None:
    limit = LIMITS[gpu]
    for (hidden, inner), steps, rows in itertools.product(
        set(expert_sizes()), (0, 128, 64, 32, 16), (16, 32, 64)
    ):
        found = tiles.choose_tiles(
            hidden, inner, rows, SMS, limit=limit, weight_size=1, scale_steps=(steps, steps)
        )
        for tile in (found.up, found.down):
            assert tiles.shared_bytes(tile, rows, 2, limit, 1) <= limit, (hidden, inner, tile)
            assert steps % tile.block_k == 0 and tile.block_k >= 16
        if hidden % 128 == 0 and steps == 0:  # a row's scale leaves the steps of bfloat16
            plain = tiles.choose_tiles(hidden, inner, rows, SMS, limit=limit)
            assert (found.up.block_k, found.down.block_n) == (plain.up.block_k, plain.down.block_n)


@on_limits
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_experts_fit(gpu: str, dtype: torch.dtype) -> None:
    limit, size = LIMITS[gpu], dtype.itemsize
    for (hidden, inner), rows in itertools.product(set(expert_sizes()), ROWS):
        if rows > tiles.MAX_ROWS:
            continue  # modules compute these
        most = tiles.padded_rows(rows)
        for sm_count in (40, SMS, 188):
            found = tiles.choose_tiles(
                hidden, inner, most, sm_count, element_size=size, limit=limit
            )
            for tile in (found.up, found.down):
                assert tiles.shared_bytes(tile, most, size, limit) <= limit, (hidden, inner, tile)
        for columns in (1, 8, 64, 256, 512, 1024):
            router = tiles.router_tile(rows, columns, element_size=size, limit=limit)
            assert tiles.router_shared_bytes(router, most, columns, size) <= limit
            assert (
                router.block_h
                == tiles.router_tile(1, columns, element_size=size, limit=limit).block_h
            ), "a row's logits would depend on the rows"


@on_limits
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_attention_fit(gpu: str, dtype: torch.dtype) -> None:
    limit, without = LIMITS[gpu], []
    for shape in set(head_shapes()):
        heads = attention_tiles.Heads(*shape, dtype.itemsize)
        chosen = (
            attention_tiles.split_tile(heads, limit),
            attention_tiles.prefill_tile(heads, limit),
        )
        if not attention_tiles.fits(heads, limit):
            without.append(shape)  # PyTorch attends
            continue
        for tile in chosen:
            assert heads.shared_bytes(tile, limit) <= limit, (shape, tile)
            assert heads.group % tile.group == 0 and tile.rows >= tile.group
    assert not without or (gpu == "T4" and min(dim for _, _, dim, _ in without) >= 384)


@needs_triton
@on_limits
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_invariant_products_and_scans_fit(gpu: str, dtype: torch.dtype) -> None:
    from megatron_async.kernels.gemm.invariant import products_triton as products
    from megatron_async.kernels.mamba import scan_triton

    limit, size = LIMITS[gpu], dtype.itemsize
    for columns in (1, 264, products.NARROW, products.NARROW + 1, 256_000):
        tile = products.tile_of(dtype, columns, limit)
        assert products.shared_bytes(tile, size, limit) <= limit
    for tile in products.HALF_TILES if gpu == "H100" else ():
        assert products.shared_bytes(tile, 2, limit) <= limit
    for sizes in mamba_sizes():
        found = scan_triton.scan_tile(sizes, size, limit)
        assert scan_triton.shared_bytes(found, sizes, size) <= limit
        assert found.piece == scan_triton.DEFAULT_TILE.piece


@pytest.mark.parametrize("gpu", ["H100", "L40S"])
def test_tile_configs_of_skinny_gemms_fit(gpu: str) -> None:
    """L40S: as much as GPUs of compute capability 12.0 have, which run these kernels too."""
    limit, tma, without = LIMITS[gpu], gpu == "H100", set()
    rows_of = KERNEL_ROWS if tma else (1, 8, 32)
    for (n, k, norm, epilogue), rows in itertools.product(sorted(gemm_shapes()), rows_of):
        config = choose(n, k, rows, norm, epilogue, tma, sm_count=SMS, limit=limit)
        if config is None:
            without.add((n, k, rows))
            continue
        assert config.shared_bytes(k, rows) <= limit, (n, k, rows, config)
        macros = defines(n, k, rows, norm, epilogue, RMS_NORM, config, SMS, limit)
        assert macros["MIN_SHARED"] <= limit - 4, "it has a word of static memory, too"
    few = {(n, k) for n, k, rows in without if rows <= 32}
    assert all(n * k <= 1024 * 128 for n, k in few), few


@emulated
@pytest.mark.parametrize("gpu", ["H100", "L40S"])
def test_the_bounds_of_cuda_kernels_are_those_of_their_sources(gpu: str) -> None:
    limit, gemms = LIMITS[gpu], {}
    for n, k, norm, epilogue in sorted(gemm_shapes())[::4]:
        for rows in (1, 32):
            config = choose(n, k, rows, norm, epilogue, gpu == "H100", sm_count=SMS, limit=limit)
            if config is not None:
                macros = defines(n, k, rows, norm, epilogue, RMS_NORM, config, SMS, limit)
                bound = max(config.shared_bytes(k, rows), macros["MIN_SHARED"])
                gemms.setdefault(config.kernel, []).append((macros, bound))
    for kernel, cases in gemms.items():
        taken = emulator.shared_bytes(kernel, [macros for macros, _ in cases])
        assert all(own <= bound <= limit for own, (_, bound) in zip(taken, cases, strict=True))
    for e4m3, step in ((False, 7), (True, 23)):
        attentions = list(attention_macros(limit, e4m3=e4m3))[::step]
        assert emulator.shared_bytes("attention", attentions) == [
            decode_attention.shared_bytes(macros) for macros in attentions
        ]


def attention_macros(limit: int, *, e4m3: bool = False) -> Iterator[dict[str, int]]:
    for head_dim, group, window in itertools.product(
        (32, 64, 96, 128, 256), (1, 2, 4, 5, 8, 16), (1, 2, 4, 16)
    ):
        reason = decode_attention.unsupported(head_dim, group, 16, head_dim, window, limit)
        if reason is not None:
            assert limit < HOPPER_BYTES or "does not fit" in reason, (head_dim, group, window)
            continue
        for kv_heads, (rows, capacity) in itertools.product(
            (1, 8), ((1, 2048), (2, 131072), (8, 4096), (32, 4096), (64, 131072), (512, 2048))
        ):
            heads = decode_attention.Heads(
                head_dim, group, kv_heads, 16, norm=True, rope=True, window=window, e4m3=e4m3
            )
            yield heads.defines(rows, capacity, SMS, limit=limit)


@on_limits
def test_the_fused_attention_fits_or_says_why_not(gpu: str) -> None:
    limit = LIMITS[gpu]
    for e4m3 in (False, True):
        for macros in attention_macros(limit, e4m3=e4m3):
            assert decode_attention.shared_bytes(macros) <= limit, macros
    reason = decode_attention.unsupported(256, 16, 16, 256, 1, limit)
    if limit < LIMITS["A100"]:
        assert f"of {limit} bytes of shared memory" in str(reason)
    else:
        assert reason is None


@on_limits
def test_the_kernel_of_a_few_rows_of_experts_fits_or_says_why_not(gpu: str) -> None:
    limit, taken = LIMITS[gpu], 0
    for (hidden, inner), rows in itertools.product(set(expert_sizes()), range(1, 5)):
        settings = RouterSettings(num_experts=64, top_k=8)
        shape = MoeShape(hidden, inner, settings, ExpertActivation())
        reason = row.why_not(shape, rows, torch.bfloat16, SMS, limit)
        if reason is None:
            assert row.shared_bytes(shape, rows, SMS) <= limit
            taken += 1
        elif hidden <= 8192 and hidden % 16 == inner % 16 == 0:
            assert "shared memory" in reason and row.shared_bytes(shape, rows, SMS) > limit
    assert taken > 60


@on_limits
def test_the_sampler_in_cuda_fits_or_is_not_taken(gpu: str) -> None:
    limit = LIMITS[gpu]
    for vocabulary, size in itertools.product((1, 264, 50_257, 151_936, 262_144, 600_000), (2, 4)):
        taken = sample_cuda.shared_bytes(vocabulary, size) <= limit
        assert sample_cuda.fits(vocabulary, size, limit) == taken
    assert sample_cuda.fits(264, 4, limit)


EXPERTS_WERE = {
    (2048, 768, 16): ((64, 128, 4, 4, 1, False), (32, 128, 7, 4, 6, False)),
    (2048, 768, 32): ((64, 128, 4, 4, 1, True), (32, 128, 5, 4, 6, False)),
    (2048, 768, 64): ((64, 128, 3, 4, 1, True), (32, 128, 4, 4, 6, False)),
    (1024, 3584, 16): ((64, 128, 4, 4, 1, False), (16, 128, 12, 4, 4, False)),
    (1024, 3584, 32): ((64, 128, 4, 4, 1, True), (16, 128, 10, 4, 4, False)),
    (1024, 3584, 64): ((64, 128, 3, 4, 1, True), (16, 128, 6, 4, 4, False)),
    (4096, 14336, 16): ((64, 128, 4, 4, 1, False), (32, 128, 7, 4, 3, False)),
    (4096, 14336, 32): ((64, 128, 4, 4, 1, True), (32, 128, 5, 4, 3, False)),
    (4096, 14336, 64): ((64, 128, 3, 4, 1, True), (32, 128, 4, 4, 3, False)),
    (2048, 1408, 16): ((64, 128, 4, 4, 1, False), (32, 128, 7, 4, 6, False)),
    (2048, 1408, 64): ((64, 128, 3, 4, 1, True), (32, 128, 4, 4, 6, False)),
    (2880, 2880, 16): ((64, 64, 8, 4, 1, False), (32, 128, 7, 4, 4, False)),
    (2880, 2880, 32): ((64, 64, 7, 4, 1, True), (32, 128, 5, 4, 4, False)),
    (2880, 2880, 64): ((64, 64, 5, 4, 1, True), (32, 128, 4, 4, 4, False)),
}
"""Tiles that figures were measured with: Qwen3-30B-A3B, Mixtral, DeepSeek-V2-Lite, GPT-OSS 20B."""


def test_an_h100_gets_what_was_measured_with() -> None:
    """A change here is a change of speed: measure first. Of GEMMs see ``test_tile_choice.py``."""
    for (hidden, inner, rows), expected in EXPERTS_WERE.items():
        found = tiles.choose_tiles(hidden, inner, rows, SMS)
        assert (dataclasses.astuple(found.up), dataclasses.astuple(found.down)) == expected
    for rows, chunk in ((1, 4), (4, 4), (5, 16), (32, 32), (64, 32)):
        assert tiles.router_tile(rows, 512) == tiles.RouterTile(256, chunk)
    for config in MODELS:
        for size, latent in itertools.product((2, 4), (None, (512, 64))):
            dim, more = (config.head_dim, None) if latent is None else latent
            heads = attention_tiles.Heads(
                config.num_attention_heads, config.num_kv_heads, dim, more, size
            )
            pad, group = attention_tiles.padded(dim), heads.group
            keys = max(16, min(64, (16384 if latent is None else 32768) // (pad * size)))
            at_once = attention_tiles.heads_at_once
            split = (group, keys, 5) if latent is None else (at_once(group, 16), keys, 3)
            assert attention_tiles.split_tile(heads) == split
            if latent is None:
                rest = (32, 16, 8, 2) if size == 4 else (64, keys, 4, 3)
            else:
                rest = (16, 16, 8, 1) if size == 4 else (64, keys, 8, 2)
            group = group if latent is None else at_once(group, rest[0])
            assert attention_tiles.prefill_tile(heads) == (group, *rest)
    lines = [str(sorted(macros.items())) for macros in attention_macros(HOPPER_BYTES)]
    assert len(lines) == 1368
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == "4dd49336835b1a5d"


@needs_triton
def test_an_h100_gets_the_products_and_scans_that_were_measured_with() -> None:
    from megatron_async.kernels.gemm.invariant import products_triton as products
    from megatron_async.kernels.mamba import scan_triton

    for dtype, narrow, wide in (
        (torch.bfloat16, products.HALF_TILE_NARROW, products.HALF_TILE),
        (torch.float16, products.HALF_TILE_NARROW, products.HALF_TILE),
        (torch.float32, products.FLOAT_TILE, products.FLOAT_TILE),
    ):
        assert products.tile_of(dtype, 2048) == narrow and products.tile_of(dtype, 2049) == wide
        for config in MODELS:
            if config.hybrid_override_pattern:
                channels = max(16, min(32, config.mamba_head_dim))
                tile = scan_triton.scan_tile(config.mamba, dtype.itemsize)
                assert tile == scan_triton.DEFAULT_TILE._replace(channels=channels)


FIRST_TILES = MoeTiles(Tile(64, 128, 3, swap=True), Tile(16, 128, 12, splits=1))
"""Those that tiny-moe got at 64 rows before anyone asked what the GPU has."""


@compiles
def test_the_compiler_gives_what_the_bound_of_experts_says() -> None:
    for given, rows in ((FIRST_TILES, 64), (None, 64), (None, 16)):
        with compiling_for(HOPPER) as found:
            kernels, launch = launches.experts(256, 64, rows, torch.bfloat16, tiles=given)
            launch(routes=False)
        taken, chosen = {each.name: each.shared for each in found}, kernels.tiles(rows)
        for name, tile in (("up_kernel", chosen.up), ("down_kernel", chosen.down)):
            assert taken[name] == tiles.shared_bytes(tile, rows, 2, HOPPER_BYTES)
        assert (taken["down_kernel"] > HOPPER_BYTES) == (given is not None)
        if given is not None:
            assert taken["down_kernel"] == 245_760


@compiles
def test_the_compiler_gives_what_the_bound_of_experts_in_e4m3_says() -> None:
    """With a scale a row, and a step of each kind of product: wgmma with the weight in registers,
    wgmma with a copy of it, and mma."""
    columns = ScaleColumns(256, 64, 256, 128)
    for rows in (16, 32, 64):
        with compiling_for(HOPPER) as found:
            kernels, launch = launches.experts(256, 64, rows, torch.bfloat16, scale_columns=columns)
            launch(routes=False)
        taken, chosen = {each.name: each.shared for each in found}, kernels.tiles(rows)
        for name, tile in (("up_kernel", chosen.up), ("down_kernel", chosen.down)):
            assert taken[name] == tiles.shared_bytes(tile, rows, 2, HOPPER_BYTES, 1), (name, rows)


@compiles
def test_the_compiler_gives_what_the_bound_of_experts_in_mxfp4_says() -> None:
    """For each kind of product."""
    for rows in (16, 64):
        with compiling_for(HOPPER) as found:
            kernels, launch = launches.experts(256, 64, rows, torch.bfloat16, packed=True)
            launch(routes=False)
        taken, chosen = {each.name: each.shared for each in found}, kernels.tiles(rows)
        for name, tile in (("up_kernel", chosen.up), ("down_kernel", chosen.down)):
            bound = tiles.shared_bytes(tile, rows, 2, HOPPER_BYTES, 0.5)
            assert taken[name] == bound <= HOPPER_BYTES, (name, rows)


@compiles
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_compiler_gives_no_more_than_the_bounds(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels.attention import (
        paged_decode_triton,
        paged_prefill_triton,
    )
    from megatron_async.kernels.attention.invariant import invariant_triton
    from megatron_async.kernels.gemm.invariant import products_triton as products

    limit, half = LIMIT_OF[capability], torch.bfloat16
    for module in (paged_decode_triton, paged_prefill_triton, invariant_triton, products):
        monkeypatch.setattr(module, "block_limit", lambda device: limit)
    heads = attention_tiles.Heads(8, 2, 128, None, 2)
    bounds = {
        "_split_kernel": heads.shared_bytes(attention_tiles.split_tile(heads, limit), limit),
        "_matmul_kernel": products.shared_bytes(products.tile_of(half, 4096, limit), 2, limit),
    }
    if capability == HOPPER:
        tile = attention_tiles.prefill_tile(heads, limit)
        bounds["_prefill_kernel"] = heads.shared_bytes(tile, limit)
        bounds["_chunks_kernel"] = heads.shared_bytes(tile, limit)
        tile = attention_tiles.invariant_tile(heads, limit, rows=True)
        bounds["_rows_kernel"] = heads.shared_bytes(tile, limit)
    with compiling_for(capability) as found:
        launches.attention(8, 2, 128, half)
        launches.product(64, 256, 4096, half)
        if capability == HOPPER:
            launches.attention(8, 2, 128, half, prefill=True)
            launches.attention(8, 2, 128, half, invariant=True)
            launches.attention(8, 2, 128, half, invariant=True, prefill=True)
    taken = {each.name: each.shared for each in found if each.name in bounds}
    assert taken.keys() == bounds.keys()
    for name, own in taken.items():
        assert own <= bounds[name] <= own * 1.1 + 1024, (name, own, bounds[name])

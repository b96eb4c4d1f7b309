"""Skinny GEMMs with e4m3 weights and scales, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.skinny_gemm import Sending, SkinnyGemm, scaled_product
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    E4M3_STAGE_K,
    EPILOGUES,
    FEW_ROWS,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SCALE_COLUMNS,
    SILU_GATE,
    SQUARED_RELU,
    STORE,
    TileConfig,
    padded,
)
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.known_gemms import GEMMS
from tests.unit.kernels.test_skinny_gemm import Gemm

__all__ = ["device"]

LIMIT = 5e-3
"""Of the relative error: the output is rounded to bfloat16, and x is where a norm is inside."""
ROW = 0
"""Scale columns: a scale for each whole row."""

Shape = tuple[int, int, int, int, bool]
"""n, k, norm, epilogue, bias."""


# --- each weight as it is -------------------------------------------------------------------------
class Codes:
    """A weight ``[n, k]`` with all 254 numbers of e4m3, and scales that are powers of two, so that
    each product with 1 is a bfloat16."""

    def __init__(self, n: int, k: int, columns: int, device: torch.device) -> None:
        codes = (torch.arange(n)[:, None] + 37 * torch.arange(k)) % 256
        codes[codes % 128 == 127] = 0x35  # in place of NaN
        assert len(codes.unique()) == 254
        self.weight = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(device)
        groups = k // columns
        powers = (torch.arange(n)[:, None] * 3 + torch.arange(groups) * 5) % 13 - 6
        self.scale = torch.exp2(powers.float()).to(device)
        self.wanted = self.weight.float() * self.scale.repeat_interleave(columns, 1)
        self.k, self.columns, self.device = k, columns, device

    def one_by_one(self, config: TileConfig, rows: int) -> Tensor:
        """The weight ``[n, k]`` as the kernel multiplies it, ``rows`` columns at a time."""
        n = len(self.weight)
        kernel = SkinnyGemm(
            n, self.k, rows, NO_NORM, STORE, RMS_NORM, config, self.device,
            scale_columns=self.columns,
        )  # fmt: skip
        found = []
        for x in torch.eye(self.k, device=self.device).bfloat16().split(rows):
            out = torch.full((rows, n), float("nan"), device=self.device).bfloat16()
            kernel(x, self.weight, out, weight_scale=self.scale)
            found.append(out)
        return torch.cat(found).T.float()


def use_source(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate GEMMs of this source from now on."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(emulator, "source_text", lambda _: text)
    monkeypatch.setattr(
        skinny_gemm, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )


def _wgmma(tiles: int, split_k: int = 1, stages: int = 2, **values: bool) -> TileConfig:
    return TileConfig(tiles, 1, 1, split_k, stages, stream_x=True, tma=True, **values)


_PLACES = [
    (32, 8, TileConfig(1, 4, 1, 1, 2)),
    (64, 16, TileConfig(2, 2, 1, 1, 3, stream_x=True)),
    (128, 32, TileConfig(1, 2, 2, 1, 2)),
    (ROW, 32, TileConfig(2, 1, 1, 2, 2, stream_x=True)),
    (ROW, 16, _wgmma(5)),
]
_MORE_PLACES = [
    (ROW, 8, _wgmma(2, 2, workspace=True)),
    (ROW, 32, _wgmma(12)),
    (ROW, 64, _wgmma(3, persistent=True)),
    (ROW, 32, _wgmma(16, 2)),
    (32, 32, TileConfig(2, 2, 1, 2, 2, stream_x=True, workspace=True)),
    (32, 1, TileConfig(1, 1, 2, 1, 2)),
    (64, 4, TileConfig(1, 3, 1, 2, 2)),
    (128, 8, TileConfig(3, 1, 1, 1, 5, persistent=True)),
]


@on_both("columns", "rows", "config", gpu=[*_PLACES, *_MORE_PLACES], small=_PLACES)
def test_every_number_of_e4m3_is_multiplied_exactly(
    device: torch.device, columns: int, rows: int, config: TileConfig
) -> None:
    """Subnormals and both zeros too, each at its place in the row, with its own scale."""
    codes = Codes(256, 256, columns or 256, device)
    assert torch.equal(codes.one_by_one(config, rows), codes.wanted)


@pytest.mark.sweep
@emulated
@pytest.mark.parametrize(("columns", "rows", "config"), _MORE_PLACES)
def test_and_in_other_configs(
    columns: int, rows: int, config: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    codes = Codes(256, 256, columns or 256, torch.device("cpu"))
    assert torch.equal(codes.one_by_one(config, rows), codes.wanted)


@pytest.mark.sweep
@emulated
@pytest.mark.parametrize(
    ("place", "there", "instead"),
    [
        (1, "pair ? 0xb3a2 : 0x9180", "pair ? 0x9180 : 0xb3a2"),  # pairs of k swapped
        (0, "0xb3a2 : 0x9180", "0x3322 : 0x1100"),  # a byte where its sign should be
        (2, "& 0x87f087f0", "& 0x07f007f0"),  # no sign
        (3, "return extended << 4 & 0x87f087f0", "return flush(extended)"),
        (1, "const Vec &xs = a[p / 2][mt], &more", "const Vec &xs = a[p % 2][mt], &more"),
        (3, "      v[j] *= by[j];\n", ""),
        (3, "+ i * WARPS + warp) % TILES;", ") % TILES;"),  # another tile's scales
        (4, "? warp_tile(i) :", "? warp_tile(0) :"),
        (1, "by[r][half][j % 2][u] *", "by[r][half][j % 2][0] *"),  # another group's scale
        (1, "+ t * 2 * SCALE_BYTES;", ";"),  # another row's
        (0, "[u * 2] * part[j] + by[r][half][j][u * 2 + 1]", "[u * 2 + 1] * part[j] + 0"),
        (0, "k0 & first, k0 & ~first", "k0, k0 & ~first"),
        (2, "first_stage * SCALE_BYTES;", "0;"),
        (1, "      ahead_scale[i] += SCALE_BYTES;\n", ""),
        (1, "t * 32 +\n", "t * 16 +\n"),
        (4, "(k ^ g) * 16", "k * 16"),  # another vector of the row
        (4, "load_shared_pair(at + 1024), 0", "load_shared_pair(at), 0"),
        (4, "g * 128 + t * 2", "g * 128 + t * 4"),
        (4, "k / 4 * X_HALF", "k / 4 * 0"),
        (4, "* STAGE_K + 64,", "* STAGE_K,"),  # the first half of x twice
    ],
)
def test_the_numbers_show_faults(
    place: int, there: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, rows, config = _PLACES[place]
    text = emulator.source_text(config.kernel)
    assert there in text
    text = text.replace(there, instead)
    flush = """inline u32 flush(u32 extended) {
      u32 v = extended << 4 & 0x87f087f0;
      if (!(v & 0x0780)) v &= ~0x7fu;
      return v & 0x07800000 ? v : v & ~0x7f0000u;
    }
    """
    entry = "__device__ __forceinline__ u32 e4m3_bits("
    assert entry in text
    text = text.replace(entry, flush + entry)
    use_source(text, monkeypatch)
    codes = Codes(256, 256, columns or 256, torch.device("cpu"))
    assert not torch.equal(codes.one_by_one(config, rows), codes.wanted)


# --- rows that end within a stage -----------------------------------------------------------------
_PARTS = [
    (320, 8, TileConfig(1, 4, 1, 1, 2)),
    (320, 8, TileConfig(1, 2, 2, 1, 2)),
    (192, 16, TileConfig(2, 2, 1, 1, 3, stream_x=True)),
    (448, 32, TileConfig(2, 1, 1, 2, 2, stream_x=True)),
    (448, 8, TileConfig(1, 2, 1, 1, 3, stream_x=True, persistent=True)),
    (320, 4, TileConfig(2, 1, 1, 1, 3, persistent=True)),
    (320, 32, _wgmma(5)),
    (448, 8, _wgmma(2, 2, workspace=True)),
    (192, 64, _wgmma(3, persistent=True)),
]


def product_beside_nan(k: int, rows: int, config: TileConfig, device: torch.device) -> None:
    """A row of x in front of one that is no number, and of a weight in front of another one."""
    n = 16 * config.row_tiles * config.warps_n * 2
    x = torch.randn(2, k, device=device).bfloat16()
    x[1] = float("nan")
    weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(n, 1, device=device)
    kernel = SkinnyGemm(
        n, k, rows, NO_NORM, STORE, RMS_NORM, config, device, scale_columns=k
    )  # fmt: skip
    out = torch.zeros(2, n, device=device).bfloat16()
    kernel(x, weight, out, weight_scale=scale)
    wanted = scaled_product(x[:1].double(), weight, scale)
    assert relative_error(out[:1], wanted) < LIMIT


@on_both("k", "rows", "config", gpu=_PARTS, small=_PARTS)
def test_a_row_may_end_within_a_stage(
    device: torch.device, k: int, rows: int, config: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one: behind it are neither numbers of the next row of the weight, nor of x."""
    monkeypatch.setattr(skinny_gemm.cuda, "sm_count", lambda _: 2)  # persistent CTAs go on
    torch.manual_seed(k)
    n = 16 * config.row_tiles * config.warps_n * 8
    codes = Codes(n, k, k, device)
    assert torch.equal(codes.one_by_one(config, rows), codes.wanted)
    product_beside_nan(k, rows, config, device)


@pytest.mark.sweep
@emulated
@pytest.mark.parametrize(
    ("place", "there", "instead"),
    [
        (0, "|| lane % 8 < LAST_K * W_BYTES / 16", "|| true"),
        (0, "      if (k >= K) continue;\n", ""),
        (1, "(PERSISTENT ? ahead_k : issued) == K_STAGES - 1", "0 == K_STAGES - 1"),
        (2, "stage < K_STAGES - 1 || i % X_LINE_VECTORS < LAST_K / 8", "true"),
        (3, "slice_stage + x_stage + i / (MT * X_EIGHT)", "x_stage + i / (MT * X_EIGHT)"),
        (5, "(PERSISTENT ? ahead_k : issued)", "issued"),
        (6, "((K + STAGE_K - 1) / STAGE_K)", "(K / STAGE_K)"),
    ],
)
def test_the_ends_of_rows_show_faults(
    place: int, there: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, rows, config = _PARTS[place]
    text = emulator.source_text(config.kernel)
    assert there in text
    use_source(text.replace(there, instead), monkeypatch)
    with pytest.raises(AssertionError):
        test_a_row_may_end_within_a_stage(torch.device("cpu"), k, rows, config, monkeypatch)


# --- norms, epilogues, ways to share K ------------------------------------------------------------
_GEMMS: list[Shape] = [
    (512, 256, RMS_NORM, STORE, True),
    (256, 512, NO_NORM, ADD, True),
    (1024, 384, RMS_NORM, SILU_GATE, False),
    (768, 256, LAYER_NORM, GELU_TANH, True),
    (768, 256, RMS_NORM, SQUARED_RELU, False),
    (1003, 256, LAYER_NORM, STORE, False),
]
_SMALL_GEMMS: list[tuple[Shape, int, TileConfig]] = [
    ((96, 384, RMS_NORM, STORE, True), 5, TileConfig(3, 1, 3, 1, 2)),
    ((96, 512, RMS_NORM, STORE, True), 32, TileConfig(1, 2, 1, 2, 3, stream_x=True)),
    (
        (96, 896, RMS_NORM, STORE, False),
        13,
        TileConfig(1, 3, 1, 2, 3, stream_x=True, workspace=True),
    ),
    ((128, 512, RMS_NORM, SILU_GATE, False), 1, TileConfig(2, 2, 1, 1, 4)),
    ((128, 640, RMS_NORM, SILU_GATE, True), 32, TileConfig(2, 2, 1, 1, 4, stream_x=True)),
    (
        (205, 512, RMS_NORM, STORE, False),
        30,
        TileConfig(1, 2, 1, 1, 3, stream_x=True, persistent=True),
    ),
    ((75, 512, RMS_NORM, STORE, False), 2, TileConfig(1, 2, 1, 1, 8, persistent=True)),
    ((64, 512, NO_NORM, ADD, True), 16, TileConfig(1, 2, 1, 4, 2)),
    ((64, 896, NO_NORM, ADD, False), 3, TileConfig(2, 2, 2, 2, 4)),
    ((96, 384, LAYER_NORM, GELU_TANH, True), 7, TileConfig(1, 3, 2, 1, 3)),
    ((64, 512, LAYER_NORM, GELU, True), 20, TileConfig(1, 2, 2, 2, 2)),
    ((64, 512, RMS_NORM, SQUARED_RELU, False), 5, TileConfig(1, 2, 2, 1, 2)),
    ((128, 512, RMS_NORM, SILU_GATE, False), 60, TileConfig(2, 2, 1, 1, 3, stream_x=True)),
    ((64, 640, NO_NORM, ADD, True), 42, TileConfig(1, 2, 2, 2, 2)),
    ((64, 384, NO_NORM, ADD, False), 64, TileConfig(2, 1, 2, 1, 2)),
]
_PART_GEMMS: list[tuple[Shape, int, TileConfig]] = [
    ((96, 320, LAYER_NORM, STORE, True), 5, TileConfig(1, 3, 1, 1, 2)),
    ((96, 320, LAYER_NORM, GELU_TANH, True), 8, TileConfig(1, 3, 2, 1, 2)),
    ((128, 448, RMS_NORM, SILU_GATE, True), 16, TileConfig(2, 2, 1, 1, 4, stream_x=True)),
    ((64, 448, NO_NORM, ADD, True), 16, TileConfig(1, 2, 1, 4, 2)),
    ((96, 320, RMS_NORM, STORE, False), 13, _wgmma(3)),
]
"""Rows that end within a stage, of which scales are by row alone."""
_WGMMA_GEMMS: list[tuple[Shape, int, TileConfig]] = [
    ((96, 384, RMS_NORM, STORE, True), 5, _wgmma(6, stages=3)),
    ((128, 512, RMS_NORM, SILU_GATE, True), 32, _wgmma(4, 2, workspace=True)),
    ((64, 640, NO_NORM, ADD, True), 42, _wgmma(4, 4)),
    ((80, 384, RMS_NORM, SQUARED_RELU, False), 64, _wgmma(2, persistent=True)),
    ((205, 256, RMS_NORM, STORE, False), 30, _wgmma(9, 2)),
]


def _configs(gemm: Gemm, count: int) -> list[TileConfig]:
    """A spread of what can be built."""
    every = itertools.product(
        (1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2, 4), (2, 4, 5), *((False, True),) * 3
    )
    shape = gemm.n, gemm.k, padded(gemm.rows), gemm.norm, gemm.epilogue
    fitting = [
        config
        for config in itertools.starmap(TileConfig, every)
        if config.fits(*shape, scale_columns=gemm.scale_columns)
    ]
    return fitting[:: max(1, len(fitting) // count)][:count]


@pytest.mark.sweep(of=15)
@on_both(
    *("shape", "rows", "config", "columns"),
    gpu=(
        *(
            (shape, rows, None, columns)
            for shape in _GEMMS
            for rows in (1, 8, 13, 32, 40, 64)
            for columns in (*SCALE_COLUMNS, ROW)
        ),
        *((*case, ROW) for case in [*_PART_GEMMS, *_WGMMA_GEMMS]),
    ),
    small=(
        *((*case, columns) for case in _SMALL_GEMMS for columns in (*SCALE_COLUMNS, ROW)),
        *((*case, ROW) for case in [*_PART_GEMMS, *_WGMMA_GEMMS]),
    ),
)
def test_equals_float64(
    device: torch.device, shape: Shape, rows: int, config: TileConfig | None, columns: int
) -> None:
    gemm = Gemm(device, *shape, rows, columns or shape[1])
    statistics_norm, wanted = LAYER_NORM if rows % 2 else RMS_NORM, gemm.wanted()
    configs = _configs(gemm, 5) if config is None else [config]
    assert configs
    for each in configs:
        kernel = gemm.kernel(each, statistics_norm)
        out, error = gemm.run(kernel, statistics_norm)
        assert relative_error(out, wanted) < LIMIT, each
        assert error < 1e-3, each
        again, _ = gemm.run(kernel, statistics_norm)
        assert torch.equal(out, again)


@pytest.mark.sweep
@on_both(
    *("shape", "rows", "columns"),
    gpu=(
        (shape, rows, columns)
        for (n, k), shape in GEMMS.items()
        for rows, columns in (
            (1, 128),
            (8, ROW),
            (32, 32),
            (32, ROW),
            (48, ROW),
            (64, 128),
            (64, ROW),
        )
        if n < 32768 and k % E4M3_STAGE_K == 0
    ),
    small=[],
)
def test_chosen_configs_equal_float64(
    device: torch.device, shape: Shape, rows: int, columns: int
) -> None:
    n, k, norm, epilogue, _ = shape
    gemm = Gemm(device, *shape, rows, columns or k)
    config = choose(
        n, k, padded(rows), norm, epilogue, sm_count=cuda.sm_count(0),
        scale_columns=gemm.scale_columns,
    )  # fmt: skip
    assert config is not None
    out, error = gemm.run(gemm.kernel(config))
    assert relative_error(out, gemm.wanted()) < LIMIT and error < 1e-3, config


def test_cases_of_the_emulator_use_every_way_to_build_the_kernel() -> None:
    configs = [config for _, _, config in _SMALL_GEMMS]
    for (n, k, norm, epilogue, _), rows, config in _SMALL_GEMMS:
        for columns in (*SCALE_COLUMNS, k):
            assert config.fits(n, k, padded(rows), norm, epilogue, scale_columns=columns), config
    for name in ("stream_x", "persistent", "workspace"):
        assert {getattr(config, name) for config in configs} == {False, True}
    assert {epilogue for (_, _, _, epilogue, _), _, _ in _SMALL_GEMMS} == set(range(len(EPILOGUES)))


@pytest.mark.sweep
@emulated
def test_partial_sums_are_sent_to_other_ranks_as_they_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A word of a rank's memory is two columns below the number of the launch."""
    emulator.install(monkeypatch)
    n, k, rows, ranks, cpu = 64, 256, 8, 2, torch.device("cpu")
    memory = tuple(torch.zeros(2 * ranks * rows * n // 2, dtype=torch.int64) for _ in range(ranks))
    sends = Sending(memory, 1, torch.zeros(1, dtype=torch.int32), rows * n)
    gemm = Gemm(cpu, n, k, NO_NORM, STORE, False, rows, 64)
    stored = torch.empty(rows, n).bfloat16()
    for out, to in ((stored, None), (None, sends)):
        kernel = SkinnyGemm(
            n, k, rows, NO_NORM, STORE, LAYER_NORM, TileConfig(1, 2, 1, 2, 2), cpu, to, 64
        )
        kernel(gemm.x, gemm.weight, out, weight_scale=gemm.weight_scale)
    place = (1 * ranks + 1) * rows * n // 2  # of launch 1, from rank 1
    for each in memory:
        words = each[place : place + rows * n // 2]
        assert (words >> 32 == 1).all() and not each[:place].any()
        # Those of eight rows and eight columns lie next to each other.
        pairs = words.view(n // 8, 8, 4).to(torch.int32).permute(1, 0, 2).reshape(rows, n // 2)
        assert torch.equal(pairs.contiguous().view(torch.bfloat16), stored)


# --- the reference, and what is refused -----------------------------------------------------------
def test_the_reference_is_the_sum_over_groups_of_scaled_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 64, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2, generator=generator)
    found = scaled_product(x, weight, scale)
    for m, n in itertools.product(range(3), range(5)):
        sums = [
            sum(float(x[m, k]) * float(weight[n, k]) for k in range(g * 32, g * 32 + 32))
            for g in range(2)
        ]
        wanted = sum(float(scale[n, g]) * sums[g] for g in range(2))
        assert abs(float(found[m, n]) - wanted) < 1e-12


@emulated
@pytest.mark.parametrize("place", (0, 4))
def test_a_kernel_takes_one_format_of_weights(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    columns, rows, config = _PLACES[place]
    columns = columns or 256
    gemm = SkinnyGemm(
        256, 256, rows, NO_NORM, STORE, RMS_NORM, config, torch.device("cpu"),
        scale_columns=columns,
    )  # fmt: skip
    x, out = torch.zeros(rows, 256).bfloat16(), torch.full((rows, 256), 7.0).bfloat16()
    weight, scale = torch.zeros(256, 256), torch.ones(256, 256 // columns)
    with pytest.raises(TypeError, match="w must be torch\\.float8_e4m3fn"):
        gemm(x, weight.bfloat16(), out, weight_scale=scale)
    e4m3 = weight.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="weight_scale must be a Tensor"):
        gemm(x, e4m3, out)
    with pytest.raises(TypeError, match="weight_scale must be torch\\.float32"):
        gemm(x, e4m3, out, weight_scale=scale.bfloat16())
    assert (out == 7).all()
    gemm(x, e4m3, out, weight_scale=scale)
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("k", "columns", "config"),
    [
        (192, 64, TileConfig(1, 2, 1, 1, 2)),  # one stage and a half
        (256, 16, TileConfig(1, 2, 1, 1, 2)),
        (256, 256 // 3, TileConfig(1, 2, 1, 1, 2)),
        (256, 64, TileConfig(1, 2, 4, 1, 2)),  # two stages for four warps
        (256, 64, TileConfig(2, 1, 1, 1, 2, stream_x=True, tma=True)),
        (384, 64, TileConfig(1, 2, 1, 1, 2, stream_x=True, persistent=True)),  # odd stages
    ],
)
def test_what_cannot_be_built_does_not_fit(k: int, columns: int, config: TileConfig) -> None:
    assert not config.fits(64, k, 8, RMS_NORM, STORE, scale_columns=columns)
    wider = config._replace(warps_k=1, persistent=False, tma=False)
    assert wider.fits(64, 512, 8, RMS_NORM, STORE, scale_columns=64)


@pytest.mark.parametrize("rows", [1, 8, 32, 48, FEW_ROWS])
def test_shapes_of_models_have_a_config(rows: int) -> None:
    shapes = [shape for shape in GEMMS.values() if shape[1] % E4M3_STAGE_K == 0]
    assert len(shapes) > 0.8 * len(GEMMS)
    sizes = [shape[:4] for shape in shapes[::4]]
    for n, k, norm, epilogue in [*sizes, (384, 128, RMS_NORM, STORE), (256, 256, NO_NORM, ADD)]:
        found = choose(n, k, rows, norm, epilogue, sm_count=132, scale_columns=128)
        assert found is not None, (n, k)
        assert found.fits(n, k, rows, norm, epilogue, scale_columns=128) and not found.tma
        few = found.warps_n * found.warps_k <= 8 and found.row_tiles <= 2
        assert rows <= ANY_SHAPE_ROWS or few, "more than the registers hold"


@emulated
def test_the_bound_of_shared_memory_is_that_of_the_source() -> None:
    cases = [(*case, columns) for case in _SMALL_GEMMS for columns in (*SCALE_COLUMNS, ROW)]
    macros, bounds = [], []
    for (n, k, norm, epilogue, _), rows, config, columns in cases:
        most = padded(rows)
        macros.append(
            skinny_gemm.defines(
                n, k, most, norm, epilogue, RMS_NORM, config, 132, scale_columns=columns or k
            )
        )
        bounds.append(config.shared_bytes(k, most, columns or k))
    for taken, bound in zip(emulator.shared_bytes("skinny_gemm_mma", macros), bounds, strict=True):
        assert 0 <= bound - taken <= 8192 + 48 * FEW_ROWS

"""Tile configs of the skinny GEMMs: what one says, and the tables that hold them.

A table is a JSON object: for each GPU a list of entries, one a line. ``tile_configs.json`` here was
measured on an H200; ``megatron-async tune`` keeps what it finds in a file of the same format in the
folder of the compiled kernels. An entry names the problem (``rows``, ``n``, ``k`` and, unless it is
for all of them, ``norm`` and ``epilogue``), those fields of :class:`TileConfig` that differ from
their defaults, and its source.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_async.errors import ConfigError
from megatron_async.kernels.disk_cache import cache_directory, keep
from megatron_async.kernels.shared_memory import HOPPER_BYTES, STATIC_BYTES

logger = logging.getLogger(__name__)

EPILOGUES = ("store", "add", "silu_gate", "gelu_tanh", "gelu", "squared_relu")
STORE, ADD, SILU_GATE, GELU_TANH, GELU, SQUARED_RELU = range(6)
NORMS = ("none", "rms_norm", "layer_norm")
NO_NORM, RMS_NORM, LAYER_NORM = range(3)

MANY_ROWS_KERNEL = "skinny_gemm_many"
FEW_ROWS = 64
"""More rows go to ``skinny_gemm_many.cu``, which takes bfloat16 weights alone."""
MAX_ROWS = 128
ANY_SHAPE_ROWS = 32
"""With bfloat16 weights more rows, up to :data:`FEW_ROWS`, go to the wgmma kernel of shapes that
were measured, and to ``skinny_gemm_many.cu`` of others."""
SHARED_BYTES = HOPPER_BYTES
"""Shared memory of a CTA at most, and of all CTAs of an SM together, where no other limit is
given."""
MAX_CLUSTER = 8
"""CTAs that every GPU of this capability runs in a cluster."""
STAGE_K, E4M3_STAGE_K = 64, 128
"""Columns of K in a stage of the ring, of bfloat16 and of e4m3 weights."""
SCALE_COLUMNS = (32, 64, 128)
"""Columns of e4m3 weights that share a scale in a row, where not the whole row does."""

BUILT_IN = Path(__file__).with_name("tile_configs.json")
USER_FILE = "tile_configs.json"
FORMER_USER_FILE = "tilings.json"
MEASURED, TUNED, HEURISTIC = SOURCES = ("measured", "tuned", "heuristic")


class GemmProblem(NamedTuple):
    """A GEMM ``[rows, k] x [n, k]^T`` with what is fused into it, for padded ``rows``.

    In a table a ``norm`` and ``epilogue`` of None stand for all of them: see :func:`lookup`.

    Args:
        scale_columns: 0 for bfloat16 weights; of e4m3 weights, columns that share a scale.
        e4m3_inputs: x is e4m3 as well, with a scale for each row.
    """

    rows: int
    n: int
    k: int
    norm: int | None = None
    epilogue: int | None = None
    scale_columns: int = 0
    e4m3_inputs: bool = False


class TileConfig(NamedTuple):
    """How a skinny GEMM is computed.

    With ``multicast`` by ``skinny_gemm_many.cu``; else with ``tma`` by ``skinny_gemm_wgmma.cu``,
    whose four warps take all tiles together; else by ``skinny_gemm_mma.cu``.

    Args:
        row_tiles: 16-row tiles of W in a warp.
        warps_n, warps_k: of a CTA.
        split_k: CTAs that share K.
        stages: of the ring of weights.
        stream_x: x passes through buffers, rather than lie in shared memory as a whole.
        persistent: CTAs stay and go on to further rows of W.
        workspace: split-K partial sums go through global memory, not through a cluster.
        tma: TMA tiles and wgmma (Hopper only), not per-thread ``cp.async`` and mma.
        multicast: CTAs next to each other that share tiles of x; 0 for the kernels of few rows.
    """

    row_tiles: int
    warps_n: int
    warps_k: int
    split_k: int
    stages: int
    stream_x: bool = False
    persistent: bool = False
    workspace: bool = False
    tma: bool = False
    multicast: int = 0

    @property
    def kernel(self) -> str:
        """The source that it configures."""
        if self.multicast:
            return MANY_ROWS_KERNEL
        return "skinny_gemm_wgmma" if self.tma else "skinny_gemm_mma"

    @property
    def weight_rows(self) -> int:
        """Rows of W in a CTA's tile."""
        return 16 * self.row_tiles * self.warps_n

    def kernel_rows(self, rows: int) -> int:
        """The rows that its kernel is built for, for padded ``rows``."""
        return max(FEW_ROWS, rows) if self.multicast and rows > ANY_SHAPE_ROWS else rows

    def ctas(self, n: int) -> int:
        """CTAs that cover ``n`` rows of W."""
        each = max(1, self.multicast)
        return -(-n // self.weight_rows // each) * each * self.split_k

    def statistic_rows(self, rows: int) -> int:
        """Elements of the residual stream that one partial statistic of epilogue ADD covers."""
        return 16 * min(self.row_tiles * self.warps_n, self.owned(rows))

    def owned(self, rows: int) -> int:
        """Fragments, of 16 rows of W and 8 of x, that a CTA of a split-K cluster finishes.

        As few as the cluster can, as many in each CTA that finishes any, and whole columns of tiles
        or equal parts of one, since statistics are of such.
        """
        tiles = self.row_tiles * self.warps_n
        fragments = row_groups(self.kernel_rows(rows)) * tiles
        if self.workspace:
            return fragments
        own = -(-fragments // self.split_k)
        while fragments % own or (tiles % own and own % tiles):
            own += 1
        return own

    def shared_bytes(self, k: int, rows: int, scale_columns: int = 0, e4m3: bool = False) -> int:
        """About what a CTA takes: the ring of W and x, received partial sums, and a reserve."""
        rows = self.kernel_rows(rows)
        stage_k = stage_columns(scale_columns)
        in_cluster = self.split_k > 1 and not self.workspace
        sent = self.owned(rows) * self.split_k * self.warps_k * 512 if in_cluster else 0
        if self.multicast:
            ring = self.stages * (2048 * self.row_tiles + 128 * rows)
            # With a workspace there is a static word in front, and the ring is aligned.
            rest = 64 * (row_groups(rows) + self.owned(rows)) + 1024 + STATIC_BYTES
            return max(ring, sent) + rest
        if self.tma:
            stage = 2048 * self.row_tiles + row_groups(rows) * (8 if e4m3 else 16) * stage_k
            return self.stages * stage + 16384 + sent
        stage = 2048 * self.row_tiles
        if 0 < scale_columns < k:
            stage += -(-64 * self.row_tiles * (stage_k // scale_columns) // 128) * 128
        ring = self.warps_n * self.warps_k * self.stages * stage
        if self.stream_x:
            buffers = (self.stages + 1) // 2 + 1
            x = 2 * buffers * row_groups(rows) * 16 * stage_k
        else:
            slice_k = -(-stage_count(k, scale_columns) // self.split_k) * stage_k
            x = rows * (slice_k * 2 + 64)
        return ring + x + 8192 + sent

    def fits(
        self,
        n: int,
        k: int,
        rows: int,
        norm: int | None,
        epilogue: int | None,
        limit: int = SHARED_BYTES,
        scale_columns: int = 0,
        e4m3_inputs: bool = False,
    ) -> bool:
        """Whether the kernel can be built so for a GPU whose CTAs have ``limit`` bytes of shared
        memory; with None, for some norm or epilogue."""
        if self.multicast or rows > FEW_ROWS:
            takes = self._takes_many(n, k, rows, norm, epilogue, scale_columns)
            return takes and not e4m3_inputs and self.shared_bytes(k, rows) <= limit
        split = self.warps_k * self.split_k > 1
        stages, warps = stage_count(k, scale_columns), self.warps_n * self.warps_k
        # With e4m3 weights the mma kernel takes more rows, while the registers of few warps do.
        many = scale_columns and self.row_tiles <= 2 and warps <= 8 and self.stages >= 2
        return (
            warps <= 32
            and self.row_tiles <= 16
            and (self.workspace or self.split_k <= MAX_CLUSTER)
            and stages >= self.split_k * self.warps_k
            and not (self.stream_x and (self.warps_k > 1 or norm == LAYER_NORM))
            and not (self.stream_x and self.persistent and stages % 2)
            and not (self.tma and 0 < scale_columns < k)
            and not (e4m3_inputs and (not self.tma or scale_columns != k or norm))
            and (not scale_columns or takes_scales(k, scale_columns))
            and not (self.tma and not self.stream_x)
            and bool(self.tma or rows <= (FEW_ROWS if many else ANY_SHAPE_ROWS))
            and not (self.tma and self.warps_n > 1)
            and not (self.workspace and (self.warps_k > 1 or self.split_k == 1))
            and not (self.persistent and (split or epilogue == ADD))
            # Statistics and pairs of gate and up do not stop at the end of the weight.
            and (epilogue not in (ADD, SILU_GATE) or n % self.weight_rows == 0)
            and self.shared_bytes(k, rows, scale_columns, e4m3_inputs) <= limit
        )

    def _takes_many(
        self, n: int, k: int, rows: int, norm: int | None, epilogue: int | None, scale_columns: int
    ) -> bool:
        """Whether ``skinny_gemm_many.cu`` can be built so, wherever it has room."""
        rows = self.kernel_rows(rows)
        blocks = max(1, rows // 128)  # of 64 rows, in a warpgroup
        cluster = self.multicast if self.workspace else self.multicast * self.split_k
        whole = n % self.weight_rows == 0 and n // self.weight_rows % max(1, self.multicast) == 0
        return (
            self.multicast > 0
            and self.tma
            and self.stream_x
            and self.warps_n == self.warps_k == 1
            and rows in (64, 128, 256)
            and self.stages >= 2  # the one in front is multiplied while the next one arrives
            and row_groups(rows) % self.multicast == 0
            and blocks * self.row_tiles <= 16
            and cluster <= MAX_CLUSTER
            and k % STAGE_K == 0
            and stage_count(k, 0) >= self.split_k
            and norm != LAYER_NORM
            and not scale_columns
            and not (self.workspace and self.split_k == 1)
            and not (self.persistent and (self.split_k > 1 or epilogue == ADD))
            and (epilogue not in (ADD, SILU_GATE) or whole)
        )

    def can_serve(self, problem: GemmProblem, limit: int = SHARED_BYTES) -> bool:
        """Whether the kernel can be built so for ``problem``."""
        rows, n, k, norm, epilogue, scale_columns, e4m3_inputs = problem
        return self.fits(n, k, rows, norm, epilogue, limit, scale_columns, e4m3_inputs)


class Entry(NamedTuple):
    """A line of a table: one of :data:`SOURCES` found this config for this problem."""

    problem: GemmProblem
    config: TileConfig
    source: str

    def to_json(self) -> str:
        """The line, without config fields at their defaults and a norm or epilogue of None."""
        problem = {
            name: value
            for name, value in self.problem._asdict().items()
            if value != GemmProblem._field_defaults.get(name)
        }
        for name, names in (("norm", NORMS), ("epilogue", EPILOGUES)):
            if name in problem:
                problem[name] = names[problem[name]]
        config = {
            name: value
            for name, value in self.config._asdict().items()
            if value != TileConfig._field_defaults.get(name)
        }
        return json.dumps({**problem, **config, "source": self.source})

    @classmethod
    def from_json(cls, values: Any) -> Entry:
        """What a line says; it may be old, or edited by hand.

        Raises:
            ValueError, TypeError, KeyError: it is no config that can be built.
        """
        values = dict(values)
        source = values.pop("source")
        if source not in SOURCES:
            raise ValueError(f"source {source!r} is none of {', '.join(SOURCES)}")
        for name, names in (("norm", NORMS), ("epilogue", EPILOGUES)):
            if name in values:
                values[name] = names.index(values[name])
        own = {name: values.pop(name) for name in GemmProblem._fields if name in values}
        problem, config = GemmProblem(**own), TileConfig(**values)
        numbers = *problem[:3], *config[:5], config.multicast + 1
        flags = *config[5:9], problem.e4m3_inputs
        if any(type(value) is not int or not 0 < value < 2**31 for value in numbers):
            raise ValueError(f"{config} of {problem}: positive integers are expected")
        if type(problem.scale_columns) is not int or type(config.multicast) is not int:
            raise ValueError(f"{config} of {problem}: scale_columns or multicast is no integer")
        if problem.rows > MAX_ROWS:
            raise ValueError(f"{problem}: more than {MAX_ROWS} rows")
        if any(type(value) is not bool for value in flags):
            raise ValueError(f"{config} of {problem}: true or false is expected")
        if not config.can_serve(problem):
            raise ValueError(f"{config} of {problem}: no kernel can be built so")
        return cls(problem, config, source)


Found = TypeVar("Found")


def lookup(table: Mapping[GemmProblem, Found], problem: GemmProblem) -> Found | None:
    """What a table has for a problem, or for all norms and epilogues of its shape."""
    return table.get(problem) or table.get(problem._replace(norm=None, epilogue=None))


def read_table(path: Path) -> dict[str, Any]:
    """The entries of a table by GPU, unchecked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table.
    """
    try:
        values = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(values, dict):
        raise ValueError("an object is expected")
    return values


def parse_entries(lines: Any) -> tuple[dict[GemmProblem, Entry], list[Exception]]:
    """The entries of one GPU that can be used, and what is wrong with the others."""
    if not isinstance(lines, list):
        return {}, [ValueError("a list of entries is expected")]
    found: dict[GemmProblem, Entry] = {}
    errors: list[Exception] = []
    for line in lines:
        try:
            entry = Entry.from_json(line)
        except (ValueError, TypeError, KeyError) as error:
            errors.append(error)
        else:
            found[entry.problem] = entry
    return found, errors


def format_table(tables: Mapping[str, Any]) -> str:
    """A table as it is kept: ``tables`` has lists of entries (or of whatever was read) by GPU."""
    groups = []
    for gpu, lines in tables.items():
        is_list = isinstance(lines, list)
        each = [e.to_json() if isinstance(e, Entry) else json.dumps(e) for e in lines if is_list]
        text = "[\n" + ",\n".join(each) + "\n]" if is_list else json.dumps(lines)
        groups.append(f"{json.dumps(gpu)}: {text}")
    return "{" + ",\n".join(groups) + "}\n"


@functools.cache
def measured() -> dict[GemmProblem, Entry]:
    """The built-in table. It was measured on one GPU, and serves others too."""
    ((_, lines),) = read_table(BUILT_IN).items()
    found, errors = parse_entries(lines)
    if errors:
        raise errors[0]
    return found


def user_file() -> Path:
    """Where ``megatron-async tune`` keeps its table."""
    return cache_directory() / USER_FILE


def load_tuned(gpu: str) -> Mapping[GemmProblem, TileConfig]:
    """What was tuned on a GPU of this name; empty if nothing was. What cannot be read is warned of
    once."""
    path = user_file()
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        _warn_of_former_file(path.with_name(FORMER_USER_FILE))
        return {}
    except OSError as error:
        _warn(path, error)
        return {}
    return _load_tuned(path, gpu, (status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=8)
def _load_tuned(path: Path, gpu: str, version: tuple[int, int]) -> Mapping[GemmProblem, TileConfig]:
    try:
        found, errors = parse_entries(read_table(path).get(gpu, []))
    except (OSError, ValueError) as error:
        found, errors = {}, [error]
    if errors:
        _warn(path, errors[0])
    return {problem: entry.config for problem, entry in found.items()}


def _warn(path: Path, error: Exception) -> None:
    logger.warning(
        "%s: not all tile configs are used (%s: %s); delete the file, or make it readable, and run "
        "'megatron-async tune' again",
        path, type(error).__name__, error,
    )  # fmt: skip


@functools.cache
def _warn_of_former_file(path: Path) -> None:
    if path.is_file():
        logger.warning(
            "%s is of an earlier version and not used; delete it, and run 'megatron-async tune' "
            "again",
            path,
        )


def save_tuned(gpu: str, found: Iterable[Entry]) -> Path:
    """Keep entries next to those that were kept before; the path of the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = user_file()
    try:
        tables = read_table(path)
    except (OSError, ValueError):
        tables = {}
    merged, _ = parse_entries(tables.get(gpu, []))
    merged.update((entry.problem, entry) for entry in found)
    tables[gpu] = [merged[problem] for problem in sorted(merged, key=_order)]
    try:
        keep(path, format_table(tables).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; set MEGATRON_ASYNC_CACHE to a directory "
            "that can be written to"
        ) from None
    return path


def _order(problem: GemmProblem) -> tuple[int, ...]:
    return tuple(-1 if value is None else value for value in problem)


def padded(rows: int) -> int:
    """The number of rows of x that a kernel for ``rows`` rows is compiled for: a power of two, and
    48."""
    return 48 if 32 < rows <= 48 else 1 << (rows - 1).bit_length()


def stage_columns(scale_columns: int) -> int:
    """Columns of K in a stage, for weights with such scales; 0 for bfloat16."""
    return E4M3_STAGE_K if scale_columns else STAGE_K


def stage_count(k: int, scale_columns: int) -> int:
    """Stages of ``k`` columns, of which the last one may have less."""
    return -(-k // stage_columns(scale_columns))


def takes_scales(k: int, scale_columns: int) -> bool:
    """Whether there is a kernel for e4m3 weights ``[n, k]`` with such scales."""
    if scale_columns == k:
        return k % STAGE_K == 0
    return k % E4M3_STAGE_K == 0 and scale_columns in SCALE_COLUMNS


def is_of_many_rows(rows: int, scale_columns: int) -> bool:
    """Whether weights that nobody measured go to ``skinny_gemm_many.cu`` at padded ``rows``."""
    return rows > (FEW_ROWS if scale_columns else ANY_SHAPE_ROWS)


def row_groups(rows: int) -> int:
    """Groups of eight rows of x, for padded ``rows``."""
    return max(1, rows // 8)

"""How ``moe_widened.cu`` is built and called: a decode step's experts in e4m3 or MXFP4, and, of
many rows, in bfloat16.

Behind the router two launches have a linear layer each, and leave the result of each place in the
table of chosen experts; ``places_triton.py`` adds them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.compile import Bf16, Fp32, Int32, Int64, kernel
from megatron_async.kernels.moe.row import FUNCTIONS
from megatron_async.kernels.moe.tiles import MAX_ROWS, padded_rows
from megatron_async.kernels.moe.widened.places_triton import add_places, statistic_rows
from megatron_async.kernels.shared_memory import HOPPER_BYTES, block_limit

if TYPE_CHECKING:
    from megatron_async.kernels.moe.shape import MoeShape, MoeWeights

SOURCE = "moe_widened"
THREADS, STAGES = (352, 256, 128), 2
"""Threads of a CTA, the first that leave room for eight rows; and steps that each warp has on their
way."""
LEAST_16_BIT_ROWS = 33
"""Rows of a step with weights in bfloat16: with fewer the Triton kernels are quicker (Qwen3-30B-A3B
on an H200, us a layer at 32 and 64 rows: 296 and 359, and 269 and 383 of theirs)."""
_LEAST_E4M3_ROWS = 2
"""At one row the one kernel of ``row.py`` is quicker. Qwen3-30B-A3B in e4m3 on an H200, us a layer
at one, two and four rows: 41, 51 and 66, of which the router took 13 and takes 7 since, beside 23,
49 and 94 in one kernel. GPT-OSS-20B in MXFP4 at one and four rows: 39 and 84 beside 44 and 201."""
_PASSES = (32, 24, 16, 8)
"""Rows of an expert that are computed at once, as many as fit into shared memory."""
_MOST_EXPERTS, _MOST_PLACES = 512, 16


class WidenedArguments(NamedTuple):
    """Parameters of ``moe_widened.cu``, in order."""

    x: Bf16
    w: Annotated[Tensor, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
    scale: Annotated[Tensor, torch.float32, torch.uint8] | None
    bias: Bf16 | None
    experts: Int32
    bits: Int64
    found: Int32
    ids: Int32
    weights: Fp32
    limit: float
    offset: float
    out: Annotated[Tensor, torch.bfloat16, torch.float32]


class Chosen(NamedTuple):
    """What the router leaves: ``experts`` int32 ``[held]``, the first ``found`` of which have rows,
    and ``bits`` int64 ``[held]``, a bit for each of these; ``ids`` int32 and ``weights`` fp32
    ``[MAX_ROWS, places]``."""

    experts: Tensor
    bits: Tensor
    found: Tensor
    ids: Tensor
    weights: Tensor


class Sums(NamedTuple):
    """Where the layer's result goes, see :class:`~..decode.MoeDecode`."""

    out: Tensor
    residual: Tensor | None = None
    statistics: Tensor | None = None
    scaled: tuple[Tensor, Tensor] | None = None


def least_rows(shape: MoeShape) -> int:
    """The least rows of a step that the kernel computes."""
    return LEAST_16_BIT_ROWS if shape.weight_size is None else 1


def least_beside_one_kernel(shape: MoeShape) -> int:
    """The least rows of a step that take this kernel where ``row.py``'s takes them too."""
    if shape.is_packed:
        return 1
    return LEAST_16_BIT_ROWS if shape.weight_size is None else _LEAST_E4M3_ROWS


def why_not(shape: MoeShape, dtype: torch.dtype, limit: int = HOPPER_BYTES) -> str | None:
    """Why the kernel does not take layers of this shape on a GPU whose CTAs have ``limit`` bytes of
    shared memory; None if it does."""
    columns = shape.scale_columns
    if dtype != torch.bfloat16:
        return f"{dtype} is not covered"
    if columns is not None and not columns.are_all:
        return "weights of two formats are not covered"
    if shape.shared:
        return "shared experts are not covered"
    if shape.held > _MOST_EXPERTS or shape.slots > _MOST_PLACES:
        return f"{shape.slots} of {shape.held} experts are not covered"
    of_row = 64 if shape.is_packed else 16
    if shape.hidden % of_row or shape.inner % of_row:
        return f"experts of {shape.inner} x {shape.hidden} are not covered"
    if columns is not None:
        for own, width in ((columns.w1, shape.hidden), (columns.w2, shape.inner)):
            if own != width and own % 64:
                return f"a scale for {own} columns is not covered"
    if _threads_that_fit(shape, limit) is None:
        return f"experts of {shape.inner} x {shape.hidden} do not fit into shared memory"
    return None


def shared_bytes(
    shape: MoeShape, rows: int, down: int, at_once: int, threads: int, stages: int
) -> int:
    """What a CTA takes of shared memory, see ``moe_widened.cu``; ``rows`` are padded."""
    columns, places = shape.scale_columns, rows * shape.settings.top_k
    k = shape.inner if down else shape.hidden
    values = int(16 / (shape.weight_size or 2))  # in 16 bytes
    steps = -(-k // values // 8)
    x_row = steps * 8 * values * 2
    of_scales = k // 32 if shape.is_packed else 0
    if columns is not None:
        of_scales = k // (columns.w2 if down else columns.w1) * 4
    a_warp = min(stages, steps) * 2048 + 2 * 16 * of_scales
    units = min(shape.held, places) + places // at_once
    schedule = shape.held * 12 + units * 4 + places * 8 + at_once * 12 + 16
    return at_once * x_row + threads // 32 * a_warp + schedule


def _threads_that_fit(shape: MoeShape, limit: int) -> int | None:
    for threads in THREADS:
        if all(
            _rows_at_once(shape, rows, down, limit, threads, STAGES) is not None
            for rows in (16, MAX_ROWS) for down in (0, 1)
        ):  # fmt: skip
            return threads
    return None


def _rows_at_once(
    shape: MoeShape, rows: int, down: int, limit: int, threads: int, stages: int
) -> int | None:
    """Return the rows of an expert that are computed at once; None where not even eight fit."""
    for at_once in _PASSES:
        taken = shared_bytes(shape, rows, down, at_once, threads, stages)
        if at_once <= rows and taken <= limit:
            return at_once
    return None


class WidenedExperts:
    """Layers of one shape on one device. Buffers are static: one layer runs at a time.

    Args:
        ctas: of a grid.
        activated: bfloat16, ``MAX_ROWS * top_k`` rows of ``inner`` or more; None takes memory.
        threads, stages: see :data:`THREADS`; None for the threads that fit.

    Attributes:
        statistic_rows: elements that one partial statistic covers.
    """

    def __init__(
        self,
        shape: MoeShape,
        device: torch.device,
        ctas: int,
        *,
        activated: Tensor | None = None,
        threads: int | None = None,
        stages: int = STAGES,
    ) -> None:
        self._shape, self._device, self._ctas = shape, device, ctas
        self._limit = block_limit(device) if device.type == "cuda" else HOPPER_BYTES
        found = threads or _threads_that_fit(shape, self._limit)
        assert found is not None, "see why_not"
        self._threads, self._stages = found, stages
        self.statistic_rows = statistic_rows(shape.hidden)
        places = MAX_ROWS * shape.settings.top_k
        with torch.inference_mode(False):
            if activated is None:
                activated = torch.empty(places, shape.inner, dtype=torch.bfloat16, device=device)
            assert len(activated) >= places, "see activated"
            self._activated = activated
            self._of_places = torch.empty(places, shape.hidden, device=device)

    def _at_once(self, padded: int, down: int) -> int | None:
        return _rows_at_once(self._shape, padded, down, self._limit, self._threads, self._stages)

    def fit(self, rows: int) -> bool:
        """Whether the CTAs of a step of ``rows`` rows fit into shared memory."""
        return all(self._at_once(padded_rows(rows), down) is not None for down in (0, 1))

    def defines(self, rows: int, down: int) -> dict[str, int]:
        """Macros of ``moe_widened.cu`` for a step of ``rows`` rows."""
        shape, activation, columns = self._shape, self._shape.activation, self._shape.scale_columns
        padded = padded_rows(rows)
        at_once = self._at_once(padded, down)
        assert at_once is not None, "see why_not"
        of_format = {"W4": int(shape.is_packed), "W8": 0, "SCALE_COLUMNS": 32}
        if columns is not None:
            of_format = {"W4": 0, "W8": 1, "SCALE_COLUMNS": columns.w2 if down else columns.w1}
        return of_format | {
            "H": shape.hidden, "INNER": shape.inner, "HELD": shape.held,
            "TOP_K": shape.settings.top_k, "DOWN": down, "ROWS": padded, "PASS": at_once,
            "GATED": int(activation.gated), "FUNCTION": FUNCTIONS.index(activation.function),
            "HAS_LIMIT": int(activation.limit is not None),
            "THREADS": self._threads, "ST": self._stages,
        }  # fmt: skip

    def work(self, rows: int) -> list[tuple[str, dict[str, int]]]:
        """Return source and macros of the launches for ``rows`` rows."""
        return [(SOURCE, self.defines(rows, down)) for down in (0, 1)]

    def up(self, weights: MoeWeights, rows: int, normed: Tensor, chosen: Chosen) -> None:
        """First linear layers and activation of the chosen experts.

        Args:
            normed: bfloat16 ``[rows or more, H]``.
        """
        activation = self._shape.activation
        arguments = WidenedArguments(
            normed, weights.w1, weights.w1_scale, weights.b1, *chosen,
            float(activation.limit or 0.0), float(activation.offset), self._activated,
        )  # fmt: skip
        self._launch(rows, 0, arguments)

    def down(self, weights: MoeWeights, rows: int, chosen: Chosen, sums: Sums) -> None:
        """Second linear layers, and the sum of each row's; after :meth:`up`."""
        arguments = WidenedArguments(
            self._activated, weights.w2, weights.w2_scale, None, *chosen, 0.0, 0.0, self._of_places
        )
        self._launch(rows, 1, arguments)
        add_places(self._of_places, chosen.ids, chosen.weights, weights.b2, rows, *sums)

    def _launch(self, rows: int, down: int, arguments: WidenedArguments) -> None:
        found = kernel(SOURCE, self.defines(rows, down), self._device)
        found.launch((self._ctas, 1, 1), arguments)

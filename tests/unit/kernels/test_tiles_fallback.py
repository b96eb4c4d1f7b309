"""What does not fit a GPU after all, once it is compiled: others take its place, with one line."""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.errors import ConfigError
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import KernelTooLargeError
from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.kernels.moe.row import MoeRow
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.models.fused import where
from megatron_async.models.fused.ahead import Refused
from megatron_async.models.fused.blocks.moe_block import MoeBlock
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, MLP
from megatron_async.sampling.sample import SampleInputs
from tests.support import emulator, launches
from tests.support.decode_rig import DecodeRig, bfloat16_model, small

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from megatron_async.kernels import fitting

HALF = torch.bfloat16
TILES = {"num_stages", "NUM_STAGES", "BLOCK_K", "CHUNK", "TILE", "ROWS", "GROUP", "GROUP_PAD"}
TILES |= {"SHARES", "CHANNELS", "EVEN_K"}
"""Arguments of kernels that a smaller tile may change."""


class Refusing:
    """Stands for a kernel of which the GPU does not run the first few."""

    def __init__(self, refuses: int) -> None:
        self.refuses, self.calls = refuses, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.calls.append((args, kwargs))
            if len(self.calls) <= self.refuses:
                raise OutOfResources(245_760, 232_448, "shared memory")

        return launch


def experts() -> None:
    _, launch = launches.experts(256, 64, 64, HALF)
    launch()


def wide_experts(*, first: bool) -> None:
    from megatron_async.kernels.moe.many import wide

    order = torch.zeros(8, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32), 2
    x, w1, w2 = (torch.zeros(*size, dtype=HALF) for size in ((8, 64), (2, 64, 64), (2, 64, 32)))
    if first:
        wide.first_layers(x, *order, w1, None, 1, ExpertActivation(), wide.TILES)
    else:
        wide.second_layers(x[:, :32].contiguous(), *order, w2, None, torch.ones(8), wide.TILES)


KERNELS: dict[str, tuple[str, Callable[[], None]]] = {
    "router_kernel": ("moe.decode", experts),
    "up_kernel": ("moe.decode", experts),
    "down_kernel": ("moe.decode", experts),
    "grouped_wide_up_kernel": ("moe.many.wide", lambda: wide_experts(first=True)),
    "grouped_wide_down_kernel": ("moe.many.wide", lambda: wide_experts(first=False)),
    "_split_kernel": (
        "attention.paged_decode_triton", lambda: launches.attention(8, 2, 128, HALF),
    ),
    "_prefill_kernel": (
        "attention.paged_prefill_triton",
        lambda: launches.attention(8, 2, 128, HALF, prefill=True),
    ),
    "_matmul_kernel": ("gemm.invariant.products_triton", lambda: launches.product(8, 64, 64, HALF)),
    "_scan_kernel": (
        "mamba.scan_triton", lambda: launches.scan(MambaSizes(8, 64, 1, 32), HALF),
    ),
}  # fmt: skip
"""By kernel: its module, and a launch."""


@pytest.fixture(autouse=True)
def _nothing_was_said_before() -> None:
    fitting._warn.cache_clear()


def seen(argument: Any) -> Any:
    """What a kernel sees of an argument."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.storage_offset()


def install(monkeypatch: pytest.MonkeyPatch, name: str, refuses: int) -> Refusing:
    """All kernels of a module do nothing, and one of them refuses."""
    module = importlib.import_module(f"megatron_async.kernels.{KERNELS[name][0]}")
    for other in vars(module).copy():
        if other.endswith("_kernel"):
            monkeypatch.setattr(module, other, Refusing(0))
    kernel = Refusing(refuses)
    monkeypatch.setattr(module, name, kernel)
    return kernel


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_that_does_not_fit_is_made_with_smaller_tiles(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = install(monkeypatch, name, refuses=2)
    for _ in range(2):
        KERNELS[name][1]()
        kernel.refuses = len(kernel.calls) + 2
    first, *_, last = kernel.calls[:3]
    changed = {key for key in first[1] if first[1][key] != last[1][key]}
    assert changed and changed <= TILES
    assert [seen(a) for a in first[0]] == [seen(a) for a in last[0]]
    assert len(kernel.calls) == 6, "the second launch begins with the first tile again"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "245760 of 232448" in said[0]


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_that_no_tile_fits_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = install(monkeypatch, name, refuses=1000)
    with pytest.raises(ConfigError, match="does not fit this GPU: it takes 245760 of 232448"):
        KERNELS[name][1]()
    assert len(kernel.calls) > 3


def test_errors_of_other_kinds_are_not_swallowed() -> None:
    def launch(tile: int) -> None:
        raise RuntimeError(f"an illegal address with {tile}")

    with pytest.raises(RuntimeError, match="illegal address with 3"):
        fitting.launch_fitting("a kernel", 3, lambda tile: range(tile), launch)

    def fails_later(tile: int) -> None:
        if tile == 3:
            raise OutOfResources(1, 0, "threads")
        launch(tile)

    with pytest.raises(RuntimeError, match="illegal address with 0"):
        fitting.launch_fitting("a kernel", 3, lambda tile: range(tile), fails_later)


# --- CUDA C++ ------------------------------------------------------------------------------------


class Driver:
    """Stands for CUDA's, which loads one kernel."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace

    def __init__(self, dynamic: int, static: int) -> None:
        self.attributes, self.dynamic = {0: 128, 1: static}, dynamic
        self.loaded, self.asked = 0, 0

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:  # noqa: N802
        self.loaded += 1
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:  # noqa: N802
        return 0, "function"

    def cuFuncGetAttribute(self, which: int, function: str) -> tuple[int, int]:  # noqa: N802
        return 0, self.attributes[which]

    def cuModuleGetGlobal(self, module: str, name: bytes) -> tuple[int, int, int]:  # noqa: N802
        return 0, 7, 4

    def cuMemcpyDtoH(self, into: int, address: int, size: int) -> tuple[int]:  # noqa: N802
        ctypes.c_int.from_address(into).value = self.dynamic
        return (0,)

    def cuFuncSetAttribute(self, function: str, which: int, value: int) -> tuple[int]:  # noqa: N802
        self.asked = value
        return (0,)


@pytest.mark.parametrize(("limit", "fits"), [(232_448, True), (101_376, False)])
def test_a_kernel_that_is_too_large_is_known_when_it_is_loaded(
    limit: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(dynamic=101_376 - 2, static=4)
    cuda._kernel.cache_clear()
    for name, stand_in in {
        "_driver": lambda: driver, "machine_code": lambda *_: b"", "architecture": lambda _: "",
        "block_limit": lambda _: limit,
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    on = torch.device("cuda", 0)
    try:
        for _ in range(2):
            reason = cuda.too_large("embed", {"H": 64}, on)
            assert (reason is None) == fits
        assert driver.loaded == 1, "nothing is loaded while a graph is captured"
        assert driver.asked == (driver.dynamic if fits else 0)
        if not fits:
            assert reason == "embed takes 101378 of 101376 bytes of shared memory on this GPU"
            with pytest.raises(KernelTooLargeError):
                cuda.kernel("embed", {"H": 64}, on)
    finally:
        cuda._kernel.cache_clear()
    assert cuda.too_large("embed", {"H": 64}, torch.device("cpu")) is None


def decoder_that_refuses(
    refuses: Callable[[str, dict[str, int]], bool], monkeypatch: pytest.MonkeyPatch
) -> tuple[FusedDecoder, Any, list[Any]]:
    """One over a model on the CPU whose GPU does not run some kernels; and what was compiled."""
    emulator.install(monkeypatch)
    compiled: list[Any] = []
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: compiled.append(work))
    monkeypatch.setattr(
        cuda, "too_large",
        lambda source, macros, device: "it is too large" if refuses(source, macros) else None,
    )  # fmt: skip
    config, device = small("qwen3"), torch.device("cpu")
    fused = FusedDecoder(bfloat16_model(config, device))
    return fused, DecodeRig(config, device).context(), compiled


def test_blocks_with_a_kernel_that_the_gpu_does_not_run_are_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, context, compiled = decoder_that_refuses(
        lambda source, _: source == "attention", monkeypatch
    )
    assert fused.covered([3, 8], context).fallbacks == ()
    fused.compile([3, 8], context)
    found = fused.covered([3, 8], context)
    assert found.fused(ATTENTION) == () and found.fused(MLP) == (1, 2)
    (fallback,) = found.fallbacks
    assert str(fallback) == "attention of layers 1-2: it is too large"
    assert len(compiled) == 2, "what is left is compiled for other neighbours"
    assert "attention" not in {source for source, _ in compiled[-1]}


def test_other_rows_keep_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fc1 = 2 * small("qwen3").ffn_hidden_size
    fused, context, _ = decoder_that_refuses(
        lambda _, macros: macros.get("N") == fc1 and macros.get("XR") == 8, monkeypatch
    )
    fused.compile([3, 8], context)
    (fallback,) = fused.covered([3, 8], context).fallbacks
    assert (fallback.kind, fallback.layers, fallback.rows) == (MLP, (1, 2), (8,))
    assert fused.covered([3], context).fallbacks == ()


def test_experts_of_a_few_rows_are_left_to_three_kernels(caplog: pytest.LogCaptureFixture) -> None:
    kernels, _ = launches.experts(256, 64, 2, HALF, device="cpu")
    block = MoeBlock.__new__(MoeBlock)
    block._kernels = kernels
    kernels._row = MoeRow(kernels.shape, torch.device("cpu"), 132)
    assert block.has_waiting_grid and kernels.work(1, gate=False, one_launch=True)
    assert not block.has_another_way(Refused("attention", "it is too large"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert block.has_another_way(Refused("moe_row", "it is too large"))
    assert not block.has_waiting_grid and not kernels.work(1, gate=False, one_launch=True)
    assert [record.getMessage() for record in caplog.records] == [
        "layers of experts take three kernels for a few rows: it is too large"
    ]


def test_the_sampler_in_triton_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async.kernels.sampling import sample_triton

    def too_large(*_: Any, **__: Any) -> None:
        raise KernelTooLargeError("sample takes too much")

    monkeypatch.setattr(sample_triton.cuda_sample, "why_not", lambda *_: None)
    monkeypatch.setattr(sample_triton.cuda_sample, "best_of_rows", too_large)
    monkeypatch.setattr(sample_triton, "_triton_splits", lambda logits, *_, **__: logits)
    logits = torch.zeros(2, 8)
    inputs = SampleInputs(*[torch.zeros(2) for _ in range(5)])
    assert sample_triton.sample_splits(logits, inputs) is logits


def test_attention_of_other_steps_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_async.kernels.attention import rope_append
    from megatron_async.kernels.attention.decode_attention import DecodeAttentions, Heads
    from megatron_async.runner.memory import cache_attention

    def too_large(*_: Any) -> None:
        raise KernelTooLargeError("attention takes too much")

    cache_attention._warn_of_steps_apart.cache_clear()
    heads = Heads(32, 2, 2, 16, norm=False, rope=False)
    monkeypatch.setattr(DecodeAttentions, "get", too_large)
    monkeypatch.setattr(rope_append, "rope_append", lambda packed, *_: packed)
    cache = cache_attention.CacheAttention(
        torch.zeros(1, 2, 3, 16, 2, 32), torch.zeros(2, 3, dtype=torch.int64),
        batch_invariant=False,
    )  # fmt: skip
    monkeypatch.setattr(cache, "heads_of_decode", lambda *_: heads)
    monkeypatch.setattr(cache, "attend_appended", lambda tokens, query, *_: query)
    tokens: Any = SimpleNamespace(slot_mapping=None, position_ids=None)
    packed = torch.zeros(2, 256)
    for _ in range(2):
        assert cache.attend_packed(tokens, 0, packed, 0.1, None, None, None, 0.0, {}) is packed
    assert [record.getMessage() for record in caplog.records] == [
        "keys and values are appended first, then attended in Triton: attention takes too much"
    ]

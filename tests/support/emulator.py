"""The CUDA kernels of ``kernels/`` on a CPU: see ``emulated_intrinsics.cpp``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention as attention
from megatron_async.kernels.attention import prefill_attention
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.launch_watch import watch
from megatron_async.kernels.moe import row as moe_row
from megatron_async.kernels.moe.widened import experts as moe_widened
from megatron_async.kernels.norm import embed
from megatron_async.kernels.ranks import mailbox, peer_best, peer_rows, peer_sum
from megatron_async.kernels.sampling import sample_cuda as sample

COMPILER = shutil.which("g++")
_INTRINSICS = Path(__file__).with_name("emulated_intrinsics.hpp")
_RUNTIME = Path(__file__).with_name("emulated_intrinsics.cpp")
_STANDARD = """
#include <cmath>
#include <cstring>
#include <utility>
"""
_RUNTIME_STANDARD = """
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>
"""
_OPTIONS = ("-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC")
_RUNTIME_OPTIONS = (
    "-shared",
    "-O2",
    "-U_FORTIFY_SOURCE",
)  # which takes fibers' longjmp for a fault
FOLDER = "EMULATED_KERNELS"
"""The environment variable with the folder of what is built, where processes share it."""
_SHARED = re.compile(r"extern __shared__ __align__\([^)]+\) char shared\[\];")
_STATIC = re.compile(r"__shared__ u32 (\w+);")
"""A word of a block. A kernel has one at most."""
_CLUSTER = {
    "skinny_gemm_many": "CLUSTER * MULTICAST", "embed": "1", "embed_share": "1", "sample": "C",
    "moe_row": "1", "moe_widened": "1", "prefill_attention": "1",
    "peer_sum": "1", "peer_best": "1", "peer_rows": "1", "mailbox": "1",
}  # fmt: skip
"""CTAs of a cluster, where that is not ``CLUSTER``."""
_ALL_WAIT = {"moe_row", "peer_sum", "peer_best", "peer_rows"}
"""Kernels all of whose CTAs run at once, since they wait for each other; so do those of GEMMs that
sum over ranks."""
_WRITTEN_BEFORE = {
    "skinny_gemm_mma": ("x", "stats_in", "residual", "launches"),
    "skinny_gemm_wgmma": ("x_map", "stats_in", "input_scale", "residual", "launches"),
    "skinny_gemm_many": ("x_map", "stats_in", "residual", "launches"),
    "attention": ("qkv",),
    "prefill_attention": ("query", "chunks", "key_map", "value_map"),
    "embed": ("token_ids", "position_ids"),
    "embed_share": ("token_ids", "position_ids"),
    "sample": (0,),
    "moe_row": (
        "x",
        "stats_in",
        "live",
        "launches",
        "logits",
        "activated",
        "residual",
        "rank_launches",
    ),
    "moe_widened": ("x", "experts", "bits", "found", "ids", "weights"),
    "peer_sum": ("partial", "received", "launches", "hidden"),
    "peer_best": ("packed", "received", "launches"),
    "peer_rows": ("partial", "received", "launches", "residual"),
    "mailbox": ("message", "received", "done"),
}
"""Arguments that the kernel in front writes."""
_OF_SECOND_LAYERS = ("x",)
"""The first layers' launch waits for the router before it lets the second layers' begin."""
_RANKS = {"peer_sum", "peer_best", "peer_rows"}
"""Kernels whose launches on several ranks wait for each other; so do those with ``SUMS``."""
LATE_ROUNDS = 2000
"""Turns of all threads before a late rank begins; on time it has at most 20 to wait."""
SM_COUNT = 132
"""Of an emulated GPU, unless a test says otherwise."""


class EmulatedKernel:
    """Stands for ``compile.Kernel``. In each launch threads run in another order."""

    def __init__(self, source: str, defines: Mapping[str, int]) -> None:
        self.name = source
        self._seed = 0
        # What GEMMs have sent is waited for word by word, and all else is there.
        self._late = () if defines.get("SENT") else _WRITTEN_BEFORE[source]
        if source == "moe_widened" and defines["DOWN"]:
            self._late = _OF_SECOND_LAYERS
        sums = bool(defines.get("SUMS"))
        self._ranks = defines["RANKS"] if source in _RANKS or sums else 1
        self._all_wait = sums or source in _ALL_WAIT
        self.in_a_row = 1
        """Launches of each rank that run one after the other, at each rank's own pace."""
        self.late_rank: int | None = None
        """A rank none of whose CTAs begins before the others have long waited for it."""
        self._waiting: list[tuple[Any, ...]] = []
        self._library = ctypes.CDLL(_library(program(source, defines)))
        self._library.run.restype = ctypes.c_char_p
        self.shared_bytes = ctypes.c_int.in_dll(self._library, "shared_bytes").value
        self.threads = ctypes.c_int.in_dll(self._library, "threads").value

    def runs_at_once(self, ctas: int) -> bool:
        """There is room for any grid."""
        return True

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run it; a kernel of several ranks runs when all have launched it, one after the other.

        Raises:
            AssertionError: it did what it must not do.
            TypeError: an argument is not of its parameter's type.
        """
        names: Sequence[Any] = range(len(arguments))
        if hasattr(arguments[0], "_fields"):
            for record in arguments:
                cuda.check_arguments(self.name, record)
            names = [name for record in arguments for name in record._fields]
            arguments = tuple(itertools.chain.from_iterable(arguments))
        if watch.seen is not None:
            watch.seen(arguments)
        self._waiting.append((names, arguments))
        if len(self._waiting) < self._ranks * self.in_a_row:
            return
        waiting, self._waiting = self._waiting, []
        values: list[Any] = []
        ranges: dict[int, list[int]] = {}
        for each in waiting:
            self._add(*each, values, ranges)
        addresses = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
        count = len(ranges)
        x, *others = grid
        late = (0, 0, 0) if self.late_rank is None else (self.late_rank * x, x, LATE_ROUNDS)
        _runtime().let_blocks_be_late(*late)
        error = self._library.run(
            (ctypes.c_void_p * len(values))(*addresses),
            (ctypes.c_int * 3)(x * self._ranks, *others),
            ctypes.c_uint(x),
            ctypes.c_int(x * self._ranks if self._all_wait else 0),
            ctypes.c_uint(self.in_a_row),
            count,
            (ctypes.c_void_p * count)(*ranges),
            (ctypes.c_longlong * count)(*(size for size, _ in ranges.values())),
            (ctypes.c_int * count)(*(int(late) for _, late in ranges.values())),
            ctypes.c_uint(self._seed),
        )
        self._seed += 1
        assert error is None, f"{self.name}: {error.decode()}"

    def _add(
        self,
        names: Sequence[Any],
        arguments: tuple[Any, ...],
        values: list[Any],
        ranges: dict[int, list[int]],
    ) -> None:
        """To ``values`` what a launch passes, and to ``ranges`` what it may touch."""

        def allow(begin: int, size: int, name: str | int) -> None:
            seen = ranges.setdefault(begin, [0, 0])
            seen[0] = max(seen[0], size)
            seen[1] |= name in self._late

        for name, argument in zip(names, arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                last = zip(argument.shape, argument.stride(), strict=True)
                size = 1 + sum((length - 1) * stride for length, stride in last)
                allow(argument.data_ptr(), argument.element_size() * size, name)
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif argument is None:
                values.append(ctypes.c_void_p(0))
            elif isinstance(argument, cuda.TensorMap):
                allow(argument.handle[0], argument.handle[14], name)
                values.append(argument.handle)
            else:
                kind = ctypes.c_float if isinstance(argument, float) else ctypes.c_int
                values.append(kind(argument))


@functools.cache
def _kernel(source: str, defines: tuple[tuple[str, int], ...]) -> EmulatedKernel:
    return EmulatedKernel(source, dict(defines))


def install(monkeypatch: pytest.MonkeyPatch, sm_count: int = SM_COUNT) -> None:
    """Let the wrappers of the CUDA kernels, and the fused forward, work on a CPU."""
    for module in (
        skinny_gemm, attention, prefill_attention, embed, sample, moe_row, moe_widened, peer_sum,
        peer_best, peer_rows, mailbox,
    ):  # fmt: skip
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(cuda, "sm_count", lambda device_index: sm_count)
    monkeypatch.setattr(cuda, "tensor_map", tensor_map)
    monkeypatch.setattr(cuda, "compile_together", lambda work, architecture: None)
    monkeypatch.setattr(cuda, "architecture", lambda device_index: "emulated")
    monkeypatch.setattr(cuda, "device_name", lambda device_index: "emulated")


def tensor_map(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], tile: Sequence[int]
) -> cuda.TensorMap:
    """Stands for ``compile.tensor_map``: what ``tma_load`` in ``emulated_intrinsics.hpp`` reads,
    and behind it how many bytes the tensor has."""
    element = tensor.element_size()
    assert (
        tile[0] * element == 128
        and max(tile) <= 256
        and len(sizes) == len(tile) == len(strides) + 1
    )
    assert all(stride % 16 == 0 for stride in strides) and tensor.data_ptr() % 16 == 0
    rest = [0] * (4 - len(sizes))
    steps = [element, *strides]
    size = element + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
    dimensions = [*sizes, *rest, *steps, *rest, *tile, *rest]
    handle = (ctypes.c_ulonglong * 16)(tensor.data_ptr(), *dimensions, len(sizes), size)
    return cuda.TensorMap(handle, tensor.data_ptr(), size)


def kernel(source: str, defines: Mapping[str, int], device: torch.device) -> EmulatedKernel:
    """Stands for ``compile.kernel``."""
    assert device.type == "cpu"
    return _kernel(source, tuple(sorted(defines.items())))


def source_text(source: str) -> str:
    """C++ that means what the kernel's source means, with an entry point ``run``."""
    rest = (cuda.SOURCES / "include" / "arithmetic.cuh").read_text() + cuda.own_text(source)
    assert rest.count("asm") == 0, "inline assembly belongs into intrinsics.cuh"
    assert len(set(_STATIC.findall(rest))) <= 1, "a block has one word"
    rest = _STATIC.sub(r"u32& \1 = *emulator::place->word;", rest)
    text = _intrinsics() + _SHARED.sub("", rest)
    cluster = _CLUSTER.get(source, "CLUSTER")
    return (
        text
        + f"""
extern "C" const int threads = THREADS;
extern "C" const char* run(void** values, const int* grid, unsigned width, int at_once,
                           unsigned launches, int ranges, void** begins,
                           const long long* sizes, const int* is_late, unsigned seed) {{
  return [&]<typename... A>(void (*kernel)(A...)) {{
    return emulator::launch(kernel, values, width, launches, std::index_sequence_for<A...>(), grid,
                            THREADS, {cluster}, at_once, shared_bytes, ranges, begins, sizes,
                            is_late, seed);
  }}({source});
}}
"""
    )


def _intrinsics() -> str:
    types = (cuda.SOURCES / "include" / "types.cuh").read_text()
    head, mark, tail = _INTRINSICS.read_text().partition("namespace emulator {")
    # The kernels' types may use the macros, and what follows uses the types.
    return head + types + mark + tail


def shared_bytes(source: str, several: Sequence[Mapping[str, int]]) -> list[int]:
    """What a kernel with each of these macros takes of shared memory, without building it."""
    own = cuda.own_text(source)
    directives = ("#define", "#if", "#else", "#endif")  # of the first one's macros
    formulas = [line for line in own.splitlines() if line.startswith(directives)]
    (taken,) = re.findall(r"const int shared_bytes = ([^;]+);", own)
    text = ["#include <cstdio>"]
    for defines in several:
        text += [f"#undef {macro}\n#define {macro} {value}" for macro, value in defines.items()]
        text += formulas if defines is several[0] else []
        text.append(f"int f{len(text)}() {{ return {taken}; }}")
    calls = (line.partition("{")[0].split()[1] for line in text if line.startswith("int f"))
    text.append("int main() {" + "".join(f'std::printf("%d\\n", {call});' for call in calls) + "}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shared")
        _compile(path, "\n".join(text))
        printed = subprocess.check_output([path], text=True)
    return [int(line) for line in printed.split()]


def program(source: str, defines: Mapping[str, int]) -> str:
    """The whole C++ program of a kernel with these macros."""
    # Macros come after the standard library, which uses some of their names.
    macros = "".join(f"#define {macro} {value}\n" for macro, value in sorted(defines.items()))
    return '#include "standard.hpp"\n' + macros + source_text(source)


def preprocessed(source: str, defines: Mapping[str, int]) -> str:
    """A kernel's own source with these macros, as its compiler sees it."""
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines.items())
    assert COMPILER is not None
    command = [COMPILER, "-E", "-P", "-x", "c++", "-"]
    given = macros + cuda.own_text(source)
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _folder() -> Path:
    return Path(os.environ.get(FOLDER) or _own_folder().name)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """What all emulated kernels share, loaded so that they find it."""
    path = _built(
        "runtime.so", _RUNTIME_STANDARD + _intrinsics() + _RUNTIME.read_text(), *_RUNTIME_OPTIONS
    )
    # What stands in front of all kernels is compiled once; the compiler may refuse what it made.
    (_folder() / "standard.hpp").write_text(_STANDARD)
    _built("standard.hpp.gch", _STANDARD, "-x", "c++-header")
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


@functools.cache
def _library(text: str) -> str:
    _runtime()
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return str(_built(f"{name}.so", text, "-shared"))


def _built(name: str, text: str, *options: str) -> Path:
    """The file that a program is compiled to, by this process or by one before it."""
    path = _folder() / name
    if not path.exists():
        own = path.with_name(f"{os.getpid()}-{name}")
        _compile(own, text, *options)
        own.replace(path)
    return path


def _compile(out: Path, text: str, *options: str) -> None:
    assert COMPILER is not None
    source = out.with_suffix(".cpp")
    source.write_text(text)
    subprocess.run([COMPILER, *_OPTIONS, *options, "-o", str(out), str(source)], check=True)

"""CUDA kernels of ``kernels/cuda`` on a CPU: see ``emulated_intrinsics.hpp``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
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
from megatron_async.kernels.gemm import skinny_gemm as linear
from megatron_async.kernels.sampling import sample_cuda as sample

COMPILER = shutil.which("g++")
_INTRINSICS = Path(__file__).with_name("emulated_intrinsics.hpp")
_STANDARD = """
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>
"""
_OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC")
_SHARED = re.compile(r"extern __shared__ __align__\([^)]+\) char shared\[\];")
_CLUSTER = {"linear": "CLUSTER", "attention": "SPLITS", "embed": "1", "sample": "C"}
_WRITTEN_BEFORE = {"linear": (0, 5, 8), "attention": (0,), "embed": (0, 1), "sample": (0,)}
"""Arguments that the kernel in front writes: x, statistics and residual; the projection; tokens;
logits."""


class EmulatedKernel:
    """Stands for ``compile.Kernel``. In each launch threads run in another order."""

    def __init__(self, source: str, defines: Mapping[str, int]) -> None:
        self.name = source
        self._seed = 0
        self._library = ctypes.CDLL(_library(program(source, defines)))
        self._library.run.restype = ctypes.c_char_p
        self.shared_bytes = ctypes.c_int.in_dll(self._library, "shared_bytes").value
        self.threads = ctypes.c_int.in_dll(self._library, "threads").value

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run it.

        Raises:
            AssertionError: it did what it must not do.
        """
        values: list[Any] = []
        ranges: dict[int, list[int]] = {}
        for index, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                begin = argument.data_ptr()
                size = argument.element_size() * (1 + sum(
                    (length - 1) * stride
                    for length, stride in zip(argument.shape, argument.stride(), strict=True)
                ))  # fmt: skip
                seen = ranges.setdefault(begin, [0, 0])
                seen[0] = max(seen[0], size)
                seen[1] |= index in _WRITTEN_BEFORE[self.name]
                values.append(ctypes.c_void_p(begin))
            elif argument is None:
                values.append(ctypes.c_void_p(0))
            elif isinstance(argument, ctypes.Array):
                values.append(argument)
            else:
                kind = ctypes.c_float if isinstance(argument, float) else ctypes.c_int
                values.append(kind(argument))
        addresses = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
        count = len(ranges)
        error = self._library.run(
            (ctypes.c_void_p * len(values))(*addresses),
            (ctypes.c_int * 3)(*grid),
            count,
            (ctypes.c_void_p * count)(*ranges),
            (ctypes.c_longlong * count)(*(size for size, _ in ranges.values())),
            (ctypes.c_int * count)(*(int(late) for _, late in ranges.values())),
            ctypes.c_uint(self._seed),
        )
        self._seed += 1
        assert error is None, f"{self.name}: {error.decode()}"


@functools.cache
def _kernel(source: str, defines: tuple[tuple[str, int], ...]) -> EmulatedKernel:
    return EmulatedKernel(source, dict(defines))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wrappers of ``kernels/cuda``, and the fused forward, work on a CPU."""
    monkeypatch.setattr(linear, "kernel", kernel)
    monkeypatch.setattr(attention, "kernel", kernel)
    monkeypatch.setattr(sample, "kernel", kernel)
    monkeypatch.setattr(cuda, "tensor_map", tensor_map)
    monkeypatch.setattr(cuda, "compile_together", lambda work, architecture: None)
    monkeypatch.setattr(cuda, "architecture", lambda device_index: "emulated")
    monkeypatch.setattr(cuda, "device_name", lambda device_index: "emulated")


def tensor_map(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> Any:
    """Stands for ``compile.tensor_map``: what ``copy_box`` in ``emulated_intrinsics.hpp`` reads."""
    assert box[0] * 2 == 128 and max(box) <= 256 and len(sizes) == len(box) == len(strides) + 1
    assert all(stride % 16 == 0 for stride in strides) and tensor.data_ptr() % 16 == 0
    rest = [0] * (4 - len(sizes))
    dimensions = [*sizes, *rest], [2, *strides, *rest], [*box, *rest]
    fields = [tensor.data_ptr(), *dimensions[0], *dimensions[1], *dimensions[2], len(sizes)]
    return (ctypes.c_ulonglong * 16)(*fields)


def kernel(source: str, defines: Mapping[str, int], device: torch.device) -> EmulatedKernel:
    """Stands for ``compile.kernel``."""
    assert device.type == "cpu"
    return _kernel(source, tuple(sorted(defines.items())))


def source_text(source: str) -> str:
    """C++ that means what the kernel's source means, with an entry point ``run``."""
    types = (cuda.SOURCES / "include" / "types.cuh").read_text()
    rest = (cuda.SOURCES / "include" / "arithmetic.cuh").read_text() + cuda.source_file(
        source
    ).read_text()
    assert rest.count("asm") == 0, "inline assembly belongs into intrinsics.cuh"
    intrinsics = _INTRINSICS.read_text()
    head, mark, tail = intrinsics.partition("namespace emulator {")
    # The kernels' types may use the macros, and what follows uses the types.
    text = head + types + mark + tail + _SHARED.sub("", rest)
    return (
        text
        + f"""
extern "C" const int threads = THREADS;
extern "C" const char* run(void** values, const int* grid, int ranges, void** begins,
                           const long long* sizes, const int* is_late, unsigned seed) {{
  return [&]<typename... A>(void (*kernel)(A...)) {{
    return emulator::launch(kernel, values, std::index_sequence_for<A...>(), grid, THREADS,
                            {_CLUSTER[source]}, shared_bytes, ranges, begins, sizes, is_late, seed);
  }}({source});
}}
"""
    )


def shared_bytes(source: str, several: Sequence[Mapping[str, int]]) -> list[int]:
    """What a kernel with each of these macros takes of shared memory, without building it."""
    lines = cuda.source_file(source).read_text().splitlines()
    formulas = [line for line in lines if line.startswith("#define")]
    text = ["#include <cstdio>"]
    for defines in several:
        text += [f"#undef {macro}\n#define {macro} {value}" for macro, value in defines.items()]
        text += formulas if defines is several[0] else []
        text.append(f"int f{len(text)}() {{ return SHARED_BYTES > LEAST ? SHARED_BYTES : LEAST; }}")
    calls = (line.partition("{")[0].split()[1] for line in text if line.startswith("int f"))
    text.append("int main() {" + "".join(f'std::printf("%d\\n", {call});' for call in calls) + "}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shared.cpp")
        path.write_text("\n".join(text))
        _compile("-o", str(path.with_suffix("")), str(path))
        printed = subprocess.check_output([path.with_suffix("")], text=True)
    return [int(line) for line in printed.split()]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    # The standard library takes most of a compilation: it is compiled once.
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "standard.hpp")
    path.write_text(_STANDARD)
    _compile("-x", "c++-header", str(path))
    return folder


def program(source: str, defines: Mapping[str, int]) -> str:
    """The whole C++ program of a kernel with these macros."""
    # Macros come after the standard library, which uses some of their names.
    macros = "".join(f"#define {macro} {value}\n" for macro, value in sorted(defines.items()))
    return '#include "standard.hpp"\n' + macros + source_text(source)


@functools.cache
def _library(text: str) -> str:
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = Path(_folder().name, f"{name}.cpp")
    path.write_text(text)
    library = path.with_suffix(".so")
    _compile("-shared", "-o", str(library), str(path))
    return str(library)


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, *_OPTIONS, *arguments], check=True)

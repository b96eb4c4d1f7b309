"""Compile the CUDA C++ sources of these folders with NVRTC, keep the machine code, launch it.

``cuda.bindings`` (NVIDIA's Python bindings) and NVRTC come with PyTorch's CUDA builds. Compiled
kernels are kept in ``$MEGATRON_ASYNC_CACHE`` (default ``~/.cache/megatron_async``), by a digest of
everything that went into them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.kernels.disk_cache import cache_directory, keep
from megatron_async.kernels.launch_watch import watch
from megatron_async.kernels.shared_memory import block_limit

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_COMMON = ("types.cuh", "intrinsics.cuh", "arithmetic.cuh")
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_NUMBERS = {float: ctypes.c_float, int: ctypes.c_int}
_compiling: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_unkept: dict[Path, bytes] = {}
"""What could not be written to disk."""

Bf16 = Annotated[Tensor, torch.bfloat16]
E4m3 = Annotated[Tensor, torch.float8_e4m3fn]
Fp32 = Annotated[Tensor, torch.float32]
Int32 = Annotated[Tensor, torch.int32]
Int64 = Annotated[Tensor, torch.int64]
Weights = Annotated[Tensor, torch.bfloat16, torch.float8_e4m3fn]
"""Fields of a kernel's arguments, next to ``int``, ``float`` and :class:`TensorMap`: pointers to
elements of this dtype, or of one of these; ``Bf16 | None`` may be null."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """How TMA finds tiles of a tensor, which has ``nbytes`` bytes from ``address`` on: see
    :func:`tensor_map`."""

    handle: Any
    address: int
    nbytes: int


class Field(NamedTuple):
    """A kernel parameter: ``kind`` is a Python type, and of tensors are ``dtypes``."""

    name: str
    kind: type
    dtypes: tuple[torch.dtype, ...]
    nullable: bool


@functools.cache
def fields_of(record: type[tuple[Any, ...]]) -> tuple[Field, ...]:
    """What the fields of a NamedTuple of kernel arguments take, in the order of the parameters."""
    fields = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        options = [hint] if hasattr(hint, "__metadata__") else [*get_args(hint)] or [hint]
        nullable = type(None) in options
        (option,) = (each for each in options if each is not type(None))
        dtypes = getattr(option, "__metadata__", ())
        fields.append(Field(name, Tensor if dtypes else option, dtypes, nullable))
    return tuple(fields)


def check_arguments(kernel: str, arguments: tuple[Any, ...]) -> None:
    """
    Raises:
        TypeError: a value of a NamedTuple of kernel arguments is not of its field's type.
    """
    for field, value in zip(fields_of(type(arguments)), arguments, strict=True):
        if value is None and field.nullable:
            continue
        is_number = field.kind in _NUMBERS and type(value) is field.kind
        if not is_number and (field.kind in _NUMBERS or not isinstance(value, field.kind)):
            wanted, got = field.kind.__name__, type(value).__name__
            raise TypeError(f"{kernel}: {field.name} must be a {wanted}, not a {got}")
        if field.dtypes and value.dtype not in field.dtypes:
            wanted = " or ".join(map(str, field.dtypes))
            raise TypeError(f"{kernel}: {field.name} must be {wanted}, not {value.dtype}")


@functools.cache
def unavailable(device_index: int) -> str | None:
    """Why these kernels do not run on a GPU; None if they do."""
    if (
        importlib.util.find_spec("cuda") is None
        or importlib.util.find_spec("cuda.bindings") is None
    ):
        return "cuda.bindings is not installed (pip install cuda-bindings)"
    if torch.cuda.get_device_capability(device_index) < (9, 0):
        return "the GPU is older than compute capability 9.0"
    try:
        _check(_nvrtc().nvrtcVersion())
    except Exception as error:  # the shared library is missing, or too old: each has its own type
        return f"NVRTC does not load: {error}"
    return None


def own_text(source: str) -> str:
    """The source of kernel ``source`` with the headers that it includes by name in their places."""
    (path,) = SOURCES.glob(f"*/{source}.cu")
    return _with_headers(path.read_text())


def _with_headers(text: str) -> str:
    return _INCLUDE.sub(
        lambda found: _with_headers((SOURCES / "include" / found[1]).read_text()), text
    )


def source_text(source: str) -> str:
    """All that NVRTC compiles for kernel ``source``: the common headers come first."""
    common = [(SOURCES / "include" / name).read_text() for name in _COMMON]
    return "".join(common) + own_text(source)


class KernelTooLargeError(RuntimeError):
    """A GPU does not run a kernel: its CTA takes more shared memory than one has."""


class Kernel:
    """A compiled kernel: ``launch`` queues it on the current stream.

    Args:
        source: a file in one of the folders here, without ``.cu``; also the name of its kernel.
        defines: preprocessor macros, all integers.
        architecture: as NVRTC names it.
        limit: bytes of shared memory that a CTA may have.

    Raises:
        KernelTooLargeError: no CTA of it fits the GPU.
    """

    def __init__(
        self, source: str, defines: Mapping[str, int], architecture: str, limit: int
    ) -> None:
        self.name = source
        code = machine_code(source, defines, architecture)
        driver = _driver()
        module = _check(driver.cuModuleLoadData(code))
        self._module = module  # loaded as long as a graph may replay it
        self._function = _check(driver.cuModuleGetFunction(module, source.encode()))
        attributes = driver.CUfunction_attribute
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        self.threads = _check(driver.cuFuncGetAttribute(most, self._function))
        address, size = _check(driver.cuModuleGetGlobal(module, b"shared_bytes"))
        value = ctypes.c_int()
        _check(driver.cuMemcpyDtoH(ctypes.addressof(value), address, size))
        self.shared_bytes = value.value
        static = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        taken = self.shared_bytes + _check(driver.cuFuncGetAttribute(static, self._function))
        if taken > limit:
            raise KernelTooLargeError(
                f"{source} takes {taken} of {limit} bytes of shared memory on this GPU"
            )
        dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, dynamic, self.shared_bytes))
        self._attribute = driver.CUlaunchAttribute()
        self._attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        overlaps = driver.CUlaunchAttributeValue()
        overlaps.programmaticStreamSerializationAllowed = 1
        self._attribute.value = overlaps

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Queue it on the current stream, unless this thread keeps launches back
        (``launch_watch.py``).

        Args:
            arguments: NamedTuples whose fields are the kernel's parameters (:func:`fields_of`), one
                behind the other, which are checked; or the bare values. Tensors go as their
                addresses, None as a null pointer. The caller sees to shapes, and to tensors living
                until the kernel has run.

        Raises:
            TypeError: a field is not of its type.
        """
        if hasattr(arguments[0], "_fields"):
            for record in arguments:
                check_arguments(self.name, record)
            arguments = tuple(itertools.chain.from_iterable(arguments))
        if watch.keeps_back:
            return
        if watch.seen is not None:
            watch.seen(arguments)
        driver, config = _driver(), self._launch_config(grid)
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = [self._attribute]
        config.numAttrs = 1
        values: list[Any] = []
        types: list[Any] = []
        for argument in arguments:
            if argument is None or isinstance(argument, Tensor):
                values.append(0 if argument is None else argument.data_ptr())
                types.append(ctypes.c_void_p)
            elif isinstance(argument, TensorMap):
                values.append(argument.handle)
                types.append(None)  # it knows itself how it is passed
            else:
                values.append(argument)
                types.append(_NUMBERS[type(argument)])
        _check(
            driver.cuLaunchKernelEx(config, self._function, (tuple(values), tuple(types)), 0),
            self.name,
        )

    def _launch_config(self, grid: tuple[int, int, int]) -> Any:
        config = _driver().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        return config

    def runs_at_once(self, ctas: int) -> bool:
        """Whether the current GPU, where nothing else runs, has room for all of ``ctas`` CTAs."""
        driver = _driver()
        width = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
        cluster = max(1, _check(driver.cuFuncGetAttribute(width, self._function)))
        config, attribute = self._launch_config((ctas, 1, 1)), driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = driver.CUlaunchAttributeValue()
        dimensions.clusterDim.x, dimensions.clusterDim.y, dimensions.clusterDim.z = cluster, 1, 1
        attribute.value = dimensions
        config.attrs, config.numAttrs = [attribute], 1
        clusters = int(_check(driver.cuOccupancyMaxActiveClusters(self._function, config)))
        return bool(ctas <= clusters * cluster)


def tensor_map(
    tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], tile: Sequence[int]
) -> TensorMap:
    """How TMA finds tiles of a tensor of bfloat16 or bytes, swizzled by 128 bytes. It holds the
    tensor's address, not the tensor.

    Args:
        sizes, tile: elements by dimension, the innermost first; a tile is 128 bytes wide.
        strides: bytes from one to the next, of all dimensions but the innermost.
    """
    driver, element = _driver(), tensor.element_size()
    kinds = driver.CUtensorMapDataType
    handle = _check(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8
            if element == 1
            else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in tile],
            [driver.cuuint32_t(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
    steps = element, *strides
    size = element + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
    return TensorMap(handle, tensor.data_ptr(), size)


def architecture(device_index: int) -> str:
    """What to compile for."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def device_name(device_index: int) -> str:
    """What a device is called; devices of one name take the same time."""
    return torch.cuda.get_device_name(device_index)


def sm_count(device_index: int) -> int:
    """SMs of a device: 132 of an H100 SXM or H200."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def has_wgmma(device_index: int) -> bool:
    """Whether a device has Hopper's wgmma, which reads its operands from shared memory."""
    return architecture(device_index) == "sm_90a"


@functools.cache
def _kernel(
    source: str, defines: tuple[tuple[str, int], ...], device_index: int
) -> Kernel | KernelTooLargeError:
    """What is too large is known from then on, too: while a graph is captured nothing is loaded."""
    limit = block_limit(torch.device("cuda", device_index))
    try:
        with torch.cuda.device(device_index):
            return Kernel(source, dict(defines), architecture(device_index), limit)
    except KernelTooLargeError as error:
        return error


def kernel(source: str, defines: Mapping[str, int], device: torch.device) -> Kernel:
    """The kernel of ``source`` with these macros, compiled and loaded at most once a process.

    Raises:
        KernelTooLargeError: no CTA of it fits the GPU.
    """
    found = _kernel(source, tuple(sorted(defines.items())), device.index or 0)
    if isinstance(found, KernelTooLargeError):
        raise found.with_traceback(None)
    return found


def too_large(source: str, defines: Mapping[str, int], device: torch.device) -> str | None:
    """Why a GPU does not run the kernel, which is compiled and loaded if need be; None if it does.
    Other devices have none of these kernels."""
    if device.type != "cuda":
        return None
    try:
        kernel(source, defines, device)
    except KernelTooLargeError as error:
        return str(error)
    return None


def compile_together(work: Sequence[tuple[str, Mapping[str, int]]], architecture: str) -> None:
    """Compile kernels side by side, each once, so that :func:`kernel` finds them on disk."""
    distinct = {(source, tuple(sorted(defines.items()))) for source, defines in work}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda item: machine_code(item[0], dict(item[1]), architecture), distinct))


def machine_code(source: str, defines: Mapping[str, int], architecture: str) -> bytes:
    """What is kept of a kernel, compiled if need be; a thread that asks for what another one is
    compiling waits for it.

    Raises:
        ConfigError: it does not compile.
    """
    text = source_text(source)
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={int(value)}" for name, value in sorted(defines.items())]
    version = _check(_nvrtc().nvrtcVersion())
    digest = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()
    path = cache_directory() / f"{source}-{digest[:32]}.cubin"
    with _compiling[path]:
        if path in _unkept:
            return _unkept[path]
        if path.is_file():
            return path.read_bytes()
        code = _compile(text, source, options)
        try:
            keep(path, code)
        except OSError as error:
            _warn_of_no_cache(f"{path.parent}: {error.strerror}")
            _unkept[path] = code
    return code


@functools.cache
def _warn_of_no_cache(reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept, so every start compiles them (%s); set "
        "MEGATRON_ASYNC_CACHE to a directory that can be written to",
        reason,
    )


def _compile(text: str, source: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), f"{source}.cu".encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            shown = log.decode(errors="replace").strip("\0 \n")
            raise ConfigError(f"{source}.cu does not compile with {options}:\n{shown}")
        code: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...], what: str = "CUDA") -> Any:
    """The values of a call of ``cuda.bindings``.

    Raises:
        RuntimeError: it failed.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)

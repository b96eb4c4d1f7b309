"""Memory that can be given back while its addresses stay: captured graphs, kernels' descriptors and
tensors that name them are as good as before once it is there again.

On a GPU this is CUDA's virtual memory: addresses are reserved once, and physical memory is mapped
to them and unmapped. On a CPU it is ``madvise``: the pages of a mapping go, and come back as zeros.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async.errors import CacheTooLargeError, ConfigError

ALIGNMENT = 512
"""Bytes to which parts of a region are aligned, as those of torch's allocator."""


def aligned(size: int) -> int:
    """``size`` bytes, rounded up to the next part's place."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Pages(Protocol):
    """The memory under a region."""

    def tensor(self) -> Tensor:
        """All of it, uint8, over the same addresses as long as there is a reference to it."""

    def release(self) -> None:
        """Give the memory back; the addresses stay, and nobody may touch them."""

    def restore(self) -> None:
        """Have memory under them again, with any values."""


class Region:
    """Memory of a device that can be given back and had again at the same addresses.

    Args:
        size: bytes, at least one.

    Attributes:
        bytes: all of it, uint8.
        is_released: there is no memory, and nobody may touch it.

    Raises:
        ConfigError: the device, or the system, cannot give memory back this way.
        CacheTooLargeError: there is not that much memory.
    """

    def __init__(self, size: int, device: torch.device, pages: Pages | None = None) -> None:
        self.size = size
        self.device = device
        self.is_released = False
        self._pages = pages or _pages(size, device)
        self._kept: Tensor | None = None
        self.bytes = self._pages.tensor()

    def part(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the bytes from ``start`` on, which is a multiple of :data:`ALIGNMENT`."""
        elements = torch.Size(shape).numel()
        return self.bytes[start : start + elements * dtype.itemsize].view(dtype).view(shape)

    def release(self, *, keep: bool) -> None:
        """Give the memory back; nothing that uses it may be in flight.

        Args:
            keep: copy its content to the host's memory first, from where :meth:`restore` has it.
                On a CPU it lies there already, and nothing is given back.
        """
        if self.is_released and not keep:
            self._kept = None
        if self.is_released or (keep and self.device.type == "cpu"):
            return
        if keep:
            self._kept = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
            self._kept.copy_(self.bytes[: self.size])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pages.release()
        self.is_released = True

    def restore(self, *, zeros: bool = False) -> bool:
        """Have the memory again; True if its content is what it was.

        Args:
            zeros: else it is zeros, and not anything.

        Raises:
            CacheTooLargeError: somebody else has the memory now. It can be tried again.
        """
        if not self.is_released:
            return True
        self._pages.restore()
        self.is_released = False
        kept, self._kept = self._kept, None
        if kept is not None:
            self.bytes[: self.size].copy_(kept)
        elif zeros and self.device.type != "cpu":  # new pages there are zeros, and take nothing yet
            self.bytes.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return kept is not None


def _pages(size: int, device: torch.device) -> Pages:
    if device.type == "cuda":
        return CudaPages(size, device.index or 0, CudaDriver(device))
    return CpuPages(size)


class CpuPages:
    """An anonymous mapping of the host's memory."""

    def __init__(self, size: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            raise ConfigError("enable_sleep_mode needs Linux, where memory is given back by pages")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, size, flags=flags)

    def tensor(self) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def release(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """The pages come by themselves."""


# --- CUDA -------------------------------------------------------------------------------------

_OUT_OF_MEMORY = 2
_PINNED = _ON_DEVICE = 1
_READ_AND_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Driver(Protocol):
    """What is needed of CUDA's driver for one device. Errors are CacheTooLargeError for a lack of
    memory, else RuntimeError."""

    def granularity(self) -> int:
        """Sizes are multiples of it."""

    def reserve(self, size: int) -> int:
        """Addresses without memory."""

    def create(self, size: int) -> int:
        """Memory without addresses; a handle."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Bring both together."""

    def unmap(self, address: int, size: int) -> None:
        """Part them."""

    def give_back(self, handle: int) -> None:
        """Give memory back; the handle is of no use any more."""

    def free(self, address: int, size: int) -> None:
        """Give addresses back."""


class CudaDriver:
    """The functions of ``libcuda`` that virtual memory is made of."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        torch.empty(1, device=device)  # so that the device has a context
        self._library = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(_ON_DEVICE, device.index or 0)
        self._properties = _AllocationProperties(type=_PINNED, location=self._location)

    def granularity(self) -> int:
        found = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties), 0
        )
        return found.value

    def reserve(self, size: int) -> int:
        address, size_t = ctypes.c_uint64(), ctypes.c_size_t
        nowhere = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size_t(size), size_t(0), *nowhere)
        return address.value

    def create(self, size: int) -> int:
        handle = ctypes.c_uint64()
        arguments = ctypes.c_size_t(size), ctypes.byref(self._properties), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), *arguments)
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        at, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        of = ctypes.c_uint64(handle), ctypes.c_uint64(0)
        self._call("cuMemMap", at, length, ctypes.c_size_t(0), *of)
        access = _Access(self._location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def give_back(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise CacheTooLargeError("the GPU has not so much memory free now")
        if status:
            raise RuntimeError(f"{name} failed with CUDA's error {status}")


class CudaPages:
    """Reserved addresses of a GPU, and the physical memory that is mapped to them. It is what torch
    sees as an array, and keeps alive while a tensor is over it."""

    def __init__(self, size: int, index: int, driver: Driver) -> None:
        self._driver = driver
        self._index = index
        granularity = driver.granularity()
        self._size = -(-size // granularity) * granularity
        self._handle: int | None = None
        self._address = driver.reserve(self._size)
        try:
            self.restore()
        except BaseException:
            driver.free(self._address, self._size)
            self._address = 0
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._address, False
        return {"shape": (self._size,), "typestr": "|u1", "data": data, "version": 3}

    def tensor(self) -> Tensor:
        made: Tensor = torch.as_tensor(self, device=torch.device("cuda", self._index))
        return made

    def release(self) -> None:
        if self._handle is not None:
            self._driver.unmap(self._address, self._size)
            self._driver.give_back(self._handle)
            self._handle = None

    def restore(self) -> None:
        handle = self._driver.create(self._size)
        try:
            self._driver.map(self._address, self._size, handle)
        except BaseException:
            self._driver.give_back(handle)
            raise
        self._handle = handle

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            self.release()
            self._driver.free(self._address, self._size)

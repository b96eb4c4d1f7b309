"""What memory captured graphs hold the addresses of, as their capture shows.

A graph has no list of its addresses. But all that is in it was launched while it was captured: by
PyTorch's operators, by Triton, and by ``kernels/compile.py``. Their tensors are seen there. Those
that the capture makes itself lie in the graphs' own memory, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.kernels import launch_watch


class Place(NamedTuple):
    """Addresses from ``begin`` on, up to ``end``."""

    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.end - self.begin

    @classmethod
    def of(cls, tensor: Tensor) -> Place | None:
        """From the first element to the last; None where a tensor has no memory."""
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
            return None
        begin = tensor.data_ptr()
        elements = tensor.numel()
        if not tensor.is_contiguous():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            elements = 1 + sum((length - 1) * stride for length, stride in pairs)
        return cls(begin, begin + elements * tensor.element_size()) if begin else None


class Held(NamedTuple):
    """What a graph holds of a place.

    Args:
        graph: the first of those that do.
        what: dtype and shape.
        storage: whose memory it was; None for a descriptor, which has an address alone.
    """

    graph: str
    what: str
    storage: StorageWeakRef | None

    @property
    def is_freed(self) -> bool:
        """Its memory has gone back, and may be another tensor's by now."""
        return self.storage is not None and bool(self.storage.expired())


@runtime_checkable
class Descriptor(Protocol):
    """A kernel's argument that holds the address of a tensor and not the tensor."""

    address: int
    nbytes: int


class GraphMemory:
    """All places that the graphs of one engine hold. No tensor is kept alive.

    Attributes:
        held: what graphs hold, by place.
        graphs: how many of them were seen.
    """

    def __init__(self) -> None:
        self.held: dict[Place, Held] = {}
        self.graphs = 0
        self._captures = 0

    def watched(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        """``work``, whose first run is seen: a device calls it for the run that is the graph. On a
        CPU a graph has the addresses of its first replay."""
        graph = f"graph {self._captures} ({name})"
        self._captures += 1
        is_seen = False

        def run() -> None:
            nonlocal is_seen
            if is_seen:
                work()
                return
            is_seen = True
            with self._seeing(graph):
                work()
            self.graphs += 1

        return run

    @contextmanager
    def _seeing(self, graph: str) -> Iterator[None]:
        launch_watch.watch_triton_if_loaded()
        seen = _Seen(graph, self.held)
        launch_watch.watch.seen = seen.launch
        try:
            with seen:
                yield
        finally:
            launch_watch.watch.seen = None


_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class _Seen(TorchDispatchMode):
    """Notes the tensors that come into a capture."""

    def __init__(self, graph: str, held: dict[Place, Held]) -> None:
        super().__init__()
        self._graph, self._held = graph, held
        self._given: set[int] = set()
        """Addresses of storages."""
        self._made: dict[int, int] = {}
        """Ends of storages by their addresses."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _LIFT_FRESH:  # made of Python's numbers just now
            self._has_made(args[0].untyped_storage())
        self.launch(args)
        if kwargs:
            self.launch(kwargs.values())
            result = func(*args, **kwargs)
        else:
            result = func(*args)
        for tensor in _tensors_in((result,)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._given:
                self._has_made(storage)
        return result

    def _has_made(self, storage: torch.UntypedStorage) -> None:
        begin = storage.data_ptr()
        self._made[begin] = max(self._made.get(begin, 0), begin + storage.nbytes())

    def launch(self, arguments: Iterable[Any]) -> None:
        """Note the arguments of an operator or a kernel."""
        for argument in _tensors_in(arguments):
            if isinstance(argument, Tensor):
                self._note(argument)
            else:
                place = Place(argument.address, argument.address + argument.nbytes)
                if not any(a <= place.begin and place.end <= b for a, b in self._made.items()):
                    self._held.setdefault(place, Held(self._graph, "a descriptor", None))

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin in self._made:
            return
        place = Place.of(tensor)
        if place is None:
            return
        self._given.add(begin)
        if place not in self._held:  # else the first graph's: it may have been freed since
            what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            self._held[place] = Held(self._graph, what, StorageWeakRef(storage))


def _tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Tensors and descriptors among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
        elif _is_descriptor(type(value), value):
            yield value


_descriptors: dict[type, bool] = {}
"""Kinds of values that were looked at: each is asked once, since all arguments are."""


def _is_descriptor(kind: type, value: Any) -> bool:
    found = _descriptors.get(kind)
    if found is None:
        found = _descriptors[kind] = isinstance(value, Descriptor)
    return found

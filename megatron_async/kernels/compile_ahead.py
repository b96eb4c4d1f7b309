"""Kernels are compiled by other threads while a start goes on.

CUDA C++ sources are given to the threads as soon as their macros are known. A Triton kernel is
known by its launch alone, so launches are rehearsed: inside of :meth:`CompileAhead.rehearsal` they
compile their kernels in other threads and run nothing, and those of CUDA C++ load theirs. What a
kernel would have filled is zeros.

A kernel that does not compile, or that the GPU does not run, is no error here: its first real use
compiles it again, and raises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.launch_watch import watch

logger = logging.getLogger(__name__)

MOST_THREADS = 16

_patching = threading.Lock()
_parsing = threading.RLock()
_begun: set[tuple[str, tuple[tuple[str, int], ...], str]] = set()


class _Rehearsal(threading.local):
    """``ahead`` rehearses in this thread; None where nothing does."""

    ahead: CompileAhead | None = None


rehearsing = _Rehearsal()


class CompileAhead:
    """Threads that compile for one GPU, all of them gone when its context is left. An error that
    leaves it does not wait for what has not begun.

    Args:
        device: a CUDA device.
        load: loads a compiled Triton kernel, in the thread that has compiled it.
    """

    def __init__(
        self, device: torch.device, load: Callable[[Any, torch.device], None] | None = None
    ) -> None:
        self._device = device
        self._load = load or load_kernel
        count = _thread_count()
        self._cuda_threads = ThreadPoolExecutor(count, thread_name_prefix="nvrtc")
        self._triton_threads = ThreadPoolExecutor(count, thread_name_prefix="triton")
        self._launched: set[tuple[Any, ...]] = set()
        self._asked: dict[int, Any] = {}
        """Kernels of Triton that were launched, by their ``id``."""
        self._gives_up = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CompileAhead:
        # Triton's threads may load what they have compiled: they are the first to be waited for.
        self._stack.enter_context(self._cuda_threads)
        self._stack.enter_context(self._triton_threads)
        mode = _async_compile_mode()
        if mode is not None:
            _parse_in_turn()
            self._stack.enter_context(mode(_Loading(self), ignore_errors=True))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            # Triton waits for its futures, which are therefore not cancelled.
            self._gives_up = True
            self._cuda_threads.shutdown(wait=False, cancel_futures=True)
        self._stack.close()
        for kernel in self._asked.values():
            _forget_failures(kernel)

    def compile(self, work: Iterable[tuple[str, Mapping[str, int]]]) -> None:
        """Have sources compiled with their macros, each once, so that they are found on disk."""
        for source, defines in work:
            architecture = cuda.architecture(self._device.index or 0)
            _begin(self._cuda_threads, source, defines, architecture)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """In this thread, launches of Triton's kernels compile, those of CUDA's load, and neither
        runs; PyTorch's operators do."""
        from triton.runtime.jit import JITFunction

        if _async_compile_mode() is None:
            raise RuntimeError("this release of Triton compiles in no other threads")
        with _patching, _Zeros():
            before = JITFunction.run
            JITFunction.run = ours = _rehearsed(before)
            rehearsing.ahead, watch.keeps_back = self, True
            try:
                yield
            finally:
                rehearsing.ahead, watch.keeps_back = None, False
                if JITFunction.run is ours:  # else somebody has put theirs around it
                    JITFunction.run = before

    def is_new(self, kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Whether a launch may need another variant of a Triton kernel than all before: to ask
        Triton, which hashes sources, takes longer than to launch."""
        self._asked[id(kernel)] = kernel
        values = [_known_of(value, of) for value, of in zip(args, kernel.params, strict=False)]
        named = [
            (name, variant_of(value) if isinstance(value, Tensor) else value)
            for name, value in sorted(options.items())
        ]
        key = (id(kernel), *values, *named)
        try:
            is_new = key not in self._launched
            self._launched.add(key)
        except TypeError:  # a value that has no hash
            return True
        return is_new

    def submit_triton(self, compile_: Callable[[], Any]) -> Future[Any]:
        """Compile and load a Triton kernel."""

        def work() -> Any:
            if self._gives_up:
                raise CancelledError
            try:
                kernel = compile_()
            except Exception:
                logger.info("a kernel is compiled again where it is used", exc_info=True)
                raise
            self._load(kernel, self._device)
            return kernel

        return self._triton_threads.submit(work)


@contextlib.contextmanager
def compilers_ahead(
    device: torch.device,
) -> Iterator[Callable[[Callable[[], None]], Future[None]]]:
    """Meanwhile other threads have what compilers need before their first kernel: a CUDA context,
    NVRTC's library, the digest of Triton's own files, and the module by which it asks the driver.
    What this yields has one of them run what it is given behind that.

    Args:
        device: a CUDA device.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="compilers") as pool:
        ready = pool.submit(_have_driver, device), pool.submit(_have_digest)

        def behind(work: Callable[[], None]) -> None:
            wait(ready)
            work()

        yield lambda work: pool.submit(behind, work)


def _have_driver(device: torch.device) -> None:
    # What is not there is an error where it is needed.
    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        cuda.unavailable(device.index or 0)
        from triton.runtime import driver

        driver.active.get_current_target()


def _have_digest() -> None:
    from triton.runtime.cache import triton_key

    triton_key()


def compile_in_background(
    work: Iterable[tuple[str, Mapping[str, int]]], device: torch.device
) -> Callable[[], None]:
    """Begin to compile sources with their macros; the threads end by themselves. Work that raises
    ends there.

    Returns:
        What leaves out all that has not begun. A process that ends waits for the rest.
    """
    pool = ThreadPoolExecutor(_thread_count(), thread_name_prefix="nvrtc")
    try:
        for source, defines in work:
            _begin(pool, source, defines, cuda.architecture(device.index or 0))
    finally:
        pool.shutdown(wait=False)
    return functools.partial(pool.shutdown, wait=False, cancel_futures=True)


def _begin(pool: Executor, source: str, defines: Mapping[str, int], architecture: str) -> None:
    """Have a source compiled, once in the life of this process: later ones find it on disk."""
    key = source, tuple(sorted(defines.items())), architecture
    if key not in _begun:
        _begun.add(key)
        pool.submit(cuda.machine_code, source, dict(defines), architecture)


def _thread_count() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


def can_rehearse() -> bool:
    """Whether the release of Triton that is installed compiles in other threads."""
    return _async_compile_mode() is not None


def _async_compile_mode() -> Any:
    try:
        import triton
    except ImportError:
        return None
    return getattr(triton, "AsyncCompileMode", None)


class _Loading(Executor):
    """What Triton gives its compilations to."""

    def __init__(self, ahead: CompileAhead) -> None:
        self._ahead = ahead

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``concurrent.futures.Executor``."""
        return self._ahead.submit_triton(functools.partial(fn, *args, **kwargs))


@functools.cache
def _parse_in_turn() -> None:
    """From here on one thread at a time parses the source of a Triton kernel.

    ``ast.parse`` of Python 3.11 counts the depth of all threads in one place until 3.11.8
    (python/cpython#106905). Where the garbage collector calls back in the middle of it, another
    thread may parse, and the first one raises a ``SystemError``.
    """
    from triton.runtime.jit import JITFunction

    owner: Any = next(kind for kind in JITFunction.__mro__ if "parse" in vars(kind))
    parse = owner.parse

    @functools.wraps(parse)
    def in_turn(kernel: Any) -> Any:
        with _parsing:
            return parse(kernel)

    owner.parse = in_turn


def compile_and_load(
    kernel: Any, device: torch.device, args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Compile a Triton kernel for launches with such arguments, in this thread, and load it."""
    _parse_in_turn()
    with torch.cuda.device(device):
        load_kernel(kernel.run(*args, grid=(1,), warmup=True, **options), device)


def load_kernel(kernel: Any, device: torch.device) -> None:
    """Compile the launcher of a compiled Triton kernel, and load both."""
    with torch.cuda.device(device):
        getattr(kernel, "run")  # noqa: B009 - a property, which loads


def _forget_failures(kernel: Any) -> None:
    """Have the variants of a Triton kernel that failed compiled again when they are used: what was
    in their way, such as too little memory, may not be there any more."""
    from triton import FutureKernel

    for variants, *_ in list(kernel.device_caches.values()):
        for key, made in list(variants.items()):
            if isinstance(made, FutureKernel) and made.kernel is None:
                variants.pop(key, None)


def variant_of(value: Any) -> Any:
    """What Triton may know of an argument that is no constant, or more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return int, value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value), value


def _known_of(value: Any, parameter: Any) -> Any:
    """What Triton may know of the argument that one of its kernels takes as this parameter."""
    if parameter.is_constexpr:
        return value
    known = variant_of(value)
    if parameter.do_not_specialize and known[0] is int:
        return int, value.bit_length() > 31
    return known


def _rehearsed(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def rehearsed(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        ahead = rehearsing.ahead
        if ahead is None:
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        if ahead.is_new(kernel, args, options):
            return run(kernel, *args, grid=grid, warmup=True, **options)
        return None

    return rehearsed


_EMPTY = frozenset(
    (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    )
)


class _Zeros(TorchFunctionMode):
    """New tensors hold zeros: what indexes with what no kernel has filled stays in bounds. A
    ``TorchDispatchMode`` would import PyTorch's compiler, for seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result

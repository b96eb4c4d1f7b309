"""Kernels are compiled in other threads, and their first use finds them."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.errors import ConfigError
from megatron_async.kernels import compile as cuda
from megatron_async.kernels import compile_ahead as ahead_
from megatron_async.kernels.compile_ahead import CompileAhead, compilers_ahead, rehearsing
from megatron_async.step import packet
from tests.support.compiled_kernels import HOPPER, compiles, compiling_for
from tests.support.patience import PATIENCE_SECONDS

GPU = torch.device("cuda", 0)


@pytest.fixture
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead_, "_begun", set())


@pytest.fixture
def compilations(fresh_caches: None) -> Iterator[list[tuple[str, str]]]:
    """The kernels that Triton compiles for Hopper, each with its thread."""
    from triton import knobs
    from triton.runtime import driver

    from tests.support.compiled_kernels import _Driver

    found: list[tuple[str, str]] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, threading.current_thread().name))

    before = driver._active
    driver.set_active(_Driver(HOPPER))
    knobs.compilation.listener = note
    try:
        yield found
    finally:
        knobs.compilation.listener = None
        driver._active = before
        _forget()


def _forget() -> None:
    """Kernels that were compiled for no GPU stay out of other tests' way."""
    from megatron_async.kernels import rings

    for kernel in (rings._read_packet_kernel, rings._advance_kernel, rings._publish_kernel):
        kernel.device_caches.clear()


def _rings() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ring, into = torch.full((2, 64), 7, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    return ring, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), into


@compiles
def test_rehearsed_launches_compile_in_other_threads_and_run_nothing(
    compilations: list[tuple[str, str]],
) -> None:
    from triton.runtime.jit import JITFunction

    from megatron_async.kernels import rings

    _forget()
    run, threads = JITFunction.run, set(threading.enumerate())
    ring, counter, sequence, into = _rings()
    loaded: list[str] = []

    def load(kernel: Any, device: torch.device) -> None:
        assert device == GPU
        loaded.append(threading.current_thread().name)

    def launch() -> None:
        rings.read_packet(ring, counter, into, 40)
        rings.publish(ring, sequence, counter, into)

    with CompileAhead(GPU, load) as ahead:
        with ahead.rehearsal():
            for _ in range(2):
                launch()
        assert JITFunction.run is run and rehearsing.ahead is None
    assert {name for name, _ in compilations} == {
        "_read_packet_kernel",
        "_advance_kernel",
        "_publish_kernel",
    }
    assert len(compilations) == len(loaded) == 3
    assert all(thread.startswith("triton") for thread in (*loaded, *dict(compilations).values()))
    assert int(into.sum()) == 64 and int(counter) == int(sequence) == 0
    assert set(threading.enumerate()) == threads
    with compiling_for(None):
        launch()
    assert len(compilations) == 3  # neither compiled again, nor read from disk


def _note_errors(ahead: CompileAhead, raised: list[BaseException]) -> None:
    """What threads raise, which a rehearsal keeps to itself, goes to ``raised`` too."""
    submit = ahead.submit_triton

    def noted(compile_: Callable[[], Any]) -> Future[Any]:
        def work() -> Any:
            try:
                return compile_()
            except BaseException as error:
                raised.append(error)
                raise

        return submit(work)

    vars(ahead)["submit_triton"] = noted


@compiles
def test_each_variant_of_a_kernel_is_compiled_once(compilations: list[tuple[str, str]]) -> None:
    from megatron_async.kernels import rings

    _forget()
    ring, counter, _, into = _rings()
    shifted = torch.ones(65, dtype=torch.int32)[1:]  # its address is no multiple of 16 bytes

    def launch(to: torch.Tensor, width: int, block: int) -> None:
        rings._read_packet_kernel[(1,)](ring, counter, to, 2, 64, width, BLOCK=block)

    variants = [(into, 40, 1024), (into, 48, 1024), (into, 40, 512), (shifted, 40, 1024)]
    raised: list[BaseException] = []
    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
        _note_errors(ahead, raised)
        is_new = ahead.is_new
        for _ in range(2):
            for variant in (*variants, (into, 41, 1024)):  # as 40
                launch(*variant)
        asked = [is_new(rings._advance_kernel, (counter,), {}) for _ in range(2)]
    assert asked == [True, False]
    assert raised == []
    assert [name for name, _ in compilations] == ["_read_packet_kernel"] * len(variants)
    with compiling_for(None):
        for variant in variants:
            launch(*variant)
    assert len(compilations) == len(variants)


@compiles
def test_threads_parse_one_kernel_at_a_time(
    compilations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the garbage collector calls back in one parse, that waits for another thread's."""
    from megatron_async.kernels import rings

    _forget()
    rings._read_packet_kernel.cache_key  # noqa: B018 - this thread has parsed
    ring, counter, _, into = _rings()
    parse, waits, parsed = ast.parse, threading.Lock(), threading.Event()
    raised: list[BaseException] = []

    def noted(*args: Any, **options: Any) -> ast.AST:
        tree: ast.AST = parse(*args, **options)
        parsed.set()
        return tree

    def call_back(phase: str, _: object) -> None:
        inside = sys._getframe(1).f_code is parse.__code__
        if inside and phase == "start" and waits.acquire(blocking=False):
            parsed.wait(0.5)  # a thread that waits its turn parses behind that

    monkeypatch.setattr(ast, "parse", noted)
    monkeypatch.setattr(ahead_, "_thread_count", lambda: 2)
    threshold = gc.get_threshold()
    gc.callbacks.append(call_back)
    gc.set_threshold(20)
    try:
        with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
            _note_errors(ahead, raised)
            for block in (512, 1024):
                rings._read_packet_kernel[(1,)](ring, counter, into, 2, 64, 40, BLOCK=block)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(call_back)
    assert raised == []
    assert waits.locked() or sys.version_info >= (3, 12)  # there it waits until no parse runs
    assert [name for name, _ in compilations] == ["_read_packet_kernel"] * 2


@compiles
def test_what_a_kernel_is_not_specialized_for_makes_no_variant(
    compilations: list[tuple[str, str]],
) -> None:
    from megatron_async.kernels.sampling import step_state

    kernel = step_state._read_packet_and_begin_kernel
    kernel.device_caches.clear()
    state = SimpleNamespace(
        last_token=torch.zeros(9, dtype=torch.int64), kv_length=torch.zeros(9, dtype=torch.int64),
        finished=torch.zeros(9, dtype=torch.bool),
        block_table=torch.zeros(9, 4, dtype=torch.int64),
    )  # fmt: skip
    ring, counter, _, _ = _rings()
    packets = SimpleNamespace(ring=ring, counter=counter)
    records = torch.zeros(128, packet.ROW_WIDTH, dtype=torch.int32)
    batch = step_state.DecodeBatch(*torch.zeros(5, 128, dtype=torch.int64))
    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
        for rows in (1, 2, 3, 8, 9, 16, 24, 32, 33, 64, 128):
            step_state.begin(records[:rows], state, 16, packets, batch)  # type: ignore[arg-type]
        assert len(ahead._launched) == 4
    assert [name for name, _ in compilations] == [kernel.__name__] * 4
    kernel.device_caches.clear()


@compiles
def test_a_look_at_weights_waits_for_its_kernels(
    compilations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels import finite

    loaded: list[str] = []
    may_begin, looked = threading.Event(), threading.Event()
    finite._mark_not_finite_kernel.device_caches.clear()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ahead_, "load_kernel", lambda kernel, device: loaded.append(kernel.name))
    half = torch.zeros(4, 64, dtype=torch.bfloat16)
    weights = [half, half[:, 1:33].contiguous(), half.view(-1)[1:49], half.float(), half[:3, :5]]
    marks = torch.zeros(len(weights), dtype=torch.int32)

    def look() -> None:
        for weight, mark in zip(weights, marks.unbind(), strict=True):
            if finite.takes(weight, weight.dtype):
                finite.mark_not_finite(weight, weight.dtype, mark)
        looked.set()

    def compile_(work: Any) -> None:
        assert may_begin.wait(PATIENCE_SECONDS)
        work()

    with compiling_for(None), ThreadPoolExecutor(1, thread_name_prefix="compilers") as pool:
        given = [(weight, weight.dtype) for weight in weights]
        finite.compile_ahead(given, lambda work: pool.submit(compile_, work))
        looking = threading.Thread(target=look)
        looking.start()
        assert not looked.wait(0.1)  # a thread that does not wait has compiled by itself below
        may_begin.set()
        looking.join(PATIENCE_SECONDS)
    finite._mark_not_finite_kernel.device_caches.clear()
    assert looked.is_set() and not finite._compiling
    assert len(loaded) == 3  # bfloat16, the same at an odd address, and float32
    assert [thread.split("_")[0] for _, thread in compilations] == ["compilers"] * 3


@compiles
def test_a_kernel_that_does_not_compile_is_an_error_of_its_launch(
    compilations: list[tuple[str, str]],
) -> None:
    import triton

    from tests.unit.kernels import wrong_kernel

    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
        wrong_kernel.launch(torch.zeros(1))
    with pytest.raises(triton.CompilationError, match="there_is_no_such_name"):
        wrong_kernel.launch(torch.zeros(1))


@compiles
def test_what_failed_ahead_is_compiled_again(compilations: list[tuple[str, str]]) -> None:
    from megatron_async.kernels import rings

    _forget()
    ring, counter, _, into = _rings()
    loaded = []

    def load(kernel: Any, device: torch.device) -> None:
        loaded.append(kernel)
        raise torch.OutOfMemoryError("no memory is left for a module")

    with CompileAhead(GPU, load) as ahead, ahead.rehearsal():
        rings.read_packet(ring, counter, into, 40)
    assert len(loaded) == len(compilations) == 2
    with compiling_for(None):
        rings.read_packet(ring, counter, into, 40)
    assert len(compilations) == 4


@compiles
def test_an_error_waits_for_nothing_that_has_not_begun(
    compilations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels import rings

    _forget()
    monkeypatch.setattr(ahead_, "_thread_count", lambda: 1)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90a")
    begun, may_end, sources = threading.Event(), threading.Event(), []

    def machine_code(source: str, defines: Any, architecture: str) -> bytes:
        sources.append(source)
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return b""

    def load(kernel: Any, device: torch.device) -> None:
        assert may_end.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(cuda, "machine_code", machine_code)
    ring, counter, sequence, into = _rings()
    with pytest.raises(KeyboardInterrupt), CompileAhead(GPU, load) as ahead:
        ahead.compile([("embed", {"H": 64}), ("norm", {})])
        with ahead.rehearsal():
            rings.read_packet(ring, counter, into, 40)
            rings.publish(ring, sequence, counter, into)
        assert begun.wait(PATIENCE_SECONDS)
        shutdown = ahead._cuda_threads.shutdown

        def noted(*args: Any, **options: Any) -> None:
            shutdown(*args, **options)
            may_end.set()

        monkeypatch.setattr(ahead._cuda_threads, "shutdown", noted)
        raise KeyboardInterrupt
    assert sources == ["embed"]
    assert "_publish_kernel" not in dict(compilations)
    with compiling_for(None):
        rings.publish(ring, sequence, counter, into)
    assert "_publish_kernel" in dict(compilations)


@compiles
def test_kernels_of_cuda_are_not_launched_in_a_rehearsal(
    compilations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def driver() -> Any:
        launched.append(threading.current_thread())
        raise RuntimeError("this is launched")

    kernel = object.__new__(cuda.Kernel)
    monkeypatch.setattr(cuda, "_driver", driver)
    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
        kernel.launch((1, 1, 1), 1)
    assert not launched
    with pytest.raises(RuntimeError, match="this is launched"):
        kernel.launch((1, 1, 1), 1)


@compiles
def test_another_threads_launches_run_during_a_rehearsal(
    compilations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    from megatron_async.kernels import rings

    seen: dict[str, bool] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen[threading.current_thread().name] = warmup

    monkeypatch.setattr(JITFunction, "run", run)
    ring, counter, _, into = _rings()
    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal():
        other = threading.Thread(
            target=rings.read_packet, args=(ring, counter, into, 40), name="other engine"
        )
        other.start()
        other.join(PATIENCE_SECONDS)
        rings.read_packet(ring, counter, into, 40)
    assert seen == {"other engine": False, threading.current_thread().name: True}
    assert JITFunction.run is run


@compiles
def test_what_no_kernel_has_filled_is_zeros(compilations: list[tuple[str, str]]) -> None:
    like, imported = torch.full((300,), 7, dtype=torch.int64), "torch._dynamo" in sys.modules
    with CompileAhead(GPU, lambda *_: None) as ahead, ahead.rehearsal(), torch.inference_mode():
        made = [
            torch.empty(300, dtype=torch.int64),
            torch.empty_like(like),
            like.new_empty(300),
            torch.empty_strided((10, 30), (30, 1), dtype=torch.int64),
            like.new_empty_strided((10, 30), (30, 1)),
        ]
        for _ in range(20):  # of memory that has been written to
            (like * 3 + 1).sum()
            made.append(torch.empty_like(like))
    assert all(not each.any() for each in made)
    assert ("torch._dynamo" in sys.modules) == imported  # that takes seconds


def test_compilers_that_are_not_there_are_no_error_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, threads = [], set(threading.enumerate())

    def unavailable(index: int) -> None:
        asked.append(threading.current_thread().name)
        raise RuntimeError("no driver")

    monkeypatch.setattr(cuda, "unavailable", unavailable)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with compilers_ahead(GPU):
        pass
    assert len(asked) == 1 and asked[0].startswith("compilers")
    assert set(threading.enumerate()) == threads


def test_what_one_thread_compiles_another_one_waits_for(
    fresh_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, begun, may_end = [], threading.Event(), threading.Event()

    def compile_(text: str, source: str, options: list[str]) -> bytes:
        calls.append(source)
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return b"code"

    monkeypatch.setattr(cuda, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    monkeypatch.setattr(cuda, "_compile", compile_)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90a")
    threads = set(threading.enumerate())
    with CompileAhead(GPU) as ahead:
        ahead.compile([("embed", {"H": 64}), ("embed", {"H": 64})])
        assert begun.wait(PATIENCE_SECONDS)
        second = threading.Thread(target=cuda.machine_code, args=("embed", {"H": 64}, "sm_90a"))
        second.start()
        may_end.set()
        second.join(PATIENCE_SECONDS)
    assert calls == ["embed"]
    assert set(threading.enumerate()) == threads


def test_a_source_that_does_not_compile_is_an_error_of_its_use(
    fresh_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(text: str, source: str, options: list[str]) -> bytes:
        raise ConfigError(f"{source}.cu does not compile")

    monkeypatch.setattr(cuda, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    monkeypatch.setattr(cuda, "_compile", compile_)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90a")
    with CompileAhead(GPU) as ahead:
        ahead.compile([("embed", {"H": 64})])
    with pytest.raises(ConfigError, match=r"embed\.cu does not compile"):
        cuda.compile_together([("embed", {"H": 64})], "sm_90a")

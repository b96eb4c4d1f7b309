"""Where the time of an engine's start goes, one line a stage.

    python -m scripts.bench_start --model random:llama8b --rows 64 --cold

The start is that of a fresh process. With ``--cold`` it has empty folders in place of its caches:
compiled kernels of this package and of Triton, and Python's byte code. Then come, in the order in
which they begin: imports of packages, the parts of loading, each kernel that is compiled, graphs,
and the first token. A stage that waits for another thread says so by little CPU time of its own.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_IMPORT_SECONDS = 0.05
"""Packages whose import took less are left out."""
BEGAN = "BENCH_START_BEGAN"
"""The variable that says when the process was started, in seconds of ``time.time``."""

STAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "torch.cuda": (("_lazy_init", "CUDA begins"),),
    "megatron_async.checkpoint.path": (("load_tokenizer", "tokenizer"),),
    "megatron_async.megatron_compat.process_groups": (
        ("ensure_parallel_state", "process group and parallel state"),
        ("_init_processes", "process group"),
    ),
    "megatron_async.checkpoint.load": (("load_pretrained", "load model"),),
    "megatron_async.models.build": (
        ("build_random_model", "build with random weights"),
        ("build_model", "build modules"),
    ),
    "megatron_async.build.model": (("network_over", "network over the model"),),
    "megatron_async.build.spec": (("EngineSpec.of", "spec"),),
    "megatron_async.build.runner": (
        ("open_runner", "open runner"),
        ("allocate", "KV cache and slots"),
    ),
    "megatron_async.build.engine": (("assemble", "assemble"),),
    "megatron_async.runner.model_runner": (("ModelRunner.__init__", "runner"),),
    "megatron_async.runner.step_program": (("StepProgram.__init__", "step program"),),
    "megatron_async.models.gpt_network": (("GPTNetwork.prepare", "prepare decode kernels"),),
    "megatron_async.device.cuda": (
        ("CudaDevice.capture", "warm up and capture"),
        ("CudaDevice._captured", "capture alone"),
    ),
    "megatron_async.kernels.compile": (
        ("compile_together", "compile together"),
        ("_compile", "NVRTC"),
        ("Kernel.__init__", "have and load a kernel"),
    ),
    "triton.compiler.compiler": (("compile", "Triton compiles"),),
    "triton.backends.nvidia.driver": (
        ("CudaUtils.__init__", "Triton's driver"),
        ("CudaLauncher.__init__", "Triton's launcher"),
    ),
}
"""What is timed, by module; names that a build has not are left out."""


@dataclass(slots=True)
class Stage:
    """A call of a stage's function, in seconds since the process was started.

    ``cpu`` is that of its thread, ``inner`` the wall time of stages inside of it.
    """

    name: str
    thread: str
    depth: int
    began: float
    wall: float = 0.0
    cpu: float = 0.0
    inner: float = 0.0


class Clock:
    """The stages of this process."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._local = threading.local()
        self.stages: list[Stage] = []

    def now(self) -> float:
        """Seconds since the process was started."""
        return time.time() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time what is inside, with what it has inside of it."""
        open_stages: list[Stage] = self._local.__dict__.setdefault("open", [])
        thread = threading.current_thread().name
        stage = Stage(name, thread, len(open_stages), self.now())
        self.stages.append(stage)
        open_stages.append(stage)
        cpu = time.thread_time()
        try:
            yield stage
        finally:
            stage.wall, stage.cpu = self.now() - stage.began, time.thread_time() - cpu
            open_stages.pop()
            if open_stages:
                open_stages[-1].inner += stage.wall

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as a stage of that name, and of what it is asked to make."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "CUDA begins" and sys.modules["torch"].cuda.is_initialized():
                return function(*args, **kwargs)
            with self.stage(f"{name} {_detail(name, args)}".rstrip()):
                return function(*args, **kwargs)

        return call


def _detail(name: str, args: tuple[Any, ...]) -> str:
    """What tells one call of a stage from another."""
    if name == "NVRTC":
        return str(args[1])
    if name == "have and load a kernel":
        return str(args[1])
    if name == "Triton compiles":
        return str(getattr(args[0], "name", ""))
    if name == "Triton's launcher":
        return str(getattr(args[1], "name", ""))
    return ""


class Imports:
    """A finder that times the import of packages, and patches modules once they are there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that Python finds by itself, with a loader that is timed."""
        if ("." in name and name not in STAGES and name != "megatron.core") or getattr(
            self._asked, "name", None
        ) == name:
            return None
        self._asked.name = name
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        finally:
            self._asked.name = None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self._time(spec.loader, name)
        return spec

    def _time(self, loader: Any, name: str) -> None:
        execute, clock = loader.exec_module, self._clock

        def timed(module: Any) -> None:
            if "." in name and name != "megatron.core":
                execute(module)
            else:
                with clock.stage(f"import {name}"):
                    execute(module)
            for path, stage in STAGES.get(name, ()):
                _patch(module, path, stage, clock)

        loader.exec_module = timed


def _patch(module: Any, path: str, stage: str, clock: Clock) -> None:
    *owners, name = path.split(".")
    owner = module
    for each in owners:
        owner = getattr(owner, each, None)
    function = None if owner is None else vars(owner).get(name)
    if isinstance(function, classmethod):
        setattr(owner, name, classmethod(clock.timed(stage, function.__func__)))  # type: ignore[arg-type]
    elif function is not None:
        setattr(owner, name, clock.timed(stage, function))


def start(clock: Clock, model: str, rows: int, options: dict[str, Any]) -> None:
    """Start an engine and have a token of it."""
    with clock.stage("import torch, first"):
        import torch
    with clock.stage("import megatron_async, first"):
        from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
    with clock.stage("CUDA begins, first"):
        if torch.cuda.is_available():
            torch.cuda.init()
            torch.zeros(1, device="cuda")
    before = clock.now()
    with clock.stage("ENGINE"):
        engine = DynamicInferenceEngine.from_pretrained(
            model, EngineConfig(max_requests=rows, **options)
        )
    print(f"engine: {clock.now() - before:.2f} s; {engine.runner.graph_count} graphs")
    with clock.stage("first token"):
        params = SamplingParams(num_tokens_to_generate=1, termination_id=-1)
        future = engine.add_request(0, [1, 2, 3, 4], params)
        while not future.done():
            engine.step_modern()
    print(f"in all: {clock.now():.2f} s, {time.process_time():.1f} s of CPU in this process")
    left = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    print(f"threads that are there: {', '.join(left) or 'none but the main one'}")
    engine.close()


def report(clock: Clock, least: float) -> None:
    """Print the stages, those of the same name under the same stage as one line."""
    print(f"\n{'begins':>7} {'wall':>7} {'own':>7} {'cpu':>7}  stage (seconds)")
    lines: dict[tuple[str, str, int], tuple[Stage, int]] = {}
    for stage in clock.stages:
        key = stage.thread.split("_")[0], stage.name, stage.depth
        first, count = lines.get(key, (None, 0))
        if first is None:
            lines[key] = stage, 1
            continue
        first.wall += stage.wall
        first.cpu += stage.cpu
        first.inner += stage.inner
        lines[key] = first, count + 1
    for stage, count in lines.values():
        if stage.wall < least or (
            stage.name.startswith("import ") and stage.wall < LEAST_IMPORT_SECONDS
        ):
            continue
        times = f" x{count}" if count > 1 else ""
        thread = "" if stage.thread == "MainThread" else f"   [{stage.thread}]"
        own = stage.wall - stage.inner
        print(
            f"{stage.began:7.2f} {stage.wall:7.2f} {own:7.2f} {stage.cpu:7.2f}  "
            f"{'  ' * stage.depth}{stage.name}{times}{thread}"
        )


def _environment(folder: Path | None) -> dict[str, str]:
    """This process's, with caches in ``folder``; None leaves them where they are."""
    found = {**os.environ, BEGAN: repr(time.time())}
    if folder is None:
        return found
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    names = {
        "TRITON_CACHE_DIR": "triton",
        "MEGATRON_ASYNC_CACHE": "kernels",
        "PYTHONPYCACHEPREFIX": "bytecode",
        "CUDA_CACHE_PATH": "cuda",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
    }
    return {**found, **{name: str(folder / each) for name, each in names.items()}}


def _options(texts: list[str]) -> dict[str, Any]:
    import json

    pairs = (text.partition("=")[::2] for text in texts)
    return {name: json.loads(value) for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="random:llama8b", help="a directory, or random:SHAPE")
    parser.add_argument("--rows", type=int, default=64, help="max_requests")
    parser.add_argument("--cold", action="store_true", help="with empty caches")
    parser.add_argument("--again", action="store_true", help="and once more, with what it left")
    parser.add_argument("--least", type=float, default=0.01, help="seconds of a line at least")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="of EngineConfig"
    )
    args = parser.parse_args()
    if BEGAN in os.environ:
        clock = Clock(float(os.environ.pop(BEGAN)))
        clock.stages.append(Stage("the interpreter", "MainThread", 0, 0.0, clock.now()))
        sys.meta_path.insert(0, Imports(clock))  # type: ignore[arg-type]
        start(clock, args.model, args.rows, _options(args.option))
        report(clock, args.least)
        return
    with tempfile.TemporaryDirectory(prefix="bench_start_") as folder:
        caches = Path(folder) if args.cold else None
        for run in ("start", "start again")[: 1 + args.again]:
            cold = ", cold" if args.cold and run == "start" else ""
            print(f"--- {run}: {args.model}, {args.rows} rows{cold}")
            sys.stdout.flush()
            subprocess.run(
                [sys.executable, "-m", "scripts.bench_start", *sys.argv[1:]],
                env=_environment(caches),
                check=True,
            )


if __name__ == "__main__":
    main()

"""What a release of megatron-core must do, in a process that imports it.

Two ranks run it. Each line of standard input is a phase (``save``, ``models``, ``scripts``,
``load``) and is answered by one line of JSON: the seconds that it took, and what went wrong by
name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.checkpoint.megatron.distributed import save_distributed
from megatron_async.models.adapt import adapt_model
from tests.support import release_stock
from tests.support.release_models import CONFIGS, model_of, tokens_of

from megatron.core import parallel_state  # isort: skip

DEPTHS = (0, 1, 2, 4)
SHARDED = {"tensor-parallel": (2, 1), "pipeline-parallel": (1, 2)}
_FORBIDDEN = ("deprecat", "rewrapping", "unknown mlp")


class _Said(logging.Handler):
    """What megatron-core logs as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def _no_deprecation() -> Iterator[None]:
    """Nothing that megatron-core says inside is about what it will not have any longer."""
    said = _Said()
    logging.getLogger().addHandler(said)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        logging.getLogger().removeHandler(said)
    from_megatron = [str(w.message) for w in warned if "/megatron/" in w.filename]
    quiet = ("inference_params", "tp_group is None", "ffn_hidden_size", "full scope")
    found = [
        message
        for message in said.messages + from_megatron
        if any(word in message.lower() for word in _FORBIDDEN)
        and not any(word in message for word in quiet)
    ]
    assert not found, found


def models(version: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Models that we build, with the same tokens at all depths, and those of users."""

    def of_kind(kind: str) -> None:
        with _no_deprecation():
            model = model_of(kind)
        serial = tokens_of(model, 0)
        for depth in DEPTHS[1:]:
            assert tokens_of(model, depth, 2 if kind == "mtp" else 0) == serial, depth
        (folder / version / f"{kind}.json").write_text(json.dumps(serial))
        save_distributed(folder / version / "ours" / kind, model, CONFIGS[kind])

    def adapted(kind: str) -> None:
        model = release_stock.stock_model(kind)
        theirs = type(model)
        loaded = load_pretrained(folder / version / "stock" / kind).model
        model = adapt_model(model)
        assert isinstance(model, theirs)
        assert tokens_of(model, 1) == tokens_of(loaded, 0)

    def this_release() -> None:
        assert compat.installed().version == version, compat.installed()
        assert compat.installed().not_tried is None

    return {
        "release": this_release,
        **{f"{kind}, depths {DEPTHS}": lambda kind=kind: of_kind(kind) for kind in CONFIGS},
        **{
            f"{kind} of megatron-core, adapted": lambda kind=kind: adapted(kind)
            for kind in release_stock.KINDS
        },
    }


def scripts(version: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Names, and scripts that call them as Megatron's own do."""

    def run() -> None:
        import pytest

        llm = "tests/functional/test_megatron_llm_script.py"
        tests = [
            "tests/unit/megatron_api/test_megatron_names.py::test_names_are_those_of_the_installed_release",
            "tests/functional/test_megatron_script.py",
            f"{llm}::test_each_way_to_call_gives_the_tokens_of_the_stock_model[async-async]",
            f"{llm}::test_hybrid_models_of_megatron_are_served",
        ]
        plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-m", "not gpu"]
        with contextlib.redirect_stdout(sys.stderr):
            assert pytest.main([*plugins, *tests]) == 0

    return {"names and scripts": run}


def save(version: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """What a user saves with this release, of one rank."""

    def of_kind(kind: str) -> None:
        model = release_stock.stock_model(kind)
        torch.save(release_stock.weights(model), folder / version / f"{kind}.pt")
        release_stock.save(model, kind, folder / version / "stock" / kind)

    return {kind: lambda kind=kind: of_kind(kind) for kind in release_stock.KINDS}


def save_sharded(version: str, folder: Path, rank: int) -> None:
    """Of two ranks: shards of the dense model."""
    for name, (tensor, stages) in SHARDED.items():
        with _ranks(folder / version / f"{name}.store", rank, 2, tensor, stages):
            model = release_stock.stock_gpt("dense", tensor, stages, rank)
            release_stock.load(model, folder / version / "stock" / "dense")
            release_stock.save(model, "dense", folder / version / "stock" / name)


@contextlib.contextmanager
def _ranks(store: Path, rank: int, size: int, tensor: int, stages: int) -> Iterator[None]:
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous = dist.FileStore(str(store), size)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor, stages)
    try:
        yield
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def load(version: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """What each release has saved, as its weights were."""

    def from_ours(path: Path) -> None:
        _assert_same(dict(model_of(path.name).named_parameters()), path)

    def from_stock(path: Path) -> None:
        kind = "dense" if path.name in SHARDED else path.name
        _assert_same(torch.load(path.parents[1] / f"{kind}.pt", weights_only=True), path)

    checks: dict[str, Callable[[], Any]] = {}
    for saved in sorted(folder.glob("*/ours/*")) + sorted(folder.glob("*/stock/*")):
        of = from_ours if saved.parent.name == "ours" else from_stock
        checks[str(saved.relative_to(folder))] = lambda of=of, saved=saved: of(saved)
    return checks


def _assert_same(expected: dict[str, torch.Tensor], path: Path) -> None:
    found = dict(load_pretrained(path).model.named_parameters())
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _run(checks: dict[str, Callable[[], Any]]) -> dict[str, str]:
    failed = {}
    for name, run in checks.items():
        try:
            run()
        except BaseException:
            failed[name] = traceback.format_exc()[-1500:]
    return failed


_PHASES: dict[str, Callable[[str, Path], dict[str, Callable[[], Any]]]] = {
    "models": models,
    "scripts": scripts,
    "load": load,
}


def main() -> None:
    """Answer each phase that standard input names."""
    version, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        started, phase = time.perf_counter(), line.strip()
        failed: dict[str, str] = {}
        if phase in _PHASES:
            compat.ensure_parallel_state()
            failed = _run(_PHASES[phase](version, folder))
        elif phase == "save":
            if rank == 0:
                compat.ensure_parallel_state()
                failed = _run(save(version, folder))
                (folder / version / "saved").touch()
            while not (folder / version / "saved").exists():
                time.sleep(0.05)
            failed |= _run({"shards": lambda: save_sharded(version, folder, rank)})
        print(json.dumps({"seconds": time.perf_counter() - started, "failed": failed}), flush=True)
    # What writes for megatron-core is killed with the process group of the test.
    os._exit(0)

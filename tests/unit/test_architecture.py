"""The rooms and the arrows between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_async"

TORCHLESS = (
    "megatron_async.scheduler.scheduler",
    "megatron_async.cache.block_allocator",
    "megatron_async.cache.retire_queue",
    "megatron_async.step.plan",
    "megatron_async.config",
    "megatron_async.request",
    "megatron_async.sampling_params",
)


@pytest.mark.parametrize("module", TORCHLESS)
def test_decisions_import_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "bad = [m for m in ('torch', 'megatron', 'triton', 'numpy') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE_SECONDS)


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


# Who may not import whom: arrows point from the engine down to caches, devices and kernels.
FORBIDDEN = {
    "scheduler": ("torch", "numpy", "time", "random", "threading"),
    "cache": ("torch", "numpy", "time", "random", "threading"),
    "kernels": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "device": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "models": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "sampling": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    ".": ("megatron_async.inference", "inference", "tests"),
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows_point_one_way(folder: str) -> None:
    files = sorted((PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py"))
    assert files
    for path in files:
        if path.name == "__main__.py":
            continue
        for name in imports_of(path):
            for forbidden in FORBIDDEN[folder]:
                assert name != forbidden and not name.startswith(forbidden + "."), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_no_pickle_is_ever_loaded() -> None:
    """Only the restricted reader of megatron's checkpoints may touch pickle, and torch.load is
    always called with weights_only=True."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("pickle.load", "pickle.loads"), path


def test_the_step_loop_fits_on_one_screen() -> None:
    tree = ast.parse((PACKAGE / "engine" / "loop.py").read_text())
    (step,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_step")
    assert step.end_lineno is not None and step.end_lineno - step.lineno < 25

"""Releases of megatron-core: which is installed, and that one package alone knows of others."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_async import megatron_compat as compat
from megatron_async.megatron_compat import classes, release
from megatron_async.megatron_compat.hybrid import pattern_from_ratios
from megatron_async.megatron_compat.release import TRIED, Release
from megatron_async.models.build import build_random_model
from megatron_async.models.gpt import GPTModel
from tests.support.release_models import CONFIGS

ROOT = Path(__file__).parents[3]
TREES = ("megatron_async", "inference", "scripts", "examples", "deploy")


# --- which release ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [*TRIED, "0.16.2", "0.17.0", "0.18.0rc1", "0.19.0"])
def test_releases_between_those_tried_are_used_in_silence(version: str) -> None:
    assert Release(version).not_tried is None


@pytest.mark.parametrize(
    ("version", "place"),
    [("0.19.3", "later"), ("0.20.0", "later"), ("1.0", "later"), ("0.20.0rc1+abc", "later"),
     ("0.15.3", "earlier"), ("0.16.0", "earlier"), ("unknown", "earlier")],
)  # fmt: skip
def test_another_release_is_named_beside_those_tried(version: str, place: str) -> None:
    said = Release(version).not_tried
    assert said is not None and f"megatron-core {version} is {place} than" in said
    assert all(tried in said for tried in TRIED)


def test_a_later_release_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(release, "installed", lambda: Release("0.21.0"))
    release.warn_if_not_tried.cache_clear()
    with caplog.at_level(logging.WARNING):
        release.warn_if_not_tried()
        release.warn_if_not_tried()
    assert len(caplog.records) == 1 and "0.16.1, 0.17.1, 0.18.2, 0.19.2" in caplog.text


@pytest.mark.slow
def test_a_later_release_warns_when_it_is_imported(tmp_path: Path) -> None:
    """In a process whose megatron-core calls itself one."""
    program = (
        "from megatron.core import package_info\n"
        "package_info.__version__ = '0.30.1'\n"
        "from megatron_async import megatron_compat\n"
        "print(megatron_compat.found()['note'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr.count("megatron-core 0.30.1 is later") == 1
    assert all(tried in done.stdout for tried in TRIED)


def test_what_pip_takes_is_what_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (need,) = (text for text in project["dependencies"] if text.startswith("megatron-core"))
    required = re.fullmatch(r"megatron-core>=([\d.]+),<0\.(\d+)", need)
    assert required is not None and required[1] == TRIED[0]
    assert int(required[2]) == Release(TRIED[-1]).numbers[1] + 1
    pinned = (ROOT / "requirements" / "constraints.txt").read_text()
    assert f'megatron-core=={TRIED[0]}; python_version < "3.12"\n' in pinned
    assert f'megatron-core=={TRIED[-1]}; python_version >= "3.12"\n' in pinned
    assert compat.found()["tried"] == list(TRIED)


# --- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_are_of_the_class_that_the_release_wants(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = build_random_model(CONFIGS[kind], device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, GPTModel) and isinstance(model, classes.MODEL_BASE)
    assert "deprecated" not in caplog.text.lower() and "Rewrapping" not in caplog.text


def test_patterns_are_those_of_megatron() -> None:
    pattern = pattern_from_ratios(8, 0.25, 0.25)
    assert (pattern.count("*"), pattern.count("-"), pattern.count("M")) == (2, 2, 4)


# --- nobody else knows ------------------------------------------------------------------------


def knowledge_of_releases(source: str) -> Iterator[str]:
    """What a file asks of megatron-core's version, or of what a release may lack."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
            if module.startswith("megatron.core") and names & {"__version__", "package_info"}:
                yield f"{node.lineno}: version of {module}"
            if module.startswith("packaging"):
                yield f"{node.lineno}: {module}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(("packaging", "megatron.core.package_info")):
                    yield f"{node.lineno}: {alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in ("__version__", "package_info"):
            if ast.unparse(node.value).startswith("megatron"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("version"):
            given = [ast.unparse(argument) for argument in node.args]
            if given and given[0].strip("'\"").replace("_", "-") == "megatron-core":
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Try):
            caught = [ast.unparse(h.type) for h in node.handlers if h.type is not None]
            if not any(name in ("ImportError", "ModuleNotFoundError") for name in caught):
                continue
            for inner in node.body:
                if (
                    isinstance(inner, ast.ImportFrom)
                    and _is_megatron(inner.module)
                    and not any(isinstance(other, ast.Import) for other in node.body)
                ):
                    yield f"{inner.lineno}: import of {inner.module} that may fail"


def _is_megatron(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "megatron"


def test_one_package_alone_knows_releases() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{what}"
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*.py"))
        if "megatron_compat" not in path.parts
        for what in knowledge_of_releases(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import megatron.core\nmegatron.core.__version__ > '0.17'",
        "from megatron.core import __version__",
        "from megatron.core import package_info",
        "from packaging.version import Version",
        "import importlib.metadata\nimportlib.metadata.version('megatron-core')",
        "from importlib.metadata import version\nversion('megatron_core')",
        "try:\n    from megatron.core.models.hybrid import x\nexcept ImportError:\n    x = None",
    ],
)
def test_the_check_sees_each_way_to_ask(source: str) -> None:
    assert list(knowledge_of_releases(source))


def test_the_check_lets_other_versions_pass() -> None:
    source = "import torch\ntorch.__version__\nfrom importlib.metadata import version\nversion('x')"
    assert not list(knowledge_of_releases(source))

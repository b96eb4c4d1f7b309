"""Names and keys in the sources of each release, which are read and not imported."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import megatron.core
import pytest

from megatron_async.megatron_api import DynamicInferenceContext, SamplingParams
from megatron_async.megatron_compat import TRIED, installed
from tests.support.releases import NoReleaseError, release_path
from tests.unit.megatron_api.test_megatron_names import KEYWORDS

INSTALLED = installed().version
RELEASES = [
    pytest.param(version, marks=() if version == INSTALLED else pytest.mark.slow)
    for version in TRIED
]


def inference_of(version: str) -> Path:
    """The folder of a release's inference package."""
    try:
        place = release_path(version)
    except NoReleaseError as error:
        pytest.skip(str(error))
    core = Path(megatron.core.__path__[0]) if place is None else place / "megatron" / "core"
    return core / "inference"


def definition(file: Path, name: str) -> ast.AST:
    (found,) = (
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    )
    return found


@pytest.mark.parametrize("version", RELEASES)
def test_sampling_params_take_the_names_of_a_release(version: str) -> None:
    theirs = definition(inference_of(version) / "sampling_params.py", "SamplingParams")
    assert isinstance(theirs, ast.ClassDef)
    names = {ast.unparse(node.target) for node in theirs.body if isinstance(node, ast.AnnAssign)}
    assert len(names) > 10
    assert names - inspect.signature(SamplingParams).parameters.keys() == set()


@functools.cache
def statistics() -> dict[str, Any]:
    """Those of this package, which are the same beside each release."""
    return DynamicInferenceContext(**KEYWORDS).get_kvcache_utilization_stats()


@pytest.mark.parametrize("version", RELEASES)
def test_the_statistics_of_the_cache_have_the_keys_of_a_release(version: str) -> None:
    file = inference_of(version) / "contexts" / "dynamic_context.py"
    theirs = definition(file, "get_kvcache_utilization_stats")
    (said,) = (node for node in ast.walk(theirs) if isinstance(node, ast.Dict))
    keys = {key.value for key in said.keys if isinstance(key, ast.Constant)}
    assert len(keys) > 5
    assert keys - statistics().keys() == set()

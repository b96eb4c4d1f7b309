"""The names that the package exports are written once; type checkers and users see the same."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import megatron_async
from megatron_async import megatron_api, training, weights
from megatron_async.contrib import transformers
from megatron_async.engine import engine
from megatron_async.engine.api_style import OUR_STYLE, ApiStyle
from megatron_async.megatron_api.engine import MEGATRON_STYLE

PACKAGES = (megatron_async, megatron_api, training, weights, transformers)
EARLIER = [
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceRequest",
    "EngineConfig",
    "EngineSuspendedError",
    "FinishReason",
    "GPTInferenceWrapper",
    "InferenceConfig",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "RequestFuture",
    "Rollout",
    "SamplingParams",
    "StepReport",
    "StructuredOutputs",
    "TextGenerationController",
    "TokenLogProbs",
    "TokenOutput",
    "__version__",
]
"""What version 0.1.0 exported."""


def stub_of(package: Any) -> dict[str, tuple[str, str]]:
    """The names that a package's stub imports, with their module and their name there."""
    source = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                assert name.asname is not None, name.name  # else checkers take it for private
                found[name.asname] = (str(node.module), name.name)
        elif isinstance(node, ast.Assign):
            assert isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name)
            found[node.targets[0].id] = found[node.value.id]
    return {name: home for name, home in found.items() if not name.startswith("_") or "__" in name}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_of_names_is_what_users_and_type_checkers_see(package: Any) -> None:
    stub = stub_of(package)
    assert sorted(stub) == sorted(package.__all__)
    assert package.HOMES.keys() == set(stub) - {"__version__"}
    assert set(package.__all__) <= set(dir(package))
    if package is transformers:
        pytest.importorskip("transformers")
    for name, (module, called) in stub.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), called), name


def test_every_name_of_before_is_exported() -> None:
    assert set(EARLIER) <= set(megatron_async.__all__)


def test_the_packages_engine_is_ours_and_megatrons_is_in_megatron_api() -> None:
    assert megatron_async.DynamicInferenceEngine is engine.DynamicInferenceEngine
    theirs = megatron_api.DynamicInferenceEngine
    assert theirs.__module__ == "megatron_async.megatron_api.engine"
    assert issubclass(theirs, engine.DynamicInferenceEngine)
    others = set(megatron_async.__all__) & set(megatron_api.__all__) - {"DynamicInferenceEngine"}
    for name in others:
        assert getattr(megatron_async, name) is getattr(megatron_api, name), name


def test_styles_are_values_that_differ_in_every_field() -> None:
    fields = ApiStyle.__dataclass_fields__
    assert all(getattr(OUR_STYLE, name) != getattr(MEGATRON_STYLE, name) for name in fields)


def test_no_module_of_the_core_asks_whether_it_is_megatrons() -> None:
    """What differs comes as a value: the engine's modules have no switch by that name."""
    core = Path(engine.__file__).parent
    named = [p.name for p in core.glob("*.py") if "as_megatron" in p.read_text(encoding="utf-8")]
    assert not named


def test_packages_of_what_users_say_have_its_classes() -> None:
    """As modules of these names had them."""
    from megatron_async import config, request, tokenizer

    assert config.EngineConfig is megatron_async.EngineConfig
    assert request.Rollout is megatron_async.Rollout
    assert tokenizer.Tokenizer.__module__ == "megatron_async.tokenizer.tokenizer"
    for package in (config, request, tokenizer):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018
        with pytest.raises(AttributeError, match="Nothing"):
            package.Nothing  # noqa: B018

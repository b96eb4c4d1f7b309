"""One tokenizer after the other, here and in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support import real_tokenizers
from tests.support.real_tokenizers import UnavailableError

CONVERTED = ("llama2",)
"""transformers 5 makes these anew from their vocabulary, without the mark in front of a text that
begins with a space. SentencePiece itself, transformers 4 and tokenizer.json put it there."""
WITHOUT_TEMPLATE = {"gptoss": "openai-gpt-oss-120b", "gemma2": "google-gemma-2-2b-it"}
"""Tokenizers whose package has no template, and the one that was published with them."""


@dataclass(frozen=True)
class Real:
    """A tokenizer of a released model."""

    name: str
    directory: Path
    ours: Tokenizer
    theirs: Any


def available(get: Callable[[], Any]) -> Any:
    """What ``get`` gives, or a skipped test that says why there is nothing."""
    try:
        return get()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=real_tokenizers.NAMES)
def real(request: pytest.FixtureRequest) -> Real:
    directory = available(lambda: real_tokenizers.tokenizer_directory(request.param))
    load = transformers.AutoTokenizer
    if request.param in CONVERTED:
        load = transformers.PreTrainedTokenizerFast
    return Real(
        request.param,
        directory,
        Tokenizer.from_directory(directory),
        load.from_pretrained(directory, local_files_only=True),
    )


@pytest.fixture(scope="session")
def template_file(real: Real) -> Path | None:
    """A template for a tokenizer whose package has none."""
    if "chat_template" in (real.directory / "tokenizer_config.json").read_text("utf-8"):
        return None
    if real.name not in WITHOUT_TEMPLATE:
        pytest.skip(f"no template was published with {real.name}")
    folder = available(real_tokenizers.templates_directory)
    return Path(folder) / f"{WITHOUT_TEMPLATE[real.name]}.jinja"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a tokenizer run in one process, which loads it once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.tokenizers)
            name = getattr(item, "callspec", None) and item.callspec.params.get("real")
            item.add_marker(pytest.mark.xdist_group(name or item.path.name))

"""The suites of other projects: where their tests of an HTTP server lie, and what they need."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one project.

    Attributes:
        shim: module of this package whose ``install`` makes them talk to our server.
        folder: where they are started, below the checkout.
        files: patterns of the files, below ``folder``.
        marker: what a file must say to be a test of a server over HTTP.
        conftest: whether its ``conftest.py`` are taken.
        plugins: files of fixtures that are taken in their place, where they are there.
    """

    name: str
    shim: str
    folder: str
    files: tuple[str, ...]
    marker: str = ""
    conftest: bool = True
    plugins: tuple[str, ...] = ()

    def arguments(self, checkout: Path) -> list[str]:
        """What pytest is given beside the files."""
        there = (each for each in self.plugins if (checkout / each).exists())
        names = [each.removesuffix(".py").replace("/", ".") for each in there]
        alone = ["--noconftest"] if not self.conftest else []
        return [*alone, *(word for name in names for word in ("-p", name))]

    def tests(self, checkout: Path) -> list[str]:
        """Their files, relative to ``folder``."""
        home = checkout / self.folder
        found = {path for pattern in self.files for path in home.glob(pattern)}
        return [
            str(path.relative_to(home)) for path in sorted(found) if self.marker in path.read_text()
        ]


SUITES = (
    Suite(
        name="vllm",
        shim="vllm_shim",
        folder="",
        files=(
            "tests/entrypoints/openai/**/test_*.py",
            "tests/entrypoints/serve/**/test_*.py",
        ),
        marker="RemoteOpenAIServer(",
        conftest=False,
        plugins=(
            "tests/entrypoints/conftest.py",
            "tests/entrypoints/openai/responses/conftest.py",
        ),
    ),
    Suite(
        name="llama-cpp",
        shim="llama_cpp_shim",
        folder="tools/server/tests",
        files=tuple(
            f"unit/test_{name}.py"
            for name in (
                "basic",
                "chat_completion",
                "compat_oai_responses",
                "completion",
                "ctx_shift",
                "security",
                "stream",
                "tokenize",
                "tool_call",
            )
        ),
    ),
    Suite(
        name="openai-python",
        shim="openai_shim",
        folder="",
        files=(
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/chat/test_completions.py",
        ),
    ),
    Suite(
        name="lmdeploy",
        shim="lmdeploy_shim",
        folder="",
        files=(
            "autotest/interface/restful/test_restful_chat_completions_v1.py",
            "autotest/interface/restful/test_restful_completions_v1.py",
        ),
        conftest=False,
    ),
)

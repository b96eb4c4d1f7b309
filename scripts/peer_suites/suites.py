"""The suites of other projects: where their tests of an HTTP server lie, and what they need."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one project.

    Attributes:
        shim: module of ``shims`` whose ``install`` makes them talk to our server.
        folder: where they are started, below the checkout.
        files: patterns of the files, below ``folder``.
        marker: a regular expression; a file with it is a test of a server over HTTP.
        conftest: whether its ``conftest.py`` are taken.
        plugins: files of fixtures that are taken in their place, where they are there.
        options: further ones of pytest.
        classes: module of this package with tests that the project has in pieces.
        pieces: patterns of the files with those pieces, below the checkout.
    """

    name: str
    shim: str
    folder: str
    files: tuple[str, ...]
    marker: str = ""
    conftest: bool = True
    plugins: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    classes: str = ""
    pieces: tuple[str, ...] = ()

    def arguments(self, checkout: Path) -> list[str]:
        """What pytest is given beside the files."""
        there = (each for each in self.plugins if (checkout / each).exists())
        names = [each.removesuffix(".py").replace("/", ".") for each in there]
        alone = ["--noconftest"] if not self.conftest else []
        return [*alone, *self.options, *(word for name in names for word in ("-p", name))]

    def tests(self, checkout: Path) -> list[str]:
        """Their files, relative to ``folder``, and ours with the classes."""
        home = checkout / self.folder
        found = {path for pattern in self.files for path in home.glob(pattern)}
        asking = [path for path in sorted(found) if re.search(self.marker, path.read_text())]
        names = [str(path.relative_to(home)) for path in asking]
        has_pieces = any(any(checkout.glob(pattern)) for pattern in self.pieces)
        return [*names, str(HERE / self.classes)] if has_pieces else names


SUITES = (
    Suite(
        name="vllm",
        shim="vllm",
        folder="",
        files=(
            "tests/entrypoints/openai/**/test_*.py",
            "tests/entrypoints/serve/**/test_*.py",
            "tests/entrypoints/launchers/api_server/test_*.py",
            "tests/entrypoints/rl/state_transitions/test_pause_*.py",
            "tests/entrypoints/rl/state_transitions/test_sleep.py",
            "tests/entrypoints/tool_parsers/test_hermes_tool_parser.py",
        ),
        marker=r"RemoteOpenAIServer\(|entrypoints\.rl\.conftest",
        conftest=False,
        plugins=(
            "tests/entrypoints/conftest.py",
            "tests/entrypoints/openai/responses/conftest.py",
        ),
    ),
    Suite(
        name="llama-cpp",
        shim="llama_cpp",
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
        shim="openai_python",
        folder="",
        files=(
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/chat/test_completions.py",
        ),
        options=("--asyncio-mode=auto",),
    ),
    Suite(
        name="lmdeploy",
        shim="lmdeploy",
        folder="",
        files=(
            "autotest/interface/restful/test_restful_chat_completions_v1.py",
            "autotest/interface/restful/test_restful_completions_v1.py",
        ),
        conftest=False,
    ),
    Suite(
        name="sglang",
        shim="sglang",
        folder="",
        files=("test/registered/openai_server/**/test_*.py",),
        marker=r"popen_launch_server\(",
        conftest=False,
        classes="from_sglang.py",
        pieces=("sglang/test/kits/*_kit.py", "python/sglang/test/kits/*_kit.py"),
    ),
    Suite(
        name="triton",
        shim="triton",
        folder="python/openai",
        files=tuple(
            f"tests/test_{name}.py"
            for name in (
                "chat_completions",
                "completions",
                "observability",
                "openai_client",
                "request_size",
                "tool_calling",
            )
        ),
    ),
    Suite(
        name="megatron-lm",
        shim="megatron",
        folder="",
        files=(
            "tests/unit_tests/test_inference.py",
            "tests/unit_tests/inference/test_common_inference_params.py",
        ),
        conftest=False,
        classes="from_megatron.py",
        pieces=("tests/functional_tests/test_cases/gpt/gpt_inference_server_smoke_*/*.py",),
    ),
)

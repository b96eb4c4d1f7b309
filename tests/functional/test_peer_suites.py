"""Tests of other projects run against this server: here, a checkout that is made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.peer_suites.__main__ import main
from scripts.peer_suites.servers import NotServedError
from scripts.peer_suites.shims.llama_cpp import options as llama_cpp_options
from scripts.peer_suites.shims.sglang import options as sglang_options
from scripts.peer_suites.shims.triton import options as triton_options
from scripts.peer_suites.shims.vllm import options as vllm_options
from scripts.peer_suites.suites import SUITES
from scripts.peer_suites.verdicts import Ended, Expected, judge, read_expected

CONFTEST = """
import pytest

@pytest.fixture
def sample_prompt():
    return "The capital of France is"
"""
TESTS = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

ARGS = ["--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"]

@pytest.fixture(scope="module")
def client():
    with RemoteOpenAIServer("some/model", ARGS) as server, server.get_client() as client:
        yield client

def test_model(client):
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("some/model", 256)

def test_text(client, sample_prompt):
    choice = client.completions.create(model="some/model", prompt=sample_prompt).choices[0]
    assert "Paris" in choice.text

@pytest.mark.parametrize("size", ["large"])
def test_size(client, size):
    raise AssertionError(f"this model is not {size}")

def test_engine():
    VllmConfig("some/model")

def test_vocabulary():
    assert ModelConfig("some/model").get_vocab_size() > 256

def test_sound():
    RemoteOpenAIServer("some/model", ["--limit-mm-per-prompt", "{}"])

@pytest.mark.skipif(not current_platform.is_rocm(), reason="for others")
def test_platform(client):
    raise AssertionError
"""
EXPECTED = r"""
[[expected]]
suite = "vllm"
test = ['test_size\[large\]']
error = "AssertionError"
reason = "the model is tiny"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "tests" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder.parents[1] / "utils.py").write_text("import a_package_that_nobody_has")
    (folder.parent / "conftest.py").write_text(CONFTEST)
    (folder / "test_peer.py").write_text(TESTS)
    (folder / "test_engine_alone.py").write_text("raise AssertionError('it is not collected')")
    return tmp_path / "checkout"


@pytest.mark.slow
def test_a_checkouts_tests_are_told_apart(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = tmp_path / "expected.toml"
    ours = Path("scripts/peer_suites/expected.toml").read_text()
    expected.write_text(EXPECTED + ours)
    assert main(["--vllm", str(checkout), "--expected", str(expected)]) == 1
    said = capfd.readouterr().out
    counts, *lines = said.splitlines()
    assert counts == "vllm: 2 passed, 3 failed as expected, 1 failed unexpectedly, 1 skipped"
    assert "      1 the model is tiny" in lines
    assert lines[-2] == "  UNEXPECTED tests/entrypoints/openai/test_peer.py::test_text"
    assert "'Paris' in" in lines[-1]


@pytest.mark.slow
def test_the_status_is_0_where_nothing_fails_unexpectedly(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--vllm", str(checkout), "-k", "test_engine"]) == 0
    assert "0 passed, 1 failed as expected" in capfd.readouterr().out


def test_a_run_without_tests_is_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--vllm", str(tmp_path)]) == 1
    assert "UNEXPECTED the run itself" in capfd.readouterr().out


def test_the_first_entry_that_fits_counts(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(EXPECTED.replace("tiny", "small") + EXPECTED)
    tests = [
        Ended("a::test_size[large]", "failed", "E   AssertionError"),
        Ended("a::test_size[large]", "failed", "E   KeyError"),
        Ended("a::test_size[other]", "failed", "E   AssertionError"),
    ]
    found = judge("vllm", tests, read_expected(path))
    assert found.expected == {"the model is small": 1}
    assert found.unexpected == tests[1:]
    assert len(judge("other", tests, read_expected(path)).unexpected) == 3


def test_each_entry_of_ours_has_a_reason_and_valid_patterns() -> None:
    names = {suite.name for suite in SUITES}
    for each in read_expected():
        assert each.reason
        assert each.suite == Expected.suite or each.suite in names
        for pattern in (*each.test, each.error):
            re.compile(pattern)


def test_vllms_options_become_ours() -> None:
    asked = ["--max-model-len", "100", "--tool-call-parser", "hermes", "--max-num-seqs=4"]
    asked += ["--enable-lora", "--lora-modules", "a=path", "b=path", "--api-key", "k"]
    length = ["--inference-max-seq-length", "100", "--tool-call-format", "hermes"]
    names = ["--served-model-name", "m", "a", "b"]
    assert vllm_options("m", asked) == [*length, "--api-key", "k", *names]
    assert vllm_options("m", ["--max-model-len", "8192"]) == ["--served-model-name", "m"]
    assert vllm_options("m", ["--served-model-name", "o"]) == ["--served-model-name", "o"]
    with pytest.raises(NotServedError, match="--uds"):
        vllm_options("m", ["--uds", "path"])


def test_llama_cpps_settings_become_ours() -> None:
    settings = {"n_ctx": 512, "n_slots": 2, "api_key": "k", "model_alias": "m"}
    length = ["--inference-max-seq-length", "256"]
    expected = [*length, "--api-key", "k", "--served-model-name", "m"]
    assert llama_cpp_options(settings)[: len(expected)] == expected
    with pytest.raises(NotServedError, match="server_embeddings"):
        llama_cpp_options({**settings, "server_embeddings": True})


def test_sglangs_options_become_ours() -> None:
    asked = ["--context-length", "100", "--mem-fraction-static", "0.5", "--device=cuda"]
    assert sglang_options(asked) == ["--inference-max-seq-length", "100"]
    with pytest.raises(NotServedError, match="--reasoning-parser"):
        sglang_options(["--reasoning-parser", "qwen3"])


def test_tritons_options_become_ours() -> None:
    asked = ["--backend", "vllm", "--tool-call-parser", "llama3", "--enable-kserve-frontends"]
    assert triton_options(asked)[2:] == ["--tool-call-format", "llama3"]
    with pytest.raises(NotServedError, match="--openai-restricted-api"):
        triton_options(["--openai-restricted-api", "inference", "key", "value"])


def test_a_suite_in_pieces_has_a_module_with_its_classes(tmp_path: Path) -> None:
    (sglang,) = (suite for suite in SUITES if suite.name == "sglang")
    assert sglang.tests(tmp_path) == []
    kits = tmp_path / "sglang" / "test" / "kits"
    kits.mkdir(parents=True)
    (kits / "json_mode_kit.py").touch()
    (module,) = sglang.tests(tmp_path)
    assert Path(module).is_file()

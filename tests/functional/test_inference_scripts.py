"""The scripts of ``inference/``, which people read and run."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "inference"
SCRIPTS = ("benchmark", "dynamic_inference", "offline_generation", "text_generation_server")


def test_the_folder_has_scripts_alone() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.suffix) == [
        f"{name}.py" for name in SCRIPTS
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short_and_say_how_they_are_started(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert f"python inference/{name}.py" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.parametrize("more", [[], ["--inference-async-scheduling"]])
def test_prompts_arrive_while_others_decode(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(FOLDER / "dynamic_inference.py"))["main"]
    prompts = ["def f(", "import ", "class A"]
    assert main(["--prompts", *prompts, "--num-tokens-to-generate", "6", *more]) == 0
    out, err = capsys.readouterr()
    assert sorted(line.split(":")[0] for line in out.splitlines()) == ["0", "1", "2"]
    assert "18 tokens in " in err


def test_texts_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(FOLDER / "offline_generation.py"))["main"]
    assert main(["--prompts", "def f(", "--max-new-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def f(") and len(out.strip()) > len("def f(")

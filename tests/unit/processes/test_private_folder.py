"""What a process shares in a directory goes with it: at its end, or with the next one's start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_async.processes import private_folder
from megatron_async.processes.private_folder import (
    disown,
    make_private_file,
    make_private_folder,
    remove_private_folder,
    renew_private_folder,
)
from tests.support.patience import PATIENCE_SECONDS

OTHER = """
import sys
from megatron_async.processes.private_folder import make_private_file, make_private_folder
print(make_private_folder("socket", sys.argv[1]), flush=True)
print(make_private_file("weights", sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        yield Path(folder)


@contextmanager
def other_process(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """One that has made a directory and a file, and lives until it is killed."""
    command = [sys.executable, "-c", OTHER, str(place)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            folder, file = (Path(process.stdout.readline().strip()) for _ in range(2))
            yield process, folder, file
        finally:
            process.kill()


def test_what_a_dead_process_has_left_goes_with_the_next_start(place: Path) -> None:
    with other_process(place) as (process, folder, file):
        (folder / "socket").touch()
        mine = make_private_folder("socket", str(place))
        assert folder.is_dir() and file.is_file()
        process.kill()
        process.wait(PATIENCE_SECONDS)
        assert folder.is_dir() and file.is_file()
        own = make_private_file("weights", str(place))
        assert not folder.exists() and not file.exists()
    assert {str(path) for path in place.iterdir()} == {mine, own}
    remove_private_folder(mine)
    assert not os.path.exists(mine)


def test_what_is_not_known_to_be_left_stays(place: Path) -> None:
    """Directories of others, without a lock, and such as are to stay."""
    (place / "megatron-async-older").mkdir()
    (place / "megatron-async-file").touch()
    (place / "other").mkdir()
    (place / "other" / private_folder.OWNER).touch()
    kept = make_private_folder("socket", str(place))
    disown(kept)
    before = {path.name for path in place.iterdir()}
    remove_private_folder(make_private_folder("socket", str(place)))
    assert {path.name for path in place.iterdir()} == before


def test_a_directory_that_was_cleaned_away_is_held_again(place: Path) -> None:
    folder = make_private_folder("socket", str(place))
    (Path(folder) / private_folder.OWNER).unlink()
    Path(folder).rmdir()
    renew_private_folder(folder)
    renew_private_folder(folder)
    make_private_folder("socket", str(place))
    assert os.path.isdir(folder)
    descriptor = private_folder._held[folder]
    remove_private_folder(folder)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_one_that_is_taken_for_a_leftover_at_its_birth_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held = private_folder._hold, iter([False, True])
    monkeypatch.setattr(private_folder, "_hold", lambda *paths: next(held) and hold(*paths))
    make_private_folder("socket", str(place))
    assert len(list(place.iterdir())) == 2

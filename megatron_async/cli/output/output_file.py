"""Files that commands write once they have measured: tried before, and written as a whole."""

from __future__ import annotations

from pathlib import Path

from megatron_async.errors import ConfigError


class OutputFile:
    """The file that ``option`` names. A process that is cut off while it writes leaves what was
    there before, not half of the new.

    Raises:
        ConfigError: no file can be written there.
    """

    def __init__(self, option: str, name: str) -> None:
        self._called = f"{option} {name}"
        self._path = Path(name)
        try:
            self._part = self._place_of_part()
            if self._part is not None:
                if self._path.exists():
                    self._path.open("a").close()
                self._part.touch()
                self._part.unlink()
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, text: str) -> None:
        """Replace what is in the file.

        Raises:
            ConfigError: it cannot be written any more.
        """
        try:
            if self._part is None:
                self._path.write_text(text)
                return
            try:
                self._part.write_text(text)
                self._part.replace(self._path.resolve())
            finally:
                self._part.unlink(missing_ok=True)
        except OSError as error:
            raise self._refusal(error) from error

    def _place_of_part(self) -> Path | None:
        """Where the text is written first, None for a device or a pipe: these are never replaced,
        nor tried, as a pipe's reader would take that for all there is."""
        if self._path.exists() and not self._path.is_file() and not self._path.is_dir():
            return None
        return Path(f"{self._path.resolve()}.part")  # next to the file itself, so a link stays one

    def _refusal(self, error: OSError) -> ConfigError:
        why = f"cannot be written: {error.strerror}; choose another place"
        return ConfigError(f"{self._called}: {why}")

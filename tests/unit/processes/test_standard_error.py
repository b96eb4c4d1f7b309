"""Standard error that nobody reads: nobody waits for it, and what is lost is counted and said."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from megatron_async.processes.standard_error import Spool, said_as_json, said_as_text
from tests.support.patience import PATIENCE_SECONDS

LINE = f"{'x' * 99}\n"


class Pipe:
    """A pipe, and a stream into it."""

    def __init__(self, most_bytes: int = 200_000) -> None:
        self.reads, self.writes = os.pipe()
        self.stream = Spool(self.writes, said_as_text, most_bytes)

    def read(self) -> Iterator[str]:
        """The lines that come."""
        return iter(open(self.reads, encoding="utf-8", closefd=False))


def test_lines_come_whole_and_in_order() -> None:
    pipe = Pipe()
    pipe.stream.write("one ")
    pipe.stream.write("two\nthree \udc80\nfo")
    pipe.stream.write("ur")
    assert pipe.stream.drain(PATIENCE_SECONDS) and pipe.stream.lost == 0
    os.close(pipe.writes)
    assert list(pipe.read()) == ["one two\n", "three \\udc80\n", "four"]


def test_what_nobody_reads_is_lost_counted_and_said() -> None:
    pipe = Pipe()
    for _ in range(10_000):
        pipe.stream.write(LINE)
    assert not pipe.stream.drain(0.01)
    lost = pipe.stream.lost
    assert 10_000 - 200_000 / 100 - 65_536 / 100 - 1 <= lost < 10_000
    lines, said = pipe.read(), 0
    while said < lost:
        if (line := next(lines)) != LINE:
            count = int(line.split()[0])
            assert line == f"{said_as_text(count)}\n"
            said += count
    assert said == lost
    threading.Thread(target=lambda: list(lines), daemon=True).start()
    assert pipe.stream.drain(PATIENCE_SECONDS)
    pipe.stream.write(LINE)
    assert pipe.stream.drain(PATIENCE_SECONDS) and pipe.stream.lost == lost


def test_a_log_whose_reader_has_gone_hurts_nobody() -> None:
    pipe = Pipe()
    os.close(pipe.reads)
    logger = logging.Logger("alone")
    logger.addHandler(logging.StreamHandler(pipe.stream))
    for number in range(3):
        logger.warning("%d", number)
    assert pipe.stream.drain(PATIENCE_SECONDS)
    assert pipe.stream.lost >= 3


def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    """A parent may have made it so for all who share it."""
    pipe = Pipe()
    os.set_blocking(pipe.writes, False)
    for _ in range(1000):
        pipe.stream.write(LINE)
    lines = pipe.read()
    assert [next(lines) for _ in range(1000)] == [LINE] * 1000 and pipe.stream.lost == 0


@pytest.mark.parametrize("said", [said_as_text, said_as_json])
def test_losses_are_said_in_one_line(said: object) -> None:
    assert callable(said) and "7 lines" in said(7) and "\n" not in said(7)


def test_each_child_has_one(tmp_path: object) -> None:
    from megatron_async.processes.child import Child

    child = Child("tests.support.writes_errors")
    assert child.connection.recv(5) == b"Spool" and child.wait(PATIENCE_SECONDS) == 0
    assert not isinstance(sys.stderr, Spool)

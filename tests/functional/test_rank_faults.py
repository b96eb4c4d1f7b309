"""A rank of a server is killed or stopped while a step runs: its request ends with an error, the
server starts the group again, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support.leftovers import has_ended
from tests.support.openings import marked
from tests.support.real_server import RealServer, real_server

LAYOUTS = {
    "TP2": ("tiny", "--tensor-model-parallel-size"),
    "PP2": ("tiny", "--pipeline-model-parallel-size"),
    "EP2": ("tiny-moe", "--expert-model-parallel-size"),
}
RANKS = ("engine_process", "rank_process")
LONG = {"prompt": "x", "max_tokens": 1800, "stream": True, "ignore_eos": True, "temperature": 0}


def ranks_of(server: RealServer) -> list[psutil.Process]:
    """Its processes that are ranks, in their order."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    found = [[each for each in below if name in " ".join(each.cmdline())] for name in RANKS]
    assert [len(each) for each in found] == [1, 1]
    return [each for (each,) in found]


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Files in memory that processes have mapped or open under a name."""
    found = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        lines = (folder / "maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
        paths += [os.readlink(each) for each in (folder / "fd").iterdir()]
        found |= {path for path in paths if path.startswith("/dev/shm/")}
    return found


async def steps_launched(server: RealServer) -> float:
    return (await server.values())["steps_launched_total"]


async def fault(layout: str, rank: int, number: signal.Signals, folder: Path) -> None:
    model, option = LAYOUTS[layout]
    short = {"prompt": "def f", "max_tokens": 6, "stream": True, "temperature": 0}
    async with real_server("--model", model, "--device", "cpu", option, "2") as server:
        await server.until_status(200)
        before = await server.text(short)
        ranks = ranks_of(server)
        shared = shared_memory_of(ranks)
        request = asyncio.create_task(server.text(LONG))
        begun = await steps_launched(server)
        while await steps_launched(server) < begun + 5:
            await asyncio.sleep(0.02)
        ranks[rank].send_signal(number)
        started = time.monotonic()
        with pytest.raises(InterruptedError) as error:
            await request
        ended = time.monotonic() - started
        while not all(has_ended(each) for each in ranks):
            await asyncio.sleep(0.02)
        gone = time.monotonic() - started
        await server.until_status(200)
        again = time.monotonic() - started
        # Seen with -s: no verdict depends on them.
        print(f"{layout} rank {rank} {number.name}: request {ended:.1f} s ({error.value}), "
              f"ranks gone {gone:.1f} s, serves again {again:.1f} s")  # fmt: skip
        assert await server.text(short) == before
        assert not {each.pid for each in ranks} & {each.pid for each in ranks_of(server)}
        log = Path(server.log).read_text()
        assert "it is started again" in log and "Traceback" not in log
        if rank:
            how = "was killed by SIGKILL" if number == signal.SIGKILL else "has not answered for"
            assert f"rank 1 of the model {how}" in log
        shared |= shared_memory_of(ranks_of(server))
    assert not [path for path in shared if os.path.exists(path)]
    assert not list(folder.iterdir())


@pytest.mark.sweep(of=12)
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP), ids=lambda each: each.name)
@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_server_starts_the_group_again(
    layout: str,
    rank: int,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MEGATRON_ASYNC_TEST", mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:  # pytest's is too long for a Unix socket
        monkeypatch.setenv("TMPDIR", folder)
        asyncio.run(fault(layout, rank, number, Path(folder)))
    own = {os.getpid(), os.getppid()}
    assert not set(marked(f"MEGATRON_ASYNC_TEST={mark}")) - own

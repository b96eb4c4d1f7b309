"""How ranks meet: who may come in, what they are told, and what of it they believe."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron_async.errors import ConfigError, IntegrityError, RankDiedError
from megatron_async.processes.call import Call
from megatron_async.processes.lifeline import EXIT_ORPHAN
from megatron_async.ranks import channel
from megatron_async.ranks.rendezvous import call, door, hosts, meeting, shared
from megatron_async.ranks.rendezvous.call import SealedCall
from megatron_async.ranks.rendezvous.door import MOST_VISITORS, Door
from megatron_async.ranks.rendezvous.shared import Shared, make_folder, remove_folder
from megatron_async.version import __version__
from tests.support.patience import PATIENCE_SECONDS

SECRET = "one that all ranks know"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (hosts.SECRET, hosts.SECRET_FILE, hosts.BIND, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def common() -> Iterator[Shared]:
    """What ranks of one host share, with a ring of some pages."""
    sender = channel.RingSender(1, lambda place: None, lambda: None, size=1 << 12)
    folder = make_folder()
    yield Shared(folder, sender.descriptor)
    sender.close()
    remove_folder(folder)


def other_host(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store in which rank 1 is on another host."""
    store = dist.HashStore()
    store.set("version 1", __version__)
    store.set("host 1", "another host")
    monkeypatch.setattr(meeting, "host_identity", lambda: "another host")
    return store


def accept(store: dist.Store, world_size: int = 2) -> dict[int, Call]:
    found, together = meeting.accept_all(store, world_size, lambda: pytest.fail("share"), no_check)
    assert not together
    return found


def no_check() -> None:
    """All will come."""


def place_of(store: dist.Store) -> tuple[str, int]:
    ((address, port),) = json.loads(store.get("address"))
    return address, port


# --- over hosts -------------------------------------------------------------------------------


def test_strangers_neither_come_in_nor_keep_a_rank_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than there is room for say nothing; others say something else, or a little at a time."""
    monkeypatch.setenv(hosts.SECRET, SECRET)
    store = dist.HashStore()
    names = iter(["this host", "another host"])
    monkeypatch.setattr(meeting, "host_identity", lambda: next(names))
    store.set("version 1", __version__)
    store.set("host 1", "another host")
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        leading = pool.submit(accept, store)
        place = place_of(store)
        assert place[0] == "127.0.0.1"
        strangers = [
            stack.enter_context(socket.create_connection(place)) for _ in range(MOST_VISITORS + 9)
        ]
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[-2].sendall(bytes(door.HELLO_BYTES))  # rank 0, and no proof
        strangers[-3].close()
        with pytest.raises(ConfigError, match="another secret: give all ranks the same"):
            door.knock(socket.create_connection(place), 1, b"another secret")
        own, common = meeting.connect(store, 1)
        found = leading.result(PATIENCE_SECONDS)
        assert list(found) == [1] and common is None
        own.say(b"here")
        assert found[1].recv_bytes() == b"here"
        found[1].say(b"there")
        assert own.recv_bytes() == b"there"
        own.close()
        found[1].close()
    assert [each.message for each in caplog.records] == [
        "somebody who is no rank of this group has come: it has another secret"
    ]
    said = b"".join(store.get(key) for key in ("address", "host 1", "version 1"))
    assert SECRET.encode() not in said and store.num_keys() == 3


def test_a_rank_is_one_of_the_group_and_comes_once() -> None:
    server = hosts.listen_as_leader(0)
    place = server.getsockname()
    with Door(server, 3, SECRET.encode()) as opened, ThreadPoolExecutor() as pool:

        def come(rank: int) -> str:
            caller = socket.create_connection(place, PATIENCE_SECONDS)
            knocking = pool.submit(door.knock, caller, rank, SECRET.encode())
            while not knocking.done():
                opened.wait(0.01)
            error = knocking.exception()
            kept.append(caller)
            return "" if error is None else str(error)

        kept: list[socket.socket] = []
        assert come(1) == "" and opened.missing == 1
        for wrong in (0, 1, 3, 1 << 31):
            assert come(wrong) == "the other end has hung up"
        assert come(2) == "" and opened.missing == 0 and sorted(opened.calls) == [1, 2]
        for each in (*kept, *opened.calls.values()):
            each.close()


def test_a_rank_that_has_come_and_gone_is_noticed_while_another_one_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hosts.SECRET, SECRET)
    store = other_host(monkeypatch)
    store.set("version 2", __version__)
    store.set("host 2", "a third host")
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(accept, store, 3)
        meeting.connect(store, 1)[0].close()
        with pytest.raises(RankDiedError, match="rank 1 has come and gone"):
            leading.result(PATIENCE_SECONDS)
    with pytest.raises(ConfigError, match="rank 2 does not reach rank 0"):
        meeting.connect(store, 2)


@pytest.mark.parametrize("change", ["byte", "again", "left out", "short"])
def test_what_somebody_on_the_way_changes_ends_a_call(change: str) -> None:
    own, other = socket.socketpair()
    sends = SealedCall(own.detach(), b"k" * 32, b"l" * 32)
    plain = Call(other.detach())
    sends.say(b"first")
    sends.say(b"second")
    messages = [plain.recv_bytes(), plain.recv_bytes()]
    if change == "byte":
        messages[1] = b"S" + messages[1][1:]
    elif change == "again":
        messages[1] = messages[0]
    elif change == "left out":
        del messages[0]
    else:
        messages[1] = b"s"
    there, here = socket.socketpair()
    relay, receives = Call(there.detach()), SealedCall(here.detach(), b"l" * 32, b"k" * 32)
    for message in messages:
        relay.say(message)
    if change != "left out":
        assert receives.recv_bytes() == b"first"
    with pytest.raises(OSError, match="not as the other rank has sent it"):
        receives.recv_bytes()
    with pytest.raises(EOFError):
        relay.recv_bytes()
    sends.close()


def test_a_message_that_says_to_be_huge_is_not_awaited() -> None:
    own, other = socket.socketpair()
    receives = Call(own.detach())
    with other:
        other.sendall(b"\xff\xff\xff\xff" + (1 << 40).to_bytes(8, "big"))
        with pytest.raises(OSError):
            receives.recv_bytes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "ranks on several hosts need a secret: set MEGATRON_ASYNC_RANK_SECRET"),
        ({hosts.SECRET: ""}, "needs at least 16 characters"),
        ({hosts.SECRET: " " * 40}, "needs at least 16 characters"),
        ({hosts.SECRET: SECRET, hosts.SECRET_FILE: "file"}, "are both set"),
        ({hosts.SECRET_FILE: "nowhere"}, "nowhere: No such file"),
        ({hosts.SECRET_FILE: "readable"}, "no file that its owner alone may read"),
        ({hosts.SECRET_FILE: "pipe"}, "no file that its owner alone may read"),
        ({hosts.SECRET_FILE: "."}, "directory|no file that its owner"),
        ({hosts.SECRET_FILE: "short"}, "needs at least 16 characters"),
    ],
)
def test_a_secret_that_is_none_is_refused_before_anybody_is_listened_to(
    given: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode, content in (("readable", 0o644, SECRET), ("short", 0o600, "abc\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, value in given.items():
        path = str(tmp_path / value) if name == hosts.SECRET_FILE else value
        monkeypatch.setenv(name, path)
    store = other_host(monkeypatch)
    store.set("host 1", "a third host")
    with pytest.raises(ConfigError, match=says):
        accept(store)
    assert not store.check(["address"])
    store.set("address", json.dumps([["127.0.0.1", 1]]))
    with pytest.raises(ConfigError, match=says):
        meeting.connect(store, 1)


def test_a_secret_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(0o400)
    monkeypatch.setenv(hosts.SECRET_FILE, str(tmp_path / "secret"))
    assert hosts.given_secret() == SECRET.encode()


def test_rank_0_listens_where_the_user_says_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", name)
        with hosts.listen_as_leader(0) as server:
            assert server.getsockname()[0] in ("127.0.0.1", "::1")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=192\.0\.2\.77.*set MEGATRON_ASYNC_RANK_B"):
        hosts.listen_as_leader(0)
    monkeypatch.setenv(hosts.BIND, "127.0.0.1")
    with hosts.listen_as_leader(0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such host.invalid")
    assert hosts.address_of_leader() == "no such host.invalid"


def test_the_store_of_a_launcher_that_has_none_is_where_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = listened_at()
    store = meeting._serve_store(2)
    store.set("a", "b")
    assert store.get("a") == b"b"
    new = listened_at() - before
    assert {address for address, _ in new} == {"127.0.0.1"}


def listened_at() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


# --- on one host ------------------------------------------------------------------------------


def test_ranks_of_one_host_meet_where_this_user_alone_comes(common: Shared) -> None:
    store = dist.HashStore()
    before = listened_at()
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(meeting.accept_all, store, 2, lambda: common, no_check)
        own, told = meeting.connect(store, 1)
        found, together = leading.result(PATIENCE_SECONDS)
    assert together and told is not None and told.folder == common.folder
    assert os.path.samestat(os.fstat(told.ring), os.fstat(common.ring))
    assert not os.get_inheritable(told.ring) and listened_at() == before
    assert stat.S_IMODE(os.stat(common.folder).st_mode) == 0o700
    for each in Path(common.folder).iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    os.close(told.ring)
    own.close()
    found[1].close()


@pytest.mark.parametrize(
    "said",
    [
        b"", b"[]", b"{}", b"[1]", b'["relative/ranks"]', b'[["host", 0]]', b'[["host", 70000]]',
        b'[["host", "1"]]', b'[["host"]]', b"[null]", b"\xff", b"[" * 5000,
    ],
)  # fmt: skip
def test_what_the_store_says_of_rank_0_is_checked(said: bytes) -> None:
    store = dist.HashStore()
    store.set("address", said)
    with pytest.raises(ConfigError, match="the store of the ranks"):
        meeting.connect(store, 1)


def test_a_socket_that_others_reach_is_not_called(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        link = tmp_path / "link"
        link.symlink_to(folder)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/ranks")
            server.listen()
            server.settimeout(0)
            for path in (f"{folder}/ranks", f"{link}/ranks", "/nowhere/ranks"):
                store = dist.HashStore()
                store.set("address", json.dumps([path]))
                with pytest.raises(ConfigError, match=r"that this user alone may enter|No such"):
                    meeting.connect(store, 1)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_rank_0_that_has_gone_is_not_called_again_and_again(common: Shared) -> None:
    store = dist.HashStore()
    store.set("address", json.dumps([f"{common.folder}/ranks"]))
    with pytest.raises(ConfigError, match=r"rank 1 does not reach rank 0: .*No such file"):
        meeting.connect(store, 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{common.folder}/ranks")
    with pytest.raises(ConfigError, match=r"rank 1 does not reach rank 0: .*refused"):
        meeting.connect(store, 1)


def hand(sends: Callable[[socket.socket], object]) -> Shared:
    own, other = socket.socketpair()
    with own, other:
        sends(own)
        own.shutdown(socket.SHUT_WR)
        return Shared.take_from(other)


def with_ring(common: Shared, data: bytes) -> Callable[[socket.socket], object]:
    length = shared.SIZE.pack(len(data))

    def send(own: socket.socket) -> None:
        socket.send_fds(own, [length], [common.ring])
        own.sendall(data)

    return send


def test_what_rank_0_hands_over_is_checked(common: Shared, tmp_path: Path) -> None:
    with_others = tmp_path / "with others"
    with_others.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(common.folder)
    before = psutil.Process().num_fds()
    for folder in (with_others, link, tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").touch(0o600)
        data = json.dumps({"folder": str(folder)}).encode()
        with pytest.raises(ConfigError):
            hand(with_ring(common, data))
    for data in (b"{}", b"[]", b"x", b'{"folder": 1}', b'{"folder": "a/b"}', b"null"):
        with pytest.raises(IntegrityError, match="names no folder"):
            hand(with_ring(common, data))
    no_ring = shared.SIZE.pack(2) + b"{}"
    huge = shared.SIZE.pack((1 << 32) - 1)
    for wrong in (no_ring, huge, b"ab"):
        with pytest.raises(IntegrityError, match="no folder and no ring"):
            hand(lambda own, wrong=wrong: own.sendall(wrong))
    with pytest.raises(ConnectionError):
        hand(lambda own: None)
    with pytest.raises(ConnectionError):
        hand(lambda own: socket.send_fds(own, [shared.SIZE.pack(9)], [common.ring]))
    assert psutil.Process().num_fds() == before


def reader_of(ring: int, followers: int = 1) -> channel.RingReceiver:
    return channel.RingReceiver(ring, 0, followers, threading.Event(), 0.0)


def test_a_ring_that_is_none_is_refused(common: Shared) -> None:
    """It must be memory of this user's alone, and of a size that rings have."""
    end, other = os.pipe()
    with contextlib.ExitStack() as stack:

        def memory(size: int, mode: int = 0o600) -> int:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.truncate(size)
            os.fchmod(file.fileno(), mode)
            return file.fileno()

        reader_of(os.dup(common.ring))
        reader_of(os.dup(memory(channel.RING_BYTES + 8 * 3)))
        before = psutil.Process().num_fds()
        wrong = [memory(1 << 12, mode) for mode in (0o644, 0o620, 0o700)]
        wrong += [memory(channel.RING_BYTES + 8 * 3 + 1), memory(0), memory(8 * 4)]
        wrong += [stack.enter_context(open(os.devnull, "r+b")).fileno(), end]
        for each in wrong:
            with pytest.raises(IntegrityError, match="this user alone may open"):
                reader_of(os.dup(each))
        assert psutil.Process().num_fds() == before + len(wrong) - 1
    os.close(end)
    os.close(other)


def test_a_ring_has_no_name_and_one_owner() -> None:
    sender = channel.RingSender(1, lambda place: None, lambda: None, size=1 << 12)
    found = os.fstat(sender.descriptor)
    assert found.st_nlink == 0 and stat.S_IMODE(found.st_mode) == 0o600
    sender.close()
    sender.close()


def test_a_message_that_is_not_whole_is_not_read() -> None:
    sender = channel.RingSender(1, lambda place: None, lambda: None, size=1 << 10)
    reader = reader_of(os.dup(sender.descriptor))
    for length in (1 << 40, (1 << 64) - 1, 100):
        sender._ring.copy_in(0, channel.HEAD.pack(length))
        sender._ring.written[0] = 50
        with pytest.raises(IntegrityError, match="is not in the ring as a whole"):
            reader.receive()
    sender.close()


@pytest.mark.parametrize(("is_over", "status"), [(False, EXIT_ORPHAN), (True, 0)])
def test_a_line_answers_from_its_beginning_and_ends_its_process_with_rank_0(
    is_over: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 0 if rank 0 has ended the group before, whatever this rank has read of that."""
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", ends.put)
    own, other = socket.socketpair()
    rank_0 = Call(own.detach())
    rank_0.say(call.BEAT)
    rank_0.say(b"message")
    line = call.Line(Call(other.detach()))
    assert rank_0.recv_bytes() == call.BEAT
    assert line.messages.get(timeout=PATIENCE_SECONDS) == b"message"
    rank_0.say(call.WAKE)
    assert line.wakes.wait(PATIENCE_SECONDS)
    if is_over:
        rank_0.say(call.OVER)
    rank_0.close()
    assert ends.get(timeout=PATIENCE_SECONDS) == status

"""The events of the prefix cache, read as vLLM's subscribers read them, against the cache."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.block_hash import prefix_hashes
from megatron_async.cache.event_log import Cleared, EventLog, Removed, Stored
from megatron_async.cache.prefix_cache import LONG_ROOT, ROOT, PrefixCache
from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.kv_events import KVEventsConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.kv_events import KVEventPublisher, shown_events
from megatron_async.errors import ConfigError
from megatron_async.replicas.engine_replica import ReplicaSettings
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import hash_engine
from tests.support.patience import PATIENCE_SECONDS

BLOCK = 4


# --- vLLM's types: a batch is an array, and its events are maps -------------------------------


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Knows which blocks are cached, with the tokens that lead to each.

    Attributes:
        blocks: tokens of each block and of all before it, by hash.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.expected = 0
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def take(self, number: bytes, payload: bytes) -> Batch:
        assert int.from_bytes(number, "big") == self.expected
        self.expected += 1
        batch = self._decoder.decode(payload)
        for event in batch.events:
            self.apply(event)
        return batch

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del self.blocks[each]  # nothing unknown is removed
        else:
            size, parent = event.block_size, event.parent_block_hash
            for place, each in enumerate(event.block_hashes):
                assert each not in self.blocks
                before = [] if parent is None else self.blocks.get(parent, [])
                own = event.token_ids[place * size : (place + 1) * size]
                self.blocks[each] = [*before, *own]
                parent = each


# --- the cache --------------------------------------------------------------------------------


def test_the_cache_without_a_log_keeps_none() -> None:
    assert PrefixCache(BlockAllocator(4), BLOCK, enabled=True).log is None


def test_events_rebuild_the_cache_under_random_use() -> None:
    """Insertions, evictions in any order and resets: after each the log's blocks are those that a
    subscriber knows, and those below the root of the cache."""
    allocator = BlockAllocator(30)
    cache = PrefixCache(allocator, BLOCK, enabled=True)
    log = cache.log = EventLog(ROOT)
    subscriber, draw = Subscriber(), random.Random(1)
    seen: set[str] = set()
    for _ in range(600):
        if draw.random() < 0.01:
            cache.clear()
        root = LONG_ROOT if draw.random() < 0.1 else ROOT
        tokens = [draw.randrange(2) for _ in range(BLOCK * draw.randrange(1, 5))]
        blocks, node = cache.match(tokens, len(tokens), root)
        for block in blocks:
            allocator.share(block)
        for start in range(len(blocks) * BLOCK, len(tokens), BLOCK):
            block = allocator.allocate()
            blocks.append(block)
            node = cache.insert(node, tuple(tokens[start : start + BLOCK]), block)
        order = blocks if draw.random() < 0.5 else blocks[::-1]  # beginnings may go first
        allocator.release(order)
        encoded = msgspec.msgpack.encode(shown_events(log.take(), BLOCK, "CPU"))
        for event in msgspec.msgpack.decode(
            encoded, type=list[BlockStored | BlockRemoved | AllBlocksCleared]
        ):
            subscriber.apply(event)
            seen.add(type(event).__name__)
        assert set(subscriber.blocks) == log.blocks()
        if root == ROOT:
            assert set(prefix_hashes(tokens, BLOCK)) & log.blocks() or not blocks
    assert seen == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_blocks_in_a_row_are_one_event() -> None:
    events = [
        Cleared(),
        Stored(1, None, (5, 6)),
        Stored(2, 1, (7, 8)),
        Stored(3, 1, (7, 9)),
        Removed(3),
        Removed(2),
    ]
    stored = {"type": "BlockStored", "block_size": 2, "medium": "GPU"}
    stored |= {"lora_id": None, "lora_name": None}
    first = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5, 6, 7, 8]}
    second = {"block_hashes": [3], "parent_block_hash": 1, "token_ids": [7, 9]}
    assert shown_events(events, 2, "GPU") == [
        {"type": "AllBlocksCleared"},
        stored | first,
        stored | second,
        {"type": "BlockRemoved", "block_hashes": [3, 2], "medium": "GPU"},
    ]


def test_a_node_whose_parent_was_forgotten_first_is_counted() -> None:
    log = EventLog(ROOT)
    log.stored(ROOT, 1, (1,))
    log.stored(1, 2, (2,))
    log.removed(1)
    log.stored(ROOT, 3, (1,))
    log.stored(3, 4, (2,))  # again what node 2 stands for
    log.removed(2)
    events = log.take()
    assert [type(event) for event in events] == [Cleared, Stored, Stored, Removed, Stored]
    assert len(log.blocks()) == 2


# --- the engine -------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as opened:
        yield opened


def addresses(folder: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv",
    }


def engine_of(config: Any, **values: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {"max_requests": 3, "block_size_tokens": BLOCK, "block_count": 24}
    return hash_engine(1, **sizes, **values, kv_events_config=config)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(PATIENCE_SECONDS * 1000)
    return socket.recv_multipart()


def subscriber_of_the_docs() -> Any:
    page = (Path(__file__).parents[3] / "docs" / "replicas.md").read_text()
    (shown,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "CachedBlocks" in b)
    names: dict[str, Any] = {}
    exec(shown, names)
    return names["CachedBlocks"]


def test_the_subscriber_of_the_docs_knows_the_engines_cache(tmp_path: Path, context: Any) -> None:
    """Under eviction and reset, although it comes late. The replay socket has all from the
    beginning, in vLLM's types."""
    given = addresses(tmp_path)
    params = SamplingParams(num_tokens_to_generate=9, temperature=0.0, termination_id=-1)
    with engine_of(given) as engine:
        log = engine.scheduler.table.prefixes.log
        assert log is not None
        for round_ in range(6):
            prompts = [[7, 7, 7, 7, round_, i, 1, 2, 3] for i in range(5)]
            engine.generate(prompts, params)
            if round_ == 3:
                engine.reset_prefix_cache()
        late = subscriber_of_the_docs()(given["endpoint"], given["replay_endpoint"], "kv")
        end = time.monotonic() + PATIENCE_SECONDS
        number = 0
        while not late.next or late.blocks != log.blocks():
            assert time.monotonic() < end
            if late.live.poll(20):
                late.read()
            else:  # it may not have been there yet, or all was sent
                engine.generate([[9] * (8 + number % 20)], params)
                number += 1
        assert log.blocks()

        replay = context.socket(zmq.DEALER)
        replay.connect(given["replay_endpoint"])
        replay.send_multipart((b"", bytes(8)))
        every = Subscriber()
        while (frames := receive(replay))[3]:
            assert frames[:2] == [b"", b"kv"]
            batch = every.take(*frames[2:])
            assert batch.data_parallel_rank == 0 and batch.ts <= time.time()
        assert frames[2] == (-1).to_bytes(8, "big", signed=True)
        assert set(every.blocks) == late.blocks and every.expected == late.next
        for block, tokens in every.blocks.items():
            assert prefix_hashes(tokens, BLOCK)[-1] == block
        for each in (late.live, late.past, replay):
            each.close(0)


def test_a_replay_is_whole_for_a_client_that_reads_late(tmp_path: Path, context: Any) -> None:
    """More messages than two sockets and the system's buffer hold."""
    config = KVEventsConfig(**addresses(tmp_path))
    publisher = KVEventPublisher(config, EventLog(ROOT), BLOCK, "CPU")
    replay = context.socket(zmq.DEALER)
    try:
        numbers = [number.to_bytes(8, "big") for number in range(100, 3100)]
        publisher._past.extend((number, bytes(1000)) for number in numbers)
        replay.connect(config.replay_endpoint)
        replay.send_multipart((b"", numbers[0]))
        assert replay.poll(PATIENCE_SECONDS * 1000)
        publisher._closing.set()
        publisher._thread.join()  # so all has been sent before the first is read
        got = []
        while (frames := receive(replay))[3]:
            got.append(frames[2])
        assert got == numbers
    finally:
        publisher.close()
        replay.close(0)


def test_nothing_is_published_unless_asked() -> None:
    for config in (None, {}, {"enable_kv_cache_events": True, "publisher": "null"}):
        with engine_of(config) as engine:
            assert engine.scheduler.table.prefixes.log is None


def test_each_replica_has_addresses_of_its_own() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/replay")
    third = config.of_rank(3)
    assert third.endpoint == "tcp://*:5560" and third.replay_endpoint == "ipc:///tmp/replay_dp3"
    assert third.data_parallel_rank == 3 and config.of_rank(0) == config


@pytest.mark.parametrize("ports", [(5557, 5558), (5560, 5557), (5557, 5657), (9000, 9002)])
def test_ports_of_replicas_never_meet(ports: tuple[int, int]) -> None:
    """The third of three could not start where the replay port was the next one."""
    config = KVEventsConfig(
        endpoint=f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}"
    )
    used = []
    for rank in range(300):
        of_rank = config.of_rank(rank)
        assert of_rank.replay_endpoint is not None
        own = [int(each.rpartition(":")[2]) for each in (of_rank.endpoint, of_rank.replay_endpoint)]
        if rank < abs(ports[1] - ports[0]):  # as vLLM's are
            assert own == [ports[0] + rank, ports[1] + rank]
        used += own
    assert len(set(used)) == 600


def test_without_a_port_left_it_is_said_for_whom() -> None:
    config = KVEventsConfig(endpoint="tcp://*:65530")
    assert config.of_rank(5).endpoint == "tcp://*:65535"
    with pytest.raises(ConfigError, match=r"no port .* lower ones, for the engine of rank 6"):
        config.of_rank(6)
    settings = ReplicaSettings(model="m", config={"kv_events_config": {"endpoint": "tcp://*:1"}})
    assert settings.config_of(3)["kv_events_config"]["endpoint"] == "tcp://*:4"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpont": "tcp://*:1"}, "has no 'endpont'"),
        ({"endpoint": "5557"}, "endpoint='5557' must be an address"),
        ({"endpoint": "tcp://*"}, "has no port"),
        ({"publisher": "kafka"}, "publisher='kafka' must be null or zmq"),
        ({"buffer_steps": 0}, "buffer_steps=0 must be an integer of at least 1"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1 must be true or false"),
        ({"replay_endpoint": "tcp://*:5557"}, "choose another"),
        ({"endpoint": "tcp://*:99999"}, "no port from 1 to 65535"),
        ({"replay_endpoint": "tcp://*:0"}, "no port from 1 to 65535"),
        ({"endpoint": "ipc://\ud800"}, "must be text that UTF-8 can write"),
        ({"topic": "\ud800"}, "must be text that UTF-8 can write"),
        ({"hwm": 2**31}, "must be at most 2147483647"),
        ({"buffer_steps": 10**30}, "must be at most 2147483647"),
        ({"data_parallel_rank": 2**70}, "must be at most 2147483647"),
        ("tcp://*:5557", "must be a JSON object"),
    ],
)
def test_wrong_values_are_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config") as caught:
        EngineConfig(kv_events_config=given)
    assert said in str(caught.value)


def test_what_cannot_be_published_is_an_error(tmp_path: Path) -> None:
    given = addresses(tmp_path)
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        engine_of(given, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="cannot be used"):
        engine_of({**given, "endpoint": f"ipc://{tmp_path}/no/such/folder"})


def test_events_that_cannot_be_sent_are_lost_with_one_warning(
    context: zmq.Context[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(ROOT)
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path / 'lost'}")
    publisher = KVEventPublisher(config, log, 4, "CPU")
    publisher._closing.set()
    publisher._thread.join()
    publisher._publisher.close()
    before = publisher._sequence
    for _ in range(3):
        log.cleared()
        publisher._send()
    assert publisher._sequence == before + 3 and not log.take()
    assert (
        [r.message for r in caplog.records].count(
            "kv_events_config: events cannot be sent: Socket operation on non-socket"
        )
        == len(caplog.records)
        == 1
    )
    publisher.close()

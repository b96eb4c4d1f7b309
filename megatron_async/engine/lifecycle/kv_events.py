"""The events of the prefix cache on a ZeroMQ socket, in the format that vLLM publishes.

A message is three frames: topic, sequence number (8 bytes, big-endian, from 0), and a batch in
msgpack, ``[time in seconds, events, data-parallel rank]``. An event is a map with its name under
``type``, as vLLM has it since June 2026 (vllm-project/vllm#42892); before that it was an array. A
replay socket is asked with one frame, the first number wanted. It answers with the kept messages
from there on, as they were (#45177), and at the end with the number -1 and no batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from megatron_async.cache.event_log import CacheEvent, Cleared, EventLog, Removed, Stored
from megatron_async.cache.prefix_cache import ROOT, PrefixCache
from megatron_async.codec import encode
from megatron_async.config.kv_events import NAME, KVEventsConfig
from megatron_async.errors import ConfigError

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.01
"""Between two looks for events: what has happened meanwhile is one batch."""
CLOSE_MILLISECONDS = 200
"""For the last batches to leave."""
END = (-1).to_bytes(8, "big", signed=True)


def publish_kv_events(
    config: KVEventsConfig | None,
    prefixes: PrefixCache,
    block_size: int,
    medium: str,
    rank: int = 0,
) -> KVEventPublisher | None:
    """Begin to publish what becomes of ``prefixes``; None where nobody asks for it.

    Raises:
        ConfigError: there is nothing to publish, or no way to.
    """
    if config is None or not config.is_on:
        return None
    if not prefixes.enabled:
        raise ConfigError(f"{NAME} needs enable_prefix_caching; turn it on")
    publisher = KVEventPublisher(config, EventLog(ROOT), block_size, medium)
    prefixes.log = publisher.log
    return publisher


class KVEventPublisher:
    """A thread that sends the events of a log.

    Args:
        medium: where the blocks are, "GPU" or "CPU".

    Attributes:
        log: what is sent.

    Raises:
        ConfigError: pyzmq is missing, or an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, log: EventLog, block_size: int, medium: str) -> None:
        zmq = _zmq()
        self.log = log
        self._block_size = block_size
        self._medium = medium
        self._rank = config.data_parallel_rank
        self._topic = config.topic.encode()
        self._sequence = 0
        self._warned = False
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._error = zmq.ZMQError
        self._context = zmq.Context()
        self._closing = threading.Event()
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, config.hwm)
            self._publisher.setsockopt(zmq.LINGER, CLOSE_MILLISECONDS)
            _open(self._publisher, "endpoint", config.endpoint, zmq)
            self._replay: Any = None
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, 0)  # a limit would drop batches, and the end
                self._replay.setsockopt(zmq.LINGER, CLOSE_MILLISECONDS)
                _open(self._replay, "replay_endpoint", config.replay_endpoint, zmq, binds=True)
        except BaseException:
            self._context.destroy(0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, and end."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(CLOSE_MILLISECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._send()
            if self._replay is None:
                self._closing.wait(BATCH_SECONDS)
            elif self._replay.poll(BATCH_SECONDS * 1000):
                self._answer()
        self._send()

    def _send(self) -> None:
        events = self.log.take()
        if not events:
            return
        number = self._sequence.to_bytes(8, "big")
        shown = shown_events(events, self._block_size, self._medium)
        batch = encode([time.time(), shown, self._rank])
        try:
            self._publisher.send_multipart((self._topic, number, batch))
        except self._error as error:  # the batch is lost, as its number tells subscribers
            if not self._warned:
                logger.warning("%s: events cannot be sent: %s", NAME, error.strerror)
            self._warned = True
        self._past.append((number, batch))
        self._sequence += 1

    def _answer(self) -> None:
        """Send past batches to a client that asks. A client that is not there any more gets
        none."""
        *envelope, first = self._replay.recv_multipart()
        if len(envelope) != 2 or len(first) != 8:
            return
        try:
            for number, batch in list(self._past):
                if number >= first:  # of the same length, so that they compare as numbers do
                    self._replay.send_multipart((*envelope, self._topic, number, batch))
            self._replay.send_multipart((*envelope, b"", END, b""))
        except self._error:
            return


def shown_events(
    events: Sequence[CacheEvent], block_size: int, medium: str
) -> list[dict[str, Any]]:
    """Events as vLLM's maps. Blocks of which each follows the one before are one event, and so are
    those that are removed together."""
    shown: list[dict[str, Any]] = []
    for event in events:
        last: dict[str, Any] = shown[-1] if shown else {"type": ""}
        match event:
            case Stored(block, parent, tokens):
                if last["type"] == "BlockStored" and last["block_hashes"][-1] == parent:
                    last["block_hashes"].append(block)
                    last["token_ids"].extend(tokens)
                else:
                    shown.append(_stored(event, block_size, medium))
            case Removed(block):
                if last["type"] == "BlockRemoved":
                    last["block_hashes"].append(block)
                else:
                    removed = {"block_hashes": [block], "medium": medium}
                    shown.append({"type": "BlockRemoved", **removed})
            case Cleared():
                shown.append({"type": "AllBlocksCleared"})
    return shown


def _stored(event: Stored, block_size: int, medium: str) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [event.block],
        "parent_block_hash": event.parent,
        "token_ids": list(event.tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def _open(opened: Any, name: str, address: str, zmq: ModuleType, *, binds: bool = False) -> None:
    binds = binds or "*" in address or "::" in address or not address.startswith("tcp://")
    try:
        opened.bind(address) if binds else opened.connect(address)
    except zmq.ZMQError as error:
        said = f"{NAME}: {name}={address!r} cannot be used: {error.strerror}; choose another"
        raise ConfigError(said) from None


def _zmq() -> ModuleType:
    try:
        import zmq
    except ImportError:
        raise ConfigError(f"{NAME} needs pyzmq; install megatron-async[server]") from None
    return zmq

"""Whether and where the events of the prefix cache are published, as vLLM's options say it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_async.errors import ConfigError, shown

PUBLISHERS = ("null", "zmq")
NAME = "kv_events_config"
MAX_INTEGER = 2**31 - 1
"""ZeroMQ's integers are C's."""
_PORT = re.compile(r"(tcp://.+:)(\d{1,5})")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEventsConfig:
    """Names and defaults are those of vLLM's ``KVEventsConfig``.

    Attributes:
        enable_kv_cache_events: publish at all.
        publisher: "zmq", or "null" for nobody; None is "zmq" where events are enabled.
        endpoint: of a PUB socket. It is bound if it has ``*`` or ``::``, or is ``ipc://`` or
            ``inproc://``, and connected else.
        replay_endpoint: of a ROUTER socket that sends past batches again; None for none.
        buffer_steps: past batches that are kept for it.
        hwm: batches that wait for a subscriber that does not read; further ones are lost to it.
        max_queue_size: is vLLM's, and changes nothing: what happens is sent in batches, however
            much it is.
        topic: of all messages.
        data_parallel_rank: in all batches; vLLM has it elsewhere.

    Raises:
        ConfigError: a value is wrong.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            self._refuse("enable_kv_cache_events", "must be true or false")
        if self.publisher is not None and self.publisher not in PUBLISHERS:
            self._refuse("publisher", f"must be {' or '.join(PUBLISHERS)}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None and name == "replay_endpoint":
                continue
            if not isinstance(value, str) or not re.match(r"(tcp|ipc|inproc)://.", value):
                self._refuse(name, "must be an address such as tcp://*:5557")
            self._check_encodable(name)
            if value.startswith("tcp://") and not 0 < _port(value) < 65536:
                self._refuse(name, "has no port from 1 to 65535; give one, as in tcp://*:5557")
        for name in ("buffer_steps", "hwm", "max_queue_size", "data_parallel_rank"):
            value, least = getattr(self, name), int(name != "data_parallel_rank")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self._refuse(name, f"must be an integer of at least {least}")
            if value > MAX_INTEGER:
                self._refuse(name, f"must be at most {MAX_INTEGER}")
        if not isinstance(self.topic, str):
            self._refuse("topic", "must be a text")
        self._check_encodable("topic")
        if self.replay_endpoint == self.endpoint:
            self._refuse("replay_endpoint", "is the endpoint of the events; choose another")

    @property
    def is_on(self) -> bool:
        """Events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_rank(self, rank: int) -> KVEventsConfig:
        """Return the settings of one of several engines: its ports are ``rank`` higher, and other
        addresses end with the rank, as vLLM's are by data-parallel ranks. Two ports that are ``d``
        apart would meet at rank ``d``: from there on they are ``2 d`` higher for each ``d`` ranks.

        Raises:
            ConfigError: a port would be above 65535.
        """
        extra = self._extra(rank)
        try:
            return dataclasses.replace(
                self,
                endpoint=_moved(self.endpoint, rank, extra),
                replay_endpoint=self.replay_endpoint and _moved(self.replay_endpoint, rank, extra),
                data_parallel_rank=rank,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}, or lower ones, for the engine of rank {rank}") from None

    def _extra(self, rank: int) -> int:
        """The number by which the ports of a rank are higher."""
        apart = abs(_port(self.endpoint) - _port(self.replay_endpoint or ""))
        if not (_port(self.endpoint) and _port(self.replay_endpoint or "") and apart):
            return rank
        return rank // apart * 2 * apart + rank % apart

    def _check_encodable(self, name: str) -> None:
        try:
            getattr(self, name).encode()
        except UnicodeEncodeError:
            self._refuse(name, "must be text that UTF-8 can write")

    def _refuse(self, name: str, said: str) -> None:
        raise ConfigError(f"{NAME}: {name}={shown(getattr(self, name))} {said}")


def kv_events_config(given: object) -> KVEventsConfig | None:
    """``given`` as the fields of a mapping, or as it is; None is None.

    Raises:
        ConfigError: a field is not known, or has a wrong value.
    """
    if given is None or isinstance(given, KVEventsConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{NAME}={shown(given)} must be a JSON object, or a KVEventsConfig")
    known = [field.name for field in dataclasses.fields(KVEventsConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"{NAME} has no {shown(name)}; it has {', '.join(known)}")
    return KVEventsConfig(**given)


def _port(address: str) -> int:
    """0 if there is none."""
    found = _PORT.fullmatch(address)
    return 0 if found is None else int(found[2])


def _moved(address: str, rank: int, extra: int) -> str:
    if not rank:
        return address
    found = _PORT.fullmatch(address)
    return f"{address}_dp{rank}" if found is None else f"{found[1]}{int(found[2]) + extra}"

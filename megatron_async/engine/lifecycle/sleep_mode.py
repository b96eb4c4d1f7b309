"""Sleep: an engine gives its GPU to somebody else, such as a trainer, and takes it back.

Memory comes back at the same addresses (``device/releasable.py``), so captured graphs are kept, and
waking up costs the copy of the weights and zeros in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_async.device.protocol import Device
from megatron_async.device.releasable import Region
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import CacheTooLargeError, ConfigError, RequestError, shown

if TYPE_CHECKING:
    from megatron_async.graph_audit.audit import GraphAudit

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
LEVELS = (1, 2)


class Memory:
    """What an engine can give back, on this rank.

    Args:
        kv_caches: all of the engine's, until they are freed.
        weights: the model's, of which no other engine makes use.
    """

    def __init__(self, kv_caches: list[Region], weights: Region | None) -> None:
        self._kv_caches = kv_caches
        self._weights = weights

    @property
    def can_sleep(self) -> bool:
        """Whether it was built so that it can be given back."""
        return self._weights is not None and bool(self._kv_caches)

    def release(self, *, keep_weights: bool) -> None:
        """Give all of it back; nothing is in flight."""
        for cache in self._kv_caches:
            cache.release(keep=False)
        if self._weights is not None:
            self._weights.release(keep=keep_weights)

    def restore(self, tag: str) -> None:
        """Take a part back, unless it is there.

        Raises:
            CacheTooLargeError: somebody else has the memory; it can be tried again.
        """
        if tag == KV_CACHE:
            for cache in self._kv_caches:
                cache.restore(zeros=True)
        elif self._weights is not None:
            self._weights.restore()


class SleepMode:
    """What of one engine's memory is there. Its methods are called between two steps, as a step.

    Args:
        memory: of this rank, or of all (``rank_group.MemoryOfRanks``).
        recover: called with an error that changes nothing.
        audit: of the engine's graphs; None for none.

    Attributes:
        asleep: tags of what is not there.
        lost_weights: their memory is there and their values are gone, until all are new.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        device: Device,
        memory: Memory,
        recover: Callable[[BaseException], None],
        audit: GraphAudit | None = None,
    ) -> None:
        self.asleep: frozenset[str] = frozenset()
        self.lost_weights = False
        self._loop = loop
        self._device = device
        self._memory = memory
        self._recover = recover
        self._audit = audit
        self._was_suspended = False

    @property
    def is_sleeping(self) -> bool:
        """Nothing is launched until :meth:`wake_up`, or new weights."""
        return bool(self.asleep) or self.lost_weights

    @property
    def is_possible(self) -> bool:
        """The engine was built for it."""
        return self._memory.can_sleep

    def check_possible(self) -> None:
        """Raises ConfigError unless the engine was built for it."""
        if not self.is_possible:
            raise ConfigError(
                "the engine cannot sleep; build it with EngineConfig(enable_sleep_mode=True), or "
                "serve with --enable-sleep-mode"
            )

    def check_awake(self) -> None:
        """Raises RequestError while it sleeps."""
        reason = self._why_asleep()
        if reason is not None:
            raise RequestError(reason)

    def refuse_asleep(self) -> None:
        """:meth:`check_awake` as the beginning of a step: another thread may have sent the engine
        to sleep until then."""
        try:
            self.check_awake()
        except RequestError as error:
            self._recover(error)
            raise

    def warn_of_waiting(self, call: str) -> None:
        """Log that ``call`` returns when another thread has woken the engine up, if it sleeps."""
        reason = self._why_asleep()
        if reason is not None:
            logger.warning("%s waits for another thread: %s", call, reason)

    def _why_asleep(self) -> str | None:
        if self.asleep:
            return "the engine sleeps; wake_up() first"
        if self.lost_weights:
            return "the weights were discarded; give new ones with update_weights"
        return None

    def check_weights(self) -> None:
        """Raises RequestError while there is no memory for weights."""
        if WEIGHTS in self.asleep:
            raise RequestError(f"the engine's weights sleep; wake_up([{WEIGHTS!r}]) first")

    def sleep(self, level: int) -> None:
        """Commit what is in flight, give up what running requests have in the cache, and release
        the memory; what sleeps already stays so."""
        if not self.is_sleeping:
            self._was_suspended = self._loop.suspended
        self._loop.suspend()
        self._loop.give_up_cache()
        self._device.synchronize()
        self.lost_weights |= level == 2
        if self._audit is not None and WEIGHTS not in self.asleep:
            self._audit.keep_digests()
        if self._audit is not None and self.lost_weights:
            self._audit.forget_digests()
        self._memory.release(keep_weights=not self.lost_weights)
        self.asleep = frozenset(TAGS)
        self.audit("a sleep")

    def audit(self, event: str, *, caches_woke: bool = False) -> None:
        """Raises IntegrityError if the engine's graphs do not fit it any more."""
        if self._audit is not None:
            self._device.synchronize()
            self._audit.check(event, asleep=self.asleep, caches_woke=caches_woke)

    def suspend(self) -> None:
        """Launch nothing until the loop is resumed, also after :meth:`wake_up`."""
        self._loop.suspend()
        self._was_suspended = True

    def wake_up(self, tags: frozenset[str]) -> None:
        """Take memory back; with all there, go on, unless the engine was suspended before.

        Raises:
            CacheTooLargeError: somebody else has the memory; it can be tried again.
        """
        caches_wake = KV_CACHE in tags & self.asleep
        try:
            self._restore(tags)
        except CacheTooLargeError as error:
            self._recover(error)
            raise
        self.audit("a wake-up", caches_woke=caches_wake)
        self._go_on()

    def _restore(self, tags: frozenset[str]) -> None:
        for tag in TAGS:
            if tag in tags & self.asleep:
                self._memory.restore(tag)
                self.asleep -= {tag}

    def weights_replaced(self) -> None:
        """All weights are new."""
        if self._audit is not None:
            self._audit.forget_digests()
        self.audit("new weights")
        if self.lost_weights:
            self.lost_weights = False
            self._go_on()

    def _go_on(self) -> None:
        if not self.is_sleeping and self._loop.suspended and not self._was_suspended:
            self._loop.resume()


def tags_of(tags: Iterable[str] | None) -> frozenset[str]:
    """Checked tags; None is all."""
    if isinstance(tags, str):
        tags = [tags]
    if tags is None:
        return frozenset(TAGS)
    try:
        found = list(tags)
    except TypeError:
        found = [shown(tags)]
    if not all(isinstance(tag, str) and tag in TAGS for tag in found):
        raise RequestError(f"tags={shown(found)} must be of {', '.join(TAGS)}")
    return frozenset(found)


def checked_level(level: int) -> int:
    """Raises RequestError for a level that there is not."""
    if type(level) is not int or level not in LEVELS:
        raise RequestError(
            f"level={shown(level)} must be 1, weights are kept in the host's memory, or 2, they "
            "are discarded"
        )
    return level

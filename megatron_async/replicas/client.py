"""All replicas, for the coroutines of a front end: as one ``EngineClient``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping
from typing import Any

import msgspec

from megatron_async.errors import (
    BusyError,
    ConfigError,
    EngineDeadError,
    EngineGivenUpError,
    MegatronAsyncError,
    QueueFullError,
    ReplicaDiedError,
    RequestError,
)
from megatron_async.replicas.replica import Replica, sum_of
from megatron_async.replicas.roster import Directory, Listing
from megatron_async.replicas.routing import PrefixRouter
from megatron_async.serving.http.changes import Changes
from megatron_async.serving.messages import (
    Control,
    EngineInfo,
    Generate,
    NotStarted,
    Output,
    Snapshot,
)

logger = logging.getLogger(__name__)

DEFAULT_RETRIES = 1
ASK_AGAIN_SECONDS = 0.5
"""After the directory could not be asked."""
UPDATE_SECONDS = 600.0
"""For a replica to come back and take new weights; then it is replaced."""
OF_ONE = frozenset({"info", "live", "profile"})
"""Controls that one replica answers; ``weights`` goes from one to the next, others to all."""


class ReplicasClient:
    """Gives requests of one front end to replicas, and hands out what they bring. What the front
    end needs of it is the same as of an
    :class:`~megatron_async.serving.front_end.engine_client.EngineClient`
    (:class:`~megatron_async.serving.front_end.protocols.Client`), and so is what belongs where.

    Args:
        directory: which replicas there are.
        retries: times that a request of which nothing was sent yet is tried again when its replica
            has died; 0 fails it at once. Of one that has brought tokens the error says whether
            it may be sent once more. A replica that is full is always passed over.
        router: which replica gets what; None for one of the default.

    Attributes:
        retried: requests that were tried again because their replica had died.

    Raises:
        ConfigError: ``retries`` is below 0.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        retries: int = DEFAULT_RETRIES,
        router: PrefixRouter | None = None,
    ) -> None:
        if retries < 0:
            raise ConfigError(f"retries={retries} must be at least 0")
        self.retried = 0
        self._directory = directory
        self._retries = retries
        self._router = PrefixRouter() if router is None else router
        self._replicas: dict[str, Replica] = {}
        self._version = 0
        self._taken_over = (0, False)
        self._has_been_ready = False
        self._given_up: str | None = None
        self._failure: NotStarted | None = None
        self._changes = Changes()
        """Changes of the replicas: all waiters look again at each."""
        self._running: dict[int, tuple[Replica, int]] = {}
        self._aborted: set[int] = set()
        """Running requests that were aborted: they are not tried again when their replica dies,
        which may not have heard of it."""
        self._changing_weights = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- its life -----------------------------------------------------------------------------

    async def connect(self) -> None:
        """Begin to look for replicas; :meth:`ready` waits for one."""
        self._follower = asyncio.create_task(self._follow(), name="replicas")

    async def aclose(self) -> None:
        """Abort what is in progress and leave."""
        tasks = [*self._tasks, *([] if self._follower is None else [self._follower])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(replica.client.aclose() for replica in self._replicas.values()))

    async def ready(self) -> EngineInfo:
        """Wait until a replica serves; what it serves.

        Raises:
            EngineGivenUpError: none ever will.
        """
        await self._changes.until(lambda: self._given_up is not None or self._usable())
        if self._given_up is not None:
            raise EngineGivenUpError(self._given_up)
        return await self._usable()[0].client.info()

    def give_up(self, reason: str) -> None:
        """There will be no replicas any more."""
        self._given_up = reason
        for replica in self._replicas.values():
            replica.client.give_up(reason)
        self._changes.tell()

    # --- what they are ------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state, as an ``EngineClient`` has it: "ready" while any replica is."""
        if self._usable():
            return "ready"
        return "dead" if self._has_been_ready or self._given_up else "starting"

    @property
    def snapshots(self) -> dict[str, Snapshot]:
        """The last of each replica, by name."""
        found = {name: replica.client.snapshot for name, replica in self._replicas.items()}
        return {name: snapshot for name, snapshot in found.items() if snapshot is not None}

    @property
    def snapshot(self) -> Snapshot | None:
        """The sum of all; None where none has sent one."""
        each = list(self.snapshots.values())
        return sum_of(each) if each else None

    @property
    def states(self) -> dict[str, bool]:
        """Whether each replica serves, by name."""
        return {name: replica.is_ready for name, replica in self._replicas.items()}

    async def info(self) -> EngineInfo:
        """What the replicas serve, with the requests and blocks of all that serve; raises
        EngineDeadError where there has been none yet."""
        found = self._usable() or [r for r in self._replicas.values() if not r.leaves]
        known: list[EngineInfo] = []
        for replica in found:
            with contextlib.suppress(EngineDeadError):
                known.append(await replica.client.info())
        if not known:
            raise EngineDeadError("no replica has started yet")
        return msgspec.structs.replace(
            known[0],
            max_requests=sum(info.max_requests for info in known),
            block_count=sum(info.block_count for info in known),
        )

    def check_ready(self) -> None:
        """Raises EngineDeadError, which says why, while no request can be served."""
        if self._usable():
            return
        if self._given_up is not None:
            raise EngineGivenUpError(self._given_up)
        for replica in self._replicas.values():
            if not replica.leaves:
                replica.client.check_ready()  # says what is wrong with this one
        raise EngineDeadError("no replica serves now; try again later")

    def _usable(self) -> list[Replica]:
        found = [replica for replica in self._replicas.values() if replica.is_ready]
        self._has_been_ready |= bool(found)
        return found

    # --- requests -----------------------------------------------------------------------------

    async def generate(self, request: Generate) -> AsyncGenerator[Output, None]:
        """Do as ``EngineClient.generate``, by one of the replicas.

        Raises:
            RequestError: the request cannot be served.
            QueueFullError: as many wait as may, at every replica.
            ReplicaDiedError: that of the request has died.
            EngineDeadError: no replica serves now.
        """
        tried: set[str] = set()
        deaths, sent = request.deaths, False
        self.retried += bool(deaths)
        try:
            while True:
                replica = self._choose(request, tried)
                try:
                    async with contextlib.aclosing(self._generate(replica, request)) as outputs:
                        async for output in outputs:
                            if sent and not output.token_ids and output.finish_reason is None:
                                continue  # a second replica has taken it
                            yield output
                            sent = True
                    return
                except QueueFullError:
                    tried.add(replica.name)
                    if sent or not self._may_try(request, tried):
                        raise
                except EngineDeadError as error:
                    tried.add(replica.name)
                    deaths += 1
                    may = deaths <= self._retries and self._may_try(request, tried)
                    if sent or not may:
                        said = f"the replica that served this request has died ({error})"
                        raise ReplicaDiedError(
                            f"{said}; try again later", deaths=deaths, may_try_again=may
                        ) from error
                    self.retried += 1
                    logger.warning("replica %s has died; a request is tried again", replica.name)
        finally:
            self._aborted.discard(request.request_id)

    def _may_try(self, request: Generate, tried: Collection[str]) -> bool:
        return request.request_id not in self._aborted and bool(self._candidates(tried))

    async def abort(self, request_id: int) -> None:
        """Do as ``EngineClient.abort``."""
        if request_id in self._running:
            self._aborted.add(request_id)
            replica, own_id = self._running[request_id]
            await replica.client.abort(own_id)

    def _candidates(self, tried: Collection[str]) -> dict[str, int]:
        """The loads of all that may get a request: those that stall only where all do."""
        usable = [replica for replica in self._usable() if replica.name not in tried]
        awake = [replica for replica in usable if not replica.is_stalled]
        return {replica.name: replica.load for replica in awake or usable}

    def _choose(self, request: Generate, tried: Collection[str]) -> Replica:
        loads = self._candidates(tried)
        if not loads:
            self.check_ready()
            raise EngineDeadError("no replica serves now; try again later")
        salt = request.params["cache_salt"]
        return self._replicas[self._router.choose(request.prompt, loads, salt)]

    async def _generate(self, replica: Replica, request: Generate) -> AsyncGenerator[Output, None]:
        count = request.params["best_of"] or request.params["n"]
        sequences = count if isinstance(count, int) else 1  # the engine refuses what is none
        client = replica.client
        own = msgspec.structs.replace(request, request_id=client.next_request_id())
        self._running[request.request_id] = replica, own.request_id
        try:
            with replica.carries(sequences):
                async with contextlib.aclosing(client.generate(own)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            del self._running[request.request_id]

    # --- controls -----------------------------------------------------------------------------

    async def command(self, control: Control) -> dict[str, Any]:
        """Ask something of all replicas, or for what is one engine's of the first; raises as
        ``EngineClient.command``. New weights go to one replica after the other, each of which goes
        on with its requests, so that none is lost."""
        if control.name == "weights":
            return await self._change_weights(control.arguments)
        self.check_ready()
        replicas = self._usable()
        if control.name in OF_ONE:
            if control.name == "profile" and replicas[0].endpoint.network is not None:
                raise RequestError("a profile can be had of replicas on this host alone")
            return await replicas[0].command(control.name, **control.arguments)
        asked = (replica.command(control.name, **control.arguments) for replica in replicas)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if control.name == "reset_prefix_cache":
            self._router.index.clear()
        good = [answer for answer in answers if isinstance(answer, dict)]
        for answer in answers:
            # One that has died meanwhile comes back with what the others know.
            is_serious = not isinstance(answer, EngineDeadError) or not good
            if isinstance(answer, BaseException) and is_serious:
                raise answer
        await self._keep(replicas[answers.index(good[0])])
        return good[0]

    async def _change_weights(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self._changing_weights.locked():
            raise BusyError("the weights are being changed already; wait for it")
        async with self._changing_weights:
            first = self._first_to_change()
            answer = await first.command("weights", **arguments)
            # From now on no replica joins without them, so that those of the listing are all.
            listing = await self._keep(first)
            await self._take_over(listing)
            failed: list[str] = []
            for member in listing.members:
                replica = self._replicas.get(member.name)
                if replica is not None and replica is not first and not replica.leaves:
                    failed += await self._update(replica, arguments)
            self._router.index.clear()
            if failed:
                count = len(listing.members) - len(failed)
                said = f"{count} of {len(listing.members)} replicas have the new weights; the "
                raise RequestError(f"{said}others are replaced: {'; '.join(failed)}")
            return answer

    def _first_to_change(self) -> Replica:
        """One that serves, else one that would with other weights; raises EngineDeadError."""
        found = self._usable() or [
            replica
            for replica in self._replicas.values()
            if replica.client.state == "ready" and not replica.leaves
        ]
        if not found:
            self.check_ready()
            raise EngineDeadError("no replica serves now; try again later")
        return found[0]

    async def _update(self, replica: Replica, arguments: Mapping[str, Any]) -> list[str]:
        """Bring new weights to one more replica; why it has not taken them. It is then replaced by
        one that begins with them."""
        try:
            async with asyncio.timeout(UPDATE_SECONDS):
                client = replica.client  # whose engine may be started again
                await self._changes.until(lambda: client.state == "ready" or replica.leaves)
                if replica.leaves:
                    return []
                await replica.command("weights", **arguments)
            return []
        except TimeoutError:
            said = f"no answer in {UPDATE_SECONDS:g} seconds"
        except MegatronAsyncError as error:
            said = str(error)
        await self._directory.expel(replica.name)
        return [f"{replica.name}: {said}"]

    async def _keep(self, replica: Replica) -> Listing:
        return await self._directory.keep((await replica.client.info()).kept)

    # --- which there are ----------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                await self._take_over(await self._directory.changed(self._version))
            except Exception as error:
                logger.warning("the replicas are not known: %s", error)
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def _take_over(self, listing: Listing) -> None:
        """See the members of a listing as they are."""
        if (listing.version, listing.is_settled) == self._taken_over:
            return
        if listing.failure is not None and listing.failure != self._failure:
            logger.warning("a replica cannot start: %s", listing.failure.message)
        self._failure = listing.failure
        self._version = listing.version
        self._taken_over = listing.version, listing.is_settled
        members = {member.name: member for member in listing.members}
        for name, replica in self._replicas.items():
            is_gone = listing.is_settled and name not in members
            if name in members and members[name].endpoint != replica.endpoint:
                is_gone = True
            if is_gone and not replica.leaves:
                replica.leave()
                self._spawn(self._part(replica))
        for name, member in members.items():
            known = self._replicas.get(name)
            if known is None or known.leaves:
                replica = self._replicas[name] = Replica(member, self._changes)
                await replica.client.connect()
        self._router.index.keep_only(self._replicas)

    async def _part(self, replica: Replica) -> None:
        """Let the requests of a replica that leaves end."""
        await self._changes.until(lambda: replica.is_over)
        await replica.client.aclose()
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""The engine process, for the coroutines of a front end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineGivenUpError,
    MegatronAsyncError,
    QueueFullError,
    RequestError,
)
from megatron_async.serving.front_end.engine_link import Link
from megatron_async.serving.http.changes import Changes
from megatron_async.serving.messages import (
    TO_ENGINE,
    Abort,
    Answer,
    Bye,
    Cancel,
    Control,
    Dropped,
    Endpoint,
    EngineInfo,
    FromEngine,
    Generate,
    Hello,
    Output,
    Outputs,
    Refused,
    Snapshot,
    ToEngine,
)

logger = logging.getLogger(__name__)

GREETING_SECONDS = 0.05
"""Between two tries to reach the engine process."""
RETRY_SECONDS = 1.0
"""Between two tries where there is something wrong with this one."""
GOODBYE_MILLISECONDS = 200


class EngineClient:
    """Sends requests of one front end to the engine process and hands out what comes back.

    All methods belong to one event loop. The connection is made anew when the process has died:
    requests in progress then raise :class:`EngineDeadError`, and so do new ones until it is back.

    Attributes:
        endpoint: of the engine process.
        state: "starting" until the engine has answered once, "ready", or "dead" after a break.
        snapshot: the last that the engine has sent; None before the first, and while there is none.
        changes: told whenever the state, what the engine says of itself, or its end changes.
    """

    def __init__(self, endpoint: Endpoint, changes: Changes | None = None) -> None:
        self.state = "starting"
        self.changes = Changes() if changes is None else changes
        self.snapshot: Snapshot | None = None
        self.endpoint = endpoint
        self._info: EngineInfo | None = None
        self._given_up: str | None = None
        self._link: Link | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._request_ids = itertools.count()
        self._greeter: asyncio.Task[None] | None = None

    @property
    def states(self) -> dict[str, bool]:
        """States of replicas, as a ``ReplicasClient`` has them: there are none."""
        return {}

    async def connect(self) -> None:
        """Begin to look for the engine process; :meth:`ready` waits for it."""
        self._greeter = asyncio.create_task(self._greet(), name="engine client")

    async def aclose(self) -> None:
        """Abort what is in progress and leave."""
        if self._greeter is not None:
            self._greeter.cancel()
            await asyncio.wait([self._greeter])
        if self._link is not None:
            with contextlib.suppress(EngineDeadError):
                self._send(Bye())
        self._break("the client is closed", linger=GOODBYE_MILLISECONDS)

    async def ready(self) -> EngineInfo:
        """Wait until the engine serves; what it serves.

        Raises:
            EngineGivenUpError: it never will.
        """
        await self.changes.until(lambda: self.state == "ready" or self._given_up is not None)
        if self._given_up is not None:
            raise EngineGivenUpError(self._given_up)
        return await self.info()

    async def info(self) -> EngineInfo:
        """What the engine serves; of the last process, if there is none now.

        Raises:
            EngineDeadError: there has not been one yet.
        """
        if self._info is None:
            raise EngineDeadError("the engine has not started yet")
        return self._info

    def give_up(self, reason: str) -> None:
        """There will be no further engine process."""
        self._given_up = reason
        if self._greeter is not None:
            self._greeter.cancel()
        self._break(reason)

    def check_ready(self) -> None:
        """Raises EngineDeadError, which says why, while no request can be served."""
        self._check_there()
        if self._info is not None and self._info.not_ready is not None:
            raise EngineDeadError(self._info.not_ready)

    # --- requests -----------------------------------------------------------------------------

    def next_request_id(self) -> int:
        """A number for a request that no other has."""
        return next(self._request_ids)

    async def generate(self, request: Generate) -> AsyncGenerator[Output, None]:
        """Decode a prompt and yield what comes, in order for each sequence; each of them has a last
        output with a ``finish_reason``. Leaving the iteration early aborts the request: use
        ``contextlib.aclosing``.

        What has gathered for a sequence while nobody waited comes as one output.

        Raises:
            RequestError: the request cannot be served.
            QueueFullError: as many wait as may.
            EngineDeadError: there is no engine process now, or it died on the way.
        """
        if request.request_id in self._mailboxes:
            raise RequestError(f"request_id={request.request_id} is in use; choose another")
        self.check_ready()
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        left: int = request.params["n"]
        try:
            self._send(request)
            while left:
                for output in await mailbox.take():
                    left -= output.finish_reason is not None
                    yield output
        finally:
            del self._mailboxes[request.request_id]
            if left and mailbox.failure is None and self.state == "ready":
                self._send(Abort(request.request_id))

    async def abort(self, request_id: int) -> None:
        """End a request: its iteration ends with the finish reason "abort". Nothing happens when it
        has ended."""
        if self.state == "ready" and request_id in self._mailboxes:
            self._send(Abort(request_id))

    async def command(self, control: Control) -> dict[str, Any]:
        """Ask something of the whole engine; ``control.number`` is the client's to choose. Nobody
        waits for it any more when the coroutine is cancelled.

        Raises:
            RequestError: it cannot be done; says why.
            BusyError: it cannot be done now.
            EngineDeadError: there is no engine process now, or it died on the way.
            MegatronAsyncError: the engine failed.
        """
        self._check_there()
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(msgspec.structs.replace(control, number=number))
            result: dict[str, Any] = await answer
            return result
        except asyncio.CancelledError:
            if self.state == "ready":
                self._send(Cancel(number))
            raise
        finally:
            del self._answers[number]

    def _check_there(self) -> None:
        if self._given_up is not None:
            raise EngineGivenUpError(self._given_up)
        if self.state != "ready":
            word = "has not started yet" if self.state == "starting" else "is being restarted"
            raise EngineDeadError(f"the engine {word}; try again later")

    # --- connection ---------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Look for an engine process whenever there is none."""
        while True:
            await self.changes.until(lambda: self.state != "ready")
            pause = GREETING_SECONDS
            try:
                if self._link is None:
                    self._link = Link(self.endpoint, self._receive, self._broken)
                self._send(Hello())
            except EngineDeadError:
                pass
            except Exception as error:  # such as no descriptor that is free: later there may be
                logger.error("the engine's process cannot be reached: %s", error)
                pause = RETRY_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.changes.until(lambda: self.state == "ready")

    def _send(self, message: ToEngine) -> None:
        if self._link is None or not self._link.send(TO_ENGINE.encode(message)):
            raise EngineDeadError("the engine does not answer; try again later")

    def _broken(self, reason: str) -> None:
        """The process at the other end is gone, whether it had answered or not: the next one does
        not know this connection, and would not hear what is sent over it."""
        self._break(f"the engine {reason}; try again later")

    def _break(self, reason: str, *, linger: int = 0) -> None:
        """Nothing more will come over this connection."""
        if self._link is not None:
            self._link.close(linger)
            self._link = None
        if self.state == "ready":
            self.state = "dead"
        self.snapshot = None
        error = EngineDeadError(reason)
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))
        self.changes.tell()

    # --- what comes ---------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                mailboxes = self._mailboxes
                for output in outputs:
                    mailbox = mailboxes.get(output.request_id)
                    if mailbox is None:
                        continue
                    if isinstance(output, Refused):
                        mailbox.fail(_error_of(output))
                    else:
                        mailbox.put(output)
            case Snapshot():
                self.snapshot = message
            case Answer(number=number, result=result, error=error, kind=kind):
                answer = self._answers.get(number)
                if answer is None or answer.done():
                    return
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(_ERRORS.get(kind, MegatronAsyncError)(error))
            case EngineInfo():
                self._info = message
                self.state = "ready"
                self.changes.tell()
            case Dropped():
                logger.error("this front end has not read what the engine sent, and was dropped")
                self._break("the engine has dropped this front end; try again later")


class Mailbox:
    """The outputs of one request on their way to one coroutine."""

    __slots__ = ("_outputs", "_waiter", "failure")

    def __init__(self) -> None:
        self.failure: MegatronAsyncError | None = None
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """One more output."""
        self._outputs.append(output)
        self._wake()

    def fail(self, error: MegatronAsyncError) -> None:
        """Learn that no more will come."""
        if self.failure is None:
            self.failure = error
            self._wake()

    async def take(self) -> list[Output]:
        """All that has come, as soon as there is something: one output for each sequence; raises
        why there will be none."""
        if not self._outputs:
            if self.failure is not None:
                raise self.failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._outputs:
                assert self.failure is not None
                raise self.failure
        outputs, self._outputs = self._outputs, []
        return outputs if len(outputs) == 1 else gather(outputs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def gather(outputs: list[Output]) -> list[Output]:
    """One output for each sequence, of several in order."""
    by_index: dict[int, list[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [each[0] if len(each) == 1 else _joined(each) for each in by_index.values()]


def _joined(outputs: list[Output]) -> Output:
    first, last = outputs[0], outputs[-1]
    texts = [output.text for output in outputs if output.text is not None]
    log_probs = [output.log_probs for output in outputs if output.log_probs is not None]
    return Output(
        first.request_id,
        first.index,
        list(itertools.chain.from_iterable(output.token_ids for output in outputs)),
        "".join(texts) if texts else None,
        list(itertools.chain.from_iterable(log_probs)) if log_probs else None,
        next((o.prompt_log_probs for o in outputs if o.prompt_log_probs is not None), None),
        last.finish_reason,
        last.stop_reason,
        last.usage,
        last.weight_spans,
        last.routed_experts,
    )


_ERRORS: dict[str, type[MegatronAsyncError]] = {
    "invalid": RequestError,
    "full": QueueFullError,
    "busy": BusyError,
    "dead": EngineDeadError,
}
"""By the kinds of :class:`Refused` and :class:`Answer`; others are the engine's own faults."""


def _error_of(refused: Refused) -> MegatronAsyncError:
    return _ERRORS.get(refused.kind, MegatronAsyncError)(refused.message)

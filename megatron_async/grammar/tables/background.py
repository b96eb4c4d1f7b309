"""Tables of grammars are made in a process beside the engine: neither its steps nor the threads
that add requests wait for one."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable

from megatron_async.errors import shown
from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.tables import work
from megatron_async.grammar.tables.kept import KeptAutomata
from megatron_async.processes.child import EXIT_SECONDS, Child, how_ended

logger = logging.getLogger(__name__)

WORKER = "megatron_async.grammar.tables.worker"
"""The module that the process runs, and this one has no use for."""
MOST_WAITING = 16
IDLE_SECONDS = 60.0
"""Behind which the process ends, until the next table is wanted: a vocabulary takes memory."""
MOST_SECONDS = 600.0
"""For a process that somebody has stopped: its own limit is of what it computes."""
MOST_FAILED_STARTS = 3
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}

Take = Callable[[StructuredOutputs, "TokenAutomaton | str | None"], None]


class BackgroundMaker:
    """A process that makes tables, and the thread that talks to it; both come with the first.

    Args:
        compiler: of the engine's vocabulary.
        budget: bytes that a table may take.
        take: gets each grammar with its table, with the reason that it has none, or with None
            where it failed.

    Attributes:
        starts: of the process.
        failures: tables that were not made since the process died, or could not be started.
    """

    def __init__(self, compiler: GrammarCompiler, budget: int, take: Take) -> None:
        self.failures = self.starts = 0
        self._compiler = compiler
        self._budget = budget
        self._take = take
        self._asked: dict[StructuredOutputs, None] = {}
        """The grammars that wait, and the one whose table is being made."""
        self._taken = threading.Condition()
        self._queue: queue.SimpleQueue[StructuredOutputs | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # a signal's handler may ask too
        self._worker: Worker | None = None
        self._failed_starts = 0
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Tables that are wanted and not there."""
        return len(self._asked)

    @property
    def pid(self) -> int | None:
        """The id of the process, while there is one."""
        worker = self._worker
        return None if worker is None else worker.child.pid

    def ask(self, spec: StructuredOutputs) -> None:
        """See :class:`~megatron_async.grammar.tables.kept.Maker`."""
        if self._is_closed or spec in self._asked or len(self._asked) >= MOST_WAITING:
            return
        self._asked[spec] = None
        self._queue.put(spec)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until no table is wanted; False when ``seconds`` were not enough."""
        with self._taken:
            return self._taken.wait_for(lambda: not self._asked, seconds)

    def close(self) -> None:
        """End the process and the thread; what is being made is lost."""
        self._is_closed = True
        self._queue.put(None)
        worker, thread = self._worker, self._thread
        if worker is not None:
            worker.child.kill()
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (spec := self._next()) is not None and not self._is_closed:
                made = self._made(spec)
                if not self._is_closed:
                    self._take(spec, made)
                self._forget(spec)
        finally:
            self._is_closed = True
            self._end_worker()
            for spec in list(self._asked):
                self._forget(spec)

    def _forget(self, spec: StructuredOutputs) -> None:
        with self._taken:
            del self._asked[spec]
            self._taken.notify_all()

    def _next(self) -> StructuredOutputs | None:
        """The grammar that is next; None to end."""
        if self._worker is not None:
            try:
                return self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._end_worker()
        return self._queue.get()

    def _made(self, spec: StructuredOutputs) -> TokenAutomaton | str | None:
        try:
            worker = self._worker or self._start_worker()
            return worker.made(spec)
        except _NotStartedError:
            self.failures += 1
            return None
        except Exception as error:  # nothing of it may concern a request
            if not self._is_closed:
                self._failed(error)
            self._end_worker()
            return None

    def _start_worker(self) -> Worker:
        """A process that is ready. When it was tried in vain too often there are no more tables."""
        if self._failed_starts == MOST_FAILED_STARTS:
            raise _NotStartedError
        self.starts += 1
        self._failed_starts += 1
        worker = self._worker = Worker()
        if self._is_closed:  # meanwhile
            worker.child.kill()
        worker.set_up(self._compiler, self._budget)
        self._failed_starts = 0
        return worker

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        died = isinstance(error, EOFError | ConnectionError) and self._worker is not None
        said = how_ended(self._worker.child) if died and self._worker else shown(str(error))
        logger.log(
            logging.WARNING if self.failures == 1 else logging.DEBUG,
            "the table of a grammar was not made, since its process failed (%s: %s); requests are "
            "guided by the host, and the next failures are not logged",
            type(error).__name__,
            said,
        )
        if self._failed_starts == MOST_FAILED_STARTS:
            logger.warning(
                "the process that makes tables of grammars has failed to start %d times in a row, "
                "and this engine starts no other: grammars without a table are followed on the "
                "host; what the first failure said is above",
                MOST_FAILED_STARTS,
            )

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


def make_in_background(kept: KeptAutomata, compiler: GrammarCompiler, budget: int) -> None:
    """Have the tables of ``kept`` made beside the engine, until it is closed or nobody has it."""
    put = weakref.WeakMethod(kept.put)

    def take(spec: StructuredOutputs, made: TokenAutomaton | str | None) -> None:
        there = put()
        if there is not None:
            there(spec, made)

    maker = kept.maker = BackgroundMaker(compiler, budget, take)
    weakref.finalize(kept, maker.close)


class _NotStartedError(Exception):
    """There is no process, and there will be none."""


class Worker:
    """The process, from here."""

    def __init__(self) -> None:
        self.child = Child(WORKER, environment=_ENVIRONMENT)
        self._connection = self.child.connection
        self._connection.settimeout(MOST_SECONDS)

    def set_up(self, compiler: GrammarCompiler, budget: int) -> None:
        """Have it make tables of a vocabulary; raises an exception if it cannot."""
        tokenizer = compiler.tokenizer_json()
        work.send(self._connection, work.Setup(compiler.vocab_size, budget))
        work.send_bytes(self._connection, tokenizer)
        ready = work.READY.decode(work.receive(self._connection))
        if ready.digest != compiler.digest:
            raise ValueError("the tokenizer has other tokens in another process")

    def made(self, spec: StructuredOutputs) -> TokenAutomaton | str:
        """A table, or why there is none; raises an exception where the process has died."""
        work.send(self._connection, work.Ask(spec.to_dict()))
        answer = work.ANSWER.decode(work.receive(self._connection))
        if answer.failure is not None:
            logger.warning("a grammar has no automaton: %s", shown(answer.failure))
        if answer.reason is not None:
            return answer.reason
        return work.receive_table(self._connection, answer)

    def end(self) -> None:
        """Make sure that it is gone."""
        self._connection.close()
        self.child.kill()
        self.child.wait()
        self.child.lifeline.close()

"""A process that makes tables of grammars, one after the other, while an engine goes on.

    python -m megatron_async.grammar.tables.worker FD

It has low priority, is the first that the system ends where memory runs short, and may end at any
line: what it takes too much of ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.tables import work
from megatron_async.processes.limits import limit_memory, limit_next_work
from megatron_async.step.extras import TABLE_FAILED
from megatron_async.tokenizer.calls import parse
from megatron_async.tokenizer.tokenizer import Tokenizer

MEMORY_BYTES, MEMORY_PER_BYTE = 4 << 30, 4
"""The most memory beyond what the vocabulary takes, and more for each byte of the pool."""
WORK_SECONDS = 60
"""The most time to compute one table: those of 4,096 states and 152,000 ids take about 10 s."""
LOWEST_PRIORITY = 19


def stand_back() -> None:
    """Let every other process go first, and stay."""
    with contextlib.suppress(OSError):
        os.nice(LOWEST_PRIORITY)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def answer(connection: socket.socket, compiler: GrammarCompiler, budget: int) -> None:
    """Make the next table. Memory that runs out ends the process."""
    ask = work.ASK.decode(work.receive(connection))
    limit_next_work(WORK_SECONDS)
    try:
        spec = StructuredOutputs.from_any(ask.spec)
        made = automaton_of(spec, compiler.compile(spec), (), budget_bytes=budget)
    except MemoryError:
        raise
    except Exception as error:  # whatever it is, the host can still follow the grammar
        said = f"{type(error).__name__}: {error}"
        work.send(connection, work.Answer(reason=TABLE_FAILED, failure=said))
        return
    if isinstance(made, str):
        work.send(connection, work.Answer(reason=made))
    else:
        work.send_table(connection, made)


def main() -> None:
    """Run the process."""
    stand_back()
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(EOFError):
        setup = work.SETUP.decode(work.receive(connection))
        tokenizer = Tokenizer(parse(work.receive(connection)))
        compiler = GrammarCompiler(tokenizer, setup.vocab_size)
        work.send(connection, work.Ready(compiler.digest))
        limit_memory(MEMORY_BYTES + MEMORY_PER_BYTE * setup.budget)
        while True:
            answer(connection, compiler, setup.budget)


if __name__ == "__main__":
    main()

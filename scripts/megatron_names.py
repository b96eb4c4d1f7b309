"""Writes ``docs/megatron.md``: what each name of megatron-core does here, from the tables that the
code asks. ``tests/unit/megatron_api/test_megatron_names.py`` compares the page with them.

    python scripts/megatron_names.py > docs/megatron.md
"""

from __future__ import annotations

import textwrap
from collections import defaultdict

from megatron_async.cli.options import megatron_flags
from megatron_async.megatron_api import HOMES, main_tables, tables
from megatron_async.megatron_api.coordinator.tables import CLIENT, COORDINATOR
from megatron_async.megatron_api.names import ANY, Entry, Table, releases, works

INTRO = """\
# Scripts written for Megatron

A script for megatron-core's dynamic engine changes its imports and runs. Tokens are those of the
stock model, at every depth (`tests/functional/test_megatron_script.py` holds such a script).

```python
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineSuspendedError,
    GPTInferenceWrapper,
    SamplingParams,
    TextGenerationController,
)
```

The same names can be had from `megatron_async`, but for the engine: `megatron_async`'s own is
another class, [which Python users call](python.md). The model is a megatron-core `GPTModel`,
`HybridModel` or `MambaModel`, in `Float16Module` or `DistributedDataParallel` too; it is adapted in
place. megatron-core may be of any release from 0.16.1 to 0.19.2, whatever release a script was
written for.

**Scheduling.** `DynamicInferenceEngine(..., config=EngineConfig(inference_async_scheduling=True,
depth=2))` says how many steps may be in flight. Without `config` the environment's
`MEGATRON_ASYNC_DEPTH` does, so that a script need not be changed; or `async_sched_mode` of the
context's `InferenceConfig`, which is "async" in ours. Else decoding is serial. A `MegatronLLM`
without an `InferenceConfig` decodes asynchronously, as in Megatron's main branch.

**Errors.** In `megatron_api`'s engine a request that is too long becomes a record with the status
FAILED, a step of a suspended engine raises `EngineSuspendedError`, and lists of the likeliest
tokens are by text. `megatron_async.DynamicInferenceEngine`, the command line and the server raise
`RequestError` instead, a step of a suspended engine does nothing, and the lists are by token id.

**Ranks.** Under torchrun each process may have its share of a model that megatron-core has divided
(tensor, pipeline, expert parallel; by `parallel_state` or a `pg_collection`). Each wraps it and
builds an engine; all make the same calls and get the same records, or rank 0 alone makes them while
the others are in `close()`: see [scaling](scaling.md#every-rank-a-process-of-yours) and
`examples/megatron_ranks.py`.

**Trainers** that ask the engine by `InferenceClient` [keep their calls](rl.md#megatrons-trainers).

In the tables *since* is the first release of megatron-core that has a name ("main" for what none
has yet), *works* means that the name does what it does in megatron-core, *accepted* that it may
be given and changes nothing, and *refused* that it raises an error with this reason. Where values
are named, any other is refused with the reason. This page is made from the tables that the code
asks (`scripts/megatron_names.py`).
"""

CLASSES = (
    {name: works("") for name in HOMES}
    | main_tables.NOT_HERE
    | {
        "ContextOverflowError": works("RequestError"),
        "MaxSequenceLengthOverflowError": works("RequestTooLongError"),
        "DynamicInferenceRequestRecord": works("DynamicInferenceRequest, which is its own record"),
    }
)

OF_COORDINATOR = (
    "`await engine.start_listening_to_data_parallel_coordinator()` returns the address for clients."
    " There are no keys: it is of this host alone unless `hostname` names another address."
)
OF_CLIENT = (
    "Ours. megatron-core's own clients are answered too, as the installed release and its main "
    "branch talk; 0.16.1's is run by a test. `DataParallelInferenceCoordinator` is nobody's to "
    "build."
)

SECTIONS: tuple[tuple[str, str, Table], ...] = (
    ("Classes", "To be imported from `megatron_async.megatron_api`.", CLASSES),
    (
        "DynamicInferenceContext",
        "Its keywords in core_v0.16, and its two arguments since; all are taken.",
        tables.CONTEXT,
    ),
    ("Attributes of DynamicInferenceContext", "", tables.CONTEXT_ATTRIBUTES),
    ("GPTInferenceWrapper", "", tables.WRAPPER),
    ("Attributes of GPTInferenceWrapper", "", tables.WRAPPER_ATTRIBUTES),
    ("TextGenerationController", "", tables.CONTROLLER),
    ("Attributes of TextGenerationController", "", tables.CONTROLLER_ATTRIBUTES),
    ("DynamicInferenceEngine", "", tables.ENGINE),
    ("Attributes of DynamicInferenceEngine", "", tables.ENGINE_ATTRIBUTES),
    (
        "SamplingParams",
        "Requests may bring megatron-core's objects or [ours](sampling.md). Fields that a class "
        "derived from megatron-core's adds are left unread.",
        tables.SAMPLING_PARAMS,
    ),
    (
        "DynamicInferenceRequest and its record",
        "They are one here, also after evictions.",
        tables.REQUEST,
    ),
    (
        "InferenceConfig",
        "`DynamicInferenceContext(model_config, inference_config)` takes ours and megatron-core's.",
        main_tables.INFERENCE_CONFIG,
    ),
    ("Further attributes of the context", "", main_tables.MAIN_CONTEXT_ATTRIBUTES),
    ("Further attributes of the engine", "", main_tables.MAIN_ENGINE_ATTRIBUTES),
    ("start_listening_to_data_parallel_coordinator", OF_COORDINATOR, COORDINATOR),
    ("InferenceClient", OF_CLIENT, CLIENT),
    ("MegatronLLM and MegatronAsyncLLM", "", main_tables.LLM),
)
TITLED = {
    "Classes": "CLASSES",
    "DynamicInferenceContext": "CONTEXT",
    "Attributes of DynamicInferenceContext": "CONTEXT_ATTRIBUTES",
    "Further attributes of the context": "CONTEXT_ATTRIBUTES",
    "GPTInferenceWrapper": "WRAPPER",
    "Attributes of GPTInferenceWrapper": "WRAPPER_ATTRIBUTES",
    "TextGenerationController": "CONTROLLER",
    "Attributes of TextGenerationController": "CONTROLLER_ATTRIBUTES",
    "DynamicInferenceEngine": "ENGINE",
    "Attributes of DynamicInferenceEngine": "ENGINE_ATTRIBUTES",
    "Further attributes of the engine": "ENGINE_ATTRIBUTES",
    "SamplingParams": "SAMPLING_PARAMS",
    "DynamicInferenceRequest and its record": "REQUEST",
    "InferenceConfig": "INFERENCE_CONFIG",
    "MegatronLLM and MegatronAsyncLLM": "LLM",
    "start_listening_to_data_parallel_coordinator": "COORDINATOR",
    "InferenceClient": "CLIENT",
}
"""By its title, what ``since`` calls the table."""


COMMAND_LINE = (
    "Of `generate`, `serve` and `verify`. Flags that have no meaning here are read, and named in "
    "one warning; unknown ones are errors."
)


def page() -> str:
    """The whole page."""
    flags = section("Command line", COMMAND_LINE, megatron_flags.FLAGS)
    parts = [INTRO, *(section(*each) for each in SECTIONS), flags, ignored_flags()]
    return "\n".join(parts)


def ignored_flags() -> str:
    """The flags that are named in the warning."""
    names = sorted(megatron_flags.value_counts().keys() - megatron_flags.FLAGS.keys())
    listed = textwrap.fill(" ".join(names), 100, break_on_hyphens=False, break_long_words=False)
    return f"Ignored are\n\n```\n{listed}\n```\n"


def section(title: str, text: str, table: Table) -> str:
    """A heading, a sentence, and a table; names with equal entries share a row."""
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    known = releases(TITLED[title]) if title in TITLED else None
    for name in sorted(table, key=str.lower):
        row = outcome(table[name]), table[name].note, since(name, known)
        rows[row].append(f"`{name}`")
    lines = [f"## {title}\n"]
    if text:
        lines.append(f"{textwrap.fill(text, 100, break_on_hyphens=False)}\n")
    has_since = known is not None
    lines += ["| name | since | | |", "|---|---|---|---|"] if has_since else []
    lines += [] if has_since else ["| name | | |", "|---|---|---|"]
    order = sorted(
        rows, key=lambda row: ("works", "accepted", "refused").index(row[0].partition(":")[0])
    )
    for said, note, first in order:
        names = ", ".join(rows[said, note, first])
        middle = f" {first} |" if has_since else ""
        lines.append(f"| {names} |{middle} {said} | {note.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def since(name: str, known: dict[str, tuple[str, str | None]] | None) -> str:
    """The releases that have a name: "0.16", "0.17 to 0.18", or "main" for what none has yet."""
    if known is None:
        return ""
    first, last = known.get(name, ("main", None))
    return first if last is None else f"{first} to {last}" if last != first else f"only {first}"


def outcome(entry: Entry) -> str:
    """The second column."""
    if entry.outcome != "accepted" or ANY in entry.values:
        return entry.outcome
    return f"accepted: {', '.join(f'`{value!r}`' for value in entry.values)}"


if __name__ == "__main__":
    print(page(), end="")

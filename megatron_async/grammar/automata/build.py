"""Makes the table of a grammar, or says why there is none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.automata import proof
from megatron_async.grammar.automata.dfa import determinised, minimal
from megatron_async.grammar.automata.expressions import Node, NotCoveredError, Text, choice
from megatron_async.grammar.automata.nfa import Nfa
from megatron_async.grammar.automata.regex import parsed
from megatron_async.grammar.automata.schema import of_schema, whitespace_of
from megatron_async.grammar.automata.table import TokenAutomaton, byte_size_of
from megatron_async.grammar.compiler import CompiledGrammar, GrammarCompiler
from megatron_async.grammar.matcher import MOST_FORCED_BYTES, Forced, Masks, Matcher, spelled
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.step.extras import MOST_FORCED, TABLE_TOO_LARGE

MOST_PROVEN_WORDS = 1 << 25
"""Words of the library's masks that a proof compares at most: with 152,000 ids 3,500 states."""
DIFFERS = "it differs from the library's"


def automaton_of(
    spec: StructuredOutputs,
    compiled: CompiledGrammar,
    stop_ids: Iterable[int] | None = None,
    *,
    budget_bytes: int,
) -> TokenAutomaton | str:
    """The table of a grammar, proven against the library's masks; or in a few words why there is
    none, for counters and logs.

    It takes from milliseconds to seconds, and belongs where grammars are compiled. What follows a
    thought has a table by itself: that of the spec without the thought.

    Args:
        compiled: what ``spec`` was compiled to.
        stop_ids: the tokens that end the text, which are no text; None for the engine's.
        budget_bytes: that the table may take.
    """
    reason = excluded(spec, compiled.compiler)
    if reason is not None:
        return reason
    masks = compiled.compiler.masks(stop_ids)
    try:
        transitions, accepting = minimal(determinised(Nfa(tree_of(spec))))
        states, words = len(transitions), len(masks.text)
        if byte_size_of(states, words) > budget_bytes:
            raise NotCoveredError(TABLE_TOO_LARGE)
        if 2 * states * words > MOST_PROVEN_WORDS:
            raise NotCoveredError("states to prove")
        over_bytes = compiled.compiler.over_bytes(spec)
    except NotCoveredError as error:
        return str(error)
    except (ValueError, RecursionError):
        return "unreadable"
    text = compiled.compiler.trie.allowed(transitions, masks.text)
    forced = _forced(transitions, accepting, masks)
    table = TokenAutomaton(transitions, accepting, text, forced)
    start = compiled.matcher(stop_ids)
    assert isinstance(start, Matcher)
    return DIFFERS if proof.differs(table, start, over_bytes) is not None else table


def excluded(spec: StructuredOutputs, compiler: GrammarCompiler) -> str | None:
    """Why a grammar has no table, if that is seen at once."""
    if compiler.has_first_bytes:
        return "tokenizer: its first token is other bytes"
    if spec.thought is not None or spec.calls is not None:
        return "thought" if spec.thought is not None else "calls"
    return None if spec.kind in ("choice", "regex", "json") else spec.kind


def tree_of(spec: StructuredOutputs) -> Node:
    """What a text must conform to.

    Raises:
        NotCoveredError: says why there is no automaton of it.
    """
    if spec.choice is not None:
        return choice(Text(text.encode()) for text in dict.fromkeys(spec.choice))
    if spec.regex is not None:
        return parsed(spec.regex)
    if spec.json is not None:
        return of_schema(str(spec.json), whitespace_of(spec))
    raise NotCoveredError(spec.kind)


def _forced(
    transitions: npt.NDArray[np.int16], accepting: npt.NDArray[np.bool_], masks: Masks
) -> npt.NDArray[np.int32]:
    """See :attr:`TokenAutomaton.forced`."""
    ways = (transitions >= 0).sum(axis=1)
    only = np.where((ways == 1) & ~accepting, (transitions >= 0).argmax(axis=1), -1).tolist()
    found = np.full((len(transitions), MOST_FORCED), -1, np.int32)
    for state in range(len(transitions)):
        data, at = bytearray(), state
        while only[at] >= 0 and len(data) <= MOST_FORCED_BYTES:
            data.append(only[at])
            at = int(transitions[at, only[at]])
        ends = bool(accepting[at]) and not ways[at] and len(data) <= MOST_FORCED_BYTES
        tokens = spelled(Forced(bytes(data), ends), masks)[:MOST_FORCED]
        found[state, : len(tokens)] = tokens
    return found

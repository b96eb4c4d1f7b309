"""What structured outputs conform to, compiled, and the token automata of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.errors import RequestError

if TYPE_CHECKING:
    from megatron_async.grammar.automata.kept import KeptAutomata
    from megatron_async.grammar.compiler import CompiledGrammar, GrammarCompiler
    from megatron_async.grammar.spec import StructuredOutputs
    from megatron_async.grammar.windows import Window, WindowMasks


class Grammars:
    """Compiles what structured outputs conform to, in the threads of the callers that ask.

    Args:
        tokenizer: the model's, or None.
        vocab_size: of the model.
        automata_bytes: of the device's pool of token automata; 0 where there is none.
        at_once: their tables are made where grammars are compiled, and not in the background.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, automata_bytes: int = 0, *, at_once: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._at_once = at_once
        self.automata_bytes = automata_bytes
        self._compiler: list[GrammarCompiler] = []
        self._windows: list[WindowMasks] = []
        self._automata: list[KeptAutomata] = []

    def compile(self, structured_outputs: Any) -> None:
        """Compile a ``StructuredOutputs``, or a dict of its fields, so that it is found when the
        request is opened.

        Raises:
            RequestError: it cannot be compiled; says what to change.
        """
        spec, grammar = self.compiled(structured_outputs)
        if self.automata_bytes and self._at_once:
            self.automata.of(spec, grammar)

    def compiled(self, structured_outputs: Any) -> tuple[StructuredOutputs, CompiledGrammar]:
        """What a text conforms to, and its grammar: see :meth:`compile`.

        Raises:
            RequestError: it cannot be compiled; says what to change.
        """
        from megatron_async.grammar.compiler import GrammarCompiler
        from megatron_async.grammar.spec import StructuredOutputs

        spec = StructuredOutputs.from_any(structured_outputs)
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and the model has none; leave it out"
            )
        if not self._compiler:
            # Without a lock, which a signal's handler would wait for: two may be made, and the
            # first is used.
            self._compiler.append(GrammarCompiler(self._tokenizer, self._vocab_size))
        return spec, self._compiler[0].compile(spec)

    @property
    def automata(self) -> KeptAutomata:
        """The token automata of grammars; one has been compiled."""
        if not self._automata:
            from megatron_async.grammar.automata.background import make_in_background
            from megatron_async.grammar.automata.kept import KeptAutomata

            kept = KeptAutomata(self.automata_bytes)
            if not self._at_once:
                make_in_background(kept, self._compiler[0], self.automata_bytes)
            self._automata.append(kept)
        return self._automata[0]

    def close(self) -> None:
        """Make no more tables."""
        for automata in self._automata:
            automata.close()

    def token_bytes(self) -> Sequence[bytes]:
        """What each token adds to a text; a grammar has been compiled."""
        return self._compiler[0].masks(()).later_bytes

    @property
    def windows(self) -> WindowMasks:
        """What makes the masks of a step, in the thread that steps."""
        if not self._windows:
            from megatron_async.grammar.windows import WindowMasks

            self._windows.append(WindowMasks(self._vocab_size))
        return self._windows[0]

    @property
    def new_window(self) -> Callable[[Any], Window]:
        """Makes a window of all its fields."""
        from megatron_async.grammar.windows import Window

        return Window._make

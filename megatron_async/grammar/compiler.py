"""Grammars over a tokenizer's vocabulary. The library below, llguidance, is seen in this package
alone."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt
import tokenizers

from megatron_async.errors import RequestError, shown
from megatron_async.grammar.automata.trie import Trie
from megatron_async.grammar.matcher import Follows, Masks, Matcher
from megatron_async.grammar.messages import UNKNOWN, explained
from megatron_async.grammar.rules import rules_of
from megatron_async.grammar.spec import PLACES, StructuredOutputs
from megatron_async.grammar.thought import Thought, check_fits
from megatron_async.grammar.thought_matcher import BREAKS, ThoughtMatcher
from megatron_async.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CACHED_GRAMMARS = 64
SLICES = tuple(rf'[^"\\\x00-\x1F\x7F]{times}' for times in ("{1,5}", "{1,10}", "{1,30}", "+"))
"""Tokens that may all come inside of a JSON string, by their longest: the library looks at the
others one by one. Its own slices begin at 10 characters; where fewer may come (``maxLength``) a
mask of 128,256 ids takes milliseconds."""
STACK_BYTES = 512 << 20
"""Enough for references as deep as ``MAX_SPEC_CHARACTERS`` has room for."""
MOST_PLACES = 128
HASHED_AT_ONCE = 4096
SPELLED = 4096
"""Texts, of what grammars force, whose tokens are kept."""

_HINTS = {
    "json": "change the schema; docs/structured-output.md lists what it may use",
    "json_object": "change whitespace_pattern",
    "regex": "change the expression; docs/structured-output.md says what it may use",
    "choice": "give fewer or shorter texts",
    "grammar": "change the grammar",
}


class GrammarCompiler:
    """Compiles for one tokenizer and one model.

    Any thread may call it: it takes from a millisecond to a second, most of it without the GIL, and
    none of it belongs into the thread that steps the engine.

    Args:
        tokenizer: a :class:`~megatron_async.tokenizer.tokenizer.Tokenizer`, or another object
        around a
            ``tokenizers.Tokenizer``, as megatron's and transformers' fast ones are.
        vocab_size: of the model: width of the masks in bits. Ids that the tokenizer does not have
            are never allowed, nor are special tokens.
        stop_ids: tokens that end the text, where it is complete and nowhere else.

    Raises:
        RequestError: the tokenizer does not tell what its tokens stand for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int] = ()) -> None:
        tokenizer = _our_tokenizer(tokenizer)
        ids = range(min(tokenizer.vocab_size, vocab_size))
        padding = [b""] * (vocab_size - len(ids))
        later = [tokenizer.token_bytes(token_id) for token_id in ids] + padding
        first = [tokenizer.token_bytes(token_id, first=True) for token_id in ids] + padding
        self.vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._first_bytes = first if first != later else None
        self._tokenizer, self._later_bytes = tokenizer, later
        self._spelled: dict[bytes, tuple[int, ...]] = {}
        self._later = _library_tokenizer(later)
        self._first = None if self._first_bytes is None else _library_tokenizer(first)
        pairs = list(zip(first, later, strict=True))
        self._text = _packed(np.flatnonzero([bool(a or b) for a, b in pairs]), vocab_size)
        self._blank = _packed(np.flatnonzero([bool(b and not a) for a, b in pairs]), vocab_size)
        is_break = [data in BREAKS for data in later]
        self._breaks = _packed(np.flatnonzero(is_break), vocab_size)
        self._trie: Trie | None = None
        self._lock = threading.RLock()
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """The grammar of ``spec``; the last :data:`CACHED_GRAMMARS` are kept.

        Raises:
            RequestError: it cannot be compiled: names the field, what is wrong and what to change.
        """
        with self._lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                return found
        compiled = _with_deep_stack(lambda: self._compile(spec))
        with self._lock:
            compiled = self._cache.setdefault(spec, compiled)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        if spec.thought is not None:
            return self._compile_thought(spec)
        try:
            lark = rules_of(spec)
            later = self._start(self._later, lark)
            first = None if self._first is None else self._start(self._first, lark)
        except (ValueError, RecursionError) as error:
            raise self._part_at_fault(spec) or _error(spec, str(error)) from error
        compiled = CompiledGrammar(self, later, first)
        # The first mask is made here, in the caller's thread: what is too expensive ends here too.
        dead_end = compiled.matcher().error
        if dead_end is not None:
            raise _error(spec, f"it allows no text: {dead_end}")
        return compiled

    def _compile_thought(self, spec: StructuredOutputs) -> CompiledGrammar:
        """What begins behind a thought is compiled, and kept, by itself."""
        thought = Thought.from_json(str(spec.thought))
        try:
            check_fits(thought, self.vocab_size)
        except ValueError as error:
            raise RequestError(f"structured_outputs.thought: {error}") from None
        if spec.kind == "thought":
            return CompiledGrammar(self, None, None, thought)
        text = self.compile(dataclasses.replace(spec, thought=None))
        return text.behind(thought)

    def _part_at_fault(self, spec: StructuredOutputs) -> RequestError | None:
        """The error of the first part that cannot be compiled by itself, of a schema that says
        where its parts are."""
        schema = _schema_with_places(spec)
        places, parts = schema.get(PLACES), schema.get("$defs")
        if not isinstance(places, list) or not isinstance(parts, dict):
            return None
        for place, part in zip(places[:MOST_PLACES], parts.values(), strict=False):
            try:
                alone = StructuredOutputs(json=part, whitespace_pattern=spec.whitespace_pattern)
                self._start(self._later, rules_of(alone))
            except (ValueError, RecursionError, RequestError) as error:
                return _error(spec, str(error), str(place))
        return None

    def _start(self, tokenizer: llguidance.LLTokenizer, lark: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def masks(self, stop_ids: Iterable[int] | None) -> Masks:
        """Which ids are text, and which end it (None: those of the engine)."""
        given = self._stop_ids if stop_ids is None else stop_ids
        ids = frozenset(token_id for token_id in given if 0 <= token_id < self.vocab_size)
        stops = _packed(np.fromiter(ids, np.int64), self.vocab_size)
        return Masks(
            text=self._text & ~stops,
            stops=stops,
            stop_ids=ids,
            first_bytes=self._first_bytes,
            blank=self._blank & ~stops,
            byte_ids=range(self.vocab_size, self.vocab_size + 256),
            later_bytes=self._later_bytes,
            spell=self._spell,
            breaks=self._breaks & ~stops,
        )

    @property
    def has_first_bytes(self) -> bool:
        """A text's first token is other bytes than later ones would be."""
        return self._first_bytes is not None

    @property
    def digest(self) -> bytes:
        """A hash of what each token adds to a text. Other threads get their turn meanwhile."""
        found = hashlib.sha256()
        for first in range(0, self.vocab_size, HASHED_AT_ONCE):
            part = self._later_bytes[first : first + HASHED_AT_ONCE]
            found.update(np.fromiter(map(len, part), np.int64, len(part)).tobytes())
            found.update(b"".join(part))
        return found.digest()

    def tokenizer_json(self) -> bytes:
        """The tokenizer, for another process; raises an exception of its library."""
        data: bytes = self._tokenizer.to_json()
        return data

    @property
    def trie(self) -> Trie:
        """What tokens add to a text, made when it is first asked for; locks others out."""
        with self._lock:
            if self._trie is None:
                self._trie = Trie(self._later_bytes)
            return self._trie

    def over_bytes(self, spec: StructuredOutputs) -> Matcher:
        """A matcher of ``spec`` for a vocabulary of the 256 bytes, whose ids they are.

        Raises:
            ValueError: it cannot be compiled for them.
        """
        vocabulary, tokenizer = _of_bytes()
        start = _with_deep_stack(lambda: self._start(tokenizer, rules_of(spec)))
        none, text = np.zeros(8, np.int32), np.full(8, -1, np.int32)
        ids = range(256, 512)
        masks = Masks(
            text, none, frozenset(), None, none, ids, vocabulary, lambda data: tuple(data), none
        )
        return Matcher(start, None, masks)

    def _spell(self, data: bytes) -> tuple[int, ...]:
        """Tokens that the tokenizer makes of the characters of ``data``; () if they stand for
        something else, as behind a space that it puts in front. Those of up to :data:`SPELLED`
        are kept."""
        found = self._spelled.get(data)
        if found is None:
            if len(self._spelled) >= SPELLED:
                self._spelled.clear()
            found = self._spelled[data] = self._spelled_anew(data)
        return found

    def _spelled_anew(self, data: bytes) -> tuple[int, ...]:
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data)
            ids = self._tokenizer.tokenize(text)
        except (UnicodeDecodeError, RequestError):
            return ()  # it begins inside a character
        if any(token_id >= self.vocab_size for token_id in ids):
            return ()
        is_it = b"".join(self._later_bytes[token_id] for token_id in ids) == text.encode()
        return tuple(ids) if is_it else ()


def _schema_with_places(spec: StructuredOutputs) -> dict[str, Any]:
    """The schema of several tools that a spec has; an empty one if it has none."""
    text = str(spec.json) if spec.calls is None else spec.calls
    if f'"{PLACES}"' not in text:
        return {}
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if spec.calls is not None:
        schema = schema.get("schema") if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


class CompiledGrammar:
    """Made by :meth:`GrammarCompiler.compile`; shared by requests, and never changed."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        later: llguidance.LLMatcher | None,
        first: llguidance.LLMatcher | None,
        thought: Thought | None = None,
    ) -> None:
        self._compiler = compiler
        self._later = later
        self._first = first
        self._thought = thought

    @property
    def compiler(self) -> GrammarCompiler:
        """What made it."""
        return self._compiler

    def behind(self, thought: Thought) -> CompiledGrammar:
        """The same behind a thought."""
        return CompiledGrammar(self._compiler, self._later, self._first, thought)

    def matcher(self, stop_ids: Iterable[int] | None = None) -> Follows:
        """A matcher at the start of a text. Each sequence needs one of its own.

        Args:
            stop_ids: the tokens that end this request's text; None for the engine's.
        """
        masks = self._compiler.masks(stop_ids)
        if self._thought is None:
            return self._at_start(masks)
        if self._later is None:
            return ThoughtMatcher(self._thought, None, None, masks)
        behind = Matcher(self._later.deep_copy(), None, masks, start=self._later)
        return ThoughtMatcher(self._thought, behind, self._at_start(masks), masks)

    def _at_start(self, masks: Masks) -> Matcher:
        assert self._later is not None
        first = None if self._first is None else self._first.deep_copy()
        return Matcher(self._later.deep_copy(), first, masks, start=self._later)


_Made = TypeVar("_Made")
_stack_size_lock = threading.RLock()  # a signal's handler may compile too


def _with_deep_stack(work: Callable[[], _Made]) -> _Made:
    """What ``work`` returns or raises, in a thread with a stack of :data:`STACK_BYTES`.

    The library recurses into schemas and rules that refer to each other, and a stack that overflows
    ends the process. Pages of the stack that are not reached take no memory.
    """
    result: Future[_Made] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="grammar-compiler")
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


class _Vocabulary:
    """What the library asks of a tokenizer. Ids past the vocabulary: the 256 bytes, and an end that
    is no token of the model."""

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.tokens = [*token_bytes, *(bytes([byte]) for byte in range(256)), b""]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [len(self.tokens) - 257 + byte for byte in text]


def _library_tokenizer(token_bytes: Sequence[bytes]) -> llguidance.LLTokenizer:
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(token_bytes))
    return llguidance.LLTokenizer(wrapped, slices=list(SLICES))


@functools.cache
def _of_bytes() -> tuple[list[bytes], llguidance.LLTokenizer]:
    """The vocabulary of the 256 bytes."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    return vocabulary, _library_tokenizer(vocabulary)


def _our_tokenizer(tokenizer: Any) -> Tokenizer:
    found = tokenizer
    for _ in range(4):
        if isinstance(found, Tokenizer):
            return found
        if isinstance(found, tokenizers.Tokenizer):
            return Tokenizer(found)
        names = ("backend_tokenizer", "_tokenizer", "tokenizer")
        found = next((inner for name in names if (inner := getattr(found, name, None))), None)
    raise RequestError(
        f"structured_outputs needs to know what each token stands for, and "
        f"{type(tokenizer).__name__} does not tell; use a tokenizer with a tokenizer.json"
    )


def _packed(ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int32]:
    """Bit id % 32 of word id // 32 set for each of ``ids``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _error(spec: StructuredOutputs, message: str, place: str | None = None) -> RequestError:
    place = place or f"structured_outputs.{spec.kind}"
    said = explained(message)
    if said == UNKNOWN:
        logger.warning("a grammar is refused, and the library says: %s", shown(message))
    return RequestError(f"{place}: {said}; {_HINTS[spec.kind]}")

"""Compare llguidance and xgrammar: the figures of docs/structured-output.md.

python -m tests.support.compare_grammars SUITE TOKENIZER LIBRARY: the folder tests/draft2020-12 of
the JSON-Schema-Test-Suite, a byte-level tokenizer.json, and which library, installed by hand.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

FIELDS = {
    "name": {"type": "string"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "email": {"type": "string", "pattern": r"^[a-z0-9.]+@[a-z0-9]+\.[a-z]{2,4}$"},
    "role": {"enum": ["admin", "user", "guest"]},
}
CLOSED = {"type": "object", "additionalProperties": False}
PERSON = CLOSED | {"properties": FIELDS, "required": [*FIELDS]}
ANNE = {"name": 'Anne "Ö" of no fixed address', "age": 44, "email": "a.b@c.org", "role": "guest"}
FORTY = {f"field_{n}": {"type": ("number", "string")[n % 2]} for n in range(40)}
LEAVES = {"v": {"type": "string"}, "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}
TREE = {"type": "object", "properties": LEAVES, "required": [*LEAVES]}
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "person": (PERSON, ANNE),
    "array of persons": ({"type": "array", "items": PERSON}, [ANNE] * 8),
    "40 optional fields": (
        CLOSED | {"properties": FORTY},
        {f"field_{n}": "some words " * 3 if n % 2 else n / 7 for n in range(40)},
    ),
    "recursive tree": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        {"v": "root", "next": [{"v": "leaf " * 8, "next": []}] * 4},
    ),
    "enum of 1,000": ({"enum": [f"value {n * 7919 % 1000:04}" for n in range(1000)]}, "value 0042"),
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, True], "text": "some words " * 20}),
}


class Llguidance:
    """A vocabulary of ``tokens``, whose last ends the text; grammars start as the package's do."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokens: list[bytes]) -> None:
        self.library = importlib.import_module("llguidance")
        self.tokens, self.eos_token_id = tokens, len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]
        self.tokenizer = self.library.LLTokenizer(self)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("tokens are not forced")

    def compile(self, schema: Any) -> Any:
        lark = f'%llguidance {{"no_forcing": true}}\nstart: %json {json.dumps(schema)}'
        grammar = self.library.LLMatcher.grammar_from_lark(lark)
        matcher = self.library.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> tuple[Any, Callable[[int], bool], Callable[[Any], Any]]:
        matcher = compiled.deep_copy()
        return (
            matcher.is_accepting,
            lambda token: matcher.try_consume_tokens([token]) == 1,
            lambda row: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes),
        )


class Xgrammar:
    def __init__(self, tokens: list[bytes]) -> None:
        self.library = importlib.import_module("xgrammar")
        info = self.library.TokenizerInfo(tokens, stop_token_ids=[len(tokens) - 1])
        self.compiler = self.library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Any:
        return self.compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def start(self, compiled: Any) -> tuple[Any, Callable[[int], bool], Callable[[Any], Any]]:
        matcher = self.library.GrammarMatcher(compiled)
        return matcher.is_completed, matcher.accept_token, matcher.fill_next_token_bitmask


def texts(instance: Any) -> Iterator[str]:
    """As JSON, up to five keys in every order: the libraries fix one, which schemas do not."""
    orders = [instance]
    if isinstance(instance, dict) and len(instance) <= 5:
        orders = [{k: instance[k] for k in order} for order in itertools.permutations(instance)]
    yield from (json.dumps(order, ensure_ascii=False) for order in orders)


def suite_counts(library: Any, suite: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in (group for file in suite.glob("*.json") for group in json.loads(file.read_text())):
        try:
            compiled = library.compile(group["schema"])
        except Exception:  # whatever a library raises for a schema that it refuses
            counts["schemas refused"] += 1
            continue
        counts["schemas compiled"] += 1
        right = True
        for test in group["tests"]:
            accepted = False
            for text in texts(test["data"]):
                complete, accept, _ = library.start(compiled)
                accepted |= all(map(accept, text.encode())) and complete()
            counts[f"valid: {test['valid']}, accepted: {accepted}"] += 1
            right &= accepted == test["valid"]
        counts["schemas without a wrong answer"] += right
    return counts


def mask_times(library: Any, compiled: Any, ids: list[int], row: Any) -> list[float]:
    """Microseconds of the masks along a text, sorted."""
    complete, accept, fill = library.start(compiled)
    times = []
    for token_id in ids:
        began = time.thread_time()
        fill(row)
        times.append((time.thread_time() - began) * 1e6)
        assert row[0, token_id // 32] >> token_id % 32 & 1 and accept(token_id)
    assert complete()
    return sorted(times)


def longest_pause(work: Callable[[], object]) -> float:
    """Seconds for which another Python thread could not run while ``work`` ran."""
    times = [time.perf_counter()]
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        times.append(time.perf_counter())
    return max(late - early for early, late in itertools.pairwise(times))


def main() -> None:
    suite, tokenizer_file, name = sys.argv[1:]
    began = time.process_time()
    importlib.import_module(name)
    print(f"import {time.process_time() - began:.3f} s, with torch: {'torch' in sys.modules}")
    make = {"llguidance": Llguidance, "xgrammar": Xgrammar}[name]
    print(dict(suite_counts(make([bytes([n]) for n in range(256)] + [b""]), Path(suite))))

    from megatron_async.tokenizer.tokenizer import Tokenizer  # imports more than is timed above

    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(tokenizer_file))
    tokens = [*map(tokenizer.token_bytes, range(tokenizer.vocab_size)), b""]
    began = time.process_time()
    library = make(tokens)
    print(f"{len(tokens) - 1:,} tokens, prepared in {time.process_time() - began:.2f} s")
    row = np.zeros((1, len(tokens) // 32 + 1), np.int32)
    for what, (schema, instance) in SCHEMAS.items():
        began = time.process_time()
        compiled = library.compile(schema)
        took = (time.process_time() - began) * 1e3
        ids = tokenizer.tokenize(json.dumps(instance, ensure_ascii=False))
        us = mask_times(library, compiled, ids, row)
        print(f"{what}: {took:.1f} ms; {len(us)} masks, median {us[len(us) // 2]:.0f}", end="")
        print(f", 99 % {us[len(us) * 99 // 100]:.0f}, worst {us[-1]:.0f} us")
    sys.setswitchinterval(1e-4)
    large = {"enum": [f"value {n * 7919 % 20011:05}" for n in range(20_000)]}
    began = time.process_time()
    pause = longest_pause(lambda: library.compile(large))
    print(f"enum of 20,000: another thread waited {pause * 1e3:.0f} ms at most of", end=" ")
    print(f"{(time.process_time() - began) * 1e3:.0f} ms that both computed")


if __name__ == "__main__":
    main()

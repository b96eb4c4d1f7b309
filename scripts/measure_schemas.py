"""Which JSON schemas structured outputs take, and whether what they let a model write validates.

    python -m scripts.measure_schemas SUITE/tests/draft2020-12 [--texts 20] [--optional]

The schemas are those of a folder of the JSON-Schema-Test-Suite. For each that compiles texts are
drawn: each token at random among those that the mask allows, of a tokenizer whose tokens are bytes,
so that texts go everywhere. Those that end are held against the schema by jsonschema-rs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.errors import RequestError
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.matcher import Follows
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.tokenizer.tokenizer import Tokenizer

LENGTH = 400
ENDS = 0.5
"""How often a text ends where it may."""


class Found(NamedTuple):
    """What the schemas of a folder gave."""

    refused: Counter[str]
    compile_ms: list[float]
    mask_us: list[float]
    ended: int
    cut: int
    wrong: list[tuple[Any, str]]


def tokenizer_of_bytes() -> Tokenizer:
    """Token n is byte n; the last one ends a text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    spelled = {byte: chr(byte) if byte in plain else chr(next(others)) for byte in range(256)}
    vocab = {character: byte for byte, character in spelled.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return Tokenizer(tokenizer, eos_token="<|end|>")


def schemas_in(folder: Path, *, optional: bool) -> Iterator[Any]:
    """Each schema of the suite's files."""
    for path in sorted(folder.glob("**/*.json" if optional else "*.json")):
        for group in json.loads(path.read_text()):
            yield group["schema"]


def finite(text: str) -> float:
    """The double of a number, which JSON lets be larger than one."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def reason_of(error: RequestError) -> str:
    """What a refusal is about, without what is of one schema alone."""
    said = re.sub(r'"[^"]*"|\'[^\']*\'|\d+', "_", str(error).partition(": ")[2])
    return said[:90]


def drawn(matcher: Follows, words: int, rng: random.Random, mask_us: list[float]) -> str | None:
    """A text that the masks allow; None for one that did not end in :data:`LENGTH` bytes."""
    row, text = np.zeros(words, dtype=np.int32), bytearray()
    while len(text) < LENGTH:
        started = time.perf_counter()
        matcher.fill_mask(row)
        mask_us.append(1e6 * (time.perf_counter() - started))
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        may_end = [int(token) for token in allowed if token >= 256]
        if may_end and (len(may_end) == len(allowed) or rng.random() < ENDS):
            return text.decode()
        token = int(rng.choice([n for n in allowed if n < 256]))
        assert matcher.accept(token), (bytes(text), token)
        text.append(token)
    return None


def measure(folder: Path, texts: int, *, optional: bool) -> Found:
    """Compile each schema, and draw texts."""
    tokenizer = tokenizer_of_bytes()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    words = -(-tokenizer.vocab_size // 32)
    found = Found(Counter(), [], [], 0, 0, [])
    ended = cut = 0
    for number, schema in enumerate(schemas_in(folder, optional=optional)):
        started = time.perf_counter()
        try:
            grammar = compiler.compile(StructuredOutputs(json=json.dumps(schema)))
        except RequestError as error:
            found.refused[reason_of(error)] += 1
            continue
        found.compile_ms.append(1e3 * (time.perf_counter() - started))
        for seed in range(texts):
            text = drawn(
                grammar.matcher(), words, random.Random(1000 * number + seed), found.mask_us
            )
            if text is None:
                cut += 1
                continue
            ended += 1
            if not jsonschema_rs.is_valid(schema, json.loads(text, parse_float=finite)):
                found.wrong.append((schema, text))
    return found._replace(ended=ended, cut=cut)


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--optional", action="store_true", help="schemas of optional parts too")
    args = parser.parse_args()
    found = measure(args.folder, args.texts, optional=args.optional)
    refused, compiled = sum(found.refused.values()), len(found.compile_ms)
    print(f"{compiled} of {compiled + refused} schemas compile")
    for reason, count in found.refused.most_common(40):
        print(f"  {count:4} {reason}")
    for name, each in (("compile, ms", found.compile_ms), ("mask, us", found.mask_us)):
        p50, p99, most = np.quantile(each, (0.5, 0.99, 1))
        print(f"{name}: median {p50:.2f}, p99 {p99:.2f}, largest {most:.2f}")
    print(f"{found.ended} texts ended, {found.cut} were cut; {len(found.wrong)} do not validate")
    for schema, text in found.wrong[:20]:
        print(json.dumps(schema)[:200], text[:200])


if __name__ == "__main__":
    main()

"""Structured outputs: what a mask allows is what the grammar does, and texts conform."""

from __future__ import annotations

import ast
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import megatron_async
from megatron_async.errors import RequestError
from megatron_async.grammar import compiler as compiler_module
from megatron_async.grammar.compiler import CompiledGrammar, GrammarCompiler
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.tokenizer.tokenizer import Tokenizer, _byte_of_character

PADDING = 45
"""Ids that the model has and the tokenizer has not."""


def byte_level() -> Tokenizer:
    """The 256 bytes, pieces of several, some of which end inside a character; 1 special token."""
    character = {byte: char for char, byte in _byte_of_character().items()}
    pieces = [*(bytes([byte]) for byte in range(256)), b'{"', b'":', b'", "', b"name", b"tr", b"ue"]
    pieces += [b" a", "ä".encode(), "日".encode()[:2], b'x"' + "日".encode()[:1], b"12", b"()"]
    vocab = {"".join(character[byte] for byte in piece): n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return Tokenizer(tokenizer, eos_token="<|end|>")


def byte_fallback() -> Tokenizer:
    """SentencePiece's: byte tokens, pieces with their space before them; 1 special token."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁▁", *"abyesno0123{}[]():,\"'日ä-+", "▁a", '▁"', '":', "▁1", "true", "▁▁b"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(["</s>"])
    return Tokenizer(tokenizer, eos_token="</s>")


def metaspace() -> Tokenizer:
    """Pieces with their space before them, and no bytes."""
    pieces = ["▁", "▁▁", *'abce12rtu"日ä', "▁a", "▁b", '▁"', "true", "ab"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return Tokenizer(tokenizer, eos_token="</s>")


def words() -> Tokenizer:
    """Whole words, which its decoder joins with spaces."""
    vocab = {word: n for n, word in enumerate(["", "a", "b", "c", "[END]"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="a"))
    tokenizer.add_special_tokens(["[END]"])
    return Tokenizer(tokenizer, eos_token="[END]")


def tiny() -> Tokenizer:
    return Tokenizer.from_directory(Path(megatron_async.__file__).parent / "assets" / "tiny")


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, tiny, words)}
COMPILERS = {
    name: GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, tokenizer.eos_ids)
    for name, tokenizer in TOKENIZERS.items()
}
of_bytes = pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "tiny"])


def allowed(matcher: Matcher, vocab_size: int) -> set[int]:
    """Ids that a mask allows; no bit past the vocabulary is set."""
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    matcher.fill_mask(row)
    ids = {
        32 * n + bit for n, word in enumerate(row.tolist()) for bit in range(32) if word >> bit & 1
    }
    assert all(token_id < vocab_size for token_id in ids)
    return ids


def walk(compiled: CompiledGrammar, name: str, seed: int, most: int = 2000) -> str:
    """Text of random allowed tokens, of which those that close something are preferred."""
    tokenizer, vocab_size = TOKENIZERS[name], COMPILERS[name].vocab_size
    (stop,) = tokenizer.eos_ids
    closing = [stop, *(n for n in range(vocab_size) if tokenizer.token_bytes(n) in b'"}])')]
    rng, matcher = random.Random(seed), compiled.matcher()
    ids: list[int] = []
    while len(ids) < most:
        may = allowed(matcher, vocab_size)
        assert matcher.error is None and (stop in may) == matcher.is_complete
        assert matcher.must_end == (may == {stop})
        preferred = may.intersection(closing) if rng.random() < 0.3 else None
        token_id = rng.choice(sorted(preferred or may))
        assert matcher.accept(token_id)
        if token_id == stop:
            assert not allowed(matcher, vocab_size) and not matcher.accept(ids[0] if ids else 0)
            return tokenizer.detokenize(ids)
        ids.append(token_id)
    raise AssertionError(f"no end after {tokenizer.detokenize(ids)!r}")


# --- texts conform ----------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": -5, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["ä", "日本", 1, None]}, "maxItems": 3},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/tree"}},
            "additionalProperties": False,
        }
    },
}
ARITHMETIC = """
# comments, and rules over several lines
root ::= sum
sum  ::= term ( [+-] term )*
term ::= number
       | "(" sum ")"
number ::= "0" | [1-9] [0-9]{0,2}
"""
LIST = r"""
root ::= "[" ws (item ("," ws item)*)? "]"
item ::= root | string | "true" | "\u00e4"
string ::= "\"" [^"\\\x00-\x1f\x7F-\U0010FFFF]{0,5} "\""
ws ::= " "?
"""


def conforms(value: Any) -> bool:
    """To SCHEMA."""

    def is_tree(tree: Any) -> bool:
        return isinstance(tree, dict) and set(tree) <= {"next"} and all(map(is_tree, tree.values()))

    return (
        set(value) <= {"name", "n", "tags", "tree"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and -5 <= value["n"] <= 300
        and all(tag in ["ä", "日本", 1, None] for tag in value.get("tags", ()))
        and len(value.get("tags", ())) <= 3
        and is_tree(value.get("tree", {}))
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9()+-]+", text) is not None and isinstance(
        ast.parse(text, mode="eval"), ast.Expression
    )


CONFORMING: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA}, lambda text: conforms(json.loads(text))),
    "json_text": ({"json": json.dumps(SCHEMA)}, lambda text: conforms(json.loads(text))),
    "compact": (
        {"json": SCHEMA, "disable_any_whitespace": True},
        lambda text: not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"', "", text)),
    ),
    "spaces": (
        {"json": {"type": "array", "items": {"enum": [1]}}, "whitespace_pattern": " ?"},
        lambda text: re.fullmatch(r"\[( ?1 ?, ?)*( ?1)? ?\]", text),
    ),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        {"regex": r"[a-cä]{2,4}(-\d{1,3})?[^\x00-ÿ]日?"},
        lambda text: re.fullmatch(r"[a-cä]{2,4}(-\d{1,3})?[^\x00-ÿ]日?", text),
    ),
    "choice": (
        {"choice": ["yes", "no", 'ä "日"\n']},
        lambda text: text in ("yes", "no", 'ä "日"\n'),
    ),
    "arithmetic": ({"grammar": ARITHMETIC}, is_sum),
    "list": ({"grammar": LIST}, lambda text: isinstance(json.loads(text.replace("ä", "1")), list)),
}


@of_bytes
@pytest.mark.parametrize("case", CONFORMING)
def test_random_allowed_tokens_make_a_text_that_conforms(name: str, case: str) -> None:
    fields, check = CONFORMING[case]
    compiled = COMPILERS[name].compile(StructuredOutputs(**fields))
    texts = [walk(compiled, name, seed) for seed in range(12)]
    for text in texts:
        assert check(text), text
    assert len(set(texts)) > 1


@of_bytes
@pytest.mark.parametrize("case", CONFORMING)
def test_masked_tokens_are_refused_and_others_accepted(name: str, case: str) -> None:
    compiler = COMPILERS[name]
    matcher = compiler.compile(StructuredOutputs(**CONFORMING[case][0])).matcher()
    rng = random.Random(case)
    for _ in range(8):
        may = allowed(matcher, compiler.vocab_size)
        for token_id in range(-2, compiler.vocab_size + 40):
            assert matcher.copy().accept(token_id) == (token_id in may), token_id
        for token_id in range(compiler.vocab_size):
            if token_id not in may:
                assert not matcher.accept(token_id)
        assert allowed(matcher, compiler.vocab_size) == may, "refused tokens change nothing"
        assert matcher.accept(rng.choice(sorted(may)))
        if matcher.must_end:
            break


def reachable(
    matcher: Matcher, vocab_size: int, ids: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Every sequence of tokens that the masks allow, without its end."""
    for token_id in allowed(matcher, vocab_size):
        after = matcher.copy()
        assert after.accept(token_id)
        if allowed(after, vocab_size):
            yield from reachable(after, vocab_size, (*ids, token_id))
        else:
            yield ids


def spellings(tokenizer: Tokenizer, text: str) -> list[tuple[int, ...]]:
    """Every sequence of tokens whose bytes are a text's. The first may give none."""
    found: list[tuple[int, ...]] = []

    def extend(ids: tuple[int, ...], rest: bytes) -> None:
        if not rest:
            found.append(ids)
            return
        for token_id in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes(token_id, first=not ids)
            if tokenizer.token_bytes(token_id) and rest.startswith(data):
                extend((*ids, token_id), rest[len(data) :])

    extend((), text.encode())
    return found


FINITE = {
    "choice": (
        {"choice": ["a", "ab", " a", "  b", "ä", "日"]},
        {"a", "ab", " a", "  b", "ä", "日"},
    ),
    "regex": ({"regex": "(ab|ä)c?|^a(b|日)$"}, {"ab", "abc", "ä", "äc", "a日"}),
    "json": ({"json": {"enum": ["ä", 12, True]}}, {'"ä"', "12", "true"}),
    "grammar": (
        {"grammar": 'root ::= x x | "日"\nx ::= "a"? "b"'},
        {"bb", "abb", "bab", "abab", "日"},
    ),
}


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace", "tiny"])
@pytest.mark.parametrize("case", FINITE)
def test_all_texts_and_no_others_are_reachable_in_every_spelling(name: str, case: str) -> None:
    fields, texts = FINITE[case]
    compiler, tokenizer = COMPILERS[name], TOKENIZERS[name]
    matcher = compiler.compile(StructuredOutputs(**fields)).matcher()
    found = list(reachable(matcher, compiler.vocab_size))
    assert {tokenizer.detokenize(ids) for ids in found} == texts
    assert sorted(found) == sorted(ids for text in texts for ids in spellings(tokenizer, text))


@pytest.mark.parametrize(("stretch", "comes"), [("[a-z]+", False), ("[a-wyz]+", True)])
def test_stretches_of_recursive_rules_are_greedy(stretch: str, comes: bool) -> None:
    """As docs/structured-output.md says, with its way out."""
    grammar = f'root ::= {stretch} r\nr ::= "x" r "y" | "-"'
    compiled = COMPILERS["byte_level"].compile(StructuredOutputs(grammar=grammar))
    for text, accepted in ((b"ax-y", comes), (b"a-", True), (b"a-y", False)):
        matcher = compiled.matcher()
        assert (all(map(matcher.accept, text)) and matcher.must_end) == accepted


def test_words_that_a_decoder_joins_with_spaces() -> None:
    matcher = COMPILERS["words"].compile(StructuredOutputs(regex="a( b)* c")).matcher()
    assert allowed(matcher, 50) == {1}
    assert [matcher.accept(n) for n in (2, 1, 1, 2, 2, 3)] == [False, True, False, True, True, True]
    assert matcher.must_end and allowed(matcher, 50) == {4}


# --- ends -------------------------------------------------------------------------------------


def test_end_tokens_are_allowed_exactly_where_the_text_is_complete() -> None:
    compiled = COMPILERS["byte_level"].compile(StructuredOutputs(regex="ab*"))
    vocab_size = COMPILERS["byte_level"].vocab_size
    matcher = compiled.matcher(stop_ids=[3, 7, 10**6])
    assert allowed(matcher, vocab_size) == {ord("a")}
    assert not matcher.accept(3) and not matcher.is_complete and not matcher.must_end
    assert matcher.accept(ord("a")) and matcher.is_complete and not matcher.must_end
    assert allowed(matcher, vocab_size) == {3, 7, ord("b")}
    assert matcher.accept(7) and matcher.must_end and not allowed(matcher, vocab_size)
    assert not matcher.accept(7) and not matcher.accept(ord("b"))


def test_an_end_token_that_is_text_too_is_never_taken_for_text() -> None:
    compiled = COMPILERS["byte_level"].compile(StructuredOutputs(regex="a|ab"))
    matcher = compiled.matcher(stop_ids=[ord("a")])
    assert not matcher.accept(ord("a")) and matcher.error
    matcher = compiled.matcher(stop_ids=[ord("b")])
    assert matcher.accept(ord("a"))
    assert allowed(matcher, COMPILERS["byte_level"].vocab_size) == {ord("b")}
    assert matcher.must_end


def test_without_end_tokens_must_end_says_that_nothing_can_follow() -> None:
    compiled = COMPILERS["byte_level"].compile(StructuredOutputs(choice=["no", "node"]))
    matcher = compiled.matcher(stop_ids=())
    states = []
    for byte in b"node":
        assert matcher.accept(byte)
        states.append((matcher.is_complete, matcher.must_end))
    assert states == [(False, False), (True, False), (False, False), (True, True)]
    assert not allowed(matcher, COMPILERS["byte_level"].vocab_size) and matcher.error is None


def test_the_empty_text_can_be_all_there_is() -> None:
    matcher = COMPILERS["byte_level"].compile(StructuredOutputs(regex="")).matcher()
    assert matcher.must_end and matcher.error is None


def test_what_the_vocabulary_cannot_spell_is_an_error_not_an_end() -> None:
    compiler = COMPILERS["words"]
    matcher = compiler.compile(StructuredOutputs(regex="a b(x|y)")).matcher()
    assert matcher.accept(1) and matcher.error is None and matcher.accept(2)
    assert matcher.error == "no token of the vocabulary can come next"
    assert not matcher.must_end and not allowed(matcher, compiler.vocab_size)


def test_matchers_of_a_grammar_do_not_know_of_each_other() -> None:
    compiled = COMPILERS["byte_fallback"].compile(StructuredOutputs(regex="a(b|c)"))
    one, other = compiled.matcher(), compiled.matcher()
    assert one.accept(ord("a"))
    again = one.copy()
    assert one.accept(ord("b")) and one.must_end
    assert other.accept(ord("a")) and again.accept(ord("c")) and other.accept(ord("c"))


# --- vocabularies -----------------------------------------------------------------------------


def test_special_and_padding_tokens_are_never_allowed() -> None:
    tokenizer, compiler = TOKENIZERS["byte_level"], COMPILERS["byte_level"]
    matcher = compiler.compile(StructuredOutputs(regex="(?s:.)*")).matcher(stop_ids=())
    may = allowed(matcher, compiler.vocab_size)
    assert may and max(may) < tokenizer.vocab_size and not may & tokenizer.special_ids
    text = compiler.compile(StructuredOutputs(choice=["<|end|>"])).matcher()
    assert not text.accept(tokenizer.eos_ids[0])
    assert all(map(text.accept, b"<|end|>"))


def test_a_model_may_have_fewer_tokens_than_its_tokenizer() -> None:
    matcher = GrammarCompiler(TOKENIZERS["byte_level"], 100).compile(
        StructuredOutputs(regex="[a-z]")
    )
    assert allowed(matcher.matcher(), 100) == set(range(ord("a"), 100))


@pytest.mark.parametrize("vocab_size", [256, 257, 288])
def test_masks_have_the_width_of_the_model(vocab_size: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    matcher = GrammarCompiler(tokenizer, vocab_size).compile(StructuredOutputs(regex=".")).matcher()
    for row in (np.zeros(vocab_size // 32 + 2, np.int32), np.zeros(vocab_size // 32, np.int64)):
        with pytest.raises(ValueError, match="row"):
            matcher.fill_mask(row)
    assert ord("a") in allowed(matcher, vocab_size)


def test_tokenizers_of_megatron_and_transformers_are_looked_into() -> None:
    inner = TOKENIZERS["byte_level"]._tokenizer
    fast = SimpleNamespace(backend_tokenizer=inner)
    for tokenizer in (inner, fast, SimpleNamespace(_tokenizer=SimpleNamespace(tokenizer=fast))):
        matcher = GrammarCompiler(tokenizer, 300).compile(StructuredOutputs(regex="a")).matcher()
        assert allowed(matcher, 300) == {ord("a")}
    with pytest.raises(RequestError, match="SimpleNamespace does not tell"):
        GrammarCompiler(SimpleNamespace(tokenize=str.split, eod=1), 300)


def test_token_bytes_joined_are_the_text() -> None:
    for name, text in (("byte_level", "a ä日"), ("byte_fallback", "a ä日"), ("tiny", "a b, ä")):
        tokenizer = TOKENIZERS[name]
        first, *later = tokenizer.tokenize(text)
        data = tokenizer.token_bytes(first, first=True) + b"".join(
            map(tokenizer.token_bytes, later)
        )
        assert data.decode() == tokenizer.detokenize([first, *later])
        assert tokenizer.token_bytes(tokenizer.eos_ids[0]) == tokenizer.token_bytes(10**6) == b""


# --- the cache --------------------------------------------------------------------------------


def test_the_cache_is_bounded_and_forgets_what_was_not_used() -> None:
    compiler = GrammarCompiler(TOKENIZERS["byte_level"], 300)
    specs = [StructuredOutputs(regex=f"x{n}") for n in range(compiler_module.CACHED_GRAMMARS + 1)]
    first, second = compiler.compile(specs[0]), compiler.compile(specs[1])
    for spec in specs:
        compiler.compile(specs[0])
        compiler.compile(spec)
    assert compiler.compile(StructuredOutputs(regex="x0")) is first
    assert compiler.compile(specs[1]) is not second


def test_threads_share_a_compiler() -> None:
    compiler = GrammarCompiler(TOKENIZERS["byte_level"], 300)
    specs = [StructuredOutputs(regex=f"x{n}") for n in range(6)]
    found: list[list[CompiledGrammar]] = []

    def compile_all() -> None:
        grammars = [compiler.compile(spec) for spec in specs]
        for n, grammar in enumerate(grammars):
            matcher = grammar.matcher(stop_ids=())
            assert all(map(matcher.accept, f"x{n}".encode())) and matcher.must_end
        found.append(grammars)

    threads = [threading.Thread(target=compile_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(grammars == found[0] for grammars in found)


# --- specs ------------------------------------------------------------------------------------

BAD_SPECS: list[tuple[Any, str]] = [
    ({}, "none set; set exactly one"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice set; set exactly one"),
    ({"json_object": False}, "set exactly one"),
    (3, "structured_outputs=3 must be"),
    ({"regexp": "a"}, r"structured_outputs\.regexp: there is no such field"),
    ({"regex": 3}, r"\.regex: 3 must be a string"),
    ({"regex": "a" * (2**20 + 1)}, r"\.regex: 1,048,577 characters are too many"),
    ({"regex": "\ud800"}, r"\.regex: not a string of valid Unicode"),
    ({"grammar": ["root"]}, r"\.grammar: .* must be a string"),
    ({"json": 3}, r"\.json: 3 must be a string"),
    ({"json": {"enum": {1, 2}}}, r"\.json: the schema cannot be written as JSON"),
    ({"json": {"maximum": float("nan")}}, r"\.json: the schema cannot be written as JSON"),
    ({"json_object": 1}, r"\.json_object: 1 must be True or False"),
    ({"choice": "yes"}, r"\.choice: 'yes' must be a list"),
    ({"choice": []}, r"\.choice: give at least one"),
    ({"choice": ["a", 1]}, r"\.choice: 1 must be a string"),
    ({"choice": ["a" * 2**20, "b"]}, r"\.choice: use at most"),
    ({"regex": "a", "whitespace_pattern": " "}, r"\.whitespace_pattern: only JSON has it"),
    ({"regex": "a", "disable_any_whitespace": True}, r"\.disable_any_whitespace: only JSON"),
    (
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
        r"\.whitespace_pattern: leave it out",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SPECS)
def test_bad_specs_name_the_field(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs.from_any(fields)


DOUBLING = (
    "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40 ::= "a"'
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a"}, r"\.regex: .*unclosed character class"),
    ({"regex": r"(a)\1"}, r"\.regex: .*backreferences are not supported"),
    ({"regex": "a(?=b)"}, r"\.regex: .*look-around"),
    ({"regex": r"[^\s\S]"}, r"\.regex: it allows no text"),
    ({"regex": "(" * 5000 + ")" * 5000}, r"\.regex: "),
    ({"json": "{"}, r"\.json: .*line 1"),
    ({"json": "[]"}, r"\.json: a schema is a JSON object"),
    ({"json": "false"}, r"\.json: a schema is a JSON object"),
    ({"json": "[" * 10_000}, r"\.json: its parts lie too deep"),
    ({"json": {"type": "text"}}, r"\.json: type text is none of .*; change the schema"),
    ({"json": {"uniqueItems": True}}, r"\.json: uniqueItems is not supported"),
    ({"json": {"$ref": "#/nowhere"}}, r"\.json: .*nowhere"),
    ({"json": {"$ref": "#"}}, r"\.json: it allows no text"),
    ({"json": {"type": "string", "pattern": "["}}, r"\.json: .*unclosed"),
    (
        {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
        r"\.json: no value conforms to it: minimum",
    ),
    ({"json_object": True, "whitespace_pattern": "["}, r"\.json_object: .*change whitespace_pat"),
    ({"grammar": "start: /a/"}, r"\.grammar: line 1: expected a rule"),
    ({"grammar": 'x ::= "a"'}, r"\.grammar: there is no rule root"),
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, r"\.grammar: line 2: rule root is there twice"),
    ({"grammar": 'root ::= "a"\n  | x'}, r"\.grammar: line 2: there is no rule x"),
    ({"grammar": 'root ::= "a'}, r'\.grammar: line 1: " without "'),
    ({"grammar": "root ::= [z-a]"}, r"\.grammar: line 1: z-a is no range"),
    ({"grammar": r'root ::= "\q"'}, r"\.grammar: line 1: unknown escape"),
    ({"grammar": 'root ::= ("a"'}, r"\.grammar: line 1: expected \)"),
    ({"grammar": 'root ::= "a"{3,2}'}, r"\.grammar: line 1: repeat m to n times"),
    ({"grammar": 'root ::= "a"{x}'}, r"\.grammar: line 1: expected \{m\}"),
    ({"grammar": 'root ::= "a" | x\nx ::= "b" x'}, r"\.grammar: rule x needs itself"),
    ({"grammar": "root ::= " + "(" * 10_000}, r"\.grammar: .*parentheses"),
    ({"grammar": "".join(f'r{n} ::= "a"\n' for n in range(1001))}, r"\.grammar: line 1001: more"),
    ({"grammar": DOUBLING}, r"\.grammar: it is too large"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_reason(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match="(?s)" + message) as caught:
        COMPILERS["byte_level"].compile(StructuredOutputs(**fields))
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "(.*[ab].*){40}a"},
        {"grammar": 'root ::= root root root | "a" | ""'},
    ],
)
def test_expressions_that_blow_up_are_bounded(fields: dict[str, Any]) -> None:
    matcher = COMPILERS["byte_level"].compile(StructuredOutputs(**fields)).matcher()
    for _ in range(30):
        assert ord("a") in allowed(matcher, COMPILERS["byte_level"].vocab_size)
        assert matcher.accept(ord("a"))


def test_deep_references_do_not_overflow_the_stack() -> None:
    refs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(10_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": refs | {"d10000": {"enum": ["a"]}}}
    rules = "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(990)) + 'r990 ::= "b" | root'
    for fields in ({"json": schema}, {"grammar": f"root ::= r0\n{rules}"}):
        matcher = COMPILERS["byte_level"].compile(StructuredOutputs(**fields)).matcher()
        assert matcher.has_next and matcher.error is None


@pytest.mark.parametrize("case", CONFORMING)
def test_a_spec_survives_json(case: str) -> None:
    spec = StructuredOutputs(**CONFORMING[case][0])
    again = StructuredOutputs.from_any(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and hash(again) == hash(spec) and again.kind == spec.kind
    assert StructuredOutputs.from_any(spec) is spec
    assert not {"disable_any_whitespace", "whitespace_pattern"} & {
        name for name, value in spec.to_dict().items() if not value
    }


def test_a_schema_is_held_as_it_was_given() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    spec = StructuredOutputs.from_any({"json": schema, "json_object": None})
    schema["type"] = "string"
    assert isinstance(spec.json, str)
    assert list(json.loads(spec.json)["properties"]) == ["b", "a"] and '"object"' in spec.json


@pytest.mark.parametrize("name", ("minimum", "maximum", "exclusiveMinimum", "multipleOf"))
def test_bounds_that_the_library_would_round_are_refused(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", name: 2**53 + 1}}}
    with pytest.raises(RequestError, match=f"structured_outputs.json: {name} {2**53 + 1}"):
        COMPILERS["byte_level"].compile(StructuredOutputs(json=schema))

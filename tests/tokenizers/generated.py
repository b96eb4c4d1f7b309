"""Texts, ids and conversations, the same in every run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

CHARACTERS = (
    "abcdefghij klmnop qrstuvwxyz ABCDEFG    ",
    "0123456789.,-+eE% ",
    "äöüßéñçøåœ ",
    "中文字符日本語한국어ひらがなカタカナ。、",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽",
    "e\u0301a\u0308\u0323n\u0303\u200d\u200b\ufeff",
    "\t\n\r\x0b\x0c\x00\x01\x1b\x7f\x85\u2028\xa0\u3000",
    "{}[]()<>\"'`\\/;:=!#$%^&*_|~@",
    "\ufb01\ufb02\u2460\u2163\u338f\u212b\u2126\u212a",
    "\u0627\u0644\u0633\u0644\u0627\u0645 שלום हिन्दी ไทย",
    "\U0001d54f\U0010ffff\ue000\uf8ff",
    "▁▁ ▁",
)
WORDS = (
    *("Hello", " world", "don't", "I'll", "  ", "\n\n", "def f(x):\n    return x", "the", " the"),
    *("<0x41>", "http://x.y/z?q=1", "\t\tif", "1234567890", "Ġ", "Ċ"),
)
SPECIAL = (
    *("<s>", "</s>", "<bos>", "<|im_start|>", "<think>", "[INST]", "<|eot_id|>"),
    *("<\uff5cUser\uff5c>", "<|start|>", "<end_of_turn>"),
)
"""Special tokens of one tokenizer or another."""
SAID = (
    *("Hello", "wor ld", "what is 2+2?", "été 中文 😀", "<b>&'\"</b>", "line\nline", " lead"),
    *("trail ", "", "</think>\nx", "<think>\nhm\n</think>\n\nyes", '{"a": 1}', "{{ x }}"),
    *("e\u0301", "\t", "<tool_response>r</tool_response>"),
)
VALUES = (1, 2.5, "x é", [1, "a"], {"b": None}, True, None)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "string", "description": "A <place> & 'x' \"y\" é"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "number"}},
    {"enum": ["a", "b"], "type": "string"},
)


def texts(count: int, *, special: bool = True) -> list[str]:
    """Texts in many scripts, some with special tokens written out."""
    draw = random.Random(0)
    words = (*WORDS, *SPECIAL) if special else WORDS
    made = ["", " ", "  ", "\n", " a", "a ", "  a  "]
    while len(made) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            if draw.random() < 0.5:
                parts.append(draw.choice(words))
            else:
                characters = draw.choice(CHARACTERS)
                parts += draw.choices(characters, k=draw.randint(1, 8))
        made.append("".join(parts))
    return made


def id_lists(count: int, vocab_size: int, special: Sequence[int]) -> Iterator[list[int]]:
    """Ids that no text has: parts of characters, special tokens within words."""
    draw = random.Random(1)
    for _ in range(count):
        ids = draw.choices(range(vocab_size), k=draw.randint(1, 12))
        if special:
            ids[draw.randrange(len(ids))] = draw.choice(special)
        yield ids


def conversations(
    count: int, *, seed: int = 2
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Messages as clients of OpenAI's API send them, and tools: none, in every second one."""
    draw = random.Random(seed)
    for number in range(count):
        with_tools = number % 2 == 1
        messages = _messages(draw, with_tools=with_tools, reasons=number % 3 == 2)
        yield messages, [_tool(draw, n) for n in range(2)] if with_tools else None


def _said(draw: random.Random) -> str:
    return " ".join(draw.choices(SAID, k=draw.randint(1, 4)))


def _tool(draw: random.Random, number: int) -> dict[str, Any]:
    properties = {f"p{n}": draw.choice(SCHEMAS) for n in range(draw.randint(0, 3))}
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": f"tool_{number}", "description": f"d {_said(draw)}"}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _call(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(["p0", "p1", "p2"], draw.randint(0, 3))
    arguments = json.dumps({name: draw.choice(VALUES) for name in names}, ensure_ascii=False)
    function = {"name": f"tool_{draw.randint(0, 1)}", "arguments": arguments}
    identity = "".join(draw.choices("abcdef0123456789", k=9))  # as long as Mistral's templates ask
    return {"id": identity, "type": "function", "function": function}


def _messages(draw: random.Random, *, with_tools: bool, reasons: bool) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        made.append({"role": "system", "content": _said(draw)})
    for _ in range(draw.randint(1, 3)):
        made.append({"role": "user", "content": _said(draw)})
        if with_tools and draw.random() < 0.6:
            calls = [_call(draw) for _ in range(draw.randint(1, 2))]
            content = draw.choice([None, None, "", "I call."])
            made.append({"role": "assistant", "content": content, "tool_calls": calls})
            if reasons and draw.random() < 0.5:
                made[-1]["reasoning_content"] = f"because {_said(draw)}"
            results = [{"tool_call_id": call["id"], "content": _said(draw)} for call in calls]
            made += [{"role": "tool", **result} for result in results]
            if draw.random() < 0.3:
                return made
        made.append({"role": "assistant", "content": _said(draw)})
        if reasons and draw.random() < 0.5:
            made[-1]["reasoning_content"] = f"since {_said(draw)}"
    if draw.random() < 0.7:
        made.pop()
    return made

"""``megatron-async chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from megatron_async.cli.options import options
from megatron_async.cli.options.chat_sampling import ChatSampling, add_chat_sampling_options
from megatron_async.engine.stepping.drive import drive
from megatron_async.errors import ConfigError, RequestError

_DESCRIPTION = """\
Chat with a model. /reset forgets the conversation, /system TEXT does so too and sets what the
system says. Ctrl-C ends an answer, the end of the input (Ctrl-D) the program. The first line, on
stderr, says how tokens are sampled.
"""


def add_command(commands: Any) -> None:
    """Add ``chat`` to the command line."""
    parser = commands.add_parser("chat", help="chat with a model", description=_DESCRIPTION)
    parser.set_defaults(run=run)
    add = parser.add_argument_group("conversation").add_argument
    add("--system", default="", metavar="TEXT", help="what the system says at first")
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own")
    add_chat_sampling_options(add)
    options.add_model_options(parser)
    options.add_scheduling_options(parser, default="on")
    options.add_engine_options(parser, max_requests=1, block_size_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_async.serving.chat.chat_template import ChatTemplates

    depth = options.resolve_scheduling(args.inference_async_scheduling, args.depth, default=True)
    sampling = ChatSampling.of(args, options.sampling_defaults(args))
    config = options.engine_config(args, depth, random_seed=sampling.seed)
    templates = ChatTemplates.from_directory(
        args.model, chat_template=args.chat_template, tokenizer_model=args.tokenizer_model
    )
    templates.source()  # an error at once if there is none
    print(f"{options.PROGRAM}: {sampling.said()}", file=sys.stderr)
    system = messages = list[dict[str, str]]()
    with options.load_engine(args.model, config) as engine:
        if (tokenizer := engine.model.tokenizer) is None:
            raise ConfigError(f"--model {args.model} has no tokenizer, and chats are text")
        for turn, line in enumerate(filter(None, _lines(args.system))):
            command, _, text = line.partition(" ")
            if command == "/system":
                system = [{"role": "system", "content": text}] if text else []
            if command in ("/system", "/reset"):
                messages = system
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                reply = _reply(engine, turn, templates.encode_chat(tokenizer, asked), sampling)
                messages = [*asked, {"role": "assistant", "content": reply}]
            except RequestError as error:
                print(f"{options.PROGRAM}: error: {error}; /reset begins anew", file=sys.stderr)
    return 0


def _lines(system: str) -> Iterator[str]:
    yield f"/system {system}"
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def _reply(engine: Any, turn: int, tokens: list[int], sampling: ChatSampling) -> str:
    """Stream an answer and return its text, or what came of it before Ctrl-C."""
    texts = []
    engine.add_request(turn, tokens, sampling.params(engine.max_sequence_length - len(tokens)))
    # Not by an exception: in the midst of a step that would stop the engine.
    before = signal.signal(signal.SIGINT, lambda *_: engine.abort_request(turn))
    try:
        for step in drive(engine):
            texts.append("".join(output.text or "" for output in step["tokens"]))
            print(texts[-1], end="", flush=True)
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)
    return "".join(texts)

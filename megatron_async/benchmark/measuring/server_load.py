"""``bench --server``: the ragged load for a server of OpenAI's API, and what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.error import URLError

import numpy

from megatron_async.benchmark.measuring.http_client import Answer, Server, send_all
from megatron_async.benchmark.measuring.loads import RaggedLoad, Request, arrivals
from megatron_async.cli.options.server_keys import KEY_VARIABLE
from megatron_async.cli.output.progress import progress_bar
from megatron_async.cli.output.table import format_table
from megatron_async.errors import ConfigError
from megatron_async.version import __version__

SAFE_VOCABULARY = 1000
"""Token ids of prompts for a server that does not say how many it has."""
ASK_SECONDS = 60
SHARES = (50, 90, 99)


class Part(NamedTuple):
    """What one process of clients saw, and the seconds of CPU time that it took."""

    answers: list[Answer]
    cpu_seconds: float


class Target:
    """A server, and how it is asked.

    Args:
        model: what it calls the model; None asks it.
        vocab_size: of the prompts' token ids; None asks the server.

    Raises:
        ConfigError: it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        model: str | None = None,
        vocab_size: int | None = None,
        chat: bool = False,
    ) -> None:
        self._key = (
            next(iter((os.environ.get(KEY_VARIABLE, "")).split()), "") if key is None else key
        )
        self.server = Server(url, self._key)
        self._chat = chat
        self.card = self._ask("/v1/models")["data"][0] if model is None or not vocab_size else {}
        self.model: str = model or self.card["id"]
        self.vocab_size: int = vocab_size or self.card.get("vocab_size") or SAFE_VOCABULARY

    def encode(self, request: Request, number: int = 0) -> bytes:
        """A request of a load, as bytes to send. It has no end tokens: whatever the model, its
        output is as long as was drawn. ``number`` is added to its token ids: what was sent under
        another one is not in the server's prefix cache."""
        prompt = [(token + number) % self.vocab_size for token in request.prompt]
        body = {
            "model": self.model,
            "max_tokens": request.params.num_tokens_to_generate,
            "ignore_eos": True,
            "temperature": request.params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._chat:
            return self.server.post("/v1/completions", {**body, "prompt": prompt})
        text = self._ask("/detokenize", {"model": self.model, "tokens": prompt})["prompt"]
        messages = [{"role": "user", "content": text}]
        return self.server.post("/v1/chat/completions", {**body, "messages": messages})

    def _ask(self, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        content = None
        if body is not None:
            headers["Content-Type"], content = "application/json", json.dumps(body).encode()
        url = self.server.url + path
        try:
            asked = urllib.request.Request(url, content, headers)
            with urllib.request.urlopen(asked, timeout=ASK_SECONDS) as answer:
                return json.load(answer)
        except (URLError, OSError, ValueError) as error:
            raise ConfigError(f"--server: {url}: {error}") from None


def run_clients(
    server: Server,
    requests: Sequence[bytes],
    arrived: Sequence[float],
    concurrency: int,
    processes: int,
    on_end: Callable[[Answer], None],
) -> list[Part]:
    """Send all requests once, from this process or from several others, each with its share."""
    if processes == 1:
        return [_run(server, requests, arrived, concurrency, on_end)]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    children = []
    for number in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        part = slice(number, None, processes)
        streams = len(range(concurrency)[part])
        given = (barrier, sender, server, requests[part], arrived[part], streams)
        child = context.Process(target=_child, args=given)
        child.start()
        children.append((child, receiver))
    parts = []
    for child, receiver in children:
        parts.append(receiver.recv())
        for answer in parts[-1].answers:
            on_end(answer)
        child.join()
    return parts


def _child(barrier: Any, sender: Any, *given: Any) -> None:
    barrier.wait()
    sender.send(_run(*given))


def _run(
    server: Server,
    requests: Sequence[bytes],
    arrived: Sequence[float],
    concurrency: int,
    on_end: Callable[[Answer], None] = lambda answer: None,
) -> Part:
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    before = time.process_time()
    with asyncio.Runner(loop_factory=factory) as runner:
        answers = runner.run(send_all(server, requests, arrived, concurrency, on_end))
    return Part(answers, time.process_time() - before)


def figures(parts: Sequence[Part]) -> dict[str, Any]:
    """Throughput, latencies and errors; times in milliseconds unless their name says otherwise.
    Requests that failed count as errors alone."""
    answers = [answer for part in parts for answer in part.answers]
    good = [answer for answer in answers if answer.error is None and answer.times]
    seconds = max(a.ended for a in answers) - min(a.due for a in answers)
    tokens, events = sum(a.tokens for a in good), sum(len(a.times) for a in answers)
    cpu = sum(part.cpu_seconds for part in parts)
    several = [a for a in good if a.tokens > 1]
    pairs = (pair for answer in good for pair in itertools.pairwise(answer.times))
    errors = Counter(a.error[0] for a in answers if a.error is not None)
    said = {a.error[0]: a.error[1] for a in answers if a.error is not None}
    return {
        "seconds": seconds,
        "requests": len(good),
        "requests_per_second": len(good) / seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        **_spread("first_token_ms", [a.times[0] - a.due for a in good]),
        **_spread(
            "token_ms_request_mean", [(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in several]
        ),
        **_spread("token_ms_between", [after - before for before, after in pairs]),
        **_spread("request_ms", [a.ended - a.due for a in good]),
        "events": events,
        "client_us_per_event": 1e6 * cpu / max(events, 1),
        "client_cores": cpu / seconds,
        "errors": dict(errors),
        "errors_said": said,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, None of nothing."""
    names = ("mean", *(f"p{share}" for share in SHARES))
    found: Sequence[float | None] = [None] * len(names)
    if seconds:
        times = 1e3 * numpy.asarray(seconds)
        found = [float(times.mean()), *map(float, numpy.percentile(times, SHARES))]
    return {f"{name}_{each}": value for each, value in zip(names, found, strict=True)}


def longest_of(args: argparse.Namespace) -> int | None:
    """Most tokens of a request to the server of ``args``; None where it does not say."""
    most: int | None = _target(args).card.get("max_model_len")
    return most


def _target(args: argparse.Namespace) -> Target:
    return Target(
        args.server,
        key=args.api_key,
        model=args.served_model_name,
        vocab_size=args.vocabulary,
        chat=args.endpoint == "chat",
    )


def measure(args: argparse.Namespace, load: RaggedLoad, command: str, keep: Any) -> dict[str, Any]:
    """Send the load at each arrival rate and return the report; ``keep`` is called with what there
    is so far."""
    target = _target(args)
    most = target.card.get("max_model_len")
    if most is not None and load.longest > most:
        raise ConfigError(
            f"{load.what} make sequences of {load.longest} tokens, and the server's longest has "
            f"{most}; lower one of them"
        )
    requests = load.make_requests(target.vocab_size)
    concurrency = args.concurrency or load.max_requests
    report = _empty_report(target, load, command, args.endpoint, concurrency)
    bar = progress_bar(total=len(requests) * len(args.arrival_rate) * args.rounds, unit="request")
    count, processes = itertools.count(), args.client_processes
    with bar:
        for rate in args.arrival_rate:
            arrived = arrivals(rate, len(requests), load.seed)
            rounds = []
            for _ in range(args.rounds):
                number = next(count)
                sent = [target.encode(one, number) for one in requests]
                parts = run_clients(
                    target.server, sent, arrived, concurrency, processes, lambda _: bar.update()
                )
                rounds.append(figures(parts))
            report["results"].append({"arrival_rate": f"{rate:g}", **_median_round(rounds)})
            keep(report)
    report["complete"] = not any(row["errors"] for row in report["results"])
    keep(report)
    return report


def _empty_report(
    target: Target, load: RaggedLoad, command: str, endpoint: str, concurrency: int
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {"megatron-async": __version__},
        "workload": "server",
        "server": target.server.url,
        "shape": target.model,
        "endpoint": endpoint,
        "concurrency": concurrency,
        "vocabulary": target.vocab_size,
        "load": dataclasses.asdict(load),
        "results": [],
        "complete": False,
    }


def _median_round(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the round of median time, with the seconds of all."""
    middle = sorted(rounds, key=lambda found: found["seconds"])[(len(rounds) - 1) // 2]
    return {**middle, "round_seconds": [found["seconds"] for found in rounds]}


LATENCIES = {
    "ttft": "first_token_ms",
    "tpot": "token_ms_request_mean",
    "itl": "token_ms_between",
    "e2e": "request_ms",
}


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    load = report["load"]
    prompt, output = load["prompt_range"], load["output_range"]
    lines = [
        f"{report['shape']} at {report['server']}, {report['endpoint']}: {load['requests']} "
        f"requests, at most {report['concurrency']} at once, prompts of {prompt[0]}-{prompt[1]} "
        f"tokens, outputs of {output[0]}-{output[1]}"
    ]
    header = ("ms", "mean", *(f"p{share}" for share in SHARES))
    for row in report["results"]:
        table = [
            [name, *(_shown(row[f"{key}_{each}"]) for each in header[1:])]
            for name, key in LATENCIES.items()
        ]
        rate = "at once" if row["arrival_rate"] == "inf" else f"{row['arrival_rate']}/s"
        lines += [
            f"arriving {rate}: {row['output_tokens_per_second']:.0f} output tokens/s, "
            f"{row['requests_per_second']:.2f} requests/s, {row['seconds']:.2f} s",
            format_table(header, table),
            f"client: {row['client_us_per_event']:.1f} us of CPU time for each of "
            f"{row['events']} events, {row['client_cores']:.2f} cores",
        ]
        for kind, number in row["errors"].items():
            lines.append(f"failed: {number} times {kind}: {row['errors_said'][kind]}")
    return "\n".join(lines)


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"

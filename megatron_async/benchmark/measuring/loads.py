"""What ``bench`` decodes: loads, their requests, and work added to the host on purpose."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.request.request import StepReport
from megatron_async.sampling_params import SamplingParams

STOPPING = 3
"""One request in this many of a ragged load ends at a token id."""

STOPPING_TEMPERATURE = 1e6
"""The temperature of those requests. Their own noise alone decides then, whatever the model: in 16
bits greedy outputs of random weights differ from run to run, and an end token would seldom come
again."""

NO_TERMINATION = -1
Range = tuple[int, int]
"""Least and most tokens."""
RANGES = ("prompt_range", "output_range")
"""What says how long requests of a ragged load are."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how it is decoded."""

    prompt: list[int]
    params: SamplingParams

    def shortened(self, new_tokens: int) -> Request:
        """The same for at most ``new_tokens``."""
        most = min(self.params.num_tokens_to_generate or new_tokens, new_tokens)
        return Request(self.prompt, dataclasses.replace(self.params, num_tokens_to_generate=most))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWork:
    """Work of the host in every measurement: ``host_work_us`` is spent at each commit,
    ``stall_us`` at every ``stall_every``-th, both spinning, as Python code would."""

    host_work_us: float = 0.0
    stall_us: float = 0.0
    stall_every: int = 0
    seed: int = 0

    @classmethod
    def own_defaults(cls) -> dict[str, Any]:
        """Return the defaults of what a kind of load has that others lack."""
        common = {field.name for field in dataclasses.fields(HostWork)}
        return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in common}

    def add_to(self, engine: Any) -> None:
        """Spend this work on ``engine`` from now on; nothing is added where there is none."""
        if self.host_work_us or self.stall_us:
            engine.observe(_SlowHost(self))

    def tokenizer(self, vocab_size: int) -> Any:
        """One of random words where something needs it, else None."""
        if "structured" not in getattr(self, "sampling", ""):
            return None
        from megatron_async.models.description.made_up_tokenizer import made_up_tokenizer

        return made_up_tokenizer(vocab_size)


class _SlowHost:
    """An observer as slow as ``work``."""

    def __init__(self, work: HostWork) -> None:
        self._work = work
        self._commits = 0

    def on_commit(self, report: StepReport) -> None:
        self._commits += 1
        stalls = self._work.stall_every and self._commits % self._work.stall_every == 0
        spin_us(self._work.host_work_us + (self._work.stall_us if stalls else 0.0))


def spin_us(microseconds: float) -> None:
    """Keep the host's thread busy."""
    until = time.perf_counter_ns() + int(microseconds * 1e3)
    while time.perf_counter_ns() < until:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(HostWork):
    """Every request has the same lengths, so that all rows decode for the whole time, and is
    sampled alike."""

    prompt_tokens: int = 128
    new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    sampling: str = ""
    sampling_rows: int | None = None
    prompt_file: str = ""

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.prompt_tokens + self.new_tokens

    @property
    def what(self) -> str:
        """The options that make a request as long as it is."""
        return f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens}"

    def requests(self, vocab_size: int, batch_size: int, text: Sequence[int] = ()) -> list[Request]:
        """Prompts are pieces of ``text``, or random token ids without any; the same for all depths
        and rounds."""
        source = random.Random(self.seed)
        plain = SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            num_tokens_to_generate=self.new_tokens, termination_id=NO_TERMINATION,
        )  # fmt: skip
        further = SamplingParams.deserialize(
            {**plain.serialize(), **json.loads(self.sampling or "{}")}
        )
        if text:
            starts = [
                source.randrange(len(text) - self.prompt_tokens + 1) for _ in range(batch_size)
            ]
            prompts = [list(text[start : start + self.prompt_tokens]) for start in starts]
        else:
            prompts = [
                [source.randrange(vocab_size) for _ in range(self.prompt_tokens)]
                for _ in range(batch_size)
            ]
        rows = batch_size if self.sampling_rows is None else self.sampling_rows
        return [Request(p, further if row < rows else plain) for row, p in enumerate(prompts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedLoad(HostWork):
    """Requests of log-normal lengths, at most ``max_requests`` of them at once."""

    requests: int = 512
    max_requests: int = 128
    prompt_range: Range = (32, 2048)
    output_range: Range = (16, 1024)
    block_count: int | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.prompt_range[1] + self.output_range[1]

    @property
    def what(self) -> str:
        """The options that make a request as long as it is."""
        prompt, output = (f"{low},{high}" for low, high in (self.prompt_range, self.output_range))
        return f"--prompt-range {prompt} and --output-range {output}"

    def make_requests(self, vocab_size: int) -> list[Request]:
        """All of which end by their drawn length. Greedy but for those that :func:`with_stops`
        gives an end token, which are sampled from their own seeds."""
        source = random.Random(self.seed)
        made = []
        for number in range(self.requests):
            length = log_normal(source, *self.prompt_range)
            params = SamplingParams(
                temperature=STOPPING_TEMPERATURE if is_stopping(number) else 0,
                num_tokens_to_generate=log_normal(source, *self.output_range),
                termination_id=NO_TERMINATION,
                seed=number,
            )
            made.append(Request([source.randrange(vocab_size) for _ in range(length)], params))
        return made


def ranges_within(most: int, given: Mapping[str, Range]) -> dict[str, Range]:
    """``prompt_range`` and ``output_range`` of requests of at most ``most`` tokens: those that are
    given, and the defaults, lowered as far as they must be. Where nothing is left, the defaults."""
    default = {name: RaggedLoad.own_defaults()[name] for name in RANGES}
    highs = {name: given.get(name, default[name])[1] for name in RANGES}
    if sum(highs.values()) <= most:
        return default | dict(given)
    prompt, output = RANGES
    if not given:
        highs = {prompt: most * 2 // 3, output: most - most * 2 // 3}
    for name, other in ((prompt, output), (output, prompt)):
        if name not in given and other in given:
            highs[name] = most - highs[other]
    if min(highs.values()) < 1:
        return default | dict(given)
    lowered = {name: (min(default[name][0], highs[name]), highs[name]) for name in RANGES}
    return lowered | dict(given)


def is_stopping(number: int) -> bool:
    """Whether this request of a ragged load gets an end token."""
    return number % STOPPING == 1


def with_stops(
    requests: Sequence[Request], tokens: Sequence[list[int]], seed: int
) -> list[Request]:
    """``requests`` with a termination id in those that :func:`is_stopping` names: a token of its
    own stream in ``tokens``, what a serial run decoded, that first occurs near a drawn place before
    the end."""
    source = random.Random(seed)
    stopping = list(requests)
    for number, (request, stream) in enumerate(zip(requests, tokens, strict=True)):
        place = source.uniform(0, len(stream))
        first = {token: at for at, token in reversed(list(enumerate(stream)))}
        places = {at: token for token, at in first.items() if at < len(stream) - 1}
        if is_stopping(number) and places:
            stop = places[min(places, key=lambda at: abs(at - place))]
            params = dataclasses.replace(request.params, termination_id=stop)
            stopping[number] = Request(request.prompt, params)
    return stopping


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive: Poisson at ``rate`` a second, all at once
    for an infinite one."""
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(count)))


def log_normal(source: random.Random, low: int, high: int) -> int:
    """A length whose logarithm is normal, with ``low`` and ``high`` two deviations from its mean
    on either side; clipped to them."""
    mean = (math.log(low) + math.log(high)) / 2
    deviation = (math.log(high) - math.log(low)) / 4
    drawn = round(math.exp(source.gauss(mean, deviation)))
    return min(max(drawn, low), high)

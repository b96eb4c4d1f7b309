"""What ``bench`` decodes: loads, their prompts, and work added to the host on purpose."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWork:
    """Work of the host in every measurement: ``host_work_us`` is spent at each commit,
    ``stall_us`` at every ``stall_every``-th, both spinning, as Python code would."""

    host_work_us: float = 0.0
    stall_us: float = 0.0
    stall_every: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(HostWork):
    """Every request has the same lengths, so that all rows decode for the whole time, and is
    sampled alike."""

    prompt_tokens: int
    new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.prompt_tokens + self.new_tokens

    @property
    def what(self) -> str:
        """The options that make a request as long as it is."""
        return f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedLoad(HostWork):
    """Requests of log-normal lengths, at most ``max_requests`` of them at once."""

    requests: int
    max_requests: int
    prompt_range: tuple[int, int]
    output_range: tuple[int, int]
    block_count: int | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.prompt_range[1] + self.output_range[1]

    @property
    def what(self) -> str:
        """The options that make a request as long as it is."""
        low, high = self.prompt_range
        least, most = self.output_range
        return f"--prompt-range {low},{high} and --output-range {least},{most}"


def prompts(vocab_size: int, batch_size: int, load: Load) -> list[list[int]]:
    """Random token ids, the same for all depths and rounds."""
    source = random.Random(load.seed)
    return [
        [source.randrange(vocab_size) for _ in range(load.prompt_tokens)] for _ in range(batch_size)
    ]


def log_normal(source: random.Random, low: int, high: int) -> int:
    """A length whose logarithm is normal, with ``low`` and ``high`` two deviations from its mean
    on either side; clipped to them."""
    mean = (math.log(low) + math.log(high)) / 2
    deviation = (math.log(high) - math.log(low)) / 4
    drawn = round(math.exp(source.gauss(mean, deviation)))
    return min(max(drawn, low), high)


def add_host_work(engine: Any, load: HostWork) -> None:
    """Spend ``load``'s host time in each commit of ``engine``. The one place that knows how."""
    if not load.host_work_us and not load.stall_us:
        return
    commit: Callable[..., None] = engine._commit
    commits = 0

    def slow_commit(*args: Any, **kwargs: Any) -> None:
        nonlocal commits
        commits += 1
        stalls = load.stall_every and commits % load.stall_every == 0
        spin_us(load.host_work_us + (load.stall_us if stalls else 0.0))
        commit(*args, **kwargs)

    engine._commit = slow_commit


def spin_us(microseconds: float) -> None:
    """Keep the host's thread busy."""
    until = time.perf_counter_ns() + int(microseconds * 1e3)
    while time.perf_counter_ns() < until:
        pass

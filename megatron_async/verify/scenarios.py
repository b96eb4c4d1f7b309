"""The scenarios of ``verify``: what may happen to requests while forwards are in flight.

A scenario is data, of ``scenarios.toml``. Its script is tied to committed tokens of its requests,
never to time, so the same script makes sense at every depth; its witnesses are what must have been
seen to happen.
"""

from __future__ import annotations

import re
import tomllib
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

MAX_SCENARIO_DEPTH = 8
"""Scripts leave their targets this many tokens to go, so that what they do is not too late."""

MAX_NEW_TOKENS = 48
"""Most tokens that a request of a scenario generates."""

MAX_LENGTH = 128
"""Most tokens of a request of a scenario, prompt and generation."""

MAX_TOKENS_IN_FLIGHT = 20
"""Most tokens of a row in flight with drafts, depth times window: scripts leave as many."""

Prompt = tuple[tuple[int, int], ...]


class Action(str, Enum):
    """What a script does. The last three act on the engine and have no target."""

    ADD = "add"
    PAUSE = "pause"
    RESUME = "resume"
    EVICT = "evict"
    ABORT = "abort"
    SUSPEND = "suspend the engine"
    CONTINUE = "resume the engine"
    NEW_WEIGHTS = "update the weights"


class Witness(str, Enum):
    """What a scenario may have to show. The value says what is missing when it does not."""

    ADD = "no request was added while another was decoding"
    PAUSE = "no request was paused"
    EVICT = "no request was evicted"
    ABORT = "no request was aborted"
    FINISH = "no request ended while another went on"
    BOUNDARY = "no decoding request crossed a KV block"
    PREFIX = "no request took prompt tokens from another's KV blocks"
    STOP = "no request ended by a stop token"
    LENGTH = "no request ended by its length"
    DISCARD = "no token was sampled past a request's end"
    ABORT_IN_FLIGHT = "no request was aborted with rows in flight"
    ABORT_WAITING = "no request was aborted while it waited"
    ABORT_PREFILLING = "no request was aborted between the chunks of its prompt"
    ABORT_PAUSED = "no request was aborted while it was paused"
    CHUNKS = "no prompt was prefilled in chunks"
    WAIT = "no request waited for a row or for memory"
    STALL = "no request was short of a KV block"
    PRESSURE = "no request was evicted but by the script"
    RECALL = "no evicted request found its own blocks again"
    PRIORITY = "no request overtook one of lower priority"
    SUSPEND = "no launch was held back"
    WEIGHTS = "no request has tokens of two weight versions"
    LOGGED = "no step was logged"


ONLY_WHEN_OVERLAPPED = frozenset({Witness.DISCARD, Witness.ABORT_IN_FLIGHT})
"""What cannot happen at depth 0."""
W = Witness


class Ask(NamedTuple):
    """One request. ``prompt`` lists pieces as (number, length): requests whose prompts begin with
    the same pieces share that prefix. With ``stop`` it is sampled, and ends by a stop token soon
    after ``stop`` tokens; otherwise by its length, ``new`` tokens."""

    name: str
    prompt: Prompt
    new: int
    sampled: bool = False
    stop: int | None = None
    priority: int = 0


class Event(NamedTuple):
    """When ``request`` has committed ``tokens``: do ``action``, to request ``target``."""

    request: str
    tokens: int
    action: Action
    target: str = ""

    def __str__(self) -> str:
        what = f"{self.action.value} {self.target}".strip()
        return f"{what} after {self.tokens} tokens of {self.request}"


class Sizes(NamedTuple):
    """Sizes of the engine that a scenario runs on."""

    rows: int = 4
    block: int = 4
    blocks: int = 96
    chunk: int = 8
    logging: int = 0


class Scenario(NamedTuple):
    """Requests, a script, and what must be seen. Requests that no event adds are there at once."""

    name: str
    description: str
    asks: tuple[Ask, ...]
    events: tuple[Event, ...]
    witnesses: frozenset[Witness]
    sizes: Sizes = Sizes()

    @classmethod
    def of(cls, name: str, entry: dict[str, Any]) -> Scenario:
        """An entry of ``scenarios.toml``."""
        return cls(
            name,
            entry["description"],
            tuple(map(_ask, entry["requests"].split(";"))),
            tuple(map(_event, filter(None, entry.get("script", "").split(";")))),
            frozenset(map(_member(Witness), entry["shows"].split())),
            Sizes(**entry.get("sizes", {})),
        )

    def targets(self, action: Action) -> list[str]:
        """The requests that the script does this to, in order."""
        return [event.target for event in self.events if event.action is action]


def _member(kind: Any) -> Any:
    """Looks a member up by its name in the file."""
    return lambda name: kind[name.upper().replace("-", "_")]


def _ask(text: str) -> Ask:
    name, prompt, new, *options = text.split()
    pieces = [piece.split("x") for piece in prompt.split("+")]
    numbers = {key: int(value) for key, value in (o.split("=") for o in options if "=" in o)}
    return Ask(
        name, tuple((int(number), int(length)) for number, length in pieces), int(new),
        sampled="sampled" in options, **numbers,
    )  # fmt: skip


def _event(text: str) -> Event:
    when, action, *target = text.split()
    found = re.fullmatch(r"([a-z]+)(\d+)", when)
    if found is None:
        raise ValueError(f"{text!r} does not say after how many tokens of which request")
    return Event(found[1], int(found[2]), _member(Action)(action), *target)


TABLE = tuple(
    Scenario.of(name, entry)
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
)
"""Every scenario, each under its own name."""

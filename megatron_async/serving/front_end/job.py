"""A prompt on its way through the engine, and what has come back of it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.messages import Output, WeightVersion

LogProbs = Sequence[tuple[float, dict[int, float]]]


class Piece(NamedTuple):
    """What an output brought one choice. Its text is final."""

    text: str
    output: Output

    @property
    def finish_reason(self) -> str | None:
        """None while the choice goes on."""
        return self.output.finish_reason


@dataclass(slots=True)
class Job:
    """One prompt on its way through the engine.

    ``text`` is what is echoed of the prompt; ``prompt_offsets``, of a text that the client has
    sent, where its tokens begin in it. ``prompt_log_probs`` and ``prompt_ranks`` are there once the
    first piece is; ``generated`` counts tokens of all choices, ``cached`` those of the prompt that
    were found in the prefix cache. ``begun`` are the choices that have a token. ``queue_seconds``
    and ``first_token``, in seconds after the request, are the first choice's to have them.
    ``scores_prompt``: the prompt alone is asked for, and the one token that the engine generates is
    not shown. ``markers`` are special tokens that mark tool calls, by id, and stay in the text.
    ``is_acknowledged``: the first piece comes as soon as the engine has taken the request, and may
    be empty. ``deaths``: replicas that have died under it. ``name``: the client's id of the
    request, ``answer_id`` that of its answer. ``keeps_stop``: the token that ends a text is a part
    of it.
    """

    prompt: list[int]
    params: SamplingParams
    priority: int
    request_id: int
    timeout: float | None
    names: dict[str, str]
    skip_special_tokens: bool = True
    text: str | None = None
    scores_prompt: bool = False
    markers: dict[int, str] = field(default_factory=dict)
    is_acknowledged: bool = False
    deaths: int = 0
    name: str = ""
    answer_id: str = ""
    keeps_stop: bool = False
    prompt_offsets: list[int] | None = None
    prompt_log_probs: LogProbs | None = None
    prompt_ranks: Sequence[int] = ()
    generated: int = 0
    cached: int = 0
    begun: set[int] = field(default_factory=set)
    ends: dict[int, str] = field(default_factory=dict)
    queue_seconds: float | None = None
    first_token: float | None = None

    def begin_again(self, deaths: int) -> None:
        """Begin again at another replica, after ``deaths`` that have died."""
        self.deaths = deaths
        self.prompt_log_probs, self.prompt_ranks, self.generated = None, (), 0
        self.begun.clear()
        self.ends.clear()

    def reasons(self) -> list[str]:
        """Why each choice that has ended did, in the engine's words."""
        return [self.ends[index] for index in sorted(self.ends)]


@dataclass(slots=True)
class Choice:
    """A whole text, with what the engine says of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_spans: Sequence[WeightVersion] = ()
    routed_experts: bytes | None = None


def shown_weights(spans: Sequence[WeightVersion]) -> dict[str, Any]:
    """What vLLM's answers say of the weights that sampled a text; and where there were drafts, how
    many of each place were verified and accepted."""
    shown = [msgspec.structs.asdict(span) for span in spans]
    for each in shown:
        if not each["drafted"]:
            del each["drafted"], each["accepted"]
    return {"weight_versions": shown}


def shown_experts(experts: bytes | None) -> dict[str, Any]:
    """What vLLM's answers say of the experts of a text's tokens: base64 of a numpy file."""
    shown = None if experts is None else base64.b64encode(experts).decode()
    return {"routed_experts": shown}


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    generated: int
    cached: int

    def to_dict(self) -> dict[str, Any]:
        """Return the usage as completions and chat have it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def usage_of(jobs: Sequence[Job]) -> Usage:
    """Tokens of all prompts of a request so far."""
    prompt = sum(len(job.prompt) for job in jobs)
    generated = sum(job.generated for job in jobs if not job.scores_prompt)
    return Usage(prompt, generated, sum(job.cached for job in jobs))

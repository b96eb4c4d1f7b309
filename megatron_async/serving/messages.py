"""What front ends and the engine process tell each other, as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Decode a prompt. ``request_id`` is the front end's own; ``params`` are the fields of
    ``SamplingParams``; ``timeout`` in seconds ends the request with what it has by then."""

    request_id: int
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0
    timeout: float | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for a request any more."""

    request_id: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """``name`` of the whole engine: info, suspend, resume, weights, reset_prefix_cache, profile,
    pause, drain; answered by an :class:`Answer` with the same ``number``."""

    number: int
    name: str
    arguments: dict[str, Any] = {}


ToEngine = Generate | Abort | Control


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What one step brought one sequence of a request.

    Args:
        index: of the sequence, 0 to n - 1.
        token_ids: new tokens; a stop token is among them.
        text: of requests with stop words alone; None where the front end makes the text.
        log_probs: for each token its log-probability and the most likely tokens' by id, if asked.
        prompt_log_probs: with the first output, for each prompt token but the first.
        finish_reason: stop, length, abort, timeout or error; None while it goes on.
        stop_reason: the stop word, or the id of the stop token of the request's own.
        usage: with the last output: prompt, cached and generated tokens, and seconds in the queue.
    """

    request_id: int
    index: int
    token_ids: list[int]
    text: str | None = None
    log_probs: list[tuple[float, dict[int, float]]] | None = None
    prompt_log_probs: list[tuple[float, dict[int, float]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, float] | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request cannot be served: ``kind`` is invalid, full or dead."""

    request_id: int
    kind: str
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All that a step brought one front end."""

    outputs: list[Output | Refused]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Of a :class:`Control`: a result, or an error's message."""

    number: int
    result: dict[str, Any] = {}
    error: str | None = None


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """The engine's counters and what it holds now, in plain types."""

    time: float
    counters: dict[str, Any]
    gauges: dict[str, float]


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """What a front end must know of the model."""

    model_name: str
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: list[int]
    dtype: str
    depth: int
    max_requests: int
    block_count: int
    version: str


FromEngine = Outputs | Answer | Snapshot | EngineInfo

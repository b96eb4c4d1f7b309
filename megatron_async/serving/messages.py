"""What front ends, the engine process and its supervisor tell each other, as msgpack."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import zmq

from megatron_async.codec import Codec
from megatron_async.processes.messages import Beat, NotStarted, Preparing, Started, Stop
from megatron_async.processes.private_folder import (
    make_private_folder,
    remove_private_folder,
    renew_private_folder,
)
from megatron_async.sampling_params import CheckedParams
from megatron_async.serving.engine_side.stall_watch import STALL_SECONDS

Named = TypeVar("Named")
LogProbs = list[tuple[float, dict[int, float]]]
"""For each token its log-probability and the most likely tokens' by id."""
PromptLogProbs = list[tuple[float, dict[int, float], int]]
"""The same with the rank of each token, from 1; 0 where the model gave NaN."""


class Network(msgspec.Struct, frozen=True):
    """Two ports of a host, and the key pair that all processes share that may know them."""

    host: str
    ports: tuple[int, int]
    keys: tuple[bytes, bytes]

    def url(self, place: int) -> str:
        """Return the URL of one of the ports."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.ports[place]}"


class Endpoint(msgspec.Struct, frozen=True):
    """Where the engine process is to be found: two Unix sockets, or two ports.

    Args:
        directory: of the sockets; nobody but this user may enter it.
        secret: the identity of every front end begins with it.
        network: None for Unix sockets.
    """

    directory: str
    secret: bytes
    network: Network | None = None

    @property
    def commands(self) -> str:
        """A ROUTER's address, for what front ends send."""
        return f"ipc://{self.directory}/commands" if self.network is None else self.network.url(0)

    @property
    def outputs(self) -> str:
        """A ROUTER's address, for what they get."""
        return f"ipc://{self.directory}/outputs" if self.network is None else self.network.url(1)

    def serve(self, opened: zmq.Socket[bytes], url: str) -> None:
        """Bind a socket to one of the two addresses."""
        self.secure(opened, serves=True)
        opened.bind(url)
        if self.network is None:
            os.chmod(url.removeprefix("ipc://"), 0o600)

    def secure(self, opened: zmq.Socket[bytes], *, serves: bool) -> None:
        """What passes a network is encrypted, and without the key nobody is heard."""
        if self.network is None:
            return
        opened.curve_publickey, opened.curve_secretkey = self.network.keys
        opened.ipv6 = ":" in self.network.host
        if serves:
            opened.curve_server = True
        else:
            opened.curve_serverkey = self.network.keys[0]

    @classmethod
    def private(cls) -> Endpoint:
        """Sockets in a new directory; raises ConfigError where its path is too long."""
        directory = make_private_folder("commands")
        return cls(directory, secrets.token_bytes(16))

    @classmethod
    def over_network(cls, host: str) -> Endpoint:
        """Two ports of ``host`` that are free now, with a key pair of CurveZMQ."""
        with contextlib.ExitStack() as stack:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            opened = [stack.enter_context(socket.socket(family)) for _ in range(2)]
            for each in opened:
                each.bind((host, 0))
            commands, outputs = (each.getsockname()[1] for each in opened)
        network = Network(host, (commands, outputs), zmq.curve_keypair())
        return msgspec.structs.replace(cls.private(), network=network)

    def prepare(self) -> None:
        """Make the directory again if somebody has removed it: what cleans up temporary files does.

        Raises:
            ConfigError: there is something else in its place.
        """
        renew_private_folder(self.directory)

    def remove(self) -> None:
        """The directory, with all that is in it."""
        remove_private_folder(self.directory)


# --- from the supervisor to its process, and back ---------------------------------------------


class Kept(msgspec.Struct, frozen=True, tag=True):
    """What the engine process was told and the next one must know.

    Args:
        weights: paths whose weights, one after the other, make those that are served of those of
            the model.
        weight_version: of them.
        suspended: nothing is launched.
        asleep: parts of its memory that were given back and are somebody else's now.
        lost_weights: their values were discarded, and no new ones have come.
        weight_names: what a trainer called the last versions that it has sent, by their numbers.
    """

    weights: tuple[str, ...] = ()
    weight_version: int = 0
    suspended: bool = False
    asleep: tuple[str, ...] = ()
    lost_weights: bool = False
    weight_names: tuple[tuple[int, str], ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """What a front end must know of the model.

    Args:
        not_ready: why no request is served although the engine runs; None when they are.
        kept: what it was told, and another one must know to be the same.
        fingerprint: ``system_fingerprint`` of answers.
    """

    model_name: str
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: list[int]
    dtype: str
    depth: int
    max_requests: int
    block_count: int
    version: str
    max_sequences: int | None = None
    """That may run or wait at the same time; None for any number."""
    not_ready: str | None = None
    kept: Kept = Kept()
    fingerprint: str | None = None


class Launch(msgspec.Struct, frozen=True, tag=True):
    """What the engine process serves, and where.

    Args:
        model: a model directory, or ``"tiny"``.
        config: the fields of an ``EngineConfig``.
        max_queue: sequences that may wait beyond those that ``max_requests`` lets run; None for
            any number.
        kept: what the process before this one was told; None for the first.
        info: what it has said of itself.
        stall_seconds: see ``StallWatch``.
    """

    model: str
    config: dict[str, Any]
    endpoint: Endpoint
    max_queue: int | None = None
    log_level: str = "WARNING"
    kept: Kept | None = None
    info: EngineInfo | None = None
    stall_seconds: float = STALL_SECONDS


class GivenUp(msgspec.Struct, frozen=True, tag=True):
    """Tells front ends that there will be no further engine process, and why."""

    reason: str


ToSupervisor = Started | Preparing | Beat | NotStarted | Kept | EngineInfo
FromSupervisor = Launch | Stop


# --- from front ends to the engine process ----------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end is there; answered by :class:`EngineInfo`."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """A front end is not any more; its requests are aborted."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Decode a prompt. ``request_id`` is the front end's own, which has checked ``params``;
    ``timeout`` in seconds ends the request with what it has by then;
    ``acknowledge``: an empty output says that it has been taken; ``deaths``: replicas that have
    died under it; ``name``: the client's id of the request, by which it may be aborted, as it may
    by ``answer_id``, that of its answer."""

    request_id: int
    prompt: list[int]
    params: CheckedParams
    priority: int = 0
    timeout: float | None = None
    acknowledge: bool = False
    deaths: int = 0
    name: str = ""
    answer_id: str = ""


def named(ids: Iterable[str], names: Mapping[Named, tuple[str, str]]) -> set[Named]:
    """The requests that ``ids`` mean: each those that clients gave this id, and where there are
    none, those whose answers have it.

    Args:
        names: of each request its client's id, and its answer's.
    """
    by_name: dict[str, set[Named]] = {}
    by_answer: dict[str, set[Named]] = {}
    for request, (own, of_answer) in names.items():
        by_name.setdefault(own, set()).add(request)
        by_answer.setdefault(of_answer, set()).add(request)
    empty: set[Named] = set()
    each_found = (by_name.get(each) or by_answer.get(each, empty) for each in ids)
    return empty.union(*each_found)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for a request any more."""

    request_id: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """``name`` of the whole engine, one of
    :data:`megatron_async.serving.engine_side.controls.CONTROLS`;
    answered by an :class:`Answer` with the same ``number``."""

    number: int
    name: str
    arguments: dict[str, Any] = {}


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the :class:`Control` of this number any more: a profile is not taken to its
    end."""

    number: int


ToEngine = Hello | Bye | Generate | Abort | Control | Cancel
TO_ENGINE: Codec[ToEngine] = Codec(ToEngine)


# --- from the engine process to front ends ----------------------------------------------------


class WeightVersion(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``start`` to ``end`` - 1 of a text were sampled by the weights of ``version``, which
    have verified ``drafted`` and ``accepted`` drafts, by their place in the window."""

    version: int
    start: int
    end: int
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step brought one sequence of a request, or several steps that have gathered.

    Args:
        index: of the sequence, 0 to n - 1.
        token_ids: new tokens; a stop token is among them.
        text: of requests with stop words alone; None where the front end makes the text.
        log_probs: for each token its log-probability and the most likely tokens' by id, if asked.
        prompt_log_probs: with the first output, for each prompt token but the first.
        finish_reason: stop, length, abort, timeout or error; None while it goes on.
        stop_reason: the stop word, or the id of the stop token of the request's own.
        usage: with the last output: ``prompt_tokens``, ``cached_tokens``, ``generated_tokens``,
            and ``queue_time`` in seconds.
        weight_spans: with the last output of a sequence, the version of the weights that sampled
            its tokens from a first one up to another.
        routed_experts: with the last output of a sequence that asks for them, a numpy file of
            uint16 ``[tokens - 1, layers, top_k]``, zeros for layers without experts.
    """

    request_id: int
    index: int
    token_ids: list[int]
    text: str | None = None
    log_probs: LogProbs | None = None
    prompt_log_probs: PromptLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, int | float] | None = None
    weight_spans: list[WeightVersion] = []
    routed_experts: bytes | None = None


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request cannot be served: ``kind`` is invalid, full, dead or internal."""

    request_id: int
    kind: str
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All that a step brought one front end, in order."""

    outputs: list[Output | Refused]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a :class:`Control`: a result, or an error's message and its kind, which is
    invalid, busy, dead or internal."""

    number: int
    result: dict[str, Any] = {}
    error: str | None = None
    kind: str = "invalid"


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """The engine's counters and what it holds now, in plain types; ``time`` in seconds since the
    epoch; ``stalled``: why requests wait without a step, None while they do not."""

    time: float
    counters: dict[str, Any]
    gauges: dict[str, int | float]
    stalled: str | None = None


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The front end has not read what it was sent; its requests were aborted."""


FromEngine = Outputs | Answer | Snapshot | Dropped | EngineInfo
FROM_ENGINE: Codec[FromEngine] = Codec(FromEngine)

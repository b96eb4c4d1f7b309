"""What rank 0 tells the others and what they answer, as frozen data.

The calls that the loop makes on its runner, what an engine is built from, new weights, timelines,
and calls of a user's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch

from megatron_async.codec import Codec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.kernel_profiler import DeviceKernel
from megatron_async.device.protocol import Span
from megatron_async.errors import MegatronAsyncError, RankDiedError, error_named
from megatron_async.models.description.config import ModelConfig
from megatron_async.step.plan import Guess, Plan


class Told(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """What rank 0 tells. ``is_answered``: rank 0 waits until it is done."""

    is_answered: ClassVar[bool]


class LoadModel(Told, frozen=True):
    """Load this rank's share of a model."""

    path: str
    config: EngineConfig
    is_answered: ClassVar[bool] = True


class BuildModel(Told, frozen=True):
    """Make a model with random weights: e4m3 in linear layers with ``quantize``, which quantize
    their inputs with ``quantize_activations``; MXFP4 in experts with ``pack``."""

    model: ModelConfig
    dtype: torch.dtype
    seed: int
    quantize: bool = False
    pack: bool = False
    quantize_activations: bool = False
    is_answered: ClassVar[bool] = True


class BuildEngine(Told, frozen=True):
    """Make the runner of engine ``engine`` over the model. ``spec`` is an encoded ``EngineSpec``,
    which only those know that build."""

    engine: int
    spec: bytes
    is_answered: ClassVar[bool] = True


class Launch(Told, frozen=True):
    """``ModelRunner.launch``."""

    engine: int
    plan: Plan
    is_answered: ClassVar[bool] = False


class Sample(Told, frozen=True):
    """``ModelRunner.sample_until``."""

    engine: int
    number: int
    is_answered: ClassVar[bool] = False


class Masks(Told, frozen=True):
    """Allowed-token masks of the pending ticket: ``data`` has the int32 words of ``masked``, then
    those of the masks that count."""

    engine: int
    data: bytes
    is_answered: ClassVar[bool] = False


class Guesses(Told, frozen=True):
    """``ModelRunner.guess``, of the pending ticket."""

    engine: int
    guesses: list[Guess]
    is_answered: ClassVar[bool] = False


class PoisonFreed(Told, frozen=True):
    """``ModelRunner.poison_freed``."""

    engine: int
    blocks: list[int]
    slots: list[int]
    is_answered: ClassVar[bool] = False


class Restart(Told, frozen=True):
    """``ModelRunner.restart``."""

    engine: int
    is_answered: ClassVar[bool] = False


class ChooseScales(Told, frozen=True):
    """``ModelRunner.choose_scales``, in which ranks meet; nothing is in flight."""

    engine: int
    stored: bool
    is_answered: ClassVar[bool] = False


class Release(Told, frozen=True):
    """``ModelRunner.release``; nothing is in flight."""

    engine: int
    is_answered: ClassVar[bool] = False


class ReadWeights(Told, frozen=True):
    """Read and check new weights."""

    source: str
    allow_non_finite_weights: bool
    is_answered: ClassVar[bool] = True


class ReadShards(Told, frozen=True):
    """Find and check this rank's share of the tensors of a trainer's ranks: ``source`` is what a
    ``ShareSource`` has told. ``all_parameters``: none may be missing."""

    source: bytes
    allow_non_finite_weights: bool
    all_parameters: bool
    is_answered: ClassVar[bool] = True


class AwaitTensors(Told, frozen=True):
    """Check what is said of the new weights that rank 0 will send whole: name, dtype and shape of
    each. ``all_parameters``: none may be missing."""

    tensors: list[list[Any]]
    all_parameters: bool
    is_answered: ClassVar[bool] = True


class ReplaceWeights(Told, frozen=True):
    """Take the weights that were read, or are sent now; nothing is in flight."""

    is_answered: ClassVar[bool] = True


class Sleep(Told, frozen=True):
    """Give memory back, of the KV caches of engine ``engine`` and of the weights, whose values are
    kept in the host's memory or not; nothing is in flight."""

    engine: int
    keep_weights: bool
    is_answered: ClassVar[bool] = True


class WakeUp(Told, frozen=True):
    """Take memory back: a tag of ``engine/lifecycle/sleep_mode.py``."""

    engine: int
    tag: str
    is_answered: ClassVar[bool] = True


class StartTimeline(Told, frozen=True):
    """Record from now on what this rank does for engine ``engine``, and its GPU's ``kernels``."""

    engine: int
    kernels: bool
    is_answered: ClassVar[bool] = True


class TakeTimeline(Told, frozen=True):
    """End the recording; answered by a :class:`Timeline`. Nothing is in flight."""

    engine: int
    is_answered: ClassVar[bool] = True


class AskClock(Told, frozen=True):
    """Answered by :class:`Now`, at once."""

    is_answered: ClassVar[bool] = True


class Called(Told, frozen=True):
    """A call of the user's on rank 0 is over, where all ranks are processes of the user's that may
    make the same one. ``brought`` is what it brought, encoded by ``megatron_api/spmd``."""

    name: str
    brought: bytes
    is_answered: ClassVar[bool] = False


class Stop(Told, frozen=True):
    """End."""

    is_answered: ClassVar[bool] = False


Message = (
    LoadModel
    | BuildModel
    | BuildEngine
    | Launch
    | Sample
    | Masks
    | Guesses
    | PoisonFreed
    | Restart
    | ChooseScales
    | Release
    | ReadWeights
    | ReadShards
    | AwaitTensors
    | ReplaceWeights
    | Sleep
    | WakeUp
    | StartTimeline
    | TakeTimeline
    | AskClock
    | Called
    | Stop
)


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """What an answered message asked for is done, or met an error of ``megatron_async.errors``."""

    error: str | None = None
    message: str = ""

    def as_error(self, rank: int) -> MegatronAsyncError | None:
        """The error that ``rank`` met; None where it met none."""
        if self.error is None:
            return None
        found = error_named(self.error, f"rank {rank}: {self.message}")
        return found or RankDiedError(f"rank {rank}: {self.error}: {self.message}")


class Timeline(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """What a rank did: its host's work and its waits for what it is told, in the order of their
    ends; the device's work, in stream order; the collectives in it, where they are seen; and its
    kernels, where they were asked for."""

    host: list[Span]
    device: list[Span]
    collectives: list[Span]
    kernels: list[DeviceKernel]


class Now(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A rank's clock, in nanoseconds of ``time.perf_counter_ns``."""

    time_ns: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The rank ends; why."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The user builds an engine on this rank, over a cache of these sizes, which only those know
    that build."""

    sizes: bytes


class Where(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Which of the engine's calls the user is in on this rank, none if empty; the last one; and
    how many messages were taken."""

    call: str
    last: str
    taken: int


Answer = Done | Timeline | Now

MESSAGES: Codec[Message] = Codec(Message)
ANSWERS: Codec[Answer | Failed | Ready | Where] = Codec(Answer | Failed | Ready | Where)

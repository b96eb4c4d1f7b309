"""What rank 0 tells the others and what they answer, as frozen data.

The calls that the loop makes on its runner, what an engine is built from, and new weights.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from megatron_async.codec import Codec
from megatron_async.step.plan import Plan


class Told(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """What rank 0 tells. ``is_answered``: rank 0 waits until it is done."""

    is_answered: ClassVar[bool]


class LoadModel(Told):
    """Load this rank's share of a model. ``config`` are the fields of an ``EngineConfig``."""

    path: str
    config: dict[str, Any]
    is_answered: ClassVar[bool] = True


class BuildModel(Told):
    """Make a model with random weights: the fields of a ``ModelConfig``, and torch's dtype."""

    model: dict[str, Any]
    dtype: str
    seed: int
    is_answered: ClassVar[bool] = True


class BuildEngine(Told):
    """Make the runner of engine ``engine`` over the model, with the sizes that rank 0 has."""

    engine: int
    config: dict[str, Any]
    slot_count: int
    enable_chunked_prefill: bool
    state_snapshot_count: int | None
    is_answered: ClassVar[bool] = True


class Launch(Told):
    """``ModelRunner.launch``."""

    engine: int
    plan: Plan
    is_answered: ClassVar[bool] = False


class Sample(Told):
    """``ModelRunner.sample_until``."""

    engine: int
    number: int
    is_answered: ClassVar[bool] = False


class Masks(Told):
    """Allowed-token masks of the pending ticket, ``rows`` of them: int32 words of ``masked`` and
    then of the masks that count are the bytes."""

    engine: int
    data: bytes
    is_answered: ClassVar[bool] = False


class PoisonFreed(Told):
    """``ModelRunner.poison_freed``."""

    engine: int
    blocks: list[int]
    slots: list[int]
    is_answered: ClassVar[bool] = False


class Restart(Told):
    """``ModelRunner.restart``."""

    engine: int
    is_answered: ClassVar[bool] = False


class Release(Told):
    """``ModelRunner.release``; nothing is in flight."""

    engine: int
    is_answered: ClassVar[bool] = False


class ReadWeights(Told):
    """Read and check new weights."""

    source: str
    allow_non_finite_weights: bool
    is_answered: ClassVar[bool] = True


class AwaitTensors(Told):
    """Check what is said of the new weights that rank 0 will send whole: name, dtype and shape of
    each. ``all_parameters``: none may be missing."""

    tensors: list[list[Any]]
    all_parameters: bool
    is_answered: ClassVar[bool] = True


class ReplaceWeights(Told):
    """Take the weights that were read, or are sent now; nothing is in flight."""

    is_answered: ClassVar[bool] = True


class Sleep(Told):
    """Give memory back, of the KV caches of engine ``engine`` and of the weights, whose values are
    kept in the host's memory or not; nothing is in flight."""

    engine: int
    keep_weights: bool
    is_answered: ClassVar[bool] = True


class WakeUp(Told):
    """Take memory back: a tag of ``engine/sleep_mode.py``."""

    engine: int
    tag: str
    is_answered: ClassVar[bool] = True


class Stop(Told):
    """End."""

    is_answered: ClassVar[bool] = False


Message = (
    LoadModel
    | BuildModel
    | BuildEngine
    | Launch
    | Sample
    | Masks
    | PoisonFreed
    | Restart
    | Release
    | ReadWeights
    | AwaitTensors
    | ReplaceWeights
    | Sleep
    | WakeUp
    | Stop
)


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """What an answered message asked for is done, or met an error of ``megatron_async.errors``."""

    error: str | None = None
    message: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The rank ends; why."""

    reason: str


MESSAGES: Codec[Message] = Codec(Message)
ANSWERS: Codec[Done | Failed] = Codec(Done | Failed)

"""Shards by a collective: a group of all ranks of a trainer and all ranks of an engine, over gloo
or NCCL.

The engine's ranks plan, and ask each trainer rank for slices of its tensors, which come in buckets.
What a rank takes is gathered beside the weights that it serves: a trainer may end in the middle.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async.codec import from_plain, parse_json
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.weights.group import MAX_HEADER_BYTES, WeightGroup
from megatron_async.weights.sharded.buckets import Bucket, buckets_of
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.plan import Slice, TrainerRank
from megatron_async.weights.tensor_info import TensorInfo, infos_of, weights_of

BUCKET_BYTES = 256 << 20
REASON_BYTES = 512
"""A rank says why it refuses in as many."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how ranks meet: the trainer's come first, then the engine's.

    Args:
        key: of this group among those that meet there one after the other.
    """

    key: str
    address: str
    port: int
    trainers: int
    engine_ranks: int
    backend: str
    timeout: float
    bucket_bytes: int
    checksums: bool

    @classmethod
    def from_json(cls, data: Any) -> Meeting:
        """Raises CheckpointError for what is none."""
        try:
            found: Meeting = from_plain(data, cls)
        except ValueError as error:
            raise CheckpointError(f"these are no handles of a ShardGroup: {error}") from None
        return found

    def join(self, rank: int, device: torch.device | str) -> WeightGroup:
        """Meet the others; raises ConfigError where they do not come."""
        return WeightGroup(
            self.address, self.port, rank=rank, world_size=self.trainers + self.engine_ranks,
            backend=self.backend, device=device, timeout=self.timeout, trainers=self.trainers,
        )  # fmt: skip

    def readers_of(self, trainer: int) -> list[int]:
        """The engine's ranks in the order in which a trainer's talks to them. With
        :meth:`trainers_of` no two wait for each other in a circle: all pairs are in one order."""
        ranks = range(self.engine_ranks)
        return sorted(ranks, key=lambda reader: self._turn(trainer, reader))

    def trainers_of(self, reader: int) -> list[int]:
        """The trainer's ranks in the order in which an engine's talks to them."""
        ranks = range(self.trainers)
        return sorted(ranks, key=lambda trainer: self._turn(trainer, reader))

    def _turn(self, trainer: int, reader: int) -> tuple[int, int]:
        return (reader - trainer) % self.engine_ranks, trainer


class ShardGroup:
    """One trainer rank's side. All ranks meet in the first :meth:`send`, while the engine is in
    ``update_weights(open_sharded(handles))``.

    Args:
        address, port: where trainer rank 0 listens.
        layout: this rank's place.
        rank: among the trainer's ``trainers`` ranks.
        engine_ranks: of the engine.
        backend, device, timeout: as those of :class:`WeightGroup`.
        bucket_bytes: of what is sent at a time: each rank takes memory for one bucket.
        checksums: each slice comes with one, which the engine compares. This one, like
            ``bucket_bytes``, is said by trainer rank 0 for all.

    Raises:
        ConfigError: ``rank`` or a number does not fit.
    """

    def __init__(
        self,
        address: str,
        port: int,
        layout: TrainerLayout,
        *,
        rank: int,
        trainers: int,
        engine_ranks: int = 1,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        bucket_bytes: int = BUCKET_BYTES,
        checksums: bool = False,
    ) -> None:
        if not 0 <= rank < trainers or engine_ranks < 1 or bucket_bytes < 8:
            raise ConfigError(
                f"rank={rank} must be below trainers={trainers}, engine_ranks={engine_ranks} at "
                f"least 1, and bucket_bytes={bucket_bytes} at least 8"
            )
        self._meeting = Meeting(
            secrets.token_hex(8), address, port, trainers, engine_ranks, backend, timeout,
            bucket_bytes, checksums,
        )  # fmt: skip
        self._layout, self._rank, self._device = layout, rank, device
        self._group: WeightGroup | None = None

    @property
    def handles(self) -> dict[str, Any]:
        """For :func:`open_sharded`, in JSON's types, for as many updates as the group lives.

        Raises:
            ConfigError: this is another rank than 0.
        """
        if self._rank:
            raise ConfigError("the handles of a ShardGroup are those of trainer rank 0")
        return {name: getattr(self._meeting, name) for name in Meeting.__slots__}

    def send(self, tensors: Mapping[str, Any]) -> None:
        """Send what the engine's ranks ask of this rank's tensors, by the names of its own modules.

        Raises:
            CheckpointError: some rank refuses what is announced or has come, for the reason that
                the error says; no engine changes its weights. Or a rank has ended, or says nothing
                for ``timeout`` seconds; then the group is of no use any more.
            ConfigError: the others do not come.
        """
        if self._group is None:
            self._group = self._meeting.join(self._rank, self._device)
        group, given = self._group, weights_of(tensors)
        infos: tuple[TensorInfo, ...] = ()
        refusal: Exception | None = None
        try:
            infos = tuple(infos_of(given))
        except CheckpointError as error:
            refusal = error
        own = json.dumps(TrainerRank(self._layout, infos).to_json()).encode()
        for trainer in range(self._meeting.trainers):
            tell(group, own if trainer == self._rank else b"", root=trainer)
        asked: dict[int, list[Bucket]] = {}
        for reader in self._meeting.readers_of(self._rank):
            data = take_from(group, self._meeting.trainers + reader)
            try:
                asked[reader] = Asked.from_bytes(data).buckets(given)
            except (CheckpointError, RuntimeError) as error:
                refusal = refusal or error
        room = torch.empty(0)
        try:
            room = room_for(group, [each for some in asked.values() for each in some])
        except RuntimeError as error:
            refusal = refusal or error
        agree(group, self._meeting, refusal)
        for reader, buckets in asked.items():
            for bucket in buckets:
                group.send_to(self._meeting.trainers + reader, bucket.pack(given, room))
        agree(group, self._meeting, None)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank of the engine asks of a trainer's: boxes of its tensors, each a name, a start and
    sizes, in the order in which they come."""

    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    bucket_bytes: int
    checksums: bool

    def to_bytes(self) -> bytes:
        """The same as JSON."""
        return json.dumps([self.boxes, self.bucket_bytes, self.checksums]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Asked:
        """The inverse; raises CheckpointError for what is none."""
        try:
            boxes, size, checksums = parse_json(data)
            found: Asked = from_plain(
                {"boxes": boxes, "bucket_bytes": size, "checksums": checksums}, cls
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"an engine asks for no boxes of tensors: {error}") from None
        return found

    def buckets(self, tensors: Mapping[str, Tensor]) -> list[Bucket]:
        """What is sent; raises CheckpointError or RuntimeError for what ``tensors`` do not have."""
        slices = [Slice(name, start, name, start, sizes) for name, start, sizes in self.boxes]
        for each in slices:
            if each.name not in tensors:
                raise CheckpointError(f"an engine asks for {each.name}, which is not there")
            each.of(tensors[each.name])
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return buckets_of(slices, dtypes, self.bucket_bytes, checksums=self.checksums)


# --- what both sides say ----------------------------------------------------------------------


def tell(group: WeightGroup, data: bytes, *, root: int) -> bytes:
    """What rank ``root`` tells all; each other gives nothing."""
    length = torch.tensor([len(data)], dtype=torch.int64, device=group.device)
    size = _checked(group, int(group.broadcast(length, root)))
    return _bytes_of(group.broadcast(_said_room(group, data, size), root))


def give_to(group: WeightGroup, rank: int, data: bytes) -> None:
    """Tell one other rank, which calls :func:`take_from`."""
    group.send_to(rank, torch.tensor([len(data)], dtype=torch.int64, device=group.device))
    group.send_to(rank, _said_room(group, data, len(data)))


def take_from(group: WeightGroup, rank: int) -> bytes:
    """The inverse of :func:`give_to`."""
    length = torch.zeros(1, dtype=torch.int64, device=group.device)
    size = _checked(group, int(group.receive_from(rank, length)))
    return _bytes_of(group.receive_from(rank, _said_room(group, b"", size)))


def agree(group: WeightGroup, meeting: Meeting, refusal: Exception | None) -> None:
    """Go on where all ranks do.

    Raises:
        CheckpointError: one refuses; says which one, and why.
    """
    said = "" if refusal is None else str(refusal) or type(refusal).__name__
    data = said.encode()[:REASON_BYTES]
    padded = bytearray(data.ljust(REASON_BYTES, b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(group.device)
    answers = [_bytes_of(each).rstrip(b"\0") for each in group.gather(own)]
    if refusal is not None:
        raise CheckpointError(said) from refusal
    for rank, answer in enumerate(answers):
        if answer:
            reader = rank - meeting.trainers
            who = f"trainer rank {rank}" if reader < 0 else f"rank {reader} of the engine"
            raise CheckpointError(f"{who} refuses them: {answer.decode(errors='ignore')}")


def room_for(group: WeightGroup, buckets: Sequence[Bucket]) -> Tensor:
    """uint8: memory for one of ``buckets`` at a time; raises RuntimeError where there is none."""
    size = max((each.nbytes for each in buckets), default=0)
    return torch.empty(size, dtype=torch.uint8, device=group.device)


def _said_room(group: WeightGroup, data: bytes, size: int) -> Tensor:
    """uint8 ``[size]``, with ``data`` in it where there is some."""
    return torch.frombuffer(bytearray(data or size), dtype=torch.uint8).to(group.device)


def _checked(group: WeightGroup, size: int) -> int:
    if not 0 < size <= MAX_HEADER_BYTES:
        group.close()
        raise CheckpointError(f"a rank of a weight group says something of {size:,} bytes")
    return size


def _bytes_of(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()

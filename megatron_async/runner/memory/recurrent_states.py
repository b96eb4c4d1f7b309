"""Recurrent state of all requests on the device: where it lives, and what a layer is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_async.device.memory import must_fit
from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec

if TYPE_CHECKING:
    from megatron_async.kernels.mamba.kernels import MambaKernels
    from megatron_async.kernels.mamba.rows import StepRows, WindowRows

ZEROS = -1
"""In place of an entry: begin from a state of zeros."""


class Zeros(Protocol):
    """Makes a tensor of zeros."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> Tensor: ...


class DecodeStates(NamedTuple):
    """The R decode rows of a forward over T tokens, padding and rows that have ended included. Row
    r brings a window of w tokens: 1, and its drafts.

    A layer begins row r with entry ``first[r]`` of slot ``slots[r]``, or with zeros where that is
    ``ZEROS``, and leaves the state after token j of the window in entry j of that slot. It reads
    before it writes: they may be the same. States behind the row's own tokens are never used and
    may be anything.

    Args:
        slots: int64 [R]; the null slot for rows that hold no live request. They may write there in
            any order, and begin from zeros, so they stay finite.
        first: int64 [R].
        window: w.
        tokens: int64 [R, w], which of the T tokens they are; T, one behind the last, for places
            without a token: such a place reads anything, and its output goes nowhere. None: token j
            of row r is token r * w + j, and those from R * w on are padding of the forward.
    """

    slots: Tensor
    first: Tensor
    window: int
    tokens: Tensor | None = None


class ChunkStates(NamedTuple):
    """The prefill chunks of a forward, at most N; entries without tokens come last.

    A layer begins chunk n with entry ``first[n]`` of slot ``slots[n]``, or with zeros where that is
    ``ZEROS`` (the beginning of a prompt), and leaves the state after its last token in entry 0. An
    entry without tokens has the null slot and may leave its zeros there.

    Args:
        slots, first: int64 [N].
        offsets: int64 [N], the forward's token that is the chunk's first.
        lengths: int64 [N], its tokens; 0 for entries without.
    """

    slots: Tensor
    first: Tensor
    offsets: Tensor
    lengths: Tensor


class StepStates(NamedTuple):
    """What the recurrent layers of one forward are told; tokens of neither part are padding, whose
    outputs may be anything finite. Without ``chunks`` it is a decode step."""

    decode: DecodeStates
    chunks: ChunkStates | None = None


class RecurrentStates:
    """The state pool, addressed by slot, and snapshots of states for the prefix cache.

    Each tensor of the spec is ``[layers, slots + 1, entries, *shape]``; the last slot is the null
    slot. An engine that drafts has as many entries as its largest window has tokens, any other
    engine has one. A window's forward leaves a state behind each of its tokens. S then says how
    many count, and the next forward of the row begins from the entry of the last one: a slot's
    entry 0 is the state behind position ``base[slot]``, so it is entry ``position - 1 - base``. The
    host knows nothing of it. A chunk and a restored snapshot leave one state, in entry 0.

    Layers that replay
    (:class:`~megatron_async.models.description.recurrent_state_spec.StateTensor`) have one
    entry: they take in again the ``first`` tokens behind it.

    A slot's states are whatever they were until a chunk that begins at position 0 (from zeros), or
    a snapshot that is copied there, begins a request. Snapshots are ``[layers, count, *shape]``.

    Args:
        entries: states of a slot; the tokens of the largest window.
        snapshot_count: 0 without a prefix cache.
        zeros: makes a tensor of a shape and dtype on ``device``; None takes torch's.

    Attributes:
        step: the states of the forward that runs now, see :meth:`begin`.
        step_rows: what its first Mamba-2 layer has made of them for all others; None until then.
        window_rows, kernels: of all Mamba-2 layers, which make them when they first run.

    Raises:
        CacheTooLargeError: they do not fit into the device's memory.
    """

    of_one_forward: ClassVar[frozenset[str]] = frozenset({"step", "step_rows"})

    def __init__(
        self,
        spec: RecurrentStateSpec,
        slot_count: int,
        *,
        entries: int,
        snapshot_count: int,
        device: torch.device,
        zeros: Zeros | None = None,
    ) -> None:
        zeros = zeros or partial(torch.zeros, device=device)
        stored = 1 if spec.replays else entries
        spec = spec.for_window(entries)
        self.spec = spec
        self.null_slot = slot_count
        self.entries = entries
        self.snapshot_count = snapshot_count
        slots = slot_count + 1
        with must_fit(
            device,
            slots * stored * spec.state_bytes,
            f"the recurrent state of {slots} slots, {stored} each",
            "max_requests, depth or num_speculative_tokens",
        ):
            self._states = _allocate(spec, (slots, stored), zeros)
            self._base = torch.zeros(slots, dtype=torch.int64, device=device)
            # On the device, so that no step fills them in.
            self._null = torch.tensor(slot_count, device=device)
            self._zeros = torch.tensor(ZEROS, device=device)
            self._entry_0 = torch.tensor(0, device=device)
        with must_fit(
            device,
            snapshot_count * spec.state_bytes,
            f"{snapshot_count} snapshots of recurrent state for the prefix cache",
            "state_snapshot_count",
        ):
            self._snapshots = _allocate(spec, (snapshot_count,), zeros)
        self.step: StepStates | None = None
        self.step_rows: StepRows | None = None
        self.window_rows: WindowRows | None = None
        self.kernels: MambaKernels | None = None

    def begin(self, step: StepStates) -> None:
        """The forward that follows has these states; in stream order."""
        self.step = step
        self.step_rows = None

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """The states of recurrent layer ``layer`` by name, each ``[slots + 1, entries, *shape]``;
        the layer reads and writes them in place."""
        return {name: states[layer] for name, states in self._states.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots."""
        return sum(states.nbytes for states in self._states.values())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(states.nbytes for states in self._snapshots.values())

    def reset(self) -> None:
        """Forget all slots; nothing may be in flight."""
        self._base.zero_()

    # --- one forward, in stream order ---------------------------------------------------------

    def decode_rows(
        self,
        slots: Tensor,
        positions: Tensor,
        finished: Tensor,
        window: int,
        tokens: Tensor | None = None,
    ) -> DecodeStates:
        """What the layers are told of decode rows, each of which begins behind the state of the
        position before ``positions`` [R].

        Args:
            slots: int64 [R], rows that have ended and padding included.
            finished: bool [slots + 1].
            tokens: see :class:`DecodeStates`.
        """
        ended = finished[slots]
        live = torch.where(ended, self._null, slots)
        if self.entries == 1:
            first = torch.where(ended, self._zeros, self._entry_0)
        else:
            first = torch.where(ended, self._zeros, positions - 1 - self._base[slots])
            self._base[live] = positions
        return DecodeStates(live, first, window, tokens)

    def chunks(
        self, slots: Tensor, starts: Tensor, offsets: Tensor, lengths: Tensor, finished: Tensor
    ) -> ChunkStates:
        """What the layers are told of chunks: int64 [N], see :class:`ChunkStates`, with the
        positions at which they start."""
        runs = (lengths > 0) & ~finished[slots]
        live = torch.where(runs, slots, self._null)
        first = torch.where(runs & (starts > 0), self._entry_0, self._zeros)
        if self.entries > 1:
            self._base[live] = starts + lengths - 1
        return ChunkStates(live, first, offsets, lengths)

    # --- snapshots, in stream order -----------------------------------------------------------

    def restore(self, slot: int, place: int, length: int) -> None:
        """The state of ``slot`` becomes that of snapshot ``place``, taken behind ``length``
        tokens."""
        for name, snapshots in self._snapshots.items():
            self._states[name][:, slot, 0].copy_(snapshots[:, place])
        self._base[slot].fill_(length - 1)

    def take_snapshot(self, slot: int, place: int, length: int) -> None:
        """Snapshot ``place`` becomes the state behind ``length`` tokens that the forward in front
        has left in ``slot``."""
        for name, snapshots in self._snapshots.items():
            snapshots[:, place].copy_(self._states[name][:, slot, 0])

    def poison(self, slots: list[int]) -> None:
        """Fill the states of freed slots with garbage (debug mode)."""
        for states in self._states.values():
            states[:, slots] = float("nan") if states.is_floating_point() else -1


def _allocate(spec: RecurrentStateSpec, shape: tuple[int, ...], zeros: Zeros) -> dict[str, Tensor]:
    return {
        tensor.name: zeros((spec.num_layers, *shape, *tensor.shape), dtype=tensor.dtype)
        for tensor in spec.tensors
    }

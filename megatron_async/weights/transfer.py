"""New weights that a trainer sends to a server: the side of the engine's process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async.errors import BusyError, CheckpointError, ConfigError, RequestError
from megatron_async.weights.announced import BUFFER_BYTES, Group
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.nccl_group import NcclGroup
from megatron_async.weights.source import Announced
from megatron_async.weights.tensor_info import announced

TIMEOUT_SECONDS = 300.0
PROBE_SECONDS = 5.0
"""For a trainer's host to accept a connection."""
ASK_AGAIN_SECONDS = 0.05


class WeightTransfer:
    """One trainer's group, and what it has sent. Tensors are gathered beside the weights that are
    served, which decode on meanwhile; when the update is finished all are checked, and replaced
    together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Group | None = None
        self._packed = False
        self._arrived: dict[str, Tensor] | None = None
        self._is_partial = False

    def connect(
        self,
        backend: str,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        packed: bool,
        *,
        given_up: threading.Event,
        group_name: str | None = None,
    ) -> None:
        """Join the group of a trainer that listens; another one is left, and what an unfinished
        update has brought is forgotten.

        Args:
            group_name: given where the trainer makes the group by ``torch.distributed``.
            given_up: is set when nobody waits for it any more.

        Raises:
            ConfigError: the trainer does not come.
        """
        _wait_for_trainer(address, port, given_up)
        where: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": TIMEOUT_SECONDS}
        self.close()
        self.forget()
        if group_name is not None:
            device = self._device if backend == "nccl" else torch.device("cpu")
            self._group = WeightGroup(
                address, port, backend=backend, device=device, name=group_name, **where
            )
        elif backend == "nccl":
            self._group = NcclGroup(address, port, device=self._device, **where)
        else:
            self._group = WeightGroup(address, port, backend=backend, device="cpu", **where)
        self._packed = packed

    @property
    def is_open(self) -> bool:
        """An update has begun and is not finished."""
        return self._arrived is not None

    @property
    def nbytes(self) -> int:
        """Bytes of what an unfinished update has brought."""
        return sum(tensor.nbytes for tensor in (self._arrived or {}).values())

    def start(self, *, partial: bool = False) -> None:
        """Begin an update.

        Args:
            partial: what it does not bring keeps its values; else that is an error at its end.

        Raises:
            BusyError: one is open.
        """
        if self.is_open:
            raise BusyError(
                "a weight update is open; finish it, or make a new weight-transfer group, which "
                "ends it"
            )
        self._arrived, self._is_partial = {}, partial

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Any],
        packed: bool,
        buffer_bytes: int | None = None,
        *,
        most_bytes: int | None = None,
    ) -> int:
        """Take the announced tensors; returns how many the update has now. An error ends the
        update, which would not be whole.

        Args:
            most_bytes: that they may take; None for any number.

        Raises:
            RequestError: there is no group, or no update was started.
            CheckpointError: what is announced are no tensors, one comes twice, they take too many
                bytes, or the trainer has ended.
        """
        if self._group is None:
            raise RequestError("there is no weight-transfer group; init_weight_transfer_engine")
        if self._arrived is None:
            raise RequestError("no update was started; start_weight_update first")
        arrived, self._arrived = self._arrived, None
        if not len(names) == len(dtypes) == len(shapes):
            raise CheckpointError(
                f"{len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes; give one "
                "of each for a tensor"
            )
        each = zip(names, dtypes, shapes, strict=True)
        infos = announced([list(one) for one in each])
        total = sum(info.nbytes for info in infos)
        if most_bytes is not None and total > most_bytes:
            said = f"the new weights take {total:,} bytes, and the model's at most {most_bytes:,}"
            raise CheckpointError(f"{said}; send its parameters alone, once")
        packed = packed or self._packed
        arrived |= Announced(self._group, infos, packed, buffer_bytes or BUFFER_BYTES).read()
        self._arrived = arrived
        return len(arrived)

    def add(self, read: Callable[[], dict[str, Tensor]]) -> int:
        """Take tensors that ``read`` gives, in place of those of the same names; returns how many
        the update has now. An error ends the update.

        Raises:
            RequestError: no update was started.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            raise RequestError("no update was started; start_weight_update first")
        arrived |= read()
        self._arrived = arrived
        return len(arrived)

    def forget(self) -> None:
        """End an update without any change."""
        self._arrived = None

    def finish(self, replace: Callable[..., object]) -> frozenset[str]:
        """Give what has arrived to ``replace``, with ``partial_update``, and return the names;
        a partial update may be of nothing.

        Raises:
            RequestError: no update was started.
            CheckpointError: nothing has come, and the update is not partial.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            raise RequestError("no update was started; start_weight_update first")
        if arrived:
            replace(arrived, partial_update=self._is_partial)
        elif not self._is_partial:
            said = "no tensor has come; send all of them before finish_weight_update"
            raise CheckpointError(said)
        return frozenset(arrived)

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _wait_for_trainer(address: str, port: int, given_up: threading.Event) -> None:
    """Wait until the trainer listens. The store's own wait cannot be interrupted, and lasts for
    minutes where a trainer has ended before it got there."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection((address, port), PROBE_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > end or given_up.wait(ASK_AGAIN_SECONDS):
                raise ConfigError(f"no trainer listens at {address}:{port}: {error}") from error

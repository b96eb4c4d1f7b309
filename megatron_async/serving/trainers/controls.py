"""Controls of trainers that send weights, as vLLM's and as SGLang's servers take them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RequestError
from megatron_async.models.quantized.values import meant_shape
from megatron_async.serving.engine_side.control_threads import Call
from megatron_async.serving.messages import Kept
from megatron_async.weights.targets import covers
from megatron_async.weights.transfer import WeightTransfer

SENT = "a trainer, which has sent them,"
"""In place of the path of weights that are in no file: the next process cannot have them."""
MOST_NAMES = 64
"""Versions of weights whose names are remembered."""
FLOOR_BYTES = 1 << 20
"""That an update may always take."""


class Weights(Protocol):
    """What is needed of ``Controls``."""

    @property
    def kept(self) -> Kept:
        """What the next process must know."""

    @property
    def weight_version(self) -> int:
        """Weight updates since the server's start."""

    @property
    def call(self) -> Call:
        """The control of the thread that asks."""

    def only_update(self) -> contextlib.AbstractContextManager[None]:
        """Raises BusyError while another thread changes the weights."""

    def note_weights(self, path: str, *, is_whole: bool) -> None:
        """Say which weights are served now."""

    def change(self, **changes: Any) -> None:
        """Say what the next process must know."""


class TrainerControls:
    """What a trainer asks of its weights' way.

    vLLM's trainers begin an update, send tensors and finish it. SGLang's send buckets: those that
    come while they hold the weights are one update, which :meth:`take_weights` ends; without that
    one ends with the bucket that says so.
    """

    def __init__(self, engine: DynamicInferenceEngine, weights: Weights) -> None:
        self._engine = engine
        self._weights = weights
        self._transfer = WeightTransfer(engine.cache.device)
        self._holds = False
        self.recompute = True
        """What running requests have is computed again with new weights."""
        self._is_bucketed = False
        """The update that is open has come in SGLang's way."""
        self._name: str | None = None
        """What the trainer calls the weights that come now."""

    # --- vLLM's -------------------------------------------------------------------------------

    def init_weight_transfer(self, **where: Any) -> dict[str, Any]:
        """Join a trainer's group. An update that another one has left open is forgotten."""
        with self._weights.only_update():
            self._transfer.connect(**where, given_up=self._weights.call.wake)
        return {}

    def start_weight_update(self, partial: bool = False) -> dict[str, Any]:
        """Begin an update by the group, of all parameters or of some.

        Raises:
            BusyError: one has begun and is not finished.
        """
        with self._weights.only_update():
            self._transfer.start(partial=partial)
            self._name, self.recompute, self._is_bucketed = None, True, False
        return {}

    def receive_weights(self, **announced: Any) -> dict[str, Any]:
        """Take tensors of the group's trainer, beside those that are served."""
        with self._weights.only_update():
            return {"tensors": self._transfer.receive(**announced, most_bytes=self._room)}

    def finish_weight_update(self) -> dict[str, Any]:
        """Replace the weights by all that has come. They are in no file: should this process end,
        the next one says that they are lost."""
        with self._weights.only_update():
            return self._finish()

    # --- SGLang's -----------------------------------------------------------------------------

    def leave_weight_transfer(self) -> dict[str, Any]:
        """Leave the trainer's group."""
        with self._weights.only_update():
            self._transfer.close()
        return {}

    def hold_weights(self, recompute: bool = True) -> dict[str, Any]:
        """Gather what comes, up to :meth:`take_weights`; what has come before is forgotten.

        Args:
            recompute: what running requests have is computed again with the new weights.
        """
        with self._weights.only_update():
            self._transfer.forget()
            self._holds, self.recompute = True, recompute
        return {}

    def add_weights(
        self,
        *,
        ends: bool,
        partial: bool,
        called: str | None = None,
        serialized: str | None = None,
        load_format: str | None = None,
        announced: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Take a bucket of tensors, of shared memory or of the group's trainer.

        Args:
            ends: it is the update's last, unless weights are held.
            partial: the update may lack parameters.
            called: a name of the weights; another one than before begins an update, and a bucket
                without one belongs to the update that is open.
        """
        with self._weights.only_update():
            is_other = None not in (called, self._name) and called != self._name
            if self._transfer.is_open and is_other:
                self._transfer.forget()
            begins = not self._transfer.is_open
            if begins:
                self._transfer.start(partial=partial)
            self._name, self._is_bucketed = called or self._name, True
            try:
                count = self._take_bucket(serialized, load_format, announced)
            except BaseException:
                if begins:  # a bucket that is refused has begun nothing
                    self._transfer.forget()
                raise
            return self._finish() if ends and not self._holds else {"tensors": count}

    def _take_bucket(
        self,
        serialized: str | None,
        load_format: str | None,
        announced: dict[str, Any] | None,
    ) -> int:
        if announced is not None:
            return self._transfer.receive(**announced, most_bytes=self._room)
        from megatron_async.serving.trainers.pickled_tensors import read_tensors

        assert serialized is not None
        room = self._room
        return self._transfer.add(lambda: read_tensors(serialized, load_format, room))

    def take_weights(self) -> dict[str, Any]:
        """Replace the weights by what has come, if anything has, and hold them no more."""
        with self._weights.only_update():
            try:
                return self._finish() if self._transfer.is_open else {}
            finally:
                self._holds, self.recompute = False, True

    def end_update(self) -> dict[str, Any]:
        """End an update for which no message was the last, unless weights are held."""
        if not self._transfer.is_open or self._holds or not self._is_bucketed:
            return {}
        with self._weights.only_update():
            return self._finish()

    def name_weights(self, called: str) -> dict[str, Any]:
        """Call the weights that are served now by this name."""
        with self._weights.only_update():
            self._name_version(self._weights.weight_version, called)
        return {}

    # --- what they are made of ----------------------------------------------------------------

    @contextlib.contextmanager
    def naming(self, name: str | None) -> Iterator[None]:
        """The weights that are taken inside are called ``name`` from their first token on; not if
        that fails. Where none are taken those that are served are called so."""
        if name is None:
            yield
            return
        before, version = self._weights.kept.weight_names, self._weights.weight_version
        self._name_version(version + 1, name)
        try:
            yield
        except BaseException:
            self._weights.change(weight_names=before)
            raise
        if self._weights.weight_version == version:
            self._weights.change(weight_names=before)
            self._name_version(version, name)

    @property
    def _most_bytes(self) -> int:
        """That an update may take: all parameters twice, in the widest dtype. A rank's own are
        about its share of them."""
        model = self._engine.model
        ranks = 1 if model.group is None else model.group.layout.world_size
        own = sum(math.prod(meant_shape(value)) for value in model.weights_owner.parameters())
        return FLOOR_BYTES + 16 * own * ranks

    @property
    def _room(self) -> int:
        """Bytes that an update may still bring."""
        return self._most_bytes - self._transfer.nbytes

    def _finish(self) -> dict[str, Any]:
        name, self._name = self._name, None
        with self.naming(name):
            names = self._transfer.finish(self._replace)
        if names:
            whole = covers(self._engine.model.weights_owner, names)
            self._weights.note_weights(SENT, is_whole=whole)
        return {"weight_version": self._weights.weight_version}

    def _replace(self, tensors: dict[str, Any], *, partial_update: bool) -> None:
        self._engine.update_weights(
            tensors, partial_update=partial_update, recompute_kv_cache=self.recompute
        )

    def _name_version(self, version: int, name: str) -> None:
        if len(name) > 200:
            raise RequestError("weight_version has more than 200 characters; shorten it")
        others = [each for each in self._weights.kept.weight_names if each[0] != version]
        named = (*others, (version, name))[-MOST_NAMES:]
        self._weights.change(weight_names=named)


TRAINER_CONTROLS: dict[str, Callable[..., dict[str, Any]]] = {
    method.__name__: method
    for method in (
        TrainerControls.init_weight_transfer,
        TrainerControls.start_weight_update,
        TrainerControls.receive_weights,
        TrainerControls.finish_weight_update,
        TrainerControls.leave_weight_transfer,
        TrainerControls.hold_weights,
        TrainerControls.add_weights,
        TrainerControls.take_weights,
        TrainerControls.end_update,
        TrainerControls.name_weights,
    )
}
"""By their names."""

"""What ``update_weights`` takes of trainer ranks: each rank of the engine takes its own share."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_async.codec import parse_json
from megatron_async.errors import CheckpointError
from megatron_async.models import parallel
from megatron_async.weights.sharded.receive import receive_moves
from megatron_async.weights.sharded.shared import open_moves

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """Tensors of a trainer's ranks, by their handles; see :func:`open_sharded`."""

    handles: Any
    each_rank_reads: ClassVar[bool] = True
    path: ClassVar[None] = None

    def share(
        self, model: GPTModel, *, allow_non_finite_weights: bool, all_parameters: bool
    ) -> Callable[[], None]:
        """Find and check this rank's share of the new weights. Calling the result copies it into
        the parameters of ``model``.

        Raises:
            CheckpointError: it does not fit, is not finite, or has another checksum, or the
                trainer's ranks do not come; the model is unchanged.
        """
        own = parallel.current()
        checks: dict[str, Any] = {
            "reader": 0 if own is None else own.rank,
            "all_parameters": all_parameters,
            "allow_non_finite_weights": allow_non_finite_weights,
        }
        if isinstance(self.handles, Mapping):
            readers = 1 if own is None else own.layout.world_size
            return receive_moves(model, self.handles, readers=readers, **checks).copy
        return open_moves(model, self.handles, **checks).copy

    def told(self) -> bytes:
        """The handles, for the other ranks of the engine."""
        return zlib.compress(json.dumps(self.handles).encode())

    @classmethod
    def of_told(cls, data: bytes) -> ShardedSource:
        """The inverse; raises CheckpointError for what is none."""
        try:
            return open_sharded(parse_json(zlib.decompress(data)))
        except (ValueError, zlib.error) as error:
            raise CheckpointError(f"these are no handles of sharded weights: {error}") from None


def open_sharded(handles: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> ShardedSource:
    """A source for ``update_weights``, of which each rank of the engine takes its own share.

    Args:
        handles: what :meth:`ShardedWeights.export` gave on each rank of the trainer, which is for
            one update; or the :attr:`ShardGroup.handles`, which are for all.

    Raises:
        CheckpointError: these are neither.
    """
    is_list = isinstance(handles, Sequence) and not isinstance(handles, (str, bytes))
    if not handles or not (is_list or isinstance(handles, Mapping)):
        raise CheckpointError(
            f"handles of sharded weights are a {type(handles).__name__}; give those of a "
            "ShardGroup, or a list of what each rank's ShardedWeights has exported"
        )
    return ShardedSource(handles)

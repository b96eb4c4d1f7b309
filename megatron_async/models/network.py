"""What an engine runs: token ids in, logits out, keys and values in the batch's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec
from megatron_async.models.parallel import ModelParallel

if TYPE_CHECKING:
    from megatron_async.weights.source import AnySource


@runtime_checkable
class Network(Protocol):
    """A model as runner and drafters use it. A class that derives from this one has these defaults,
    and sets ``vocab_size``, ``max_sequence_length`` and ``kv_cache_spec``.

    Attributes:
        vocab_size: token ids; columns of the logits behind them are padding, and never sampled.
        max_sequence_length: most tokens of a request; None says nothing.
        kv_cache_spec: what a token takes in the KV cache, on this rank; None says nothing, and the
            cache is given.
        recurrent_state_spec: what recurrent layers keep of a request; None without such layers.
        logits_width: columns of this rank's logits; None is ``vocab_size``.
        logits_dtype: dtype of the logits; None is the cache's.
        device: where the weights are; None says nothing.
        parallel: this process's place among the ranks of the model; None for one rank.
        rotation_limit: tokens up to which requests are rotated in one way, and longer ones in
            another (longrope); None for one way alone.
        attention_window: tokens that the layer with the largest window attends to; None if one
            attends to all.
        mtp_layers: layers for multi-token prediction.
        drafts_itself: :meth:`make_drafter` makes what drafts.
        hidden_states: those of the tokens of the last :meth:`forward`, ``[T, hidden]`` after the
            final norm; None if it leaves none.
        hidden_state_count: how many :meth:`handing_out_hidden_states` can hand out; 0 for none.
    """

    vocab_size: int
    max_sequence_length: int | None = None
    kv_cache_spec: KVCacheSpec | None = None
    recurrent_state_spec: RecurrentStateSpec | None = None
    logits_width: int | None = None
    logits_dtype: torch.dtype | None = None
    device: torch.device | None = None
    parallel: ModelParallel | None = None
    rotation_limit: int | None = None
    attention_window: int | None = None
    mtp_layers: int = 0
    drafts_itself: bool = False
    hidden_states: Tensor | None = None
    hidden_state_count: int = 0

    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        """Run the model once; nothing in it waits for the device.

        Args:
            token_ids, position_ids: int64 ``[T]``, the tokens of all rows one after the other.
            context: the :class:`~megatron_async.runner.memory.forward_batch.ForwardBatch`.

        Returns:
            Logits ``[R, logits_width]`` of the rows that ``context.last_token_index`` names.
        """
        ...

    def forward_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Any,
        hidden_states: Tensor | None = None,
    ) -> None:
        """:meth:`forward` into ``logits`` ``[R, logits_width]``, those of the first R rows.

        Args:
            hidden_states: ``[T, hidden]``, filled with the hidden states of all tokens after the
                final norm; None leaves them out, and costs nothing.
        """
        # Behind those of the rows there may be some of padding.
        logits.copy_(self.forward(token_ids, position_ids, context)[: len(logits)])

    def reserve_positions(self, length: int) -> None:
        """Have rotary embeddings for ``length`` positions; called before steps are captured."""
        return

    def claim_waiting_grids(self, owner: object) -> bool:
        """Whether the engine whose device is ``owner`` may launch kernels whose CTAs wait for each
        other."""
        return False

    def kernels_of(self, rows: list[int], context: Any) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Sources with their macros that :meth:`prepare` is going to compile."""
        return ()

    def prepare(self, rows: list[int], context: Any) -> None:
        """Compile what decoding ``rows`` rows needs, ahead of their capture."""
        return

    def shortened(self) -> Network:
        """What launches the same kernels, in fewer layers: for a rehearsal. It shares weights, and
        may be used until this one changes."""
        return self

    def make_drafter(self, batch: Any, max_rows: int) -> Any:
        """What drafts, a :class:`~megatron_async.runner.drafter.Drafter`, if it
        ``drafts_itself``."""
        return None

    def handing_out_hidden_states(
        self, layers: tuple[int, ...], take: Callable[[int, Tensor], None]
    ) -> AbstractContextManager[None]:
        """The one :meth:`forward` of this thread meanwhile gives ``take`` its hidden states
        ``[T, hidden]`` by number of ``layers``: 0 is the embedding, the last is behind the final
        norm."""
        raise ConfigError(f"a {type(self).__name__} hands out no hidden states")

    def expert_layers(self) -> list[Any]:
        """Layers that choose experts, in the model's order, without those that draft."""
        return []

    @property
    def weights_owner(self) -> Any:
        """The object whose weights are replaced: one may be under several engines."""
        return self

    def read_weights(
        self,
        source: str | Path | Mapping[str, Any] | AnySource,
        *,
        allow_non_finite_weights: bool = False,
        all_parameters: bool = False,
    ) -> Callable[[], None]:
        """Read and check new weights. Calling the result replaces the model's in place; then
        nothing may be in flight.

        Raises:
            CheckpointError: they do not fit.
        """
        raise CheckpointError(f"a {type(self).__name__} takes no new weights")

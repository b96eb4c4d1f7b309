"""What a model's layers ask of the forward that runs now: megatron-core's inference context."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Batch(Protocol):
    """The T tokens of a forward over R rows, and their way to keys and values.

    A class that derives from this one has the defaults: those of a decode step of one token a row.

    Attributes:
        position_ids, token_slots: int64 ``[T]``.
        slot_mapping: int64 ``[T]``, block * block size + offset: where a token's keys and values
            go.
        kv_cache: ``[layers, key or value, blocks, tokens of a block, heads, head dimension]``.
        block_table: int64 ``[slots, blocks of a slot]``.
        last_token_index: int64 ``[R]``, the token whose logits each row wants; None means token r.
        window: tokens of each row of a decode step, one row after the other, of consecutive
            positions; None where tokens of one row may come in any other way.
        has_gaps: there may be padding in front of the first token of a row's window.
        num_speculative_tokens: drafts that each decode row may bring along.
        batch_invariant: a token's bits do not depend on what else is in the forward.
        grids_may_wait: grids may wait for their own CTAs, and for those of other ranks, see
            ``device/waiting_grids.py``.
        gemm_autotune_seconds: of the start, for timing GEMMs that nobody has measured.
        states: recurrent states of the model; None without.
        padding_mask: bool ``[1, T]``, true for tokens that are padding, or of requests that have
            ended; None if there are none.
        long_rotation: int32 ``[T]``, whether each token's request is rotated as a long one; None if
            none is.
        decoder_hidden_states: of the last forward, ``[T, 1, hidden]``; the model sets them.
    """

    position_ids: Tensor
    token_slots: Tensor
    slot_mapping: Tensor
    kv_cache: Tensor
    block_table: Tensor
    block_size_tokens: int
    last_token_index: Tensor | None = None
    window: int | None = 1
    has_gaps: bool = False
    num_speculative_tokens: int = 0
    batch_invariant: bool = False
    grids_may_wait: bool = False
    gemm_autotune_seconds: float = 0.0
    states: Any = None
    decoder_hidden_states: Tensor | None = None

    @property
    def padding_mask(self) -> Tensor | None:
        return None

    @property
    def long_rotation(self) -> Tensor | None:
        return None

    def is_decode_only(self) -> bool:
        """True when the forward that runs now has decode rows alone."""
        return True

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax_scale: float,
        **limits: Any,
    ) -> Tensor:
        """Store ``key``, ``value`` ``[T, kv_heads, head_dim]`` and attend with ``query`` ``[T,
        heads, head_dim]`` to all tokens of each row's own sequence up to its own position.

        ``layer`` counts this pipeline stage's layers from 0; multi-token prediction layers come
        after the decoder's. ``limits`` are ``window``, ``soft_cap`` and ``sinks`` of a layer that
        has them. Returns ``[T, heads, head_dim]``.
        """
        ...

    def attend_packed(
        self,
        layer: int,
        packed: Tensor,
        softmax_scale: float,
        cos_sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        **limits: Any,
    ) -> Tensor:
        """:meth:`attend` on CUDA from the packed projection, normed, rotated and appended."""
        ...

    def attend_latent(
        self, layer: int, query: Tensor, latent: Tensor | None, softmax_scale: float, rank: int
    ) -> Tensor:
        """Likewise of multi-latent attention: store ``latent`` ``[T, 1, size]``, the key of all
        heads, whose first ``rank`` elements are its value, and attend with ``query`` ``[T, heads,
        size]``. Returns ``[T, heads, rank]``. Without ``latent`` it is there already."""
        ...

    def append_latent(
        self,
        layer: int,
        query: Tensor,
        packed: Tensor,
        out: Tensor,
        cos_sin: Tensor,
        weight: Tensor,
        eps: float,
    ) -> None:
        """Append latents from the packed projection on CUDA, normed and rotated, and rotate
        ``query`` into ``out``."""
        ...


def padding_mask(layer: Any, context: Any) -> dict[str, Tensor]:
    """What the MLP of ``layer`` is called with beside its input: which tokens of the forward that
    runs now are padding or of requests that have ended, where that matters."""
    mask = None if context is None else context.padding_mask
    return {"padding_mask": mask} if mask is not None and hasattr(layer.mlp, "settings") else {}

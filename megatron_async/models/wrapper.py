"""One forward of a megatron-core model over the tokens of a batch."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels.gemm.batch_invariant import batch_invariant_mode
from megatron_async.models.adapt import adapt_model
from megatron_async.models.gpt import GPTModel

logger = logging.getLogger(__name__)


@functools.cache
def _warn_of_slow_decoding(reason: str) -> None:
    logger.warning(
        "decode steps run the model's own forward, which is slower than the fused one: %s", reason
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """What one token needs in the KV cache of this rank.

    ``num_layers`` counts the multi-token prediction layers too, after the decoder's;
    ``num_kv_heads`` is this tensor-parallel rank's share.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class GPTInferenceWrapper:
    """The model side of the engine: token ids in, logits out, keys and values in the context.

    Args:
        model: one of :func:`~megatron_async.models.build.build_model`, or a megatron-core
            ``GPTModel``, which is adapted in place. It is set to evaluation mode.
        inference_context: used by :meth:`forward` when it is given none.
        batch_invariant: on a GPU, compute with kernels that give each token bits of its own,
            whatever else is in the forward. The context attends, so it needs the same choice.
        fused_decode: decode with the kernels of ``models/fused_decode.py`` where they take the
            model, which is faster. Where they do not, a warning says why, once, and
            ``fused_decode_off``.

    Raises:
        ConfigError: the model has a part that cannot be served; the message names it.
    """

    def __init__(
        self,
        model: Any,
        inference_context: Any = None,
        *,
        batch_invariant: bool = False,
        fused_decode: bool = True,
    ) -> None:
        self.model: GPTModel = adapt_model(model).eval()
        self.inference_context = inference_context
        self.batch_invariant = batch_invariant
        self.vocab_size: int = self.model.vocab_size
        self.max_sequence_length: int = self.model.max_sequence_length
        parameter = next(self.model.parameters())
        self.device: torch.device = parameter.device
        attention = self.model.decoder.layers[0].self_attention
        num_mtp_layers = len(self.model.mtp.layers) if self.model.mtp_process else 0
        self.kv_cache_spec = KVCacheSpec(
            num_layers=len(self.model.decoder.layers) + num_mtp_layers,
            num_kv_heads=attention.num_query_groups_per_partition,
            head_dim=attention.hidden_size_per_attention_head,
            dtype=parameter.dtype,
        )
        self.fused_decode_off: str | None = None
        self._fused: Any = None
        if batch_invariant:
            self.fused_decode_off = "batch_invariant=True"
        elif not fused_decode:
            self.fused_decode_off = "fused_decode=False"
        else:
            from megatron_async.models.fused import decoder as fused

            self.fused_decode_off = fused.why_not(self.model)
            if self.fused_decode_off is None:
                self._fused = fused.FusedDecoder(self.model)
            elif self.device.type == "cuda":
                _warn_of_slow_decoding(self.fused_decode_off)

    def prepare(self, rows: list[int], context: Any) -> None:
        """Compile what decoding so many rows needs, ahead of their capture."""
        if self._fused is None:
            return
        self._fused.compile(rows, context)
        reason = self._fused.off(rows, context)
        if reason is not None:
            self.fused_decode_off = reason
            _warn_of_slow_decoding(reason)

    def forward_into(
        self, logits: Tensor, token_ids: Tensor, position_ids: Tensor, context: Any
    ) -> None:
        """:meth:`forward` into ``logits`` ``[R, vocab]``."""
        if self._fused is not None and self._fused.takes(logits, context):
            self._fused.forward(token_ids, position_ids, context, logits)
        else:
            logits.copy_(self.forward(token_ids, position_ids, context))

    @torch.no_grad()
    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any = None) -> Tensor:
        """Run the model once; nothing in it waits for the device.

        Args:
            token_ids: int64 ``[T]``, the tokens of all rows one after the other.
            position_ids: int64 ``[T]``, their positions.
            context: holds keys and values; see
                :class:`~megatron_async.models.attention.AttentionContext`. If its
                ``materialize_only_last_token_logits`` is set, its ``last_token_logits([1, T,
                hidden]) -> [R, hidden]`` selects the rows that get logits.

        Returns:
            Logits ``[R, vocab]`` (or ``[T, vocab]``) in the model's dtype.
        """
        if context is None:
            context = self.inference_context
        with self.numerics():
            logits: Tensor = self.model(
                token_ids.unsqueeze(0),
                position_ids.unsqueeze(0),
                None,
                inference_context=context,
                runtime_gather_output=True,
            )
        return logits.squeeze(0)

    def numerics(self) -> AbstractContextManager[None]:
        """The scope in which all of the model's Python must run, MTP layers included."""
        return batch_invariant_mode() if self.batch_invariant else nullcontext()

    __call__ = forward

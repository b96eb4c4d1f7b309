"""megatron-core's ``GPTModel``, with inference for models that have multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models.config import ModelConfig
from megatron_async.models.rope import RotaryTable

if TYPE_CHECKING:
    from megatron_async.checkpoint.family import Names

from megatron.core.models.gpt.gpt_model import GPTModel as MegatronGPTModel  # isort: skip


class GPTModel(MegatronGPTModel):  # type: ignore[misc]
    """A GPTModel whose forward without labels leaves multi-token prediction (MTP) alone.

    megatron's own runs the MTP layers in each forward and needs labels for them. Training (a
    forward with ``labels``) is megatron's.

    Attributes:
        decoder_hidden_states: of the last forward without labels and without a context, ``[S, B,
            hidden]`` after the final norm: what the first MTP layer drafts from. A context gets
            its own, ``[T, 1, hidden]``: others may run the model in other threads.
        rotary: the table that all attention layers share; None without rotary embeddings.
        sliding_rotary: that of layers with a window, where they have one of their own.
        model_config: what the model was built from; None if its user built it with megatron-core.
        huggingface_names: of the directory that its weights were loaded from, if that was one of
            Hugging Face's.
        token_count: ids that may be sampled, where the rest of the vocabulary is padding; None for
            all.
    """

    decoder_hidden_states: Tensor | None = None
    model_config: ModelConfig | None = None
    token_count: int | None = None
    huggingface_names: Names | None = None
    rotary: RotaryTable | None
    sliding_rotary: RotaryTable | None

    def setup_embeddings_and_output_layer(self) -> None:
        """As megatron's, but that stages with a tied output layer load their own copies: its
        collective moves them to a GPU."""
        if self.config.pipeline_model_parallel_size == 1:
            super().setup_embeddings_and_output_layer()

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        if labels is not None:
            result: Tensor = super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *args, **kwargs
            )
            return result
        context = kwargs.get("inference_context")
        (self if context is None else context).decoder_hidden_states = hidden_states
        if context is not None and context.materialize_only_last_token_logits:
            rows = context.last_token_logits(hidden_states.transpose(0, 1))
            hidden_states = rows.unsqueeze(1)
        return self.logits(hidden_states, kwargs.get("runtime_gather_output"))

    def logits(self, hidden_states: Tensor, gather_output: bool | None = True) -> Tensor:
        """Output layer: normed hidden states ``[S, B, hidden]`` to logits ``[B, S, vocab]``."""
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        # Of strided rows torch.matmul makes a product for each, which reads the whole weight.
        logits, _ = self.output_layer(
            hidden_states.contiguous(), weight=weight, runtime_gather_output=gather_output
        )
        transposed: Tensor = logits.transpose(0, 1).contiguous()
        return transposed

    def mtp_hidden_states(
        self,
        depth: int,
        hidden_states: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Any = None,
    ) -> Tensor:
        """Run one MTP layer.

        Row p combines the hidden state of position p with token ``p + depth + 1``; its logits
        (see :meth:`logits`) are about token ``p + depth + 2``. In the context its layer index is
        ``num_layers + depth`` and its position is p.

        Args:
            depth: which MTP layer, from 0.
            hidden_states: ``[S, B, hidden]``: ``decoder_hidden_states`` for depth 0, else what
                this method returned for ``depth - 1``.
            token_ids: int64 ``[B, S]``, the tokens ``p + depth + 1``.
            position_ids: int64 ``[B, S]``, their positions (read by learned embeddings only).
            context: inference context, or None for plain causal attention.

        Returns:
            ``[S, B, hidden]``, normed.
        """
        embedded = self.embedding(input_ids=token_ids, position_ids=position_ids)
        result: Tensor = self.mtp.layers[depth]._proj_and_transformer_layer(
            hidden_states=hidden_states, decoder_input=embedded, inference_params=context
        )
        return result

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy: labels ``[B, S]`` and logits ``[S, B, vocab]`` to fp32 ``[B, S]``."""
        if self.pg_collection.tp.size() > 1:
            sharded: Tensor = super().compute_language_model_loss(labels, logits)
            return sharded
        # No collective of one rank: it would cost a launch, and on the CPU a round trip.
        flat = logits.transpose(0, 1).float().flatten(0, 1)
        return F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)

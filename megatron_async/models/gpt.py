"""Language models of megatron-core, with inference for those that have multi-token prediction.

On each release a model that we build is of the class that the release wants. Of a model that its
user has built the class stays a subclass of what it was (``models/adapt.py``).
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.megatron_compat.classes import (
    GPT_MODEL,
    HYBRID_MODEL,
    MAMBA_MODEL,
    MODEL_BASE,
)
from megatron_async.models import parallel
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.layers.rope import RotaryTable

if TYPE_CHECKING:
    from megatron_async.checkpoint.huggingface.family import Names

from megatron.core.models.common.embeddings.language_model_embedding import (  # isort: skip
    LanguageModelEmbedding,
)
from megatron.core.models.common.language_module.language_module import (  # isort: skip
    LanguageModule,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip
from megatron.core.transformer.enums import ModelType  # isort: skip
from megatron.core.transformer.multi_token_prediction import (  # isort: skip
    MultiTokenPredictionBlock,
)
from megatron.core.transformer.transformer_block import TransformerBlock  # isort: skip


_OF_DECODER = ("padding_mask", "packed_seq_params")
"""Arguments that are the layers', where they are given."""


class Inference:
    """A model's forward without labels, which leaves multi-token prediction (MTP) alone.

    megatron's own runs the MTP layers in each forward, or needs labels for them. Training (a
    forward with ``labels``) is megatron's.

    Attributes:
        decoder_hidden_states: of the last forward without labels and without a context, ``[S, B,
            hidden]`` after the final norm: what the first MTP layer drafts from. A context gets
            its own, ``[T, 1, hidden]``: others may run the model in other threads.
        rotary: the table that all attention layers share; None without rotary embeddings.
        sliding_rotary: that of layers with a window, where they have one of their own.
        model_config: what the model was built from; None if its user built it with megatron-core.
        stored_cache_scales: of keys and values, that the directory has for an FP8 KV cache, fp32
            ``[layers, 2, heads]`` of its own layers and heads; None without.
        stored_block: rows and columns that share a scale of e4m3 in that directory; None without.
        huggingface_names: of the directory that its weights were loaded from, if that was one of
            Hugging Face's.
        token_count: ids that may be sampled, where the rest of the vocabulary is padding; None for
            all.
    """

    of_one_forward: ClassVar[frozenset[str]] = frozenset({"decoder_hidden_states"})
    config: Any
    embedding: Any
    decoder: Any
    mtp: Any
    output_layer: Any
    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    pg_collection: Any
    decoder_hidden_states: Tensor | None = None
    model_config: ModelConfig | None = None
    token_count: int | None = None
    huggingface_names: Names | None = None
    stored_cache_scales: Tensor | None = None
    stored_block: tuple[int, int] | None = None
    rotary: RotaryTable | None
    sliding_rotary: RotaryTable | None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        runtime_gather_output: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Logits ``[B, S, vocab]``, of each row's last token where the context asks for those
        alone; hidden states on a stage that is not the last; losses ``[B, S]`` with ``labels``."""
        if kwargs.get("packed_seq_params") is not None:
            self._check_packs()
        if labels is not None:
            given: Any = super()
            losses: Tensor = given.forward(
                input_ids, position_ids, attention_mask, decoder_input=decoder_input,
                labels=labels, runtime_gather_output=runtime_gather_output, **kwargs,
            )  # fmt: skip
            return losses
        context = inference_context
        if context is None:
            context = kwargs.get("inference_params")
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if context is not None and decoder_input is not None:
            # Strides as after a copy: for those of a transposed row torch.matmul makes a product of
            # each token, unless the weight wants a gradient.
            decoder_input = decoder_input.flatten().view(decoder_input.shape)
        hidden_states: Tensor = self.decoder(
            hidden_states=decoder_input,
            attention_mask=attention_mask,
            inference_context=context,
            **{name: kwargs[name] for name in _OF_DECODER if kwargs.get(name) is not None},
        )
        if not self.post_process:
            return hidden_states
        (self if context is None else context).decoder_hidden_states = hidden_states
        if context is not None and context.materialize_only_last_token_logits:
            rows = context.last_token_logits(hidden_states.transpose(0, 1))
            hidden_states = rows.unsqueeze(1)
        return self.logits(hidden_states, runtime_gather_output)

    def _check_packs(self) -> None:
        """Raise :class:`ConfigError` for layers that would carry state from one packed sequence to
        the next."""
        module: Any = self
        if any(hasattr(each, "state_tensors") for each in module.modules()):
            raise ConfigError(
                "packed_seq_params are not read by recurrent layers: give sequences one by one, or "
                "padded"
            )

    def logits(self, hidden_states: Tensor, gather_output: bool | None = True) -> Tensor:
        """Output layer: normed hidden states ``[S, B, hidden]`` to logits ``[B, S, vocab]``."""
        weight = None
        if self.share_embeddings_and_output_weights:
            given: Any = self
            weight = given.shared_embedding_or_output_weight()
        # For strided rows torch.matmul makes a product for each, which reads the whole weight.
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
            given: Any = super()
            sharded: Tensor = given.compute_language_model_loss(labels, logits)
            return sharded
        # No collective of one rank: it would cost a launch, and on the CPU a round trip.
        flat = logits.transpose(0, 1).float().flatten(0, 1)
        return F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with weights of its own, among the same ranks: process groups, which cannot be
        copied, are shared. An engine over this model does not serve the copy."""
        memo.update({id(each): each for each in _of_this_process()})
        own: Any = self
        made: Any = object.__new__(type(self))
        memo[id(self)] = made
        with torch.inference_mode(False):
            made.__setstate__({name: deepcopy(value, memo) for name, value in vars(self).items()})
        for one, other in zip(made.parameters(), own.parameters(), strict=True):
            for name, value in vars(other).items():  # what megatron says of it; torch drops it
                vars(one).setdefault(name, deepcopy(value, memo))
        return made


class GPTModel(Inference, MODEL_BASE):  # type: ignore[misc]
    """A model that we build: a transformer block of any layers, MTP layers, one vocabulary.

    Its parameters have the names of megatron-core's ``GPTModel`` on each release.

    Args:
        config: megatron's.
        transformer_layer_spec: of the decoder of this stage.
        vocab_size, max_sequence_length: of the embedding, which has positions where
            ``position_embedding_type`` is ``"learned_absolute"``.
        mtp_block_spec: of the MTP layers; None for none.
        pre_process, post_process: whether this stage has the embedding and the output layer.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "none",
        mtp_block_spec: Any = None,
    ) -> None:
        LanguageModule.__init__(self, config=config)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.parallel_output, self.fp16_lm_cross_entropy = True, False
        self.disable_param_offloading = True
        self.model_type = ModelType.encoder_or_decoder
        self.mtp_process = mtp_block_spec is not None
        groups = self.pg_collection
        if pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                position_embedding_type=position_embedding_type,
                tp_group=groups.tp,
            )
        self.decoder = TransformerBlock(
            config=config,
            spec=transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
        )
        if self.mtp_process:
            self.mtp = MultiTokenPredictionBlock(
                config=config, spec=mtp_block_spec, pg_collection=groups
            )
        if post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
                tp_group=groups.tp,
            )
        # Stages with a tied output layer load their own copies: megatron's collective, which would
        # give it to the last one, moves them to a GPU.
        if config.pipeline_model_parallel_size == 1:
            self.setup_embeddings_and_output_layer()


def _of_this_process() -> list[Any]:
    """Its process groups, and its place among the ranks of a model."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    place = parallel.current()
    return groups if place is None else [*groups, place]


class AdaptedGPTModel(Inference, GPT_MODEL):  # type: ignore[misc]
    """A user's ``GPTModel``."""


class AdaptedHybridModel(Inference, HYBRID_MODEL):  # type: ignore[misc]
    """A user's ``HybridModel``."""


class AdaptedMambaModel(Inference, MAMBA_MODEL):  # type: ignore[misc]
    """A user's ``MambaModel``."""


ADAPTED: dict[type, type] = {
    GPT_MODEL: AdaptedGPTModel,
    HYBRID_MODEL: AdaptedHybridModel,
    MAMBA_MODEL: AdaptedMambaModel,
}
"""Classes of models that users build, and what adapting makes of them."""

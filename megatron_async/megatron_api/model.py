"""megatron-core's wrapper of a model, and its controller, over ours."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.megatron_api.names import no_attribute
from megatron_async.megatron_api.spmd.place import pg_collection_of, take_place
from megatron_async.megatron_api.tables import CONTROLLER_ATTRIBUTES, WRAPPER_ATTRIBUTES
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.network import Network
from megatron_async.models.served import ServedModel, tokenize_prompt
from megatron_async.ranks.replica import data_parallel_group

from megatron.core.inference.contexts import BaseInferenceContext  # isort: skip


def outside_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """Leave ``torch.inference_mode()``, in which a script may run: for tensors that other threads
    write to."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


class GPTInferenceWrapper(GPTNetwork):
    """The model side of the engine, with megatron-core's arguments.

    Args:
        model: a megatron-core ``GPTModel``, which is adapted in place. ``Float16Module`` and
            ``DistributedDataParallel`` are taken off.
        inference_wrapper_config: not read; where a context stands in its place, that is the
            context, as in megatron-core's main branch.
        inference_context: of the engine that will serve the model.
        pg_collection: the process groups of a model that is divided over ranks; None takes the
            context's, the model's, or megatron-core's parallel state.
        batch_invariant, fused_decode: as of the class that this one is derived from.

    Raises:
        ConfigError: the model has a part that cannot be served; the message names it.
    """

    def __init__(
        self,
        model: Any,
        inference_wrapper_config: Any = None,
        inference_context: Any = None,
        pg_collection: Any = None,
        *,
        batch_invariant: bool = False,
        fused_decode: bool = True,
    ) -> None:
        if inference_context is None and isinstance(inference_wrapper_config, BaseInferenceContext):
            inference_wrapper_config, inference_context = None, inference_wrapper_config
        if pg_collection is None:
            pg_collection = pg_collection_of(inference_context)
        with outside_inference_mode():
            take_place(model, pg_collection)
            super().__init__(model, batch_invariant=batch_invariant, fused_decode=fused_decode)
        self.inference_context = inference_context
        self.inference_wrapper_config = inference_wrapper_config
        self.model_is_pipeline_parallel = self._has_stages
        self.sequence_parallel = False
        place = self.parallel
        self.tp_size = 1 if place is None else place.layout.tensor
        self.tp_group = None if place is None else place.tensor_group
        self.pp_group = None if place is None else place.pipeline_group
        self.pipeline_communication_dtype = self.kv_cache_spec.dtype

    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any = None) -> Tensor:
        """Run the model once, over ``inference_context`` where no other is given."""
        return super().forward(
            token_ids, position_ids, self.inference_context if context is None else context
        )

    __call__ = forward

    @property
    def inference_params(self) -> Any:
        """An older name of ``inference_context``."""
        return self.inference_context

    def prep_model_for_inference(self, prompts_tokens: Any = None) -> None:
        """Nothing is left to do: the model is in evaluation mode."""

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, WRAPPER_ATTRIBUTES)


class TextGenerationController:
    """A model that can be served, and its tokenizer, with megatron-core's arguments. One serves
    one engine.

    Args:
        inference_wrapped_model: a :class:`GPTInferenceWrapper`, the model itself, or any object
            with ``vocab_size`` and ``forward``.
        tokenizer: an object with ``tokenize``, ``detokenize``, ``eod`` (and ``bos``), or None when
            prompts are token ids.
        pp_group: not read.
    """

    def __init__(
        self, inference_wrapped_model: Any, tokenizer: Any = None, pp_group: Any = None
    ) -> None:
        if isinstance(inference_wrapped_model, torch.nn.Module):
            inference_wrapped_model = GPTInferenceWrapper(inference_wrapped_model)
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.pp_group = pp_group
        self._is_taken = False
        network = inference_wrapped_model
        if not isinstance(network, Network):
            network = OtherNetwork(network)
        place = network.parallel
        self.model_is_pipeline_parallel = place is not None and place.layout.pipeline > 1
        self.served = ServedModel(network=network, tokenizer=tokenizer, strips_begin=True)

    @property
    def dp_group(self) -> Any:
        """megatron-core's data-parallel group; None where there is none."""
        return data_parallel_group()

    @classmethod
    def over(cls, served: ServedModel) -> TextGenerationController:
        """The wrapper of a model that was loaded."""
        made = cls(served.network, served.tokenizer)
        made.served = served
        return made

    def take(self) -> None:
        """An engine has it from now on."""
        self._is_taken = True

    def check_free(self) -> None:
        """Raises :class:`ConfigError` if it serves an engine already."""
        if self._is_taken:
            raise ConfigError(
                "the controller serves another engine already; build a new "
                "TextGenerationController over the same model"
            )

    def tokenize_prompt(*given: Any, **named: Any) -> list[int]:
        """Token ids of a text prompt, without begin tokens that the tokenizer puts in front, with
        one where ``add_BOS`` is true; :class:`RequestError` where there can be none.

        Called with ``(prompt, add_BOS=False)`` as in core_v0.16, or as since with ``(tokenizer,
        prompt, add_BOS=False)``, also of the class.
        """
        if given and isinstance(given[0], TextGenerationController):
            served, given = given[0].served, given[1:]
            if "tokenizer" not in named and (not given or isinstance(given[0], str)):
                return served.tokenize_prompt(*given, **named)
        return tokenize_prompt(*given, strips_begin=True, **named)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, CONTROLLER_ATTRIBUTES)


class OtherNetwork(Network):
    """An object of a class of its user's, with ``vocab_size``, ``forward`` and what else it has of
    :class:`Network`'s names."""

    vocab_size: int = 0

    def __init__(self, given: Any) -> None:
        names = [name for name in dir(self) if not name.startswith("_")]
        self.__dict__.update({name: getattr(given, name) for name in names if hasattr(given, name)})

    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        raise NotImplementedError  # the object's own is found before this one

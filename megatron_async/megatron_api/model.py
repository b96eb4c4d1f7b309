"""megatron-core's wrapper of a model, and its controller, over ours."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megatron_async.megatron_api.names import no_attribute
from megatron_async.megatron_api.tables import CONTROLLER_ATTRIBUTES, WRAPPER_ATTRIBUTES
from megatron_async.models import wrapper
from megatron_async.runner import controller

from megatron.core.inference.contexts import BaseInferenceContext  # isort: skip


def outside_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """For tensors that other threads write to: a script may run in ``torch.inference_mode()``."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


class GPTInferenceWrapper(wrapper.GPTInferenceWrapper):
    """The model side of the engine, with megatron-core's arguments.

    Args:
        model: a megatron-core ``GPTModel``, which is adapted in place. ``Float16Module`` and
            ``DistributedDataParallel`` are taken off.
        inference_wrapper_config: not read; where a context stands in its place, that is the
            context, as in megatron-core's main branch.
        inference_context: of the engine that will serve the model.
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
        with outside_inference_mode():
            super().__init__(
                model,
                inference_context,
                batch_invariant=batch_invariant,
                fused_decode=fused_decode,
            )
        self.inference_wrapper_config = inference_wrapper_config
        self.model_is_pipeline_parallel = False
        self.sequence_parallel = False
        self.tp_size = 1

    @property
    def inference_params(self) -> Any:
        """An older name of ``inference_context``."""
        return self.inference_context

    def prep_model_for_inference(self, prompts_tokens: Any = None) -> None:
        """Nothing is left to do: the model is in evaluation mode."""

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, WRAPPER_ATTRIBUTES)


class TextGenerationController(controller.TextGenerationController):
    """A model that can be served, and its tokenizer, with megatron-core's arguments.

    Args:
        inference_wrapped_model: a :class:`GPTInferenceWrapper`, or the model itself.
        tokenizer: as of the class that this one is derived from.
        pp_group: not read.
    """

    def __init__(
        self, inference_wrapped_model: Any, tokenizer: Any = None, pp_group: Any = None
    ) -> None:
        if isinstance(inference_wrapped_model, torch.nn.Module):
            inference_wrapped_model = GPTInferenceWrapper(inference_wrapped_model)
        super().__init__(inference_wrapped_model, tokenizer)
        self.pp_group = pp_group
        self.model_is_pipeline_parallel = False

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, CONTROLLER_ATTRIBUTES)

"""A model and its tokenizer, as an engine takes them. The name is megatron-core's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.device.protocol import Device
from megatron_async.errors import ConfigError, RequestError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from megatron_async.weights.source import WeightSource


class TextGenerationController:
    """A model that can be served, and its tokenizer.

    Args:
        inference_wrapped_model: a :class:`~megatron_async.models.wrapper.GPTInferenceWrapper`, a
            megatron-core ``GPTModel``, or any object with ``vocab_size`` and ``forward``.
        tokenizer: an object with ``tokenize``, ``detokenize``, ``eod`` (and ``bos``), or None when
            prompts are token ids.
    """

    def __init__(self, inference_wrapped_model: Any, tokenizer: Any = None) -> None:
        if isinstance(inference_wrapped_model, torch.nn.Module):
            from megatron_async.models.wrapper import GPTInferenceWrapper

            inference_wrapped_model = GPTInferenceWrapper(inference_wrapped_model)
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self._attached = False

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Token ids of a text prompt.

        Raises:
            RequestError: the model came without a tokenizer, or it knows no begin token.
        """
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer; give the prompt as token ids, or a tokenizer_model"
            )
        ids = list(self.tokenizer.tokenize(prompt))
        if add_BOS:
            bos = getattr(self.tokenizer, "bos", None)
            if bos is None:
                raise RequestError(
                    "add_BOS=True but the tokenizer has no begin token; leave it out"
                )
            if ids[:1] != [bos]:
                ids.insert(0, bos)
        return ids

    def attach(
        self,
        device: Device,
        context: DynamicInferenceContext,
        *,
        make: Callable[..., ModelRunner] = ModelRunner,
        **options: Any,
    ) -> ModelRunner:
        """A runner of this model over a context, for the one engine that it serves; ``options`` are
        :class:`ModelRunner`'s, which ``make`` makes.

        Raises:
            ConfigError: the controller or the context serves an engine already, or the context
                does not suit the model.
        """
        if self._attached:
            raise ConfigError(
                "the controller serves another engine already; build a new "
                "TextGenerationController over the same model"
            )
        self._check_suits(context)
        self._attached = context.attached = True
        claim = getattr(self.inference_wrapped_model, "claim_waiting_grids", None)
        context.grids_may_wait = claim is not None and claim(device)
        reserve = getattr(self.inference_wrapped_model, "reserve_positions", None)
        if reserve is not None:
            reserve(context.max_sequence_length)
        return make(device, context, self.inference_wrapped_model, **options)

    def _check_suits(self, context: DynamicInferenceContext) -> None:
        if context.attached:
            raise ConfigError(
                "the context serves another engine already; build a new DynamicInferenceContext"
            )
        model = self.inference_wrapped_model
        most = getattr(model, "max_sequence_length", None)
        if most is not None and context.max_sequence_length > most:
            raise ConfigError(
                f"the context's max_sequence_length={context.max_sequence_length} exceeds the "
                f"model's {most}; lower it"
            )
        spec = getattr(model, "kv_cache_spec", None)
        if spec is None:
            return
        layers, tensors, _, _, heads, head_dim = context.kv_cache.shape
        # Layers of multi-token prediction need room only where they run.
        needed = max(min(layers, spec.num_layers), spec.decoder.num_layers)
        for name, has, needs in (
            ("num_layers", layers, needed),
            ("num_attention_heads", heads, spec.num_kv_heads),
            ("kv_channels", head_dim, spec.head_dim),
            ("cache_mla_latent", tensors == 1, spec.latent_rank is not None),
            ("params_dtype", context.params_dtype, spec.dtype),
        ):
            if has != needs:
                raise ConfigError(f"the context has {name}={has} and the model needs {needs}")

    @property
    def weights_owner(self) -> Any:
        """The object whose weights are replaced: one may be under several controllers."""
        return getattr(self.inference_wrapped_model, "model", self.inference_wrapped_model)

    def read_weights(
        self,
        source: str | Path | Mapping[str, Any] | WeightSource,
        *,
        allow_non_finite_weights: bool = False,
        all_parameters: bool = False,
    ) -> Callable[[], None]:
        """Read and check new weights. Calling the result replaces the model's in place; then
        nothing may be in flight.

        Raises:
            CheckpointError: they do not fit.
        """
        from megatron_async.weights.place import read_weights

        own = getattr(self.inference_wrapped_model, "update_weights", None)
        checks = {
            "allow_non_finite_weights": allow_non_finite_weights,
            "all_parameters": all_parameters,
        }

        def read() -> Callable[[], None]:
            if own is not None:
                return functools.partial(own, source)
            return read_weights(self.weights_owner, source, **checks)

        group = getattr(self.inference_wrapped_model, "rank_group", None)
        if group is None:
            return read()
        replace: Callable[[], None] = group.read_weights(self.weights_owner, source, read, **checks)
        return replace

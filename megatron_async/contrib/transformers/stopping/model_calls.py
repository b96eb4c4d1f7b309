"""The calls of a model that stock ``generate`` makes, in transformers 4.57 and 5."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from transformers import CompileConfig
from transformers.cache_utils import StaticLayer

PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


class ModelCalls:
    """Prefill first, then one forward per token. All private names of transformers are here."""

    def __init__(self, model: Any, config: Any) -> None:
        self.model = model
        self.config = config
        self._prefilled = False
        self._mask_is_full = False
        self._has_prefill = hasattr(model, "_prefill")  # transformers 5
        self._forward: Any = None

    def start(self, input_ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare for the first forward; returns the keyword arguments to go on with."""
        model = self.model
        self._mask_is_full = self._has_full_mask(model_kwargs)
        if not self._has_prefill:
            model_kwargs = model._get_initial_cache_position(
                input_ids.shape[1], input_ids.device, model_kwargs
            )
        compiled = model._valid_auto_compile_criteria(model_kwargs, self.config)
        self._forward = (
            model.get_compiled_call(self.config.compile_config) if compiled else model.__call__
        )
        if not self._has_prefill and self.config.prefill_chunk_size is not None:
            model_kwargs = model._prefill_chunking(input_ids, self.config, **model_kwargs)
            self._prefilled = True
        return model_kwargs

    def compilation(self, model_kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of ``torch.compile`` where stock compiles the forward, for one that is captured
        here and not by the compiler; None where it does not."""
        if not self.model._valid_auto_compile_criteria(model_kwargs, self.config):
            return None
        asked = self.config.compile_config or CompileConfig()
        given = {
            name: value
            for name, value in asked.to_dict().items()
            if name in ("fullgraph", "dynamic", "backend", "mode", "options")
        }
        modes: dict[Any, str | None] = {
            "reduce-overhead": None,
            "max-autotune": "max-autotune-no-cudagraphs",
        }
        given["mode"] = modes.get(given.get("mode"), given.get("mode"))
        return given

    def forward(self, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """The model's output for the next token; the first call is the prefill."""
        first, self._prefilled = not self._prefilled, True
        if first and self._has_prefill:
            return self.model._prefill(input_ids, self.config, model_kwargs)
        last = {}
        if self._has_prefill:
            last = {"next_sequence_length": 1 if model_kwargs["use_cache"] else None}
        inputs = self.model.prepare_inputs_for_generation(input_ids, **last, **model_kwargs)
        return (self.model if first else self._forward)(**inputs, return_dict=True)

    def advance(self, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the next forward."""
        updated: dict[str, Any] = self.model._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        if self._mask_is_full:
            updated.pop("attention_mask", None)
        return updated

    def _has_full_mask(self, model_kwargs: dict[str, Any]) -> bool:
        """Whether a mask over the tokens says nothing, so that forwards behind the prefill can do
        without: transformers up to 5.17 waits in each for the device to look at it. Later ones
        leave it out themselves."""
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
        if self.model.config.is_encoder_decoder or not isinstance(mask, Tensor) or mask.ndim != 2:
            return False
        if cache is None or getattr(cache, "is_compileable", True):
            return False  # the mask of a static cache is made in front of the forward
        return bool((mask == 1).all())

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around all forwards after the prefill, as stock does."""
        stock: AbstractContextManager[Any] = nullcontext()
        if hasattr(self.model, "_optimize_model_for_decode"):
            stock = self.model._optimize_model_for_decode()
        with stock, without_padding_checks(self.model):
            yield


def look_at_nothing(*_: Any, **__: Any) -> None:
    """One function for all calls: compiled forwards hold on to it."""


@contextmanager
def without_padding_checks(model: Any) -> Iterator[None]:
    """Some models (GPT-2) look for padding tokens in the input of each forward, to warn once: a
    host wait per token. The prefill has looked at the prompt."""
    checking = [m for m in model.modules() if hasattr(m, PADDING_CHECK)]
    checking = [m for m in checking if PADDING_CHECK not in vars(m)]
    for module in checking:
        vars(module)[PADDING_CHECK] = look_at_nothing
    try:
        yield
    finally:
        for module in checking:
            vars(module).pop(PADDING_CHECK, None)


def stock_sample(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stock greedy decoding and sampling, also inside of ``async_stopping``."""
    method = type(model)._sample
    return getattr(method, "stock", method)(model, *args, **kwargs)


def stock_beam_search(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model)._beam_search(model, *args, **kwargs)


def longest_input(model: Any, cache: Any) -> int | None:
    """The most tokens that a forward can have behind it, by the table of positions and a static
    cache: on a GPU one more is an error that ends the process. None: no limit is known."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    limits += [layer.max_cache_len for layer in layers if type(layer) is StaticLayer]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def pad_token(config: Any, input_ids: Tensor) -> Tensor | None:
    """The padding token id on the device, as ``generate`` has prepared it."""
    pad: Tensor | None = config._pad_token_tensor
    return None if pad is None else pad.to(input_ids.device)


def is_own_cache_of_generate(model: Any, cache: Any) -> bool:
    """Whether ``generate`` made ``cache`` and will not hand it out by itself.

    transformers 5 marks a user's cache. 4.57 does not, so there only its own static one is known.
    """
    if hasattr(model, "_prefill"):
        return not getattr(cache, "_is_user_defined", False)
    return cache is getattr(model, "_cache", None)


def forget_unused_cache(model: Any, cache: Any) -> None:
    """transformers 4.57 keeps the static cache of a call for the next one, which fails if no
    forward has used it."""
    if vars(model).get("_cache") is cache and not cache.layers[0].is_initialized:
        vars(model).pop("_cache")


def attention_kind(model: Any) -> str:
    """The name of the attention implementation in use."""
    return str(model.config._attn_implementation)


def takes_cache_position(model: Any) -> bool:
    """Whether a forward is told where its tokens go: in transformers 4.57 only."""
    return not hasattr(model, "_prefill")

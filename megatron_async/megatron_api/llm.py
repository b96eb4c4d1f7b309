"""``MegatronLLM`` and ``MegatronAsyncLLM`` of megatron-core's main branch, over our engine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError, RequestError
from megatron_async.megatron_api.context import DynamicInferenceContext
from megatron_async.megatron_api.engine import DynamicInferenceEngine
from megatron_async.megatron_api.inference_config import InferenceConfig, attention_layers
from megatron_async.megatron_api.main_tables import LLM
from megatron_async.megatron_api.model import GPTInferenceWrapper, TextGenerationController
from megatron_async.megatron_api.names import check_keywords, no_attribute
from megatron_async.models.adapt import unwrapped
from megatron_async.request.request import DynamicInferenceRequest

Prompts = str | list[int] | list[str] | list[list[int]]


class _LLM:
    """An engine, and what steps it: a thread of its own, or with ``use_coordinator=False`` each
    call of ``generate``. Arguments are those of :class:`MegatronLLM`."""

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        inference_config: Any = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: Any = None,
        config: EngineConfig | None = None,
    ) -> None:
        given = {"coordinator_host": coordinator_host, "coordinator_port": coordinator_port}
        check_keywords(type(self).__name__, LLM, given)
        model = unwrapped(model)
        if inference_config is None:
            inference_config = InferenceConfig()
            most = getattr(model, "max_sequence_length", inference_config.max_sequence_length)
            inference_config.max_sequence_length = min(inference_config.max_sequence_length, most)
        context = DynamicInferenceContext(model.config, inference_config, **_layers(model))
        wrapper = (inference_wrapper_cls or GPTInferenceWrapper)(model, context)
        self.controller = TextGenerationController(wrapper, tokenizer)
        self.context = context
        if config is not None:
            config = dataclasses.replace(config, max_requests=context.max_requests)
        self.engine = DynamicInferenceEngine(self.controller, context, config=config)
        self.is_primary_rank = not use_coordinator or self.engine.rank == 0
        self._use_coordinator = use_coordinator
        self._ended = threading.Event()
        self._paused = self._suspended = False
        if use_coordinator:
            self.engine.start()

    def update_weights(self, source: str | Path | Mapping[str, Any], **options: Any) -> int:
        """New weights between two steps, also while the engine is paused; see the engine's."""
        return self.engine.update_weights(source, **options)

    def _generate(self, prompts: Prompts, params: Any, data: Any) -> list[DynamicInferenceRequest]:
        check_keywords("generate()", LLM, {"multi_modal_data": data})
        listed = _listed(prompts)
        return self.engine.generate(listed, params) if listed else []

    def _set(self, *, paused: bool | None = None, suspended: bool | None = None) -> None:
        """Nothing is launched while the engine is paused or suspended."""
        if not self._use_coordinator:
            raise RuntimeError("This method requires use_coordinator=True")
        self._paused = self._paused if paused is None else paused
        self._suspended = self._suspended if suspended is None else suspended
        if self._paused or self._suspended:
            self.engine.suspend()
        else:
            self.engine.resume()

    def _shutdown(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.engine.close()

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, LLM)


class MegatronLLM(_LLM):
    """A model that generates text, with the interface of megatron-core's main branch.

    Args:
        model: a megatron-core ``GPTModel``, which is adapted in place.
        tokenizer: an object with ``tokenize``, ``detokenize``, ``eod`` (and ``bos``), or None.
        inference_config: an :class:`InferenceConfig`, megatron-core's own too.
        use_coordinator: a thread of the engine's own steps it; without it ``generate`` does, and
            the engine cannot be paused.
        coordinator_host, coordinator_port: None; there is no coordinator process.
        inference_wrapper_cls: called with the model and the context.
        config: ours, for what the ``InferenceConfig`` has no word for, such as the depth.

    Raises:
        ConfigError: an argument cannot be served; the message says why.
    """

    def generate(
        self, prompts: Prompts, sampling_params: Any = None, multi_modal_data: Any = None
    ) -> list[DynamicInferenceRequest]:
        """Decode one prompt or several; the records in the same order, also of one.

        Raises:
            RequestError: the prompts are no text, token ids or list of these.
        """
        return self._generate(prompts, sampling_params, multi_modal_data)

    def pause(self) -> None:
        """Commit what is in flight and launch nothing until :meth:`unpause`."""
        self._set(paused=True)

    def unpause(self) -> None:
        """Go on after :meth:`pause`."""
        self._set(paused=False)

    def suspend(self) -> None:
        """The same as :meth:`pause`, until :meth:`resume`."""
        self._set(suspended=True)

    def resume(self) -> None:
        """Take :meth:`suspend` back. An engine that was paused before stays paused."""
        self._set(suspended=False)

    def shutdown(self) -> None:
        """Close the engine; again does nothing."""
        self._shutdown()

    def wait_for_shutdown(self) -> None:
        """Wait until :meth:`shutdown` was called."""
        self._ended.wait()

    def __enter__(self) -> MegatronLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


class MegatronAsyncLLM(_LLM):
    """:class:`MegatronLLM` for coroutines. ``use_coordinator=False`` is refused, as theirs is."""

    def __init__(self, *, use_coordinator: bool = True, **arguments: Any) -> None:
        if not use_coordinator:
            raise ConfigError(
                "MegatronAsyncLLM needs use_coordinator=True: a thread of the engine's own steps it"
            )
        super().__init__(use_coordinator=True, **arguments)

    async def generate(
        self, prompts: Prompts, sampling_params: Any = None, multi_modal_data: Any = None
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Decode one prompt, or several: one record, or a list of them in the same order.

        Raises:
            RequestError: the prompts are no text, token ids or list of these.
        """
        found = await asyncio.to_thread(self._generate, prompts, sampling_params, multi_modal_data)
        return found[0] if _is_one(prompts) else found

    async def pause(self) -> None:
        """Commit what is in flight and launch nothing until :meth:`unpause`."""
        await asyncio.to_thread(self._set, paused=True)

    async def unpause(self) -> None:
        """Go on after :meth:`pause`."""
        await asyncio.to_thread(self._set, paused=False)

    async def suspend(self) -> None:
        """The same as :meth:`pause`, until :meth:`resume`."""
        await asyncio.to_thread(self._set, suspended=True)

    async def resume(self) -> None:
        """Take :meth:`suspend` back. An engine that was paused before stays paused."""
        await asyncio.to_thread(self._set, suspended=False)

    async def shutdown(self) -> None:
        """Close the engine; again does nothing."""
        await asyncio.to_thread(self._shutdown)

    async def wait_for_shutdown(self) -> None:
        """Wait until :meth:`shutdown` was called."""
        await asyncio.to_thread(self._ended.wait)

    async def __aenter__(self) -> MegatronAsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


def _layers(model: Any) -> dict[str, int]:
    """How many layers of a hybrid model keep keys and values; of others their config says it."""
    kinds = getattr(getattr(model, "decoder", None), "layer_type_list", None)
    if kinds is None:
        return {}
    predicting = getattr(model.config, "mtp_num_layers", None) or 0
    return {"num_layers": attention_layers(kinds) + predicting}


def _is_one(prompts: Prompts) -> bool:
    return isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))


def _listed(prompts: Any) -> list[Any]:
    """The prompts as a list, as megatron-core takes them; raises :class:`RequestError`."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list) or not (
        all(isinstance(each, int) for each in prompts)
        or all(isinstance(each, str | list) for each in prompts)
    ):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a text, a list of token ids, or a list "
            "of these"
        )
    return [prompts] if _is_one(prompts) else prompts

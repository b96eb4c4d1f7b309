"""The model of a rank other than 0, and the engines over it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_async.build.model import for_config, load_share, network_over
from megatron_async.build.runner import open_runner
from megatron_async.build.spec import EngineSpec
from megatron_async.codec import Codec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.protocol import Device
from megatron_async.engine.lifecycle.sleep_mode import Memory
from megatron_async.models.build import build_random_model
from megatron_async.models.served import ServedModel
from megatron_async.ranks.messages import (
    AwaitTensors,
    BuildEngine,
    BuildModel,
    LoadModel,
    ReadShards,
    Sleep,
    WakeUp,
)
from megatron_async.ranks.new_weights import await_tensors
from megatron_async.ranks.start import device_of_rank
from megatron_async.runner.model_runner import ModelRunner

SPECS: Codec[EngineSpec] = Codec(EngineSpec)


class RankModel:
    """This rank's share of a model, and what the engines over it can give back.

    Args:
        device: "cpu" or "cuda": the GPU of this process among those of its host; or which one.
        model: if it has been built already.
    """

    def __init__(self, device: str | torch.device, model: ServedModel | None = None) -> None:
        self._device = device_of_rank(device) if isinstance(device, str) else device
        self._given = model
        self._memory: dict[int, Memory] = {}

    @property
    def _model(self) -> ServedModel:
        assert self._given is not None
        return self._given

    def load(self, message: LoadModel) -> None:
        """See :class:`LoadModel`."""
        self._given = load_share(message.path, message.config, self._device)

    def make(self, message: BuildModel) -> None:
        """See :class:`BuildModel`."""
        made = build_random_model(
            message.model,
            device=self._device,
            dtype=message.dtype,
            seed=message.seed,
            quantize=message.quantize,
            pack=message.pack,
            quantize_activations=message.quantize_activations,
        )
        self._given = ServedModel(network=network_over(made, EngineConfig()))

    def build(self, message: BuildEngine) -> tuple[Device, ModelRunner]:
        """See :class:`BuildEngine`."""
        spec = SPECS.decode(message.spec)
        model = for_config(self._model, spec.config)
        device, batch, runner = open_runner(spec, model, self._device)
        self._memory[message.engine] = Memory(batch.cache.regions, model.weights_region)
        return device, runner

    def read_weights(self, source: str, allow_non_finite_weights: bool) -> Callable[[], None]:
        """See ``ServedModel.read_weights``."""
        return self._model.read_weights(source, allow_non_finite_weights=allow_non_finite_weights)

    def read_shards(self, message: ReadShards) -> Callable[[], None]:
        """See :class:`ReadShards`."""
        from megatron_async.weights.sharded.source import ShardedSource

        return self._model.read_weights(
            ShardedSource.of_told(message.source),
            allow_non_finite_weights=message.allow_non_finite_weights,
            all_parameters=message.all_parameters,
        )

    def await_tensors(self, message: AwaitTensors) -> Callable[[], None]:
        """See :class:`AwaitTensors`."""
        return await_tensors(
            self._model.weights_owner, message.tensors, all_parameters=message.all_parameters
        )

    def sleep(self, message: Sleep) -> None:
        """See :class:`Sleep`."""
        self._memory[message.engine].release(keep_weights=message.keep_weights)

    def wake_up(self, message: WakeUp) -> None:
        """See :class:`WakeUp`."""
        self._memory[message.engine].restore(message.tag)

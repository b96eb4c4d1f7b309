"""Which rank of a group has what of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError

MOST_MICRO_BATCHES = 16
"""With steps of some depth, and a few stages, fewer messages are on their way than
``kernels/ranks/mailbox.py`` has room for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a group, under the names of megatron-core.

    Ranks are numbered with the tensor-parallel rank first and the pipeline stage last, as
    megatron-core does. Experts are spread over the ranks of a stage; where these are more than the
    tensor-parallel ranks, they hold copies of everything else and compute it alike.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages, of some layers each.
        expert: ranks of a stage that have some experts each.

    Raises:
        ConfigError: the sizes do not go together.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.expert > 1 and self.expert % self.tensor:
            raise ConfigError(
                f"expert_model_parallel_size={self.expert} must be a multiple of "
                f"tensor_model_parallel_size={self.tensor}, or 1"
            )

    @classmethod
    def of(cls, config: EngineConfig) -> Layout:
        """The layout that a configuration asks for."""
        return cls(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.expert_model_parallel_size,
        )

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return max(self.tensor, self.expert)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.stage_ranks

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stage_ranks

    def neighbour(self, rank: int, stages: int) -> int:
        """The rank in the same place of a stage ``stages`` stages further."""
        return rank + stages * self.stage_ranks

    @property
    def sampling_ranks(self) -> tuple[int, ...]:
        """The ranks whose logits count: those of the last stage that hold no copies."""
        first = (self.pipeline - 1) * self.stage_ranks
        return tuple(range(first, first + self.tensor))

    def listeners(self, tensor_rank: int) -> tuple[int, ...]:
        """The ranks that get their tokens from the sampling rank of this tensor-parallel rank,
        which is one of them."""
        return tuple(range(tensor_rank, self.world_size, self.tensor))

    def copies(self, tensor_rank: int) -> tuple[int, ...]:
        """The :meth:`listeners` that are in the last stage."""
        last = self.pipeline - 1
        return tuple(r for r in self.listeners(tensor_rank) if self.stage(r) == last)

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "EP": self.expert, "PP": self.pipeline}
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def unsupported(layout: Layout, config: EngineConfig) -> Iterable[str]:
    """What a configuration asks for that a group of several ranks does not do, a line each."""
    if layout.world_size == 1:
        return
    if config.device is not None and config.device.startswith("cuda:"):
        yield f"device={config.device!r} is one GPU; use 'cuda', of which each rank takes its own"
    if (
        layout.pipeline > 1
        and config.num_speculative_tokens
        and config.speculative_method not in ("ngram", "grammar")
    ):
        yield (
            "num_speculative_tokens with pipeline_model_parallel_size above 1 needs "
            "speculative_method='ngram' or 'grammar': other drafts need the last stage's hidden "
            "states"
        )
    if layout.pipeline > 1 and (config.pipeline_micro_batches or 0) > MOST_MICRO_BATCHES:
        yield (
            f"pipeline_micro_batches={config.pipeline_micro_batches} is more than "
            f"{MOST_MICRO_BATCHES}, which stages have messages for"
        )
    if layout.pipeline > 1 and config.draft_model is not None:
        yield "draft_model does not go together with pipeline_model_parallel_size above 1"


def check_supported(layout: Layout, config: EngineConfig) -> None:
    """Raises :class:`ConfigError` with what a group of these ranks does not do."""
    for reason in unsupported(layout, config):
        raise ConfigError(reason)

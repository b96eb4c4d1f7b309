"""A model that is served, with what an engine must know of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.device.releasable import Region
from megatron_async.errors import ConfigError, RequestError
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.network import Network

if TYPE_CHECKING:
    from megatron_async.ranks.group import RankGroup
    from megatron_async.weights.source import AnySource


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A network, and what was loaded with it.

    Attributes:
        network: what an engine runs.
        tokenizer: an object with ``tokenize``, ``detokenize``, ``eod`` (and ``bos``), or None when
            prompts are token ids.
        eos_token_ids: tokens that end a request which names no ``termination_id``; None takes the
            tokenizer's ``eod``.
        draft: a network over the same vocabulary that drafts for this one.
        group: rank 0's hold on the other ranks; None for one rank.
        weights_region: memory of the parameters that can be given back; None if theirs is torch's.
        sampling_defaults: fields of ``SamplingParams`` for requests that bring none; None for
            megatron-core's.
        strips_begin: begin tokens that the tokenizer itself puts in front of a prompt are left out,
            as in megatron-core.
    """

    network: Network
    tokenizer: Any = None
    name: str = "model"
    eos_token_ids: tuple[int, ...] | None = None
    draft: Network | None = None
    group: RankGroup | None = None
    weights_region: Region | None = None
    sampling_defaults: dict[str, Any] | None = None
    strips_begin: bool = False

    @property
    def weights_owner(self) -> Any:
        """The object whose weights are replaced: one may be under several engines."""
        return self.network.weights_owner

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Token ids of a text prompt.

        Raises:
            RequestError: the model came without a tokenizer, or it knows no begin token.
        """
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer; give the prompt as token ids, or a tokenizer_model"
            )
        return tokenize_prompt(self.tokenizer, prompt, add_BOS, strips_begin=self.strips_begin)

    def read_weights(
        self,
        source: str | Path | Mapping[str, Any] | AnySource,
        *,
        allow_non_finite_weights: bool = False,
        all_parameters: bool = False,
    ) -> Callable[[], None]:
        """Read and check new weights, on all ranks. Calling the result replaces the model's in
        place; then nothing may be in flight.

        Raises:
            CheckpointError: they do not fit.
        """
        checks = {
            "allow_non_finite_weights": allow_non_finite_weights,
            "all_parameters": all_parameters,
        }
        read = functools.partial(self.network.read_weights, source, **checks)
        if self.group is None:
            return read()
        return self.group.read_weights(self.weights_owner, source, read, **checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a network's engine is planned by. Data alone.

    Attributes:
        kv_cache: of all attention layers, those of multi-token prediction too; None says nothing.
        state_bytes: of a slot's recurrent state; None without recurrent layers.
        max_sequence_length, rotation_limit, attention_window, mtp_layers, drafts_itself: see
            :class:`Network`.
        stages: of layers, on ranks of their own.
    """

    vocab_size: int
    max_sequence_length: int | None = None
    kv_cache: KVCacheSpec | None = None
    state_bytes: int | None = None
    rotation_limit: int | None = None
    attention_window: int | None = None
    mtp_layers: int = 0
    stages: int = 1
    drafts_itself: bool = False

    @classmethod
    def of(cls, network: Network, recurrent_state_dtype: str | None = None) -> ModelDescription:
        """Describe a network whose recurrent layers keep sums in ``recurrent_state_dtype``; None is
        the model's."""
        states = network.recurrent_state_spec
        return cls(
            vocab_size=network.vocab_size,
            max_sequence_length=network.max_sequence_length,
            kv_cache=network.kv_cache_spec,
            state_bytes=(
                None if states is None else states.with_dtype(recurrent_state_dtype).state_bytes
            ),
            rotation_limit=network.rotation_limit,
            attention_window=network.attention_window,
            mtp_layers=network.mtp_layers,
            stages=1 if network.parallel is None else network.parallel.layout.pipeline,
            drafts_itself=network.drafts_itself,
        )

    @property
    def position_limit(self) -> int | None:
        """Positions that are computed in one way; None says nothing."""
        limits = (self.max_sequence_length, self.rotation_limit)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def cached(self) -> KVCacheSpec:
        """What a token takes in the KV cache.

        Raises:
            ConfigError: nobody knows.
        """
        if self.kv_cache is None:
            raise ConfigError("the model does not say its kv_cache_spec; build its cache yourself")
        return self.kv_cache


def tokenize_prompt(
    tokenizer: Any, prompt: str, add_BOS: bool = False, *, strips_begin: bool
) -> list[int]:
    """Token ids of a text prompt; see :class:`ServedModel`. Raises RequestError where ``add_BOS``
    asks for a begin token that the tokenizer has not."""
    ids = list(tokenizer.tokenize(prompt))
    bos = _begin_token(tokenizer) if add_BOS or strips_begin else None
    if strips_begin:
        from megatron_async.tokenizer.begin import behind_begin

        ids = behind_begin(ids, bos)
    if add_BOS:
        if bos is None:
            raise RequestError("add_BOS=True but the tokenizer has no begin token; leave it out")
        if ids[:1] != [bos]:
            ids.insert(0, bos)
    return ids


def _begin_token(tokenizer: Any) -> int | None:
    try:
        found: int | None = tokenizer.bos
    except (AttributeError, NotImplementedError):  # megatron's tokenizers that have none
        return None
    return found

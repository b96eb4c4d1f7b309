"""The requests of scenarios, made for a model, and what serial decoding makes of them."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_async.request.request import FinishReason
from megatron_async.sampling_params import SamplingParams
from megatron_async.verify.decode import Outcome, Work, decode
from megatron_async.verify.scenarios import MAX_LENGTH, Ask, Prompt, Scenario, Sizes
from megatron_async.verify.workload import NO_TERMINATION, make_prompt

if TYPE_CHECKING:
    from megatron_async.config.engine_config import EngineConfig
    from megatron_async.engine.engine import DynamicInferenceEngine

STOP_WINDOW = 4
"""A request that is to stop after n tokens stops after n + 1 .. n + STOP_WINDOW."""

ATTEMPTS = 16
"""Seeds tried until a request reaches, at the right place, a token that it has not had before."""


def without_drafts(config: EngineConfig) -> EngineConfig:
    """``config`` with nothing that drafts."""
    return dataclasses.replace(config, num_speculative_tokens=0, draft_model=None)


def reference_config(config: EngineConfig, sizes: Sizes) -> EngineConfig:
    """Serial, without drafts, one request at a time, and nothing that is in a scenario's way."""
    return dataclasses.replace(
        scenario_config(without_drafts(config), sizes),
        max_requests=1,
        enable_prefix_caching=False,
        depth=0,
        inference_async_scheduling=None,
        inference_logging_step_interval=0,
    )


def scenario_config(config: EngineConfig, sizes: Sizes) -> EngineConfig:
    """``config`` with a scenario's sizes. Tokens are computed again after evictions, and prefilled
    by one request for another, which needs numerics that do not depend on the batch."""
    return dataclasses.replace(
        config,
        max_requests=sizes.rows,
        block_size_tokens=sizes.block,
        block_count=sizes.blocks,
        buffer_size_gb=None,
        prefill_chunk_tokens=sizes.chunk,
        max_tokens=None,
        enable_prefix_caching=True,
        inference_logging_step_interval=sizes.logging,
        batch_invariant=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario for one model: its requests by name, and what must come of each."""

    scenario: Scenario
    works: dict[str, Work]
    reference: dict[str, Outcome]


class Reference:
    """What serial decoding makes of requests: each alone, with room for it, and without an event.

    A prompt is decoded once, without stop tokens and as far as anyone needs; how far each request
    gets and why it ends is worked out here, not by the engine.

    Args:
        engine: one of :func:`reference_config`.
        scenarios: whose requests will be asked for.
        seed: of the prompts and of the sampled requests.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, scenarios: Sequence[Scenario], seed: int
    ) -> None:
        self._engine = engine
        self._lengths: Counter[Prompt] = Counter()
        for ask in (ask for scenario in scenarios for ask in scenario.asks):
            need = ask.new if ask.stop is None else ask.stop + STOP_WINDOW
            self._lengths[ask.prompt] = max(self._lengths[ask.prompt], need)
        self._seed = seed
        self._decoded: dict[tuple[Prompt, int | None], list[int]] = {}

    def prepare(self, scenario: Scenario) -> Prepared:
        """Make the prompts of the model's tokens, choose stop tokens that will come, and decode."""
        works: dict[str, Work] = {}
        outcomes: dict[str, Outcome] = {}
        for ask in scenario.asks:
            works[ask.name], outcomes[ask.name] = self._prepare(ask)
        return Prepared(scenario, works, outcomes)

    def _prepare(self, ask: Ask) -> tuple[Work, Outcome]:
        if ask.stop is None:
            attempt = 0 if ask.sampled else None
            tokens = self._tokens(ask, attempt)[: ask.new]
            return self._work(ask, attempt), Outcome(tokens, FinishReason.LENGTH)
        # A stop token is one that the request has for the first time at the right place.
        for attempt in range(ATTEMPTS):
            tokens = self._tokens(ask, attempt)
            for at in range(ask.stop, ask.stop + STOP_WINDOW):
                if tokens[at] not in tokens[:at]:
                    work = self._work(ask, attempt, stop=(tokens[at],))
                    return work, Outcome(tokens[: at + 1], FinishReason.STOP)
        # There is none: the run goes on without it, and will miss its witness.
        ended = ask._replace(new=len(tokens))
        return self._work(ended, attempt), Outcome(tokens, FinishReason.LENGTH)

    def _work(self, ask: Ask, attempt: int | None, stop: tuple[int, ...] = ()) -> Work:
        """``attempt`` None is greedy; the others sample with different seeds."""
        prompt: list[int] = []
        for number, length in ask.prompt:
            prompt += make_prompt(self._engine, random.Random(f"{self._seed}/{number}"), length)
        params = SamplingParams(
            temperature=0.0 if attempt is None else 1 + attempt / 4,
            seed=random.Random(f"{self._seed}/{ask.prompt}/{attempt}").getrandbits(63),
            num_tokens_to_generate=ask.new,
            termination_id=NO_TERMINATION,
            stop_token_ids=stop,
        )
        return Work(prompt, params)

    def _tokens(self, ask: Ask, attempt: int | None) -> list[int]:
        key = (ask.prompt, attempt)
        if key not in self._decoded:
            work = self._work(ask._replace(new=self._lengths[ask.prompt]), attempt)
            decoded = decode(self._engine, [work])
            self._decoded[key] = decoded.requests[0].generated_tokens
        return self._decoded[key]


def prepare_all(
    engine: DynamicInferenceEngine, scenarios: Sequence[Scenario], config: EngineConfig, seed: int
) -> list[Prepared]:
    """The reference of each scenario, decoded with its own block and chunk size."""
    prepared = []
    for block, chunk in dict.fromkeys((s.sizes.block, s.sizes.chunk) for s in scenarios):
        mine = [s for s in scenarios if (s.sizes.block, s.sizes.chunk) == (block, chunk)]
        sizes = Sizes(block=block, chunk=chunk, blocks=-(-MAX_LENGTH // block))
        with engine.with_config(reference_config(config, sizes)) as serial:
            reference = Reference(serial, mine, seed)
            prepared += [reference.prepare(scenario) for scenario in mine]
    return prepared

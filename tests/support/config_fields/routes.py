"""A config on the paths of the engine: chunks, prefix hits, evictions, pauses, drafts of each kind,
and the formats that models are stored in."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.checkpoint.load import Pretrained
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.sampling_params import SamplingParams
from tests.support.config_fields.bases import BASES, KINDS, Values
from tests.support.config_fields.compare import saved_model
from tests.support.engines import config_at

SAVE = {"ours": save_native, "megatron": save_distributed}
NEW = 12
DRAFTS = 3
DRAFT_LIMIT = 30
"""Positions of the model that drafts."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way through the engine.

    Args:
        chunk: tokens of a prefill chunk.
        blocks: of the cache; with few of them some requests are evicted.
        drafts: what drafts; None drafts nothing.
        stored: the format that the engine loads.
        interrupted: requests are paused, resumed and evicted.
    """

    chunk: int
    blocks: int = 120
    drafts: Literal["ngram", "mtp", "model"] | None = None
    stored: Literal["ours", "megatron"] = "ours"
    interrupted: bool = False


ROUTES = {
    "chunks of 1": Route(1),
    "chunks of 3, interrupted": Route(3, blocks=24, interrupted=True),
    "chunks of 64": Route(64, stored="megatron"),
    "prompt look-up": Route(17, drafts="ngram", interrupted=True),
    "layers that draft": Route(64, drafts="mtp", stored="megatron"),
    "a model that drafts": Route(17, drafts="model"),
}
SCALED: Values = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 3.0, "original_max_position_embeddings": 16,
    "truncate": None,
}  # fmt: skip
OWN: Values = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
LONG: Values = {
    "rope_type": "longrope", "rope_theta": 50.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 2.5, 3.0],
}  # fmt: skip
MADE: dict[str, Values] = {
    "gemma3_text": {"layer_types": KINDS, "rope_parameters": OWN},
    "ministral3": {"sliding_window": 9},
    "qwen2": {"rope_parameters": SCALED, "layer_types": KINDS},
    "gpt_oss": {"rope_parameters": None},
    "bamba": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    "phi3": {"rope_parameters": LONG},
}
"""Fields that were once wrong, or that need a border."""


def values_of(model_type: str) -> Values:
    """The base of a type, with what :data:`MADE` has for it."""
    return {"model_type": model_type, **BASES[model_type], **MADE.get(model_type, {})}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of transformers and this package's own of the same weights."""

    theirs: Any
    ours: Pretrained

    @classmethod
    def of(cls, values: Values, folder: Path) -> Subject:
        """The model of a config with random weights."""
        theirs = saved_model(folder, values)
        return cls(theirs, load_pretrained(folder))

    @property
    def border(self) -> int | None:
        """Tokens up to which a request is rotated in one way, and a longer one in another."""
        limit: int | None = None
        if self.ours.model.rotary is not None:
            limit = self.ours.model.rotary.limit
        return limit

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """transformers' of all tokens behind each of ``ids``, ``[len(ids), vocabulary]``, where
        each token was generated behind those before it."""

        def forward(tokens: list[int]) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
            return found

        found, border = forward(ids), self.border
        if border is not None and border < len(ids):
            found[:border] = forward(ids[:border])
        return found

    def difference(self, request: Any, prompt: list[int]) -> float:
        """The largest of the log-probabilities of a request's generated tokens."""
        ids = prompt + request.generated_tokens
        at = torch.arange(len(prompt) - 1, len(ids) - 1)
        expected = self.log_probs(ids)[at, torch.tensor(ids)[at + 1]]
        return float((expected - torch.tensor(request.generated_log_probs)).abs().max())


def _built(config: ModelConfig, like: Any, noise: float) -> Any:
    """A model with the weights of ``like`` as far as it has them, which ``noise`` is added to, and
    random ones."""
    torch.manual_seed(7)
    model = build_model(config, device="cpu", dtype=torch.float32)
    known = dict(like.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in known:
                parameter.copy_(known[name][: len(parameter)])
                parameter.add_(noise * torch.randn_like(parameter))
            else:
                parameter.add_(0.25 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def _drafter(ours: Pretrained, folder: Path) -> None:
    """Store a model over the same vocabulary that is nearly right and has fewer positions; of one
    layer where the model has recurrent ones, which no drafter may have."""
    config, model, noise = ours.config, ours.model, 0.02
    if config.hybrid_override_pattern is not None:
        config = ModelConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, num_kv_heads=2, head_dim=8,
            ffn_hidden_size=48, vocab_size=config.vocab_size, max_sequence_length=DRAFT_LIMIT,
            sliding_window=5,
        )  # fmt: skip
    config = dataclasses.replace(config, max_sequence_length=DRAFT_LIMIT)
    save_native(folder, _built(config, model, noise), config)


def prompts(most: int) -> list[list[int]]:
    """Their common beginning ends within a window, at its end and behind it; one ends with the last
    of ``most`` positions, and one repeats itself."""
    rng = random.Random(49)
    start = [rng.randrange(1, 90) for _ in range(26)]
    ends = [[rng.randrange(1, 90) for _ in range(rng.randrange(1, 8))] for _ in range(4)]
    shared = [start[:n] + end for n, end in zip((6, 12, 13, 26), ends, strict=True)]
    longest = [rng.randrange(1, 90) for _ in range(min(most, 72))]
    return [prompt[: most - NEW] for prompt in (*shared, start[:5] * 4, longest)]


def asked_of(engine: DynamicInferenceEngine, route: Route, twice: list[list[int]]) -> list[Any]:
    """The requests for some prompts, in their order."""
    params = SamplingParams(
        num_tokens_to_generate=NEW, temperature=1.0, seed=3, termination_id=-1,
        return_log_probs=True, skip_prompt_log_probs=True,
    )  # fmt: skip
    if not route.interrupted:
        return engine.generate(twice, params)
    futures = [engine.add_request(n, prompt, params) for n, prompt in enumerate(twice)]
    for number in range(len(twice)):
        for _ in range(3):
            engine.step_modern()
        engine.pause_request(number)
        engine.step_modern()
        engine.resume_request(number)
        engine.evict_request((number + 1) % len(twice))
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [future.result(timeout=0) for future in futures]


def difference_on(subject: Subject, route: Route, folder: Path) -> float:
    """The largest difference of a log-probability from transformers' on a way through the engine.

    Raises:
        ConfigError, CheckpointError: the model cannot go this way.
    """
    config, model = subject.ours.config, subject.ours.model
    options: dict[str, Any] = {}
    if route.drafts == "mtp":
        config = dataclasses.replace(config, mtp_num_layers=2)
        model = _built(config, model, noise=0.0)
    SAVE[route.stored](folder / "ours", model, config)
    if route.drafts is not None:
        options["num_speculative_tokens"] = DRAFTS
    if route.drafts == "ngram":
        options["speculative_method"] = "ngram"
    if route.drafts == "model":
        _drafter(subject.ours, folder / "draft")
        options["draft_model"] = str(folder / "draft")
    settings = config_at(
        1, max_requests=3, block_size_tokens=4, block_count=route.blocks, debug=True,
        prefill_chunk_tokens=route.chunk, **options,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained(folder / "ours", settings) as engine:
        most = engine.max_sequence_length
        twice = prompts(most) * 2
        requests = asked_of(engine, route, twice)
        counters = engine.counters
    assert bool(counters.tokens_drafted) == (route.drafts is not None)
    assert not route.interrupted or (counters.evictions and counters.pauses)
    assert all(len(request.generated_tokens) == NEW for request in requests)
    found = zip(requests, twice, strict=True)
    each = [subject.difference(request, prompt) for request, prompt in found]
    assert all(math.isfinite(difference) for difference in each), each
    return max(each)


def is_stored_exactly(ours: Pretrained, stored: Literal["ours", "megatron"], folder: Path) -> bool:
    """Whether a model is the same in each bit, and its config in each field, once it was stored and
    loaded again."""
    SAVE[stored](folder, ours.model, ours.config)
    again = load_pretrained(folder)
    ids, places = torch.arange(1, 41)[None], torch.arange(40)[None]
    with torch.no_grad():
        one, other = (
            model(ids, places, None, runtime_gather_output=True)
            for model in (ours.model, again.model)
        )
    return again.config == ours.config and torch.equal(one, other)

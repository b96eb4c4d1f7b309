"""Every feature of a request with drafts of the embedded model: tokens, text, ends and bits of
log-probabilities are those without drafts.

Rounding is the same for every shape (``batch_invariant``), so that bits can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.grammar.calls import Calls
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.runner import step_program
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

pytestmark = pytest.mark.sweep

ARGUMENTS = {
    "type": "object", "required": ["unit", "days"], "additionalProperties": False,
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer"}},
}  # fmt: skip
CALL = {
    "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
    "properties": {"name": {"const": "get_weather"}, "arguments": ARGUMENTS},
}  # fmt: skip
CALLS = Calls(schema=CALL, begin="<tool_call>", end="</tool_call>", between="\n").to_json()
HEAD = "class Stack:\n    def push(self"
NEW_TOKENS = 10


def never_the_last(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that hides what was sampled last."""
    logits[tokens[-1]] = -float("inf")
    return logits


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6, "min_p": 0.01},
    "bad words": {"temperature": 0.0, "bad_words": ["self", "return", [10], " ="]},
    "min tokens": {"stop_token_ids": range(0, 264, 2), "min_tokens": 7},
    "many stops": {"stop_token_ids": range(0, 264, 9)},
    "bias": {"temperature": 0.4, "logit_bias": {i: (-3.0, 2.0)[i % 2] for i in range(0, 264, 7)}},
    "allowed": {"allowed_token_ids": range(40, 120)},
    "filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.03},
    "log probs": {"return_log_probs": True, "top_n_logprobs": 3},
    "processed": {
        "temperature": 0.6, "return_log_probs": True, "top_n_logprobs": 2, "top_k": 9,
        "log_probs_mode": "processed", "skip_prompt_log_probs": True, "presence_penalty": 0.7,
    },
    "stop words": {"temperature": 0.3, "stop_words": ["self.s", "ppend", "x)"]},
    "siblings": {"temperature": 0.8, "n": 2, "best_of": 3},
    "regex": {"structured_outputs": {"regex": "[a-f]{3,9}[0-9]+ = (True|False)"}},
    "json": {"temperature": 0.5, "structured_outputs": {"json_object": True}},
    "processor": {"temperature": 0.5, "logits_processors": [never_the_last]},
    "forced keys": {
        "structured_outputs": {"json": ARGUMENTS, "disable_any_whitespace": True},
        "return_log_probs": True, "top_n_logprobs": 2, "num_tokens_to_generate": 30,
    },
    "recursive grammar": {
        "structured_outputs": {"grammar": 'root ::= "(" root ")" | "[x, " root "]" | "yes"'},
        "return_log_probs": True, "num_tokens_to_generate": 20,
    },
    "tool calls": {
        "temperature": 0.3, "structured_outputs": {"regex": "yes|no", "calls": CALLS},
        "num_tokens_to_generate": 50, "logit_bias": {ord("<"): 40.0},
    },
    "choice": {
        "temperature": 0.9, "structured_outputs": {"choice": ["class Stack", "class Queue:"]},
        "return_log_probs": True, "log_probs_mode": "processed", "skip_prompt_log_probs": True,
        "presence_penalty": 0.4, "num_tokens_to_generate": 30, "ignore_eos": False,
    },
}  # fmt: skip


def params_of() -> list[SamplingParams]:
    """A request for each feature."""
    return [
        SamplingParams(
            **{"seed": i, "ignore_eos": True, "num_tokens_to_generate": NEW_TOKENS, **values}
        )
        for i, values in enumerate(FEATURES.values())
    ]


def prompt_of(index: int) -> str:
    """Some prompts are long, and begin alike."""
    return (HEAD * (1 + index % 2)) + (", x", ":\n", "")[index % 3]


@functools.cache
def plain() -> DynamicInferenceEngine:
    """The weights that all engines share; decodes alone, without drafts."""
    return DynamicInferenceEngine.from_pretrained("tiny", engine_config(0, 0))


def engine_config(depth: int, drafts: int, **values: Any) -> Any:
    values = {
        "max_requests": 6, "batch_invariant": True, "max_sequence_length": 128, "device": "cpu",
        **values,
    }  # fmt: skip
    return config_at(depth, num_speculative_tokens=drafts, **values)


def shown(request: DynamicInferenceRequest) -> Any:
    """All that a user sees of a request; log-probabilities with all their bits."""
    return [
        (
            choice.generated_tokens, choice.generated_text, choice.finish_reason,
            choice.generated_log_probs, choice.generated_top_n_logprobs,
            choice.prompt_log_probs, choice.prompt_top_n_logprobs,
        )
        for choice in (request.choices or [request])
    ]  # fmt: skip


@functools.cache
def expected(block: int = 64) -> list[Any]:
    """Blocks of 3 give sums of attention another order, without drafts too."""
    params = params_of()
    prompts = [prompt_of(i) for i in range(len(params))]
    with plain().with_config(engine_config(0, 0, block_size_tokens=block)) as engine:
        requests = engine.generate(prompts, params)
    return [shown(request) for request in requests]


# --- events -----------------------------------------------------------------------------------

Event = Callable[[DynamicInferenceEngine, int], None]


def no_event(engine: DynamicInferenceEngine, step: int) -> None:
    """Nothing happens."""


def commands(engine: DynamicInferenceEngine, step: int) -> None:
    """Pauses, evictions, a suspension, and neighbours that come and are aborted."""
    victim = next(iter(engine.outputs.keys), 0)
    if step % 6 == 1 and step < 40:
        engine.evict_request(victim)
    if step % 5 == 2:
        engine.pause_request(victim)
    if step % 5 == 4:
        for request_id in range(len(FEATURES)):
            engine.resume_request(request_id)
    if step % 9 == 3:
        engine.add_request(
            900 + step, HEAD, SamplingParams(termination_id=-1, temperature=0.7, seed=step)
        )
        engine.update_sampling_params(900 + step, temperature=0.1)
    if step % 9 == 8:
        engine.abort_request(900 + step - 5)
    if step == 11:
        engine.suspend()
        engine.step_modern()
        engine.resume()


def weights(engine: DynamicInferenceEngine, step: int) -> None:
    """All is computed again by the same weights; the prefixes are forgotten too."""
    if step == 5:
        model = engine.model.network.model
        engine.update_weights(dict(model.state_dict()))
    if step == 8:
        engine.reset_prefix_cache()


EVENTS: dict[str, Event] = {"none": no_event, "commands": commands, "weights": weights}
MATRIX = [
    # depth, drafts, block size, chunk, events, method
    (0, 1, 1, 8, "none", "mtp"),
    (1, 2, 1, 24, "commands", "ngram"),
    (2, 4, 1, 256, "weights", "mtp"),
    (1, 4, 2, 8, "commands", "mtp"),
    (2, 1, 2, 24, "weights", "ngram"),
    (0, 2, 2, 256, "none", "mtp"),
    (2, 2, 3, 8, "weights", "mtp"),
    (0, 4, 3, 24, "none", "ngram"),
    (1, 1, 3, 256, "commands", "mtp"),
    (2, 1, 16, 24, "commands", "mtp"),
    (0, 2, 16, 8, "weights", "ngram"),
    (1, 4, 16, 256, "none", "ngram"),
    (1, 2, 256, 24, "weights", "mtp"),
    (2, 4, 256, 256, "commands", "ngram"),
    (0, 1, 256, 8, "commands", "mtp"),
    (1, 3, 16, 24, "commands", "model"),
    (2, 2, 256, 8, "weights", "model"),
]
"""Each pair of a block size and a value of another column, and most other pairs, and two with a
model that drafts. Each has every second feature, so that each block size has them all."""


@pytest.mark.parametrize(("depth", "drafts", "block", "chunk", "event", "method"), MATRIX)
def test_features(depth: int, drafts: int, block: int, chunk: int, event: str, method: str) -> None:
    config = engine_config(
        depth, drafts, block_size_tokens=block, prefill_chunk_tokens=chunk, debug=True,
        speculative_method="mtp" if method == "model" else method,
        draft_model="tiny" if method == "model" else None, block_count=max(10, 400 // block),
    )  # fmt: skip
    if method == "model":  # it is loaded with the model
        opened = DynamicInferenceEngine.from_pretrained("tiny", config)
    else:
        opened = plain().with_config(config)
    with opened as engine:
        every = params_of()
        chosen = range(
            MATRIX.index((depth, drafts, block, chunk, event, method)) % 2, len(every), 2
        )
        futures = {i: engine.add_request(i, prompt_of(i), every[i]) for i in chosen}
        step = 0
        while engine.has_unfinished_requests():
            EVENTS[event](engine, step)
            engine.step_modern()
            step += 1
            assert step < 2000
        requests = {i: future.result(0) for i, future in futures.items()}
        counters = engine.counters
    wanted = expected(3) if block == 3 else expected()
    names = list(FEATURES)
    for i, request in requests.items():
        assert shown(request) == wanted[i], names[i]
    assert counters.tokens_accepted == sum(counters.accepted_by_position) > 0
    for name in ("forced keys", "choice", "tool calls"):
        request = requests.get(names.index(name))
        assert request is None or request.counters.accepted > 3 or drafts < 2, name
    assert event == "none" or counters.evictions > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window_kernels", (False, True))
def test_features_on_a_gpu(window_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of guided requests too, in the kernels and in the torch code, which are captured."""
    monkeypatch.setattr(step_program, "WINDOW_KERNELS_ON", window_kernels)
    gpu = {"device": "cuda", "dtype": "bfloat16", "debug": True}
    params = params_of()
    prompts = [prompt_of(i) for i in range(len(params))]
    alone = engine_config(0, 0, **gpu)
    with DynamicInferenceEngine.from_pretrained("tiny", alone) as engine:
        wanted = [shown(request) for request in engine.generate(prompts, params)]
        for depth, drafts, method in ((0, 2, "mtp"), (1, 3, "ngram"), (2, 4, "mtp")):
            config = engine_config(depth, drafts, speculative_method=method, **gpu)
            with engine.with_config(config) as drafting:
                requests = drafting.generate(prompts, params)
                assert drafting.counters.tokens_accepted > 0
            for name, request, want in zip(FEATURES, requests, wanted, strict=True):
                assert shown(request) == want, (name, depth, drafts, method)


# --- ends -------------------------------------------------------------------------------------


@functools.cache
def ends() -> tuple[list[SamplingParams], list[Any]]:
    """Requests that end at each place of a window in each way, and what they give."""
    base: dict[str, Any] = {"temperature": 0.0, "termination_id": -1}
    (whole,) = plain().generate([HEAD], SamplingParams(num_tokens_to_generate=16, **base))
    tokens = whole.generated_tokens
    tokenizer = plain().model.tokenizer
    text = [tokenizer.detokenize(tokens[:count]) for count in range(len(tokens) + 1)]
    params = []
    for place in range(1, 11):
        # From inside the token before to inside the token behind.
        word = text[place + 2][max(0, len(text[place]) - 1) : len(text[place + 2])]
        params += [
            SamplingParams(num_tokens_to_generate=place, **base),
            SamplingParams(num_tokens_to_generate=16, stop_token_ids=[tokens[place]], **base),
            SamplingParams(num_tokens_to_generate=16, stop_words=[word], **base),
        ]
    requests = plain().generate([HEAD] * len(params), params)
    return params, [shown(request) for request in requests]


@pytest.mark.parametrize(("depth", "drafts"), ((0, 2), (2, 4)))
def test_ends_at_each_place_of_a_window(depth: int, drafts: int) -> None:
    params, wanted = ends()
    with plain().with_config(engine_config(depth, drafts, debug=True)) as engine:
        requests = engine.generate([HEAD] * len(params), params)
    assert [shown(request) for request in requests] == wanted
    # Ends fall on each place of a window.
    lengths = {len(r.generated_tokens) % (drafts + 1) for r in requests}
    assert lengths == set(range(drafts + 1))
    assert {r.finish_reason for r in requests} == {"length", "stop"}
    # Of each kind: length, stop token, stop string. What is counted is what the last step kept;
    # four drafts of two layers are seldom all right.
    for kind in range(3):
        kept = {r.steps.count(r.steps[-1]) for r in requests[kind::3]}
        assert kept >= set(range(1, min(drafts, 3) + 1)), kind


def test_a_request_as_long_as_the_cache() -> None:
    """Windows and what is drafted behind them reach beyond its last block."""
    params = SamplingParams(num_tokens_total=20, temperature=0.0, termination_id=-1)
    (want,) = plain().generate(["x"], params)
    for block in (1, 3):
        config = engine_config(
            2, 4, max_requests=2, block_size_tokens=block, block_count=-(-20 // block),
            max_sequence_length=20, debug=True,
        )  # fmt: skip
        with plain().with_config(config) as engine:
            for request in engine.generate(["x", "x"], params):
                assert request.generated_tokens == want.generated_tokens


# --- while it runs ----------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[DynamicInferenceEngine]:
    with plain().with_config(engine_config(2, 2, debug=True)) as engine:
        yield engine


def test_new_sampling_parameters(engine: DynamicInferenceEngine) -> None:
    """From the token that the request's span names they are in force."""
    old: dict[str, Any] = {"temperature": 0.8, "seed": 4, "termination_id": -1}
    params = SamplingParams(num_tokens_to_generate=24, **old)
    future = engine.add_request(0, HEAD, params)
    for _ in range(5):
        engine.step_modern()
    assert engine.update_sampling_params(0, temperature=1.5, top_k=30, seed=9)
    while engine.has_unfinished_requests():
        engine.step_modern()
    request = future.result(0)
    tokens = request.generated_tokens
    ticket = request.sampling_spans[-1].ticket
    start = sum(report.ticket < ticket for report in request.steps)
    assert 0 < start < 24
    (before,) = plain().generate([HEAD], params)
    assert tokens[:start] == before.generated_tokens[:start]
    head = plain().model.tokenize_prompt(HEAD) + tokens[:start]
    changed = SamplingParams(
        num_tokens_to_generate=24 - start, temperature=1.5, top_k=30, seed=9, termination_id=-1
    )
    (behind,) = plain().generate([head], changed)
    assert tokens[start:] == behind.generated_tokens
    assert tokens != before.generated_tokens


def test_reset_and_the_same_again(engine: DynamicInferenceEngine) -> None:
    params = SamplingParams(num_tokens_to_generate=30, temperature=0.5, seed=1, termination_id=-1)
    engine.add_request(0, HEAD, params)
    for _ in range(5):
        engine.step_modern()
    engine.reset()
    assert engine.counters.tokens_drafted == 0
    (want,) = plain().generate([HEAD], params)
    (request,) = engine.generate([HEAD], params)
    assert request.generated_tokens == want.generated_tokens


@pytest.mark.parametrize("again", ((1, 4), (0, 0)))
def test_a_recorded_run_with_other_drafts(again: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    params = [p for p in params_of() if not p.logits_processors][:7]
    with plain().with_config(engine_config(1, 2, record=str(path), debug=True)) as engine:
        futures = [engine.add_request(i, prompt_of(i), p) for i, p in enumerate(params)]
        step = 0
        while engine.has_unfinished_requests():
            if step % 3 == 0:
                engine.evict_request(step % 7)
            engine.step_modern()
            step += 1
        assert [shown(f.result(0)) for f in futures] == expected()[:7]
    depth, drafts = again
    with plain().with_config(engine_config(depth, drafts, debug=True)) as engine:
        result = replay(read_run(path), engine)
    assert result.differences == ()
    assert [e.tokens for e in result.endings] and len(result.endings) == 7

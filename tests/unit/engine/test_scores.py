"""Given tokens are scored in the steps of all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.engine.recording import read_run
from megatron_async.errors import EngineStoppedError, RequestError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.request.scores import Score
from tests.support.engines import DEPTHS, config_at

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, head_dim=8,
    ffn_hidden_size=48, vocab_size=61, max_sequence_length=80,
)  # fmt: skip
PROMPTS = [[(7 * n + 3 * i) % 60 for i in range(4 + 9 * (n % 4))] for n in range(8)]
SIZES: dict[str, Any] = {
    "batch_invariant": True, "block_size_tokens": 4, "block_count": 20, "max_requests": 4,
    "prefill_chunk_tokens": 8,
}  # fmt: skip


def network_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> GPTNetwork:
    model = build_random_model(CONFIG, device=torch.device("cpu"), dtype=dtype, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return GPTNetwork(model, batch_invariant=True)


def engine_of(depth: int, seed: int = 1, **values: Any) -> DynamicInferenceEngine:
    served = ServedModel(network=network_of(seed))
    return DynamicInferenceEngine(served, config_at(depth, **SIZES | values))


def sampled(**values: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=1.0, seed=n, num_tokens_to_generate=24, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True, **values,
        )
        for n in range(len(PROMPTS))
    ]  # fmt: skip


@torch.no_grad()
def logits_of(tokens: list[int], seed: int) -> torch.Tensor:
    ids = torch.tensor(tokens)
    return network_of(seed).forward(ids, torch.arange(len(ids))).double()


@pytest.mark.parametrize("depth", DEPTHS)
def test_scores_of_what_was_generated_are_its_log_probs(depth: int) -> None:
    """Bit for bit, with requests that run beside, evictions and prefixes that are known."""
    with engine_of(depth) as engine:
        rollouts = [request.rollout() for request in engine.generate(PROMPTS, sampled())]
        for number, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(900 + number, prompt, sampled()[number])
        scores = engine.score([rollout.tokens for rollout in rollouts], top_n=2)
        assert engine.counters.evictions
        engine.update_weights(network_of(2).model.state_dict())
        others = engine.score([rollouts[0].tokens])
    for rollout, score in zip(rollouts, scores, strict=True):
        assert score.tokens == rollout.tokens and score.weight_version == 0
        assert score.log_probs[len(rollout.prompt_tokens) - 1 :] == rollout.log_probs
        assert len(score.log_probs) == len(score.ranks) == len(score.entropies) == len(score.top)
        for own, token, rank, top in zip(
            score.log_probs, score.tokens[1:], score.ranks, score.top, strict=True
        ):
            assert len(top) == 2 and (rank > 2 or list(top)[rank - 1] == token)
            assert rank > 2 or top[token] == own
    assert others[0].weight_version == 1 and others[0].log_probs != scores[0].log_probs


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of matrix products, which share out a product's rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_scores_have_the_same_bits_in_any_chunks_beside_any_others(threads: int) -> None:
    """Whatever number of targets a forward has, in fp32."""
    sequences = [[(5 * i + length) % 60 for i in range(length)] for length in range(3, 40, 6)]
    config = config_at(0, **SIZES)
    served = ServedModel(network=network_of(3, torch.float32))
    with DynamicInferenceEngine(served, config) as engine:
        alone = [engine.score([each])[0].log_probs for each in sequences]
        for chunk, together in ((2, 1), (11, 4), (80, 3)):
            sizes = SIZES | {"prefill_chunk_tokens": chunk, "max_requests": together}
            with engine.with_config(config_at(2, **sizes)) as other:
                found = [score.log_probs for score in other.score(sequences)]
            assert found == alone, (chunk, together)


def test_entropies_are_those_of_the_models_distributions() -> None:
    with engine_of(2) as engine:
        (score,) = engine.score([PROMPTS[3]])
    chances = logits_of(PROMPTS[3], 1)[:-1].log_softmax(-1)
    expected = -(chances.exp() * chances).sum(-1)
    assert torch.allclose(torch.tensor(score.entropies).double(), expected, atol=0.03)
    assert expected.std() > 0.05 and score.top == ()


def test_a_recorded_run_is_scored_under_other_weights(tmp_path: Path) -> None:
    """Ids that were used again, sequences of one request, and one that was aborted."""
    path = tmp_path / "run.jsonl"
    with engine_of(1, record=str(path)) as engine:
        first = engine.generate(PROMPTS[:3], sampled()[:3])
        futures = [engine.add_request(first[0].request_id, PROMPTS[4], sampled(n=2)[4])]
        futures.append(engine.add_request(77, PROMPTS[5], sampled()[5]))
        for _ in range(6):
            engine.step_modern()
        engine.abort_request(77)
        while engine.has_unfinished_requests():
            engine.step_modern()
        ended = [*first, *futures[0].result().choices, futures[1].result()]
    expected = {(tuple(r.prompt_tokens), tuple(r.generated_tokens)) for r in ended}
    sequences = read_run(path).sequences()
    assert len(sequences) == len(ended) and set(sequences) == expected
    with engine_of(2, seed=2) as other:
        scores = other.score([prompt + generated for prompt, generated in sequences])
    for (prompt, generated), score in zip(sequences, scores, strict=True):
        tokens = [*prompt, *generated]
        chances = logits_of(tokens, 2)[:-1].log_softmax(-1)
        own = chances.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(score.log_probs).double(), own, atol=0.1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_score_is_of_one_version_whenever_new_weights_come(depth: int) -> None:
    """A prompt of four chunks, behind each number of steps."""
    prompt, asked = PROMPTS[3], (0, -1)
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=1, termination_id=-1, return_log_probs=True,
        top_n_logprobs=2, prompt_hidden_states=asked,
    )  # fmt: skip
    expected = []
    for seed in (1, 2):
        with engine_of(0, seed=seed) as other:
            expected += other.score([prompt], top_n=2, hidden_states=asked)
    versions = []
    for steps in range(1, 8):
        with engine_of(depth) as engine:
            future = engine.add_request(0, prompt, params)
            for _ in range(steps):
                engine.step_modern()
            engine.update_weights(network_of(2).model.state_dict())
            while engine.has_unfinished_requests():
                engine.step_modern()
            score = Score.of(future.result())
        own = expected[score.weight_version]
        assert replace(score, weight_version=0) == replace(own, weight_version=0), steps
        assert torch.equal(score.hidden_states, own.hidden_states)
        versions.append(score.weight_version)
    assert versions == sorted(versions, reverse=True) and set(versions) == {0, 1}


def test_the_engines_own_thread_scores_too() -> None:
    with engine_of(1) as engine:
        alone = engine.score(PROMPTS[:2])
        engine.start()
        assert engine.score(PROMPTS[:2]) == alone


def test_what_cannot_be_scored_is_refused() -> None:
    with engine_of(1) as engine:
        (one,) = engine.score([[5]])
        assert (one.log_probs, one.ranks, one.entropies, one.tokens) == ((), (), (), (5,))
        for wrong, said in (([[]], "empty"), ([[1] * 80], "80"), ([[61]], "61"), (7, "prompts")):
            with pytest.raises(RequestError, match=said):
                engine.score(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="top_n_logprobs=21"):
            engine.score([[1, 2]], top_n=21)
        assert not engine.has_unfinished_requests()
        engine.start()
    with pytest.raises(EngineStoppedError):
        engine.score([[1, 2]])

"""Requests whose first tokens are given: they have the model's log-probabilities, and what follows
is what would have followed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import RequestError
from megatron_async.request.request import FinishReason
from megatron_async.request.rollouts import batch_of
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.unit.engine.test_scores import PROMPTS, engine_of, network_of

GIVEN = (0, 1, 3, 9, 17)
"""Tokens that are forced, by request in turns."""
LENGTH = 24


def params_of(number: int, forced: list[int] | None, **values: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": number, "num_tokens_to_generate": LENGTH,
           "termination_id": -1, "return_log_probs": True, "skip_prompt_log_probs": True,
           "top_n_logprobs": 2, "forced_token_ids": forced, **values}
    )  # fmt: skip


def play(
    depth: int, forced: list[list[int]] | None, **values: Any
) -> tuple[list[DynamicInferenceRequest], Any]:
    """All requests in a cache that is too small; what step by step was handed out is theirs."""
    with engine_of(depth, **values) as engine:
        futures = [
            engine.add_request(n, prompt, params_of(n, None if forced is None else forced[n]))
            for n, prompt in enumerate(PROMPTS)
        ]
        taken: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            for token in engine.step_modern()["tokens"]:
                taken.setdefault(token.request_id, []).append(token.token_id)
                assert token.log_probs is not None
        found = [future.result() for future in futures]
        assert [taken[n] for n in range(len(found))] == [r.generated_tokens for r in found]
        return found, engine.counters


@pytest.mark.parametrize(("depth", "drafts"), [(0, 2), (1, 0), (2, 2), (4, 0)])
def test_what_follows_is_what_would_have_followed(depth: int, drafts: int) -> None:
    """Bit for bit, with drafts and evictions; a forced token has the log-probability that it had
    when it was sampled."""
    values: dict[str, Any] = {"num_speculative_tokens": drafts, "speculative_method": "ngram"}
    free, _ = play(depth, None, **values)
    forced = [r.generated_tokens[: GIVEN[n % len(GIVEN)]] for n, r in enumerate(free)]
    found, counters = play(depth, forced, **values)
    assert counters.evictions
    for own, other in zip(found, free, strict=True):
        assert list(own.prompt_tokens) == list(other.prompt_tokens)
        # Forced tokens were drafted by nobody; an eviction drops a window too.
        rollouts = [replace(each.rollout(), drafted_rows=()) for each in (own, other)]
        assert rollouts[0] == rollouts[1]
        assert own.generated_top_n_logprobs == other.generated_top_n_logprobs
        assert len(own.steps) == len(own.tpot) == LENGTH and own.prompt_log_probs is None
        assert own.finish_reason is FinishReason.LENGTH


def test_forced_tokens_end_nothing_and_are_text(hash_free: list[int]) -> None:
    """Stop tokens among them too; a stream has each of them."""
    tokenizer, forced = hash_tokenizer(), [hash_free[4], *hash_free[1:4]]
    with hash_engine(1, max_requests=2, tokenizer=tokenizer) as engine:
        ends = SamplingParams(
            num_tokens_to_generate=12, termination_id=hash_free[1], forced_token_ids=forced,
            temperature=0.0,
        )  # fmt: skip
        (request,) = engine.generate([[1, 2, 3]], ends)
        assert request.generated_tokens[:4] == forced and len(request.generated_tokens) > 4
        assert request.generated_log_probs is None
        expected = tokenizer.detokenize(request.generated_tokens)
        assert request.generated_text is not None
        assert expected.startswith(request.generated_text) and len(request.generated_text) >= 4
        asked = {"prompt": [1, 2, 3], "sampling_params": ends}
        assert asyncio.run(streamed(engine, asked)) == request.generated_tokens


async def streamed(engine: DynamicInferenceEngine, asked: dict[str, Any]) -> list[int | None]:
    return [token.token_id async for token in engine.stream(**asked)]


@pytest.fixture(scope="module")
def hash_free() -> list[int]:
    with hash_engine(0, max_requests=1) as engine:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, termination_id=-1)
        return engine.generate([[1, 2, 3]], params)[0].generated_tokens


def test_the_prompts_own_log_probs_end_at_the_prompt() -> None:
    with engine_of(1) as engine:
        prompt, forced = PROMPTS[3], [5, 6, 7]
        whole = params_of(0, forced, skip_prompt_log_probs=False)
        (request,) = engine.generate([prompt], whole)
        (score,) = engine.score([[*prompt, *forced]], top_n=2)
    own = request.prompt_log_probs
    assert own is not None and request.generated_log_probs is not None
    assert (*own, *request.generated_log_probs[:3]) == score.log_probs
    assert request.prompt_token_ranks == list(score.ranks[: len(prompt) - 1])


def test_nothing_is_learned_from_tokens_that_were_not_sampled() -> None:
    """Neither in a rollout nor in a batch, where one was aborted before its first token too."""
    given = ([], [5], [5, 6, 7])
    with engine_of(1) as engine:
        rollouts = [
            request.rollout()
            for request in engine.generate([PROMPTS[1]] * 3, [params_of(7, g) for g in given])
        ]
        future = engine.add_request(9, PROMPTS[2], params_of(9, [5, 6]))
        engine.abort_request(9)
        engine.step_modern()
        rollouts.append(future.result().rollout())
    count = len(PROMPTS[1])
    batch = batch_of(rollouts)
    for forced, rollout, row in zip(given, rollouts, batch.loss_mask.int().tolist(), strict=False):
        place = count + len(forced)
        assert list(rollout.generated_tokens[: rollout.forced]) == forced
        assert rollout.loss_mask == (0,) * place + (1,) * (count + LENGTH - place)
        assert row[: count + LENGTH] == list(rollout.loss_mask)
    assert rollouts[3].generated_tokens == () and not any(rollouts[3].loss_mask)
    assert not batch.loss_mask[3].any() and (batch.weight_versions[2, count:] == 0).all()


@pytest.mark.parametrize("way", ("continue", "restart"))
def test_new_weights_in_between(way: str) -> None:
    """A restart gives them again; else each has the version of its log-probability."""
    with engine_of(1) as engine:
        forced = [n % 60 for n in range(20)]
        future = engine.add_request(0, PROMPTS[0], params_of(0, forced, num_tokens_total=None))
        for _ in range(4):
            engine.step_modern()
        new = network_of(2).model.state_dict()
        engine.update_weights(new, partial_rollouts=way)
        while engine.has_unfinished_requests():
            engine.step_modern()
        rollout = future.result().rollout()
        (score,) = engine.score([rollout.tokens])
    assert rollout.generated_tokens[:20] == tuple(forced) and len(rollout.log_probs) == LENGTH
    versions = rollout.weight_versions
    assert set(versions) == ({1} if way == "restart" else {0, 1})
    of_new = score.log_probs[len(PROMPTS[0]) - 1 :]
    for place, version in enumerate(versions):
        assert (rollout.log_probs[place] == of_new[place]) == (version == 1), place


def test_a_recorded_run_has_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with engine_of(2, record=str(path)) as engine:
        ended = engine.generate(PROMPTS[:3], [params_of(n, [7, 7, 8]) for n in range(3)])
    run = read_run(path)
    expected = {(tuple(r.prompt_tokens), tuple(r.generated_tokens)) for r in ended}
    assert set(run.sequences()) == expected
    with engine_of(2) as engine:
        assert replay(run, engine).differences == ()
    changed = [json.loads(line) for line in path.read_text().splitlines()]
    for line in changed:
        if line.get("command") == "AddRequest":
            line["tokens"][-1] = 9
    path.write_text("\n".join(map(json.dumps, changed)))
    with engine_of(2) as engine, pytest.raises(RequestError, match="tokens and params contradict"):
        replay(read_run(path), engine)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"forced_token_ids": "ab"}, "list of token ids"),
        ({"forced_token_ids": [1.5]}, "must be an integer"),
        ({"forced_token_ids": [61]}, "61"),
        ({"num_tokens_to_generate": 2}, "has 2 tokens and the request may generate 2"),
        ({"n": 2}, "do not go together with n=2"),
        ({"best_of": 3}, "do not go together with n=3"),
        ({"min_tokens": 2}, "min_tokens=2"),
        ({"presence_penalty": 1.0}, "presence_penalty=1.0"),
        ({"stop_words": ["a"]}, "stop_words="),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs="),
        ({"log_probs_mode": "processed"}, "log_probs_mode='processed'"),
    ],
)
def test_what_they_do_not_go_together_with_is_refused(values: dict[str, Any], said: str) -> None:
    with engine_of(0) as engine, pytest.raises(RequestError, match=said):
        engine.add_request(0, [1, 2], params_of(0, [3, 4], **values))

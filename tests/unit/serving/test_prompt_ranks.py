"""``prompt_logprobs`` have a rank for every token, as vLLM's do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from megatron_async.sampling_params import SamplingParams
from tests.support.engines import hash_engine
from tests.support.hash_model import VOCAB_SIZE
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.served import served

TOKENIZER = hash_tokenizer()
TEXT = "abcdefghijabcdefghij"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}


def engine(**values: Any) -> Any:
    return hash_engine(1, max_requests=2, block_size_tokens=4, tokenizer=TOKENIZER, **values)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("top", [0, 3])
def test_every_token_of_a_prompt_has_its_rank(path: str, top: int) -> None:
    with served(engine()) as made:
        asked = {**BODIES[path], "prompt_logprobs": top, "return_token_ids": True}
        answer = httpx.post(made.url + path, json=asked).raise_for_status().json()
    (choice,) = answer["choices"]
    known = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
    ids = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
    assert known[0] is None and len(known) == len(ids)
    behind = 0
    for token, entry in zip(ids[1:], known[1:], strict=True):
        own = entry[str(token)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert 1 <= own["rank"] <= VOCAB_SIZE
        ranks = [each["rank"] for each in entry.values()]
        assert sorted(ranks)[:top] == list(range(1, top + 1)) and len(set(ranks)) == len(ranks)
        by_rank = sorted(entry.values(), key=lambda each: each["rank"])
        assert by_rank == sorted(entry.values(), key=lambda each: -each["logprob"])
        behind += own["rank"] > top
    assert behind


@pytest.mark.parametrize("chunk", [3, 64])
def test_ranks_are_those_of_the_whole_vocabulary(chunk: int) -> None:
    params = SamplingParams(num_tokens_to_generate=1, return_log_probs=True, top_n_logprobs=20)
    with engine(prefill_chunk_tokens=chunk, block_count=40) as made:
        (request,) = made.generate([list(range(1, 12))], params)
    assert request.prompt_token_ranks is not None and request.prompt_top_n_logprobs is not None
    shown = zip(
        request.prompt_tokens[1:],
        request.prompt_token_ranks,
        request.prompt_top_n_logprobs,
        strict=True,
    )
    for token, rank, top in shown:
        listed = list(top).index(token) + 1 if token in top else None
        assert rank == listed if listed else rank > 20

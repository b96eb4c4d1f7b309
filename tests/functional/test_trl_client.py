"""TRL's own client against this server, where trl is installed.

vLLM, whose NCCL transport the client uses, is a stand-in over gloo (tests/support/trl_stand_ins).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.engines import config_at
from tests.support.huggingface_models import SIZES
from tests.support.served_engine import NoParent
from tests.support.served_over_http import free_port, serving

pytest.importorskip("trl")
STAND_INS = Path(__file__).parents[1] / "support" / "trl_stand_ins"
PROMPTS = [[5, 6, 7], [9, 1]]


@pytest.fixture(scope="module")
def client_class() -> Iterator[Any]:
    sys.path.insert(0, str(STAND_INS))
    from trl.generation.vllm_client import VLLMClient

    yield VLLMClient
    sys.path.remove(str(STAND_INS))


def llama(seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def expected(model: transformers.LlamaForCausalLM) -> list[list[int]]:
    made = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        made.append(out[0, len(prompt) :].tolist())
    return made


def test_trls_client_generates_and_sends_weights(client_class: Any, tmp_path: Path) -> None:
    old, new = llama(1), llama(2)
    old.save_pretrained(tmp_path)
    config = config_at(1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20)
    engine = DynamicInferenceEngine.from_pretrained(tmp_path, config)
    options: Any = {"development": True, "weight_transfer_backend": "gloo"}
    with serving(engine, NoParent(), **options) as url:
        client = client_class(base_url=url, group_port=free_port())
        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "logprobs": 0}
        found = client.generate(PROMPTS, **asked)
        assert found["prompt_ids"] == PROMPTS and found["completion_ids"] == expected(old)
        assert [len(each) for each in found["logprobs"]] == [6, 6]
        assert [[i for (i,) in each] for each in found["logprob_token_ids"]] == expected(old)
        sampled = client.generate(PROMPTS, n=2, temperature=1.0, max_tokens=4, logprobs=2)
        assert len(sampled["completion_ids"]) == 4
        sequences = [p + made for p, made in zip(PROMPTS, expected(old), strict=True)]
        scored = client.get_sequence_logprobs(sequences, [3, 2], top_logprobs=20)
        for made, actual, ids, of_all in zip(
            expected(old), scored["actual_logprobs"], scored["logprob_token_ids"],
            scored["logprobs"], strict=True,
        ):  # fmt: skip
            assert [top[0] for top in ids] == made and len(of_all[0]) == 20
            assert [each[0] for each in actual] == [each[0] for each in of_all]
        # The client asks for a device of CUDA; the stand-in's group is of the CPU.
        client.init_communicator(device="cuda")
        client.update_model_params(new)
        client.reset_prefix_cache()
        assert client.generate(PROMPTS, **asked)["completion_ids"] == expected(new)
        with client.weight_update():
            for name, parameter in old.named_parameters():
                client.update_named_param(name, parameter.data)
        client.reset_prefix_cache()
        assert client.generate(PROMPTS, **asked)["completion_ids"] == expected(old)
        client.close_communicator()

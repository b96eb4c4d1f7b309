"""TRL's own client and trainer against this server, where trl is installed.

vLLM, whose NCCL transport the client uses, is a stand-in over gloo (tests/support/trl_stand_ins).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
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


WORDS = [f"w{n}" for n in range(96)]
GOOD = range(1, 33)
"""Tokens that are worth something."""
STEPS = 20


def worth(completions: list[str], **_: Any) -> list[float]:
    """The share of good words in each text."""
    good = {WORDS[n] for n in GOOD}
    each = [text.split() for text in completions]
    return [sum(word in good for word in words) / max(len(words), 1) for words in each]


def words_tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="w0", eos_token="w95", unk_token="w0"
    )


@pytest.mark.parametrize("correction", [True, False])
def test_trls_trainer_learns_from_this_server(
    client_class: Any, tmp_path: Path, correction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constructor, generation, weight synchronization; at another temperature than 1."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    joins = client_class.init_communicator
    # It wants a device of CUDA; the stand-in's group is of the CPU.
    monkeypatch.setattr(client_class, "init_communicator", lambda self, device: joins(self, "cuda"))
    model = llama(1)
    model.save_pretrained(tmp_path / "model")
    config = config_at(1, dtype="float32", max_requests=16, max_sequence_length=64)
    engine = DynamicInferenceEngine.from_pretrained(tmp_path / "model", config)
    options: Any = {"development": True, "weight_transfer_backend": "gloo"}
    with serving(engine, NoParent(), logprobs_mode="processed_logprobs", **options) as url:
        args = GRPOConfig(
            output_dir=str(tmp_path / "trained"), use_vllm=True, vllm_mode="server",
            vllm_server_base_url=url, vllm_group_port=free_port(), use_cpu=True, bf16=False,
            vllm_importance_sampling_correction=correction, temperature=0.7,
            per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
            max_steps=STEPS, learning_rate=2e-3, logging_steps=1, save_strategy="no",
            report_to="none", seed=3,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=worth,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w9 w1"] * 8}),
            processing_class=words_tokenizer(),
        )
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        assert len(rewards) == STEPS
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
        if correction:
            name = "sampling/importance_sampling_ratio/mean"
            ratios = [entry[name] for entry in trainer.state.log_history if name in entry]
            assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3) and len(ratios) == STEPS
        assert engine.weight_version >= STEPS - 1

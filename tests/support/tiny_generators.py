"""Tiny transformers models with random weights, and batches of ragged prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 24


@cache
def generator_model(name: str) -> Any:
    """A model of two layers, in eval mode: gpt2, llama, qwen3, or mistral with a window of 6."""
    import transformers as t

    torch.manual_seed(7)
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if name == "gpt2":
        config: Any = t.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2,
            initializer_range=0.6, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model: Any = t.GPT2LMHeadModel(config)
    elif name == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**small))
    elif name == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**small))
    else:
        model = t.MistralForCausalLM(t.MistralConfig(**small, sliding_window=6))
    model.set_attn_implementation("eager")  # hands attentions out
    return model.eval()


def prompts(rows: int, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Ids and mask, int64 ``(rows, length)``; row i has i % length tokens of padding, left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    pads = torch.arange(rows) % length
    mask = (torch.arange(length) >= pads[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}

"""A megatron-core model and a tokenizer as its user has them, built without this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async import megatron_compat as compat

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

VOCAB = 96


class Tokenizer:
    """As much of a tokenizer as megatron-core's own tests use."""

    eod = VOCAB - 1
    bos = VOCAB - 2
    vocab_size = VOCAB

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(32 + t) for t in tokens)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """For modules that import it: what takes a GPU where there is one takes the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def stock_model(device: str = "cpu", **changes: Any) -> GPTModel:
    """Two layers; ``changes`` are of its config."""
    compat.ensure_parallel_state()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        add_bias_linear=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **changes,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCAB,
        max_sequence_length=128,
        parallel_output=False,
        position_embedding_type="rope",
    )
    return model.eval().to(device)

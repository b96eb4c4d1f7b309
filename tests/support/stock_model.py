"""A megatron-core model and a tokenizer as its user has them, built without this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_async import megatron_compat as compat

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # isort: skip
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # isort: skip

VOCAB = 96


class OfLatents(DotProductAttention):
    """megatron-core's own attention, which does not take what its multi-latent attention says."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


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


def stock_model(
    device: str = "cpu",
    position_embedding_type: str = "rope",
    attributes: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> GPTModel:
    """Two layers; ``changes`` are of its config, of multi-latent attention if they name it, and
    ``attributes`` what scripts give the config that is no field of it."""
    compat.ensure_parallel_state()
    torch.manual_seed(0)
    has_latents = changes.get("multi_latent_attention", False)
    config = (MLATransformerConfig if has_latents else TransformerConfig)(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4 if has_latents else 2,
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
    for name, value in attributes.items():
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization,
        multi_latent_attention=has_latents,
        qk_layernorm=config.qk_layernorm,
    )
    if has_latents:
        spec.submodules.self_attention.submodules.core_attention = OfLatents
    # Since 0.19 megatron-core refuses some of them without Transformer Engine.
    refusal = "_resolve_qk_norm_config"
    with contextlib.ExitStack() as patches:
        if hasattr(MLASelfAttention, refusal):
            patches.enter_context(
                mock.patch.object(MLASelfAttention, refusal, lambda self, parts: vars(parts))
            )
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=128,
            parallel_output=False,
            position_embedding_type=position_embedding_type,
        )
    return model.eval().to(device)

"""Sequences that a trainer packs one behind the other are trained as if each were alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.errors import ConfigError
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_random_model
from tests.support.stock_hybrid import stock_hybrid
from tests.support.stock_model import (
    no_gpu,  # noqa: F401
    stock_model,
)

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

LENGTHS = (5, 1, 9, 16)
VOCABULARY = 90


def general_model() -> Any:
    """Layers with more than megatron's have."""
    config = dataclasses.replace(load_pretrained("tiny").config, residual_multiplier=0.5)
    return build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, Any] = {
    "tiny": lambda: load_pretrained("tiny", dtype=torch.float32).model,
    "general layers": lambda: general_model(),
    "stock": lambda: adapt_model(stock_model(**NO_DROPOUT)),
    "latents": lambda: adapt_model(
        stock_model(
            multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16,
            qk_pos_emb_head_dim=8, v_head_dim=16, rope_type="rope", **NO_DROPOUT,
        )
    ),
}  # fmt: skip


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]


def packed(parts: list[Tensor], **changes: Any) -> dict[str, Any]:
    """Arguments of a forward."""
    lengths = [part.shape[1] for part in parts]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    said = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    return {
        "input_ids": torch.cat(parts, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": None,
        "packed_seq_params": dataclasses.replace(said, **changes),
    }


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logits.float().log_softmax(-1).square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_trained_as_if_alone(name: str) -> None:
    model = MODELS[name]().train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    parts = sequences()
    together = model(**packed(parts))
    alone = torch.cat([model(part, torch.arange(part.shape[1])[None], None) for part in parts], 1)
    assert torch.allclose(together, alone, atol=1e-4, rtol=1e-4)
    ours, expected = gradients(model, together), gradients(model, alone)
    assert len(expected) > 5 and ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(ours[key], value, atol=1e-3 * float(value.abs().max())), key
    # Attention over the whole is something else.
    whole = packed(parts) | {"packed_seq_params": None}
    assert not torch.allclose(model(**whole), alone, atol=1e-2)


def test_losses_of_packed_sequences_are_megatrons() -> None:
    model = MODELS["stock"]()
    parts = sequences()
    labels = [part.roll(-1, dims=1) for part in parts]
    losses = model(**packed(parts), labels=torch.cat(labels, dim=1))
    alone = [
        model(part, torch.arange(part.shape[1])[None], None, labels=label)
        for part, label in zip(parts, labels, strict=True)
    ]
    assert torch.allclose(losses, torch.cat(alone, dim=1), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 5])}, "must be from 0 to the 31 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 5, 31])}, "must be from 0 to the 31 tokens"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 8, 16, 24, 40])}, "without padding"),
        ({"qkv_format": "sbhd"}, "qkv_format='sbhd' and a batch of 1; give 'thd'"),
        ({"cu_seqlens_q": None}, "give 'thd', cu_seqlens_q"),
    ],
)
def test_what_is_not_read_of_packed_sequences_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        MODELS["stock"]()(**packed(sequences(), **changes))


def test_recurrent_layers_refuse_packed_sequences() -> None:
    """Their state would go on from one sequence to the next."""
    model = adapt_model(stock_hybrid("M*-"))
    for labels in (None, torch.cat(sequences(), dim=1)):
        with pytest.raises(ConfigError, match="are not read by recurrent layers"):
            model(**packed(sequences()), labels=labels)


def test_an_attention_bias_is_refused() -> None:
    layer = MODELS["tiny"]().decoder.layers[0].self_attention
    hidden = torch.zeros(3, 1, layer.config.hidden_size)
    with pytest.raises(ConfigError, match="pass no attention_bias"):
        layer(hidden, attention_bias=torch.zeros(1))

"""Models as a user of megatron-core builds and saves them, with nothing of this package but what a
machine without CUDA needs."""

from __future__ import annotations

import argparse
import copy
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.release_models import CONFIGS, fill
from tests.support.stock_hybrid import stock_hybrid

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import (  # isort: skip
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig  # isort: skip

KINDS = ("dense", "mtp", "moe", "hybrid")
_PATTERN = "M-*M"
_CHANGES: dict[str, dict[str, Any]] = {
    "dense": {},
    "mtp": {"mtp_num_layers": 2},
    "moe": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    },
}


def stock_gpt(kind: str, tensor: int = 1, stages: int = 1, rank: int = 0) -> Any:
    """A ``GPTModel`` of this rank."""
    size = CONFIGS["dense"]
    config = TransformerConfig(
        num_layers=2, hidden_size=size.hidden_size, num_attention_heads=4, num_query_groups=2,
        kv_channels=8, ffn_hidden_size=48, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, **_CHANGES[kind],
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if kind == "moe":
        layer = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    mtp = None
    if kind == "mtp":
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    with mock.patch("torch.Tensor.cuda", lambda self, *_, **__: self):
        model = GPTModel(
            config=config, vocab_size=size.vocab_size, max_sequence_length=128,
            transformer_layer_spec=layer, position_embedding_type="learned_absolute",
            mtp_block_spec=mtp, share_embeddings_and_output_weights=False,
            pre_process=stages == 1 or rank == 0, post_process=stages == 1 or rank == 1,
        )  # fmt: skip
    return model.eval()


def stock_model(kind: str) -> Any:
    """A model of one rank, with weights that depend on their names alone."""
    model = stock_hybrid(_PATTERN) if kind == "hybrid" else stock_gpt(kind)
    fill(model)
    return model


def _arguments(kind: str) -> argparse.Namespace:
    args: dict[str, Any] = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, group_query_attention=True,
        num_query_groups=2, kv_channels=8, ffn_hidden_size=48, normalization="RMSNorm",
        norm_epsilon=1e-5, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False,
        swiglu=True, position_embedding_type="learned_absolute", max_position_embeddings=128,
        rotary_percent=1.0, untie_embeddings_and_output_weights=True, padded_vocab_size=64,
        vocab_size=64, mtp_num_layers=None, params_dtype=torch.float32, num_experts=None,
    )  # fmt: skip
    if kind == "mtp":
        args["mtp_num_layers"] = 2
    if kind == "moe":
        args |= _CHANGES["moe"]
        args |= {"num_experts": args.pop("num_moe_experts"), "moe_layer_freq": 1}
    if kind == "hybrid":
        args |= dict(
            num_layers=4, hidden_size=64, kv_channels=16, ffn_hidden_size=96, padded_vocab_size=96,
            vocab_size=96, position_embedding_type="none", is_hybrid_model=True,
            hybrid_override_pattern=_PATTERN, mamba_state_dim=8, mamba_head_dim=16,
            mamba_num_groups=2, mamba_num_heads=None,
        )  # fmt: skip
    return argparse.Namespace(**args)


def save(model: Any, kind: str, directory: Path) -> None:
    """As training does: weights, optimizer state of the same shapes, arguments."""
    directory.mkdir(parents=True, exist_ok=True)
    sharded = model.sharded_state_dict()
    moments = []
    for value in list(nested_values(sharded)):
        if isinstance(value, ShardedTensor):
            moment = copy.copy(value)
            moment.key = f"optimizer.state.exp_avg.{value.key}"
            moment.data = torch.full_like(value.data, 7.0)
            moments.append(moment)
    sharded["optimizer"] = {str(n): moment for n, moment in enumerate(moments)}
    sharded |= {"args": _arguments(kind), "checkpoint_version": 3.0, "iteration": 7}
    dist_checkpointing.save(sharded, str(directory))


def load(model: Any, directory: Path) -> None:
    """Weights of a directory of theirs, of any number of ranks."""
    sharded = {k: v for k, v in model.sharded_state_dict().items()}
    loaded = dist_checkpointing.load(sharded, str(directory))
    model.load_state_dict({k: v for k, v in loaded.items() if k in dict(model.state_dict())})


def weights(model: Any) -> dict[str, torch.Tensor]:
    """By the names of the models that this package builds."""
    names = {"conv1d_": "conv1d.", "final_norm": "final_layernorm",
             "mtp_model_layer": "transformer_layer"}  # fmt: skip
    found = {}
    for name, parameter in model.named_parameters():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = parameter.detach().clone()
    return _stacked(found)


def _stacked(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' weights with the expert as their first dimension."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in found if ".local_experts." in name]:
        experts.setdefault(re.sub(r"local_experts\.\d+\.", "", name), []).append(found.pop(name))
    return found | {name: torch.stack(each) for name, each in experts.items()}

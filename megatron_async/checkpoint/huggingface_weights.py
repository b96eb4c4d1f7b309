"""Weights of Hugging Face directories: which stored tensor goes where in a ``GPTModel``."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_async.checkpoint import mimo
from megatron_async.checkpoint.files import load_safetensors
from megatron_async.checkpoint.targets import Target, TensorParallel
from megatron_async.errors import IntegrityError
from megatron_async.models.config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class Targets(dict[str, Target]):
    """Targets by stored name; knows which parameters no stored tensor fills."""

    def __init__(self, parameters: dict[str, torch.Tensor], parallel: TensorParallel) -> None:
        self._parameters = parameters
        self._parallel = parallel
        self.unused = set(parameters)

    def parameter(self, name: str) -> torch.Tensor:
        self.unused.discard(name)
        if name not in self._parameters:
            raise IntegrityError(f"the model built for this config has no parameter {name}")
        return self._parameters[name].detach()

    def whole(self, stored: str, name: str) -> None:
        parameter = self.parameter(name)
        self[stored] = self._parallel.target(name, parameter, list(parameter.shape))

    def rows(self, stored: dict[str, slice], name: str, lead: tuple[int, ...]) -> None:
        """Split ``name`` along ``lead`` (its rows as sizes) and give each part to a tensor.

        ``lead`` is (groups, parts, rows): a stored tensor takes its slice of parts.
        """
        parameter = self.parameter(name)
        grid = parameter.view(*lead, *parameter.shape[1:])
        for stored_name, part in stored.items():
            view = grid[:, part]
            shape = [view.shape[:3].numel(), *parameter.shape[1:]]
            self[stored_name] = self._parallel.target(name, view, shape)


def _layer(
    targets: Targets, config: ModelConfig, parallel: TensorParallel, theirs: str, ours: str
) -> None:
    """Targets of one layer, by the prefixes of its stored names and of its parameters.

    ``linear_qkv`` holds, for each key-value head, its query heads, its key, its value.
    ``linear_fc1`` holds the gate's rows, then the up projection's.
    """
    queries = config.num_attention_heads // config.num_kv_heads
    qkv_lead = (config.num_kv_heads // parallel.size, queries + 2, config.head_dim)
    q, k, v = slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2)
    attention = f"{theirs}.self_attn"
    targets.whole(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight")
    targets.whole(f"{theirs}.post_attention_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight")
    if config.qk_norm:
        for x in "qk":
            targets.whole(
                f"{attention}.{x}_norm.weight", f"{ours}.self_attention.{x}_layernorm.weight"
            )
    for kind in ("weight", "bias"):
        bias = kind == "bias"
        if config.qkv_bias or not bias:
            targets.rows(
                {
                    f"{attention}.q_proj.{kind}": q,
                    f"{attention}.k_proj.{kind}": k,
                    f"{attention}.v_proj.{kind}": v,
                },
                f"{ours}.self_attention.linear_qkv.{kind}",
                qkv_lead,
            )
        if config.attention_output_bias or not bias:
            targets.whole(f"{attention}.o_proj.{kind}", f"{ours}.self_attention.linear_proj.{kind}")
        if config.mlp_bias or not bias:
            targets.rows(
                {
                    f"{theirs}.mlp.gate_proj.{kind}": slice(0, 1),
                    f"{theirs}.mlp.up_proj.{kind}": slice(1, 2),
                },
                f"{ours}.mlp.linear_fc1.{kind}",
                (1, 2, config.ffn_hidden_size // parallel.size),
            )
            targets.whole(f"{theirs}.mlp.down_proj.{kind}", f"{ours}.mlp.linear_fc2.{kind}")


def weight_targets(
    config: ModelConfig, parameters: dict[str, torch.Tensor], parallel: TensorParallel
) -> dict[str, Target]:
    """Target of every stored tensor of a Llama, Qwen2, Qwen3 or MiMo checkpoint.

    ``parameters`` are those of this tensor-parallel rank.

    Raises:
        IntegrityError: ``parameters`` are not those of a model built from ``config``.
    """
    targets = Targets(parameters, parallel)
    targets.whole(_EMBEDDING, "embedding.word_embeddings.weight")
    targets.whole("model.norm.weight", "decoder.final_layernorm.weight")
    if not config.tie_word_embeddings:
        targets.whole(_LM_HEAD, "output_layer.weight")
    for n in range(config.num_layers):
        _layer(targets, config, parallel, f"model.layers.{n}", f"decoder.layers.{n}")
    for mtp in mimo.mtp_layers(config.mtp_num_layers):
        mimo.mtp_targets(targets, mtp)
        _layer(targets, config, parallel, mtp.theirs, mtp.inner)
    if targets.unused:
        raise IntegrityError(f"no stored tensor fills parameter {min(targets.unused)}")
    return targets


def load_weights(directory: Path, config: ModelConfig, model: torch.nn.Module) -> None:
    """Fill ``model``, built from ``config``, with the weights of ``directory``.

    Raises:
        CheckpointError: see :func:`megatron_async.checkpoint.files.load_safetensors`.
    """
    load_safetensors(
        directory,
        weight_targets(config, dict(model.named_parameters()), TensorParallel.current()),
        copies={_LM_HEAD: _EMBEDDING} if config.tie_word_embeddings else None,
        ignore=lambda name: name.endswith("rotary_emb.inv_freq"),
    )

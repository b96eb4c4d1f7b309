"""What this package must know of a type of Hugging Face model: one file each in ``families/``."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.field_table import MXFP4, TABLE
from megatron_async.checkpoint.huggingface.rope_fields import rope
from megatron_async.checkpoint.quantized import FIELD, FORMER_FIELD, quantization_of
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.description.config import ModelConfig

MAX_LAYERS = 10_000

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}
_UNGATED = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """How stored tensors are named, without ".weight" and ".bias"; ``layer`` and a name make one.

    Args:
        layer: of layer n; the names below it follow.
        qkv: three projections, or one that holds all: "stacked" queries, keys, values, or
            ("by_head") those of each head, one head after the other.
        fc1: gate and up projection, or one name for both; or the only one.
        transposed: linear weights are stored ``[in, out]``.
        interleaved: rotated pairs are stored next to each other, not half a head apart.
        prefix: of all names but ``head``; older files leave it out.
        in_memory: parts of names in files, and what transformers has there in its memory.
        ignored: ends of the names of tensors that hold no parameter.
        experts: names in layers of experts.
        mamba: prefix of a Mamba-2 mixer.
        parts: layers of a hybrid pattern that a stored layer is: 2 for a mixer and the MLP behind
            it.
    """

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm"
    post_attention_norm: str = ""
    pre_mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_layout: Literal["stacked", "by_head"] = "stacked"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    projection: str = "self_attn.o_proj"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    transposed: bool = False
    interleaved: bool = False
    prefix: str = ""
    in_memory: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    experts: ExpertNames = field(default_factory=ExpertNames)
    mamba: str = "mamba"
    parts: int = 1

    def in_file(self, name: str) -> str:
        """The name that a tensor has in files, by its name there or in transformers' memory."""
        for file, memory in self.in_memory:
            if file not in name:
                name = name.replace(memory, file, 1)
        return name

    def as_given(self, name: str, given: Container[str]) -> str:
        """The name in files, or that in transformers' memory if it is the one that is ``given``."""
        if name in given:
            return name
        in_memory = name
        for file, memory in self.in_memory:
            in_memory = in_memory.replace(file, memory, 1)
        return in_memory if in_memory in given else name


def nothing(fields: Fields) -> dict[str, Any]:
    """Return no further fields, for families that :func:`common` describes as they are."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A type of model.

    Args:
        model_type, architecture: as ``config.json`` names them.
        config: fields of :class:`ModelConfig` that :func:`common` does not find, or finds wrong.
        names: of the stored tensors.
        defaults: what transformers assumes where ``config.json`` is silent.
        aliases: names in ``config.json`` of the fields that :func:`common` reads.
        also: further names that transformers takes for a field of the file, and lets win.
        gated: the MLP has a gate.
        partial_rotary: a part of each head may be rotated.
        has_rope: :func:`common` reads the rotary embeddings.
        rope_kinds: other names of the kinds of rope scaling.
        quantization: a ``quant_method`` whose weights are unpacked when they are read.
    """

    model_type: str
    architecture: str
    config: Callable[[Fields], dict[str, Any]] = nothing
    names: Names = Names()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    gated: bool = True
    partial_rotary: bool = False
    has_rope: bool = True
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    quantization: str | None = None

    def convert(self, values: Mapping[str, Any]) -> ModelConfig:
        """The architecture that the content of a ``config.json`` describes.

        Raises:
            CheckpointError: a field is missing, of a wrong type, or asks for something that this
                package cannot do.
        """
        TABLE[self.model_type].check(values)
        fields = Fields(
            values, self.defaults, self.aliases, rope_kinds=self.rope_kinds, also=self.also
        )
        found = {**common(self, fields), **self.config(fields)}
        window = found.get("sliding_window")
        longest = found["max_sequence_length"]
        if window is not None and window >= longest:
            # Layers with a window may rotate otherwise, whether or not it leaves anything out.
            if found.get("sliding_rope_theta") is None:
                found |= {"sliding_window": None, "sliding_layers": None}
            else:
                found["sliding_window"] = longest
        return ModelConfig(**found)


def common(family: Family, fields: Fields) -> dict[str, Any]:
    """What most types of models have under the same names."""
    _check_quantization(family, fields)
    if not fields.values.get("is_causal", True):  # a null too lets tokens see what is behind them
        raise fields.unsupported("is_causal", "true")
    hidden_size = fields.read("hidden_size", int)
    heads = fields.read("num_attention_heads", int)
    if heads < 1:
        raise fields.unsupported("num_attention_heads", "a positive integer")
    head_dim = fields.read("head_dim", int, 0) or None
    if head_dim is None and hidden_size % heads:
        divisor = f"a divisor of {fields.name('hidden_size')}={hidden_size}"
        raise fields.unsupported("num_attention_heads", divisor)
    # A null is not as absent here: transformers takes it for one head for each attention head.
    kv_heads = fields.optional("num_key_value_heads", int)
    activations = _ACTIVATIONS if family.gated else _UNGATED
    activation = fields.read("hidden_act", str, "silu")
    if activation not in activations:
        raise fields.unsupported("hidden_act", ", ".join(activations), activation)
    bias = fields.read("attention_bias", bool, False)
    found = {
        "num_layers": fields.read("num_hidden_layers", int),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden_size // heads if head_dim is None else head_dim,
        "ffn_hidden_size": fields.read(
            "intermediate_size", int, None if family.gated else 4 * hidden_size
        ),
        "vocab_size": fields.read("vocab_size", int),
        "norm_epsilon": fields.read("rms_norm_eps", float, 1e-6),
        "activation": activations[activation],
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": fields.read("mlp_bias", bool, False),
        "tie_word_embeddings": fields.read("tie_word_embeddings", bool, False),
    }
    if family.has_rope:
        found |= rope(fields, partial=family.partial_rotary)
    return found


def _check_quantization(family: Family, fields: Fields) -> None:
    found = quantization_of(fields.values)
    if found is None:
        return
    from megatron_async.checkpoint.quantized.scheme import METHODS, knows, scheme_of

    if knows(found):
        scheme_of(found)
        return
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is None or method != family.quantization:
        methods = [*METHODS, *([] if family.quantization is None else [family.quantization])]
        known = ", ".join(map(repr, methods))
        name = FIELD if fields.values.get(FIELD) is not None else FORMER_FIELD
        raise fields.unsupported(name, f"unquantized weights, or quant_method {known}")
    if isinstance(found, dict):
        MXFP4.check(found, of="quantization_config")


def layer_count(fields: Fields) -> int:
    """The number of layers where each is listed; raises CheckpointError for more than there are in
    any model."""
    layers: int = fields.read("num_hidden_layers", int)
    if layers > MAX_LAYERS:
        raise fields.unsupported("num_hidden_layers", f"at most {MAX_LAYERS}")
    return layers


def expert_fields(fields: Fields) -> dict[str, Any]:
    """What most types of models with experts have under the same names: ``num_experts``,
    ``num_experts_per_tok``, and ``norm_topk_prob``.

    Weights of a softmax over all experts, divided by their sum over the chosen ones, are a softmax
    over the chosen ones.
    """
    return {
        "num_moe_experts": fields.read("num_experts", int),
        "moe_router_topk": fields.read("num_experts_per_tok", int),
        "moe_router_pre_softmax": not fields.read("norm_topk_prob", bool, False),
    }


def expert_layers(fields: Fields) -> tuple[int, ...] | None:
    """``moe_layer_freq`` from ``decoder_sparse_step`` and ``mlp_only_layers`` (Qwen)."""
    step = fields.read("decoder_sparse_step", int, 1)
    if step < 1:
        raise fields.unsupported("decoder_sparse_step", "a positive integer")
    dense = fields.read("mlp_only_layers", list, [])
    kinds = [n not in dense and (n + 1) % step == 0 for n in range(layer_count(fields))]
    return None if all(kinds) else tuple(map(int, kinds))


def sliding_layers(
    fields: Fields, window: int | None, is_sliding: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """``sliding_window`` and ``sliding_layers`` from ``layer_types``.

    Args:
        is_sliding: whether a layer is, where there is no ``layer_types``.

    Raises:
        CheckpointError: ``layer_types`` has another kind of layers, not one for each layer, or
            sliding ones without a window.
    """
    kinds = fields.optional("layer_types", list)
    if kinds is None and window is None:
        return {}
    layers = layer_count(fields)
    if kinds is None:
        kinds = ["sliding_attention" if is_sliding(n) else "full_attention" for n in range(layers)]
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if len(kinds) != layers or not set(map(str, kinds)) <= known:
        raise fields.unsupported("layer_types", f"{' or '.join(sorted(known))} for each layer")
    found = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    if not found:
        return {}
    return {
        "sliding_window": window,
        "sliding_layers": None if len(found) == layers else found,
    }

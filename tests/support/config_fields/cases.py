"""Which values a field takes: absent, null, the class's own, and others that are legal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.config_fields.bases import BASES, KINDS, LONGEST, Values

ABSENT = object()
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "quick_gelu")
NOT_DRAWN = {
    # Sizes of tensors and names of tokens that no other value of one field fits.
    "vocab_size", "hidden_size", "num_hidden_layers", "n_embd", "n_layer", "bos_token_id",
    "eos_token_id", "pad_token_id", "transformers_version", "architectures", "model_type",
    "num_heads", "mamba_n_heads", "rope_parameters", "dtype", "is_encoder_decoder",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward",
}  # fmt: skip
LENGTHS: tuple[Any, ...] = (8, 24, 64)
OTHERS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (1, 5, LONGEST, 4096),
    "max_window_layers": (0, 2, 28),
    "max_position_embeddings": LENGTHS,
    "n_positions": LENGTHS,
    "original_max_position_embeddings": LENGTHS,
    "layer_types": (KINDS, KINDS[::-1], ["sliding_attention"] * 3, ["full_attention"] * 3),
    "no_rope_layers": ([0, 1, 1], [1, 1, 1], []),
    "no_rope_layer_interval": (1, 3),
    "sliding_window_pattern": (1, 2, 3),
    "_sliding_window_pattern": (1, 2),
    "mlp_only_layers": ([], [0], [1, 2]),
    "decoder_sparse_step": (1, 2, 3),
    "attn_layer_indices": ([], [0, 2], [0, 1, 2]),
    "layers_block_type": (["attention", "mlp"], ["mamba", "moe"]),
    "hybrid_override_pattern": ("ME*-", "M*"),
    "position_embedding_type": ("nope", "rope"),
    "topk_method": ("greedy", "group_limited_greedy"),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rotary_pct": (0.25, 1.0),
    "clip_qkv": (0.05, 4.0),
    "time_step_limit": ([0.0, 0.1], [0.001, 0.1], [0.0, {"__float__": "Infinity"}]),
    "mamba_d_head": ("auto", 8),
    "time_step_rank": ("auto", 4),
    "num_key_value_heads": (1, 2, 4),
    "num_attention_heads": (2, 4),
    "intermediate_size": (16, 40),
    "num_experts_per_tok": (1, 3),
    "head_dim": (8, 16),
    "swiglu_alpha": (1.0, 1.702),
    "swiglu_limit": (0.3, 7.0),
    "llama_4_scaling_beta": (0.1, 1.0),
    "norm_topk_prob": (True, False),
    "n_inner": (64,),
    "rope_theta": (50.0,),
    "rotary_emb_base": (50.0,),
    "rope_local_base_freq": (50.0,),
    "final_logit_softcapping": (0.7, 5.0),
    "attn_logit_softcapping": (0.3, 5.0),
    "moe_latent_size": (16,),
    "is_causal": (True, False),
    "per_layer_config": ({}, {"1": {"intermediate_size": 40}}),
    "mamba_n_groups": (1, 4),
    "mamba_d_conv": (2, 4),
    "mamba_dt_limit": ([0.0, {"__float__": "Infinity"}], [0.0, 0.1]),
    "num_experts": (4, 6),
    "num_local_experts": (4, 6),
    "scoring_func": ("softmax", "sigmoid"),
}
HIDDEN: dict[str, tuple[str, ...]] = {
    # Fields that a class takes without declaring them.
    "": ("head_dim", "partial_rotary_factor", "rope_theta", "original_max_position_embeddings",
         "layer_types", "sliding_window", "attention_bias", "mlp_bias", "is_causal",
         "per_layer_config"),
    "gemma3_text": ("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
    "gemma2": ("hidden_act",),
    "gpt2": ("num_attention_heads", "max_position_embeddings"),
    "granitemoehybrid": ("layers_block_type",),
    "olmoe": ("num_local_experts",),
    "gpt_neox": ("rotary_pct", "rotary_emb_base"),
    "nemotron_h": ("hybrid_override_pattern", "mamba_n_groups", "mamba_d_conv", "mamba_dt_limit",
                   "mamba_conv_bias", "layer_types", "num_local_experts", "attention_head_dim"),
    "deepseek_v2": ("scoring_func", "moe_layer_freq", "num_experts"),
    "qwen3_moe": ("num_experts", "num_local_experts", "max_window_layers"),
    "mixtral": ("num_experts",),
    "gpt_oss": ("num_experts",),
}  # fmt: skip
COMPANIONS: dict[tuple[str, Any], Values] = {
    # What another value needs beside it.
    ("topk_method", "group_limited_greedy"): {"n_group": 3, "topk_group": 2},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A ``config.json`` that differs from the base of ``model_type`` in ``field``."""

    model_type: str
    field: str
    shown: str
    values: Values


def _changed(model_type: str, field: str, value: Any, **more: Any) -> Case:
    values = {**BASES[model_type], **more}
    if value is ABSENT:
        values.pop(field, None)
    else:
        values[field] = value
        values |= COMPANIONS.get((field, value) if isinstance(value, str) else ("", ""), {})
    shown = "absent" if value is ABSENT else repr(value)
    return Case(model_type, field, shown, {"model_type": model_type, **values})


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return list(field.default) if isinstance(field.default, tuple) else field.default
    return ABSENT


def _others(name: str, default: Any) -> tuple[Any, ...]:
    if name in OTHERS:
        return OTHERS[name]
    if "act" in name.split("_") or name == "activation_function" or name.endswith("_activation"):
        return ACTIVATIONS
    if isinstance(default, bool) or name.endswith("_bias") or name.startswith("use_"):
        return (True, False)
    if isinstance(default, float):
        return (0.5 * default, 3.0 * default, 0.25)
    if isinstance(default, int):
        return (1, 2, 16)
    return ()


def _infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_infinity(x) for x in value]
    return {"__float__": "Infinity"} if value == float("inf") else value


def field_cases(model_type: str) -> Iterator[Case]:
    """Every field of the type's class in transformers, one at a time."""
    declared = {
        field.name: _default(field) for field in dataclasses.fields(CONFIG_MAPPING[model_type])
    }
    names = dict.fromkeys([*declared, *HIDDEN[""], *HIDDEN.get(model_type, ())])
    for name in names:
        if name in NOT_DRAWN:
            continue
        default = _infinity(declared.get(name, ABSENT))
        found: list[Any] = [ABSENT, None]
        is_large = type(default) is int and default > 4 * LONGEST and "window" not in name
        if not is_large and name not in ("num_attention_heads", "intermediate_size"):
            found.append(default)
        found += [x for x in _others(name, default)]
        for n, value in enumerate(found):
            if n == 0 or value is not ABSENT:
                yield _changed(model_type, name, value)


KINDS_OF_ROPE: dict[str, Values] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 32},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
ROPE_FIELDS: dict[str, tuple[Any, ...]] = {
    "rope_theta": (500.0, None),
    "partial_rotary_factor": (0.25, 0.5, 1.0, None),
    "factor": (1.0, 2.5, None, ABSENT),
    "original_max_position_embeddings": (8, 24, None, ABSENT),
    "attention_factor": (1.0, 0.7, 1.3, None),
    "beta_fast": (1.5, 2, None),
    "beta_slow": (0.3, 2, None),
    "mscale": (0.7, 1.0, None),
    "mscale_all_dim": (0.9, 1.0, None),
    "truncate": (True, False, None),
    "llama_4_scaling_beta": (0.2, None),
    "mrope_section": ([2, 1, 1],),
    "low_freq_factor": (0.5, 2.0),
    "high_freq_factor": (3.0, 8.0),
    "short_factor": (None,),
    "long_factor": (None,),
}


KNOWN_TO = {
    "factor": ("linear", "dynamic", "yarn", "longrope", "llama3"),
    "original_max_position_embeddings": ("yarn", "longrope", "llama3"),
    "attention_factor": ("yarn", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"), ("yarn",)),
}
"""Kinds of rope that have a field, beside the default kind."""


def _pairs(values: Values, model_type: str, factor: float) -> int:
    head: int = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if model_type == "deepseek_v2":
        head = values["qk_rope_head_dim"]
    return int(head * factor) // 2


ROTATED = {"glm": 0.5, "glm4": 0.5, "gpt_neox": 0.5, "bamba": 0.5}


def _rope(model_type: str, kind: str) -> Values:
    found = {"rope_type": kind, "rope_theta": 50.0, **KINDS_OF_ROPE[kind]}
    if model_type == "ministral3":
        found |= {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
    if model_type == "gpt_neox":
        found["partial_rotary_factor"] = 0.5
    if kind == "longrope":
        pairs = _pairs(BASES[model_type], model_type, ROTATED.get(model_type, 1.0))
        found["short_factor"] = [1.0 + 0.1 * n for n in range(pairs)]
        found["long_factor"] = [1.5 + 0.5 * n for n in range(pairs)]
    return found


def _as_stored(model_type: str, kind: str, rope: Values) -> Iterator[tuple[str, Values]]:
    """The forms in which files have a rope."""
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    bare = {name: x for name, x in rope.items() if name != "rope_theta"}
    older = {name: x for name, x in bare.items() if name != "rope_type"} | {"type": kind}
    yield "rope_parameters", {"rope_parameters": rope}
    yield "rope_scaling", {"rope_parameters": ABSENT, "rope_scaling": bare, **theta}
    yield "rope_scaling.type", {"rope_parameters": ABSENT, "rope_scaling": older, **theta}
    if model_type == "gemma3_text":
        plain = {"rope_type": "default", "rope_theta": 1e4}
        yield "full", {"rope_parameters": {"full_attention": rope, "sliding_attention": plain}}
        yield "sliding", {"rope_parameters": {"full_attention": plain, "sliding_attention": rope}}
        yield "both", {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}


def _with(model_type: str, field: str, shown: str, changes: Values) -> Case:
    values = {"model_type": model_type, **BASES[model_type], **changes}
    kept = {name: value for name, value in values.items() if value is not ABSENT}
    return Case(model_type, field, shown, kept)


def rope_cases(model_type: str) -> Iterator[Case]:
    """Every kind of rope in every form, and every field of each kind, one at a time."""
    for name in ("rope_parameters", "rope_scaling"):
        for value in (ABSENT, None, {}):
            shown = "absent" if value is ABSENT else repr(value)
            yield _with(model_type, name, shown, {name: value})
            if name == "rope_scaling":
                both = {"rope_parameters": _rope(model_type, "linear"), name: value}
                yield _with(model_type, name, f"{shown} beside rope_parameters", both)
    for kind in KINDS_OF_ROPE:
        rope = _rope(model_type, kind)
        for form, changes in _as_stored(model_type, kind, rope):
            yield _with(model_type, form, kind, changes)
            top = {**changes, "original_max_position_embeddings": 20}
            yield _with(model_type, form, f"{kind}, original length 20 beside it", top)
            yield _with(model_type, form, f"{kind}, factor 0.5 beside it",
                        {**changes, "partial_rotary_factor": 0.5})  # fmt: skip
        other = {"rope_parameters": _rope(model_type, "linear"), "rope_scaling": rope}
        yield _with(model_type, "rope_scaling", f"{kind} beside rope_parameters", other)
        for name, found in ROPE_FIELDS.items():
            if kind not in (*KNOWN_TO.get(name, KINDS_OF_ROPE), "default"):
                continue
            for value in found:
                changed = {**rope, name: value}
                if name == "mscale_all_dim":
                    changed["mscale"] = 0.707
                changed = {key: x for key, x in changed.items() if x is not ABSENT}
                shown = "absent" if value is ABSENT else repr(value)
                for form, changes in _as_stored(model_type, kind, changed):
                    if form in ("rope_parameters", "full", "sliding"):
                        yield _with(model_type, f"{form}.{name}", f"{kind}: {shown}", changes)


NO_ROPE = ("gpt2", "mamba2", "nemotron_h")


def cases(model_type: str) -> list[Case]:
    """All of a type."""
    found = list(field_cases(model_type))
    return found if model_type in NO_ROPE else [*found, *rope_cases(model_type)]

"""Every field of a ``config.json`` is heeded, refused by name, or one that changes nothing."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_async.checkpoint.families import families
from megatron_async.checkpoint.huggingface.field_table import TABLE
from megatron_async.checkpoint.huggingface.huggingface import convert_config
from megatron_async.checkpoint.reading.field_uses import FieldUses
from megatron_async.errors import CheckpointError
from tests.support.config_fields.bases import BASES, LONGEST, Values
from tests.support.config_fields.cases import Case, cases
from tests.support.config_fields.compare import RIGHT, compare
from tests.support.config_fields.page import rows, rows_beside
from tests.support.config_fields.pairs import pairs

ROOT = Path(__file__).parents[3]
DRAWN, PAIRS = 10, 6
THEIRS = sorted(set(families()) & set(CONFIG_MAPPING))


def drawn() -> list[Case]:
    """A share of all cases, each of another type; ``scripts/compare_config_fields.py`` has all."""
    rng = random.Random(49)
    types = rng.sample(THEIRS, DRAWN + PAIRS)
    single = [rng.choice(cases(kind)) for kind in types[:DRAWN]]
    return [*single, *(pair for kind in types[DRAWN:] for pair in pairs(kind, 1, rng))]


@pytest.mark.parametrize("case", drawn(), ids=lambda case: f"{case.model_type}-{case.field}")
def test_drawn_configs_are_transformers_or_refused_by_name(case: Case) -> None:
    result = compare(case)
    assert result.verdict in RIGHT, (case.field, case.shown, result.said)


def case_of(model_type: str, field: str, **changes: Any) -> Case:
    """The base of a type with other values."""
    values = {"model_type": model_type, **BASES[model_type], **changes}
    return Case(model_type, field, "given", values)


YARN: Values = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 3.0, "original_max_position_embeddings": 32
}  # fmt: skip
LONGROPE: Values = {
    **YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4
}  # fmt: skip
OLDER: Values = {"type": "linear", "factor": 8.0}
BOTH = ("full_attention", "sliding_attention")
EPSILON = ("rms_norm_eps", "absent")
WRONG_ONCE = {
    "a null for the whole rope is the class's own": case_of(
        "gpt_oss", "rope_parameters", rope_parameters=None
    ),
    "shares of 0 are off": case_of(
        "llama", "rope_parameters", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0}
    ),
    "as with latents": case_of(
        "deepseek_v2", "rope_parameters",
        rope_parameters={**YARN, "mscale": 0.0, "mscale_all_dim": 0.7},
    ),
    "a growth of 0 is none": case_of(
        "ministral3", "rope_parameters",
        rope_parameters={**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0},
    ),
    "as with Ministral 3": case_of("ministral3", "rope_parameters", rope_parameters=None),
    "another length beside a rope is that of some kinds": case_of(
        "ministral3", "rope_parameters", original_max_position_embeddings=20,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0,
                         "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
    ),
    "a null truncate is false": case_of(
        "llama", "truncate", rope_parameters={**YARN, "truncate": None}
    ),
    "a null for the rotated part is all": case_of(
        "glm", "partial_rotary_factor", partial_rotary_factor=None
    ),
    "Bamba's null rotated part is a half": case_of(
        "bamba", "partial_rotary_factor", partial_rotary_factor=None
    ),
    "Mamba's norms have the class's epsilon too": next(
        case for case in cases("granitemoehybrid") if (case.field, case.shown) == EPSILON
    ),
    "a null bias is none": case_of("granitemoehybrid", "mamba_conv_bias", mamba_conv_bias=None),
    "Bamba's rotated part is heeded": case_of(
        "bamba", "rope_parameters", rope_parameters={"rope_type": "default", "rope_theta": 50.0,
                                                     "partial_rotary_factor": 0.25}
    ),
    "the older name of a kind is not Gemma 3's": case_of(
        "gemma3_text", "rope_scaling", rope_scaling=OLDER
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ONCE)
def test_fields_that_were_read_in_one_form_alone(name: str) -> None:
    result = compare(WRONG_ONCE[name])
    assert result.verdict == "alike", result.said


@pytest.mark.parametrize(
    ("model_type", "field", "changes"),
    (
        ("bamba", "hidden_act", {"hidden_act": "gelu"}),
        ("granitemoehybrid", "hidden_act", {"hidden_act": "gelu_pytorch_tanh"}),
        ("gemma3_text", "truncate",
         {"rope_parameters": {kind: {**YARN, "truncate": False} for kind in BOTH}}),
        ("gemma3_text", "rope_type",  # the engine knows one border of rotations
         {"rope_parameters": {"sliding_attention": LONGROPE}}),
        ("gemma3_text", "rope_type",
         {"rope_parameters": {"sliding_attention": LONGROPE, "full_attention":
                              {**LONGROPE, "original_max_position_embeddings": 24}}}),
        ("nemotron_h", "mlp_bias", {"mlp_bias": True}),
        ("nemotron_h", "attention_bias", {"attention_bias": True}),
        ("deepseek_v2", "scoring_func", {"scoring_func": "sigmoid"}),
        ("olmoe", "clip_qkv", {"clip_qkv": 4.0}),
        ("gpt2", "add_cross_attention", {"add_cross_attention": True}),
        ("qwen2", "is_causal", {"is_causal": False}),
        ("mixtral", "is_causal", {"is_causal": None}),
        ("llama", "per_layer_config", {"per_layer_config": {"1": {"num_key_value_heads": 1}}}),
        ("llama", "transformers_weights", {"transformers_weights": "other.safetensors"}),
        ("llama", "compression_config", {"compression_config": {"format": "int-quantized"}}),
        ("gpt_oss", "swiglu_alpha", {"swiglu_alpha": 1.0}),
    ),
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(
    model_type: str, field: str, changes: Values
) -> None:
    values = {"model_type": model_type, **BASES[model_type], **changes}
    with pytest.raises(CheckpointError, match=rf"{field}=.+ is not supported"):
        convert_config(Path("config.json"), values)


NOT_SET = {"bamba": {"layer_types"}}
"""Further names that transformers itself cannot set."""


@pytest.mark.parametrize("model_type", THEIRS)
def test_further_names_are_those_of_transformers(model_type: str) -> None:
    theirs = dict(CONFIG_MAPPING[model_type].attribute_map)
    kept = {name: of for name, of in theirs.items() if name not in NOT_SET.get(model_type, ())}
    declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    # The name that the class declares is the file's own, whichever of the two the class maps.
    own = {(of, name) if name in declared else (name, of) for name, of in kept.items()}
    assert own <= set(families()[model_type].also.items())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    (
        ("gpt2", {"n_head": 2, "num_attention_heads": 4}),
        ("gpt2", {"n_positions": 99, "max_position_embeddings": LONGEST}),
        ("nemotron_h", {"n_groups": 4, "mamba_n_groups": 2}),
        ("nemotron_h", {"layers_block_type": ["attention"], "layer_types": ["attention", "moe"]}),
    ),
)
def test_a_further_name_wins(model_type: str, changes: Values) -> None:
    """gpt2's heads were once those of ``n_head`` whatever the file said beside it."""
    result = compare(case_of(model_type, next(reversed(changes)), **changes))
    assert result.verdict == "alike", result.said


@pytest.mark.parametrize("model_type", THEIRS)
def test_the_table_has_every_field_of_transformers(model_type: str) -> None:
    declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    assert not declared - TABLE[model_type].names


class Watched(dict[str, Any]):
    """A config that knows which of its fields were looked up."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


@pytest.mark.parametrize("model_type", sorted(BASES))
def test_loaders_read_nothing_that_the_table_lacks(model_type: str) -> None:
    values = Watched({"model_type": model_type, **BASES[model_type]})
    families()[model_type].convert(values)
    assert not values.asked - TABLE[model_type].names


def test_each_type_has_a_row() -> None:
    assert set(TABLE) == set(families())


def test_a_row_has_each_name_once() -> None:
    for kind, uses in TABLE.items():
        parts = (uses.heeded, uses.neutral, frozenset(uses.only))
        assert sum(map(len, parts)) == len(uses.names), kind


def test_documentation_has_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    wanted = [*rows(), *rows_beside()]
    for row in wanted:
        assert row in page, "write into docs/models.md:\n" + "\n".join(wanted)


def test_unknown_fields_are_named_once(log: pytest.LogCaptureFixture) -> None:
    uses = FieldUses.of("a", "b")
    uses.check({"a": 1, "b": 2, "c": 3, "d": None, "e": [], "_f": 1, "\x1b[2J": 1})
    assert [r.getMessage() for r in log.records] == [
        r"fields of config.json that are left unread: \x1b[2J, c"
    ]

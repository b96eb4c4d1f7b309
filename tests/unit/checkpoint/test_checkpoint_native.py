"""This package's own format, and how a path is recognised."""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import safe_open
from tokenizers import decoders, models

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.checkpoint.families import families
from megatron_async.checkpoint.native import describe, write_config
from megatron_async.checkpoint.path import EMBEDDED, IN_CHECKOUT
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from tests.support.config_fields.bases import BASES
from tests.support.config_fields.routes import MADE

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 64,
    "max_sequence_length": 128,
}
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
CONFIGS = {
    "plain": ModelConfig(**BASE),
    "tied_mtp": ModelConfig(**BASE, tie_word_embeddings=True, mtp_num_layers=2),
    "biased": ModelConfig(
        **BASE, qk_norm=True, qkv_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "scaled": ModelConfig(**BASE, rope_scaling=SCALING),
    "gpt": ModelConfig(
        **BASE,
        normalization="LayerNorm",
        activation="gelu_tanh",
        position_embedding="learned_absolute",
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(len(name))
    model = build_model(CONFIGS[name], device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def tokenizer_files(path: Path) -> list[Path]:
    path.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return [path / "tokenizer.json", path / "tokenizer_config.json"]


@pytest.mark.parametrize("name", CONFIGS)
def test_native_roundtrip_is_exact(tmp_path: Path, name: str) -> None:
    model = build(name)
    files = tokenizer_files(tmp_path / "tokenizer")
    save_native(
        tmp_path / "a" / "model", model, CONFIGS[name], tokenizer_files=files, eos_token_ids=[2, 5]
    )
    loaded = load_pretrained(tmp_path / "a" / "model")
    assert loaded.config == CONFIGS[name]
    assert loaded.eos_token_ids == (2, 5)
    assert loaded.name == "model"
    assert loaded.tokenizer is not None and loaded.tokenizer.tokenize("ab") == [0, 1]
    expected, actual = dict(model.named_parameters()), dict(loaded.model.named_parameters())
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


OF_NO_FILE: tuple[dict[str, Any], ...] = (
    {"activation": "relu", "mtp_num_layers": 1, "qk_norm": True, "qk_norm_kind": "l2"},
    {"query_scaling_beta": 0.1, "query_scaling_tokens": 7},
    {
        "rope_scaling": RopeScaling(factor=2.0, kind="linear"), "sliding_rope_theta": 3.0,
        "sliding_rope_scaling": SCALING, "sliding_window": 5, "sliding_layers": (1,),
    },
    {
        "num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 2,
    },
    {
        "num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_latent_size": 16,
        "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_max": True,
    },
    {
        "num_layers": 3, "hybrid_override_pattern": "M*-", "position_embedding": "none",
        "mamba_conv_kernel": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "mamba_head_dim": 16, "mamba_num_groups": 2,
    },
)  # fmt: skip
"""What no loader of Hugging Face's sets, beside what the types below have."""


def every_field() -> list[ModelConfig]:
    """Configurations of which each field is another than its default in one at least."""
    found = [
        families()[kind].convert({"model_type": kind, **values, **MADE.get(kind, {})})
        for kind, values in BASES.items()
    ]
    return [*found, *(ModelConfig(**{**BASE, **values}) for values in OF_NO_FILE)]


def test_every_field_is_stored(tmp_path: Path) -> None:
    for config in every_field():
        write_config(tmp_path, config)
        assert describe(tmp_path, read_json(tmp_path / "config.json")).config == config


def test_every_field_is_another_than_its_default_in_one_of_these() -> None:
    fields = dataclasses.fields(ModelConfig)
    changed = {
        field.name
        for config in every_field()
        for field in fields
        if getattr(config, field.name) != field.default
    }
    assert changed == {field.name for field in fields}


@pytest.mark.parametrize("save", (save_native, save_distributed))
def test_a_model_that_is_saved_again_keeps_its_padding(tmp_path: Path, save: Any) -> None:
    """Rows of padding were tokens once their model had gone through a directory of ours."""
    model = build("plain")
    model.token_count = 60
    save(tmp_path, model, CONFIGS["plain"])
    assert load_pretrained(tmp_path).model.token_count == 60


def test_tied_weights_are_stored_once_and_mtp_is_stored(tmp_path: Path) -> None:
    save_native(tmp_path, build("tied_mtp"), CONFIGS["tied_mtp"])
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        names = list(opened.keys())
    assert "embedding.word_embeddings.weight" in names
    assert not any(name.startswith("output_layer") for name in names)
    assert any(name.startswith("mtp.layers.1.") for name in names)


def test_stored_dtype_is_as_asked_and_config_says_so(tmp_path: Path) -> None:
    save_native(tmp_path, build("plain"), CONFIGS["plain"], dtype=torch.bfloat16, bos_token_id=1)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["format"] == "megatron_async" and values["format_version"] == 1
    assert values["dtype"] == "bfloat16" and values["bos_token_id"] == 1
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        stored = opened.get_tensor("decoder.final_layernorm.weight")
    assert stored.dtype == torch.bfloat16
    loaded = dict(load_pretrained(tmp_path).model.named_parameters())
    assert torch.equal(loaded["decoder.final_layernorm.weight"], stored.float())


def test_an_eos_id_named_twice_counts_once(tmp_path: Path) -> None:
    save_native(tmp_path, build("plain"), CONFIGS["plain"], eos_token_ids=[3, 3, *range(8)])
    assert load_pretrained(tmp_path).eos_token_ids == (3, 0, 1, 2, 4, 5, 6, 7)


def test_any_number_of_eos_ids_is_kept(tmp_path: Path) -> None:
    """More than a slot of the device has room for: the host knows the others."""
    ids = [*range(40, 0, -1)]
    save_native(tmp_path, build("plain"), CONFIGS["plain"], eos_token_ids=ids)
    assert load_pretrained(tmp_path).eos_token_ids == tuple(ids)


def test_eos_ids_of_the_tokenizer_serve_where_the_config_has_none(tmp_path: Path) -> None:
    files = tokenizer_files(tmp_path / "tokenizer")
    save_native(tmp_path / "m", build("plain"), CONFIGS["plain"], tokenizer_files=files)
    assert load_pretrained(tmp_path / "m").eos_token_ids == (2,)


def test_corrupt_tokenizer_is_an_error(tmp_path: Path) -> None:
    save_native(tmp_path, build("plain"), CONFIGS["plain"])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer file"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": True}, "num_layers=True must be a positive integer"),
        ({"vocab_size": 10**13}, "vocab_size=10+ must be a positive integer of at most 2147483647"),
        ({"mtp_num_layers": 0.5}, "mtp_num_layers=0.5 must be a non-negative integer"),
        ({"mtp_num_layers": -1}, "mtp_num_layers=-1 must be a non-negative integer"),
        ({"activation": "elu"}, "activation='elu' must be one of swiglu, clamped_swiglu, geglu"),
        ({"normalization": []}, r"normalization=\[\] must be one of RMSNorm, LayerNorm"),
        ({"position_embedding": "alibi"}, "position_embedding='alibi' must be one of rope, "),
        ({"norm_epsilon": "x"}, "norm_epsilon='x' must be a finite number above 0"),
        ({"norm_epsilon": None}, "norm_epsilon=None must be a finite number"),
        ({"rope_theta": "x"}, "rope_theta='x' must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a finite number"),
        ({"rope_theta": True}, "rope_theta=True must be a finite number"),
        ({"qk_norm": 1}, "qk_norm=1 must be true or false"),
        ({"rope_scaling": "yarn"}, "must be a mapping, not str"),
        ({"rope_scaling": {**asdict(SCALING), "factor": "8"}}, "factor='8' must be a finite"),
    ],
)
def test_wrong_value_in_the_model_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        ModelConfig.from_dict({**BASE, **changes})
    assert str(raised.value).startswith("model config: ") and "\n" not in str(raised.value)


def test_integers_of_json_become_floats() -> None:
    config = ModelConfig.from_dict({**BASE, "rope_theta": 10**20})
    assert isinstance(config.rope_theta, float) and config.rope_theta == 1e20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format='other', format_version=1 is not supported"),
        ({"format_version": 2}, "format_version=2 is not supported; supported: 'megatron_async'"),
        ({"model": None}, "model must be an object"),
        ({"model": {**BASE, "num_layers": 0}}, r"config.json: model config: num_layers=0"),
        ({"model": {**BASE, "depth": 1}}, "unexpected keyword argument 'depth'"),
        ({"model": {**BASE, "vocab_size": 65}}, r"shape \[64, 32\], expected \[65, 32\]"),
        ({"model": {**BASE, "num_layers": 3}}, "tensor decoder.layers.2.* and 5 more is missing"),
        ({"model": {**BASE, "num_layers": 1}}, "unexpected tensor decoder.layers.1"),
        ({"dtype": "int4"}, "dtype='int4' is not one of float32, bfloat16, float16"),
        ({"eos_token_ids": [1, -2]}, r"eos_token_ids=\[1, -2\] must be a token id"),
        ({"eos_token_ids": [2**31]}, r"eos_token_ids=\[2147483648\] .* of at most 2147483647"),
        ({"bos_token_id": 1.5}, "bos_token_id=1.5 must be a token id"),
        ({"token_count": 65}, "token_count=65 must be an integer of 1 to 64"),
        ({"token_count": True}, "token_count=True must be an integer of 1 to 64"),
        ({"speed": "fast"}, "unknown field speed"),
    ],
)
def test_wrong_config_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_native(tmp_path, build("plain"), CONFIGS["plain"])
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_pretrained(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_have_their_names(name: str) -> None:
    assert load_pretrained(name).name == name


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_installation_without_a_model_says_where_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path / "site" / package)
    where = "it is in a checkout" if name in IN_CHECKOUT else "has no embedded model"
    with pytest.raises(CheckpointError, match=f"{name}: .*{where}.*Run from a checkout"):
        load_pretrained(name)


def test_neither_the_package_nor_a_front_end_imports_anything_heavy() -> None:
    code = (
        "import sys, megatron_async; before = set(sys.modules); import megatron_async.checkpoint; "
        "from megatron_async.serving import messages; "
        "from megatron_async.serving.front_end import build, front_end_process; "
        "endpoint, config = messages.Endpoint('', b''), build.ServerConfig(model_names=('tiny',)); "
        "build._text_of(build.FrontendSettings(model='tiny', endpoint=endpoint, config=config)); "
        "print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert "megatron_async" in out.stdout
    assert not {"torch", "megatron", "safetensors"} & set(ast.literal_eval(out.stdout))

"""Hugging Face directories: the same logits as transformers, and clear errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.huggingface.huggingface import convert_config
from megatron_async.errors import CheckpointError
from megatron_async.models.description.config import RopeScaling

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_attention_bias": ("Llama", {"attention_bias": True}),
    "llama_rope_scaling": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama_head_dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_biased": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}


def make(name: str) -> Any:
    """A random transformers model; zeros and ones of biases and norms are randomised too."""
    family, options = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def saved(name: str, path: Path, **options: Any) -> Any:
    model = make(name)
    model.save_pretrained(path, **options)
    return model


def logits_of_ours(path: Path, ids: torch.Tensor) -> torch.Tensor:
    loaded = load_pretrained(path)
    assert not loaded.model.training
    positions = torch.arange(ids.shape[1])[None]
    logits: torch.Tensor = loaded.model(ids, positions, None, runtime_gather_output=True)
    return logits


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, shard_size: str) -> None:
    theirs = saved(name, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    ids = torch.randint(0, 64, (1, 100))
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(logits_of_ours(tmp_path, ids), expected, atol=1e-5, rtol=1e-5)


def test_dtype_is_float32_on_cpu_unless_asked(tmp_path: Path) -> None:
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    by_default = load_pretrained(tmp_path)
    asked = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in by_default.model.parameters()} == {torch.float32}
    assert {p.dtype for p in asked.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in asked.model.parameters())
    assert by_default.name == tmp_path.name and by_default.tokenizer is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, (7, 9)),
        ({"eos_token_id": 5}, {"eos_token_id": 3}, (5,)),
        ({}, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": [*range(20)]}, (*range(20),)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids_come_from_generation_config_first(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    saved("llama", tmp_path)
    edit_json(tmp_path / "config.json", **config)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_pretrained(tmp_path).eos_token_ids == expected


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))


# config.json alone


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    model_type = family.lower()
    return {"architectures": [f"{family}ForCausalLM"], "model_type": model_type, **SIZES, **changes}


def convert(**changes: Any) -> Any:
    family = changes.pop("family", "Llama")
    return convert_config(Path("config.json"), config_of(family, **changes))


def test_old_and_new_rope_layouts_agree() -> None:
    old = convert(rope_theta=5e5, rope_scaling=LLAMA3)
    older = convert(
        rope_theta=500000, rope_scaling={**{k: v for k, v in LLAMA3.items()}, "type": "llama3"}
    )
    new = convert(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old == older == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )
    assert convert(rope_theta=7.0, rope_scaling=None).rope_theta == 7.0
    assert convert(rope_scaling={"rope_type": "default"}).rope_scaling is None


@pytest.mark.parametrize("layout", [LLAMA3, {"rope_type": "default"}, {}, None])
@pytest.mark.parametrize("theta", [{}, {"rope_theta": 2e4}])
def test_both_rope_layouts_at_once_mean_what_transformers_takes(
    layout: dict[str, Any] | None, theta: dict[str, float]
) -> None:
    changes = {"rope_scaling": layout, "rope_parameters": {**LLAMA3, "rope_theta": 1e6}, **theta}
    theirs = transformers.LlamaConfig(**copy.deepcopy({**SIZES, **changes})).rope_parameters
    ours = convert(**changes)
    assert ours.rope_theta == theirs["rope_theta"]
    assert (ours.rope_scaling is not None) == (theirs["rope_type"] == "llama3")


def test_an_empty_list_of_architectures_is_as_absent() -> None:
    assert convert(architectures=[]) == convert(architectures=None) == convert()


def test_absent_fields_get_the_values_transformers_assumes() -> None:
    plain = {k: v for k, v in config_of("Llama").items() if k != "num_key_value_heads"}
    config = convert_config(Path("config.json"), plain)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.norm_epsilon == 1e-6 and config.rope_theta == 10000.0
    assert convert(family="Qwen3").head_dim == 128
    for family in ("Llama", "Qwen2", "Qwen3"):
        assert convert(family=family, num_key_value_heads=None).num_kv_heads == 4
        theirs = getattr(transformers, f"{family}Config")(**{**SIZES, "num_key_value_heads": None})
        assert theirs.num_key_value_heads == 4
    assert convert(family="Qwen2").qkv_bias and not convert(family="Qwen2").attention_output_bias
    assert convert(family="Qwen3").qk_norm


def test_sliding_window_that_is_not_in_use_is_no_obstacle() -> None:
    convert(family="Qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=1)
    convert(family="Qwen2", layer_types=["full_attention", "full_attention"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "falcon", "architectures": None}, "model_type='falcon'.*llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None, "architectures": ["FooForCausalLM"]}, r"\['FooForCausalLM'\]"),
        ({"hidden_act": "elu"}, "hidden_act='elu'.*silu"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}.*unquantized"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor=-2.0 must be a finite"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "xpos"}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling.rope_type='xpos'",
        ),
        ({"rope_parameters": {"rope_type": "xpos"}}, "rope_parameters.rope_type='xpos'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for all layers"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "original_max_position_embeddings is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size='32' must be of type int"),
        ({"num_hidden_layers": 0}, "num_layers=0 must be a positive"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be of type bool"),
        ({"model_type": []}, r"model_type=\[\] is not supported.*llama"),
        ({"layer_types": 5}, "layer_types=5 must be of type list"),
        ({"rope_theta": 10**400}, "rope_theta=10+ must be a finite number above 0"),
        ({"rope_theta": 0}, "rope_theta=0 must be a finite"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be a finite"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta=nan must be a finite"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be a finite"),
        ({"rope_scaling": {**LLAMA3, "factor": 0.0}}, "factor=0.0 must be a finite"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor=4.0 must be above low_freq_factor=4.0",
        ),
        ({"max_position_embeddings": 10**13}, "max_position_embeddings=10+ .* at most 2147483647"),
        ({"vocab_size": 10**13}, "vocab_size=10+ must be an integer of at most"),
        ({"intermediate_size": 10**40}, "intermediate_size=10+ must be an integer of at"),
    ],
)
def test_unsupported_config_names_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        convert(**changes)
    assert str(raised.value).startswith("config.json: ") and "\n" not in str(raised.value)


# broken directories


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_inv_freq_and_equal_tied_head_are_harmless(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path / "model.safetensors", edit)
    load_pretrained(tmp_path)
    load_pretrained(tmp_path, dtype=torch.bfloat16)


def replace(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return edit


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "tensor model.norm.weight is missing"),
        ("model.extra", torch.ones(1), "unexpected tensor model.extra"),
        ("lm_head.weight", torch.ones(64, 32), "lm_head.weight differs from the tied"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.ones(32, 32),
            r"k_proj.weight has shape \[32, 32\], expected \[16, 32\]",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.ones(48, 32, dtype=torch.int8),
            "up_proj.weight has dtype I8; supported are F64, F32",
        ),
    ],
)
def test_wrong_tensor_is_named(
    tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    saved("llama_tied", tmp_path)
    edit_tensors(tmp_path / "model.safetensors", replace(name, value))
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


def test_untied_checkpoint_without_head_says_so(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit_tensors(tmp_path / "model.safetensors", replace("lm_head.weight", None))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_weights_are_one_line(tmp_path: Path, size: int) -> None:
    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"safetensors: truncated or corrupt") as raised:
        load_pretrained(tmp_path)
    assert "\n" not in str(raised.value)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    content = (tmp_path / shard).read_bytes()

    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard}: no such file"):
        load_pretrained(tmp_path)

    (tmp_path / shard).write_bytes(content)
    edit_tensors(tmp_path / shard, lambda tensors: tensors.update(copy=tensors.pop(name)))
    with pytest.raises(CheckpointError, match=f"{shard}: unexpected tensor copy"):
        load_pretrained(tmp_path)

    (tmp_path / shard).write_bytes(content)
    other = next(file for file in weight_map.values() if file != shard)
    with safe_open(tmp_path / shard, "pt") as opened:
        twice = opened.get_tensor(name)
    edit_tensors(tmp_path / other, lambda tensors: tensors.update({name: twice}))
    with pytest.raises(CheckpointError, match=f"{name} is stored in another file too"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"weight_map": {}}', "weight_map must be a non-empty object"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "'../other.safetensors' is not a"),
        ('{"weight_map": {"a": "weights.bin"}}', "'weights.bin' is not a safetensors file"),
    ],
)
def test_corrupt_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    saved("llama", tmp_path, max_shard_size="10KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"index.json: {message}"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config\.json: not valid JSON"),
        ("[]", r"config\.json: must hold a JSON object"),
        ("{}", r"config\.json: has neither format nor model_type nor architectures; supported"),
        (json.dumps(config_of("Llama")), "has neither model.safetensors nor"),
        (json.dumps(config_of("Llama", dtype="int8")), "dtype='int8' is not one of float32"),
        (json.dumps(config_of("Llama", eos_token_id="x")), "eos_token_id='x' must be a token id"),
        (json.dumps(config_of("Llama", eos_token_id=2**31)), "json: eos_token_id=2147483648 must"),
        (json.dumps(config_of("Llama", eos_token_id=[1, 99])), "99 is not one of the vocabulary's"),
    ],
)
def test_corrupt_config_is_named(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_a_config_that_is_not_utf_8_is_named(tmp_path: Path, encoding: str) -> None:
    text = json.dumps(config_of("Llama"))
    (tmp_path / "config.json").write_text(text, encoding=encoding)
    with pytest.raises(
        CheckpointError, match=r"config\.json: (not valid JSON|must hold)"
    ) as raised:
        load_pretrained(tmp_path)
    assert "\n" not in str(raised.value)
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load_pretrained(tmp_path)


def test_paths_that_are_no_model_directory_say_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="some/model: not a directory; supported are Hugg"):
        load_pretrained("some/model")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json; supported are"):
        load_pretrained(tmp_path)

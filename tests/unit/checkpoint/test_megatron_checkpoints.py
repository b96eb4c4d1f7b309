"""Directories of Megatron-LM's training, without a file of this package's own.

What stock megatron writes itself is loaded in ``test_checkpoint_distributed``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.checkpoint import describe_pretrained, load_pretrained, save_distributed
from megatron_async.checkpoint.path import load_tokenizer
from megatron_async.checkpoint.reading.distributed_metadata import read_metadata
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, RequestError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

from megatron.core.enums import ModelType  # isort: skip
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (  # isort: skip
    YarnRotaryEmbedding,
    _yarn_get_mscale,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

TINY = Path(__file__).parents[3] / "megatron_async/assets/tiny"
CONFIG = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=24,
    vocab_size=384,
    max_sequence_length=64,
)
ARGUMENTS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 8,
    "ffn_hidden_size": 24,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "add_bias_linear": False,
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 512,
    "vocab_size": 380,
    "params_dtype": torch.bfloat16,
    "model_type": ModelType.encoder_or_decoder,
    "exit_signal": signal.SIGTERM,
    "mtp_hsm": False,
}
LATENTS: dict[str, Any] = {
    "multi_latent_attention": True, "qk_layernorm": True, "qk_head_dim": 8, "kv_lora_rank": 12,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 10, "q_lora_rank": 20, "rotary_scaling_factor": 8.0,
    "mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT_SIZES = {
    name: LATENTS[name] for name in ("kv_lora_rank", "qk_pos_emb_head_dim", "v_head_dim")
}


def write_arguments(directory: Path, **changes: Any) -> None:
    args = argparse.Namespace(**{**ARGUMENTS, **changes})
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 20}, directory / "common.pt")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept")
    save_distributed(path / "d", build_model(CONFIG, device="cpu", dtype=torch.float32), CONFIG)
    (path / "d" / "config.json").unlink()
    write_arguments(path / "d")
    return path / "d"


@pytest.fixture
def root(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "iter_0000020")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    return tmp_path


def test_root_is_its_last_iteration(root: Path) -> None:
    loaded = load_pretrained(root)
    assert (loaded.config, loaded.name, loaded.tokenizer) == (CONFIG, root.name, None)
    assert load_pretrained(root / "iter_0000020").config == CONFIG
    (root / "iter_0000020").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    described = describe_pretrained(root)
    assert (described.config, described.dtype) == (CONFIG, torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("21", r"iteration\.txt: names iter_0000021, which is not there"),
        ("", "'' is neither an iteration nor release"),
        ("../../x", "'../../x' is neither"),
        ("9" * 5000, "has 5,000 bytes; the most is 64"),
    ],
)
def test_tracker_that_names_nothing_is_refused(root: Path, text: str, reason: str) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        load_pretrained(root)


def test_legacy_checkpoint_says_how_to_convert(tmp_path: Path) -> None:
    for folder in ("iter_0000007/mp_rank_00", "iter_0000007/mp_rank_01"):
        os.makedirs(tmp_path / folder)
        (tmp_path / folder / "model_optim_rng.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for path in (tmp_path, tmp_path / "iter_0000007"):
        with pytest.raises(CheckpointError, match=r"mp_rank_00.*--ckpt-convert-format torch_dist"):
            load_pretrained(path)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"group_query_attention": True}, {"num_kv_heads": 1}),
        ({"add_qkv_bias": True}, {"qkv_bias": True}),
        (
            {"add_bias_linear": True, "swiglu": False, "normalization": "LayerNorm"},
            {
                "qkv_bias": True,
                "attention_output_bias": True,
                "mlp_bias": True,
                "activation": "gelu_tanh",
                "normalization": "LayerNorm",
            },
        ),
        ({"swiglu": False}, {"activation": "gelu"}),
        ({"qk_layernorm": True}, {"qk_norm": True}),
        ({"untie_embeddings_and_output_weights": False}, {"tie_word_embeddings": True}),
        (
            {"position_embedding_type": "learned_absolute"},
            {"position_embedding": "learned_absolute"},
        ),
        ({"rotary_base": 5e5}, {"rope_theta": 5e5}),
        ({"mtp_num_layers": 2, "mtp_hsm": True}, {"mtp_num_layers": 2}),
        (
            {"num_experts": 8, "moe_layer_freq": 1, "moe_router_topk_scaling_factor": 2.5},
            {
                "num_moe_experts": 8,
                "moe_ffn_hidden_size": 24,
                "moe_router_topk_scaling_factor": 2.5,
            },
        ),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 4.0},
            {
                "rope_scaling": RopeScaling(
                    factor=4.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=8192,
                )
            },
        ),
    ],
)
def test_arguments_of_a_training_describe_the_model(
    root: Path, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    write_arguments(root / "iter_0000020", **changes)
    expected = {**CONFIG.to_dict(), **fields}
    assert describe_pretrained(root).config == ModelConfig(**expected)


@pytest.mark.parametrize("rope_type", (None, "rope"))
def test_latents_of_a_training_are_those_of_megatron(rope_type: str | None, tmp_path: Path) -> None:
    """Its rotations, its scale, and the names of Transformer Engine's layers for its norms."""
    config = ModelConfig.from_dict(
        {**CONFIG.to_dict(), "num_kv_heads": 2, "head_dim": 14, "attention_scale": 1.0}
        | {"latent_attention": {**LATENT_SIZES, "q_lora_rank": 20}}
    )
    model = build_model(config, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_distributed(tmp_path, model, config)
    (tmp_path / "config.json").unlink()
    write_arguments(tmp_path, **LATENTS, rope_type=rope_type)
    names = set(read_metadata(tmp_path))
    assert {
        "decoder.layers.input_layernorm.weight",
        "decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight",
        "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight",
    } <= names
    loaded = load_pretrained(tmp_path)
    attention = loaded.model.decoder.layers[0].self_attention
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name
    mla = {name: value for name, value in LATENTS.items() if name != "qk_layernorm"}
    megatron = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, **mla,
        **({} if rope_type is None else {"rope_type": rope_type}),
    )  # fmt: skip
    mscale = _yarn_get_mscale(megatron.rotary_scaling_factor, megatron.mscale_all_dim)
    assert attention.softmax_scale == pytest.approx(mscale**2 / 14**0.5)
    cos, _ = attention.rotary.prefix(60)
    if rope_type is None:
        rotary = YarnRotaryEmbedding(
            6, scaling_factor=8.0, original_max_position_embeddings=16, mscale=0.7,
            mscale_all_dim=0.9, use_cpu_initialization=True,
        )  # fmt: skip
        angles, factor = rotary.get_emb(60)
        torch.testing.assert_close(cos, angles[:, 0, 0, :3].cos() * factor)
    else:
        torch.testing.assert_close(cos[1], (10000 ** (-torch.arange(0, 6, 2) / 6)).cos())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": 8, "moe_layer_freq": [1, 0]}, "moe_layer_freq=.*a 0 or a 1 for each"),
        ({"num_experts": 8, "moe_layer_freq": 0}, "args.moe_layer_freq=0 is not supported"),
        ({"num_experts": 1}, "moe_router_topk=2 must be at most num_moe_experts=1"),
        (
            {"num_experts": 8, "moe_router_load_balancing_type": ["sinkhorn"]},
            "args.moe_router_load_balancing_type=.*supported: a top-k router",
        ),
        ({"moe_apply_probs_on_input": True}, "args.moe_apply_probs_on_input=True is not"),
        ({"multi_latent_attention": True}, "args.qk_layernorm=None is not supported.*norms of lat"),
        ({**LATENTS, "rotary_percent": 0.5}, "args.rotary_percent=0.5 is not supported"),
        ({**LATENTS, "rope_type": "xpos"}, "args.rope_type='xpos' is not supported"),
        (
            {"position_embedding_type": "mrope"},
            "position_embedding_type='mrope'.* rope",
        ),
        ({"window_size": (127, 0)}, "args.window_size=<a tuple of 2> is not supported"),
        ({"hidden_size": None}, "args.hidden_size=None must be an integer"),
        ({"num_layers": 10**6}, "the configuration describes|num_layers=1000000, and the weights"),
        ({"num_layers": 10**5000}, "num_layers=a number of too many digits must be a positive"),
        ({"swiglu": np.array([True, False])}, "args.swiglu=<numpy.* must be True or False"),
        ({"softmax_type": np.array(["vanilla"])}, "args.softmax_type=<numpy.* is not supported"),
        ({"normalization": "x" * 2**20}, r"args\.normalization='x+\.\.\. is not supported"),
        ({"params_dtype": torch.int8}, "args.params_dtype=<torch.int8> is not supported"),
        ({"norm_epsilon": "small"}, "args.norm_epsilon='small' must be a number"),
    ],
)
def test_argument_that_is_not_supported_is_named(
    root: Path, changes: dict[str, Any], reason: str
) -> None:
    write_arguments(root / "iter_0000020", **changes)
    with pytest.raises(CheckpointError, match=reason):
        load_pretrained(root)


def test_tokenizer_is_found_by_its_stored_name(root: Path, tmp_path_factory: Any) -> None:
    iteration = root / "iter_0000020"
    elsewhere = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(TINY / "tokenizer.json", elsewhere)
    for stored in (elsewhere, elsewhere / "tokenizer.json", elsewhere / "tokenizer.model"):
        write_arguments(iteration, tokenizer_model=str(stored))
        assert load_pretrained(root).tokenizer is not None
        assert load_tokenizer(root).tokenize("a") == load_tokenizer("tiny").tokenize("a")
    for stored in ("no/where", "x" * 300, "a\0b", 7, "org/not-in-the-cache"):
        write_arguments(iteration, tokenizer_model=stored)
        assert load_pretrained(root).tokenizer is None
    # As later versions of Megatron-LM save it.
    os.mkdir(iteration / "tokenizer")
    shutil.copy(TINY / "tokenizer.json", iteration / "tokenizer")
    assert load_pretrained(root).tokenizer is not None


def test_tokenizer_is_taken_as_given(root: Path) -> None:
    for given in (TINY, TINY / "tokenizer.json"):
        assert load_pretrained(root, tokenizer_model=given).tokenizer is not None
    arguments = ["--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(["generate", "--model", str(root), "--tokenizer-model", str(TINY), *arguments]) == 0
    for given in (root, TINY / "config.json", "x" * 300):
        with pytest.raises(CheckpointError, match=r"tokenizer|File name too long"):
            load_pretrained(root, tokenizer_model=given)


@pytest.mark.parametrize(
    ("changes", "tokenizer", "count"),
    [
        ({"vocab_size": 380}, None, 380),
        ({"vocab_size": 380}, 383, 383),
        ({"vocab_size": 380, "tokenizer_type": "NullTokenizer"}, None, 381),
        ({"vocab_size": 384}, None, None),
        ({"vocab_size": 999}, None, None),
        ({"vocab_size": None}, None, None),
        ({"vocab_size": None}, 300, 300),
        ({"vocab_size": None}, 200, None),  # training had another one
        ({"vocab_size": None, "make_vocab_size_divisible_by": 8}, 300, None),
        ({"vocab_size": None, "make_vocab_size_divisible_by": 0}, 300, None),
        ({"vocab_size": None, "tensor_model_parallel_size": 3}, 200, 200),
    ],
)
def test_tokens_of_a_padded_vocabulary(
    root: Path, changes: dict[str, Any], tokenizer: int | None, count: int | None
) -> None:
    write_arguments(root / "iter_0000020", **changes)
    described = describe_pretrained(root)
    assert described.vocabulary is not None
    assert described.vocabulary.token_count(described.config.vocab_size, tokenizer) == count


@pytest.mark.parametrize("depth", (0, 2))
def test_padding_of_the_vocabulary_is_never_sampled(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = build_model(CONFIG, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        # Whatever the hidden state, one of the padded ids is the likeliest.
        model.output_layer.weight[380:] *= 1000.0
        model.output_layer.weight[381] = -model.output_layer.weight[380]
    save_distributed(tmp_path / "d", model, CONFIG)
    (tmp_path / "d" / "config.json").unlink()
    write_arguments(tmp_path / "d", vocab_size=380)
    greedy = SamplingParams(temperature=0, num_tokens_to_generate=6, return_log_probs=True)
    drawn = SamplingParams(temperature=1.5, seed=3, num_tokens_to_generate=20)
    further = SamplingParams(
        temperature=1.5, seed=4, num_tokens_to_generate=20, repetition_penalty=1.2
    )
    config = config_at(depth, max_requests=4, block_count=40, debug=True)
    with DynamicInferenceEngine.from_pretrained(tmp_path / "d", config) as engine:
        requests = engine.generate([[1, 2, 379]] * 3, [greedy, drawn, further])
        with pytest.raises(RequestError, match=r"token id 380; the model's ids are 0 \.\. 379"):
            engine.generate([[380]], greedy)
    assert max(max(request.generated_tokens) for request in requests) < 380
    tokens, expected = [1, 2, 379], []
    for _ in range(6):
        ids, places = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        logits = model(ids, places, None, runtime_gather_output=True)[0, -1]
        assert logits.argmax() >= 380
        tokens.append(int(logits[:380].argmax()))
        expected.append(logits[:380].log_softmax(0).max().item())
    assert requests[0].generated_tokens == tokens[3:]
    assert requests[0].generated_log_probs == pytest.approx(expected, abs=1e-4)

"""Each type of Hugging Face model: its file, its row in ``docs/models.md``, its config."""

from __future__ import annotations

import dataclasses
import importlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import families as package
from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.families import families
from megatron_async.checkpoint.huggingface.huggingface import convert_config
from megatron_async.checkpoint.huggingface.transformers_config import transformers_config
from megatron_async.checkpoint.native import save_native
from megatron_async.contrib.transformers.engine.weights import convert_model
from megatron_async.errors import CheckpointError
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.features import features
from megatron_async.weights.place import read_weights
from tests.support.huggingface_models import CONFIGS, random_model

ROOT = Path(__file__).parents[3]
MOST_LINES = 80
NOT_THEIRS = {"mimo"}
"""Types that transformers does not have; ``test_checkpoint_mtp.py`` has a forward of its own."""


def module_of(path: Path) -> Any:
    """The module of a type's file."""
    return importlib.import_module(f"{package.__name__}.{path.parent.name}.{path.stem}")


def files() -> dict[str, Path]:
    """The file of each type."""
    found = {}
    for path in Path(package.__path__[0]).glob("*/[!_]*.py"):
        found[module_of(path).FAMILY.model_type] = path
    return found


def model_type(name: str) -> str:
    kind: str = CONFIGS[name]().model_type
    return kind


def table() -> list[str]:
    """The rows that ``docs/models.md`` must have."""
    compared: dict[str, list[str]] = {kind: ["a forward of its test"] for kind in NOT_THEIRS}
    for name in CONFIGS:
        compared.setdefault(model_type(name), []).append(name)
    rows = []
    for kind, family in families().items():
        said = (module_of(files()[kind]).__doc__ or "").strip().removesuffix(".")
        row = (f"`{kind}`", f"`{family.architecture}`", said, ", ".join(compared[kind]))
        rows.append(f"| {' | '.join(row)} |")
    return rows


def test_documentation_has_a_row_for_each_type() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == table(), "write into docs/models.md:\n" + "\n".join(table())


def test_a_type_is_one_short_file() -> None:
    assert set(files()) == set(families())
    for path in files().values():
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_every_type_is_compared_with_transformers() -> None:
    assert {model_type(name) for name in CONFIGS} == set(families()) - NOT_THEIRS


@pytest.mark.parametrize("name", CONFIGS)
def test_config_says_the_same_after_a_way_through_json(name: str) -> None:
    values = json.loads(json.dumps({**CONFIGS[name]().to_dict(), "architectures": None}))
    config = convert_config(Path("config.json"), values)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert all(isinstance(feature, str) for feature in features(config))
    for changed in ("num_hidden_layers", "num_attention_heads"):
        changed = families()[model_type(name)].aliases.get(changed, changed)
        with pytest.raises(CheckpointError, match=changed):
            convert_config(Path("config.json"), {**values, changed: "many"})


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3", "cohere-qk-norm", "olmo2", "glm4", "phi3", "granite", "qwen2_moe", "bamba"),
        *("deepseek_v2-groups", "gpt_oss", "nemotron_h-experts"),
    ],
)
def test_weights_survive_saving_and_updates(name: str, tmp_path: Path) -> None:
    """What is stored in another order or form is right in our own format, too."""
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    save_native(tmp_path / "ours", loaded.model, loaded.config)
    again = load_pretrained(tmp_path / "ours")
    assert again.config == loaded.config
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.25)
    theirs.save_pretrained(tmp_path / "new")
    read_weights(again.model, tmp_path / "new")()
    ids = torch.randint(1, 100, (1, 40))
    with torch.no_grad():
        expected = theirs(ids).logits
        found = again.model(ids, torch.arange(40)[None], None, runtime_gather_output=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "nemotron_h"])
def test_models_with_experts_have_a_way_back(name: str) -> None:
    values = {**CONFIGS[name]().to_dict(), "architectures": None, "use_sliding_window": False}
    config = convert_config(Path("config.json"), {**values, "layer_types": None})
    back = transformers_config(config)
    assert back.model_type == name
    assert convert_config(Path("config.json"), {**back.to_dict(), "architectures": None}) == config


@pytest.mark.parametrize("name", ["bamba", "nemotron_h-experts"])
def test_hybrid_models_are_converted_from_memory(name: str) -> None:
    theirs = random_model(name)
    ours = convert_model(theirs).model
    ids = torch.randint(1, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = ours(ids, torch.arange(40)[None], None, runtime_gather_output=True)
        torch.testing.assert_close(found, theirs(ids).logits, atol=1e-4, rtol=1e-4)


IN_MEMORY = ["gpt_neox", "granitemoehybrid-experts", "mixtral"]


@pytest.mark.parametrize(
    ("name", "tied"),
    [*product(IN_MEMORY, (False, True)), ("nemotron_h-experts", False)],
)
def test_names_of_transformers_memory_are_taken(name: str, tied: bool, tmp_path: Path) -> None:
    """Of a trainer's state dict, of a model in memory, and of files that are written so."""
    theirs = random_model(name, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.25)
    theirs.save_pretrained(tmp_path / "in memory", save_original_format=False)
    before = load_pretrained(tmp_path / "before").model
    read_weights(before, theirs.state_dict(), all_parameters=True)()
    ids = torch.randint(1, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    converted = convert_model(theirs).model
    with torch.no_grad():
        wanted = theirs(ids).logits
        for model in (before, converted, load_pretrained(tmp_path / "in memory").model):
            found = model(ids, torch.arange(40)[None], None, runtime_gather_output=True)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["granitemoehybrid-experts", "mixtral"])
def test_a_part_may_have_the_names_of_transformers_memory(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path).model
    new = {n: 2 * x for n, x in theirs.state_dict().items() if "router." in n or "mlp.gate." in n}
    read_weights(model, new)()
    routers = [p for n, p in model.named_parameters() if n.endswith("mlp.router.weight")]
    assert len(routers) == len(new) > 0
    assert all(one.equal(two) for one, two in zip(routers, new.values(), strict=True))


@pytest.mark.parametrize(
    "name", ["granitemoehybrid-experts", "deepseek_v2", "gpt_oss", "mixtral", "gemma2", "smollm3"]
)
@pytest.mark.parametrize("in_memory", (False, True))
def test_tensors_may_come_one_by_one(name: str, in_memory: bool, tmp_path: Path) -> None:
    """As partial updates: by the name of each one alone, of a tied output layer too, and of what
    is no parameter."""
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path).model
    stored = theirs.state_dict() if in_memory else load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    no_parameter = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    for one, tensor in {**stored, **no_parameter}.items():
        read_weights(model, {one: tensor})()
    again = load_pretrained(tmp_path).model
    assert all(x.equal(y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_are_the_same_model(name: str, tmp_path: Path) -> None:
    """As transformers 5 holds them, and stores them where it is told to; number of experts under
    the name of transformers 4."""
    model = random_model(name)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = load_file(tmp_path / "stacked" / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    if name == "qwen3_moe":
        path = tmp_path / "stacked" / "config.json"
        path.write_text(path.read_text().replace("num_local_experts", "num_experts"))
    each, stacked = (load_pretrained(tmp_path / kind) for kind in ("each", "stacked"))
    assert each.config == stacked.config
    expected = dict(each.model.named_parameters())
    for key, parameter in stacked.model.named_parameters():
        assert torch.equal(parameter, expected[key]), key


def test_gpt2_without_prefixes_and_with_masks_loads(tmp_path: Path) -> None:
    """As its authors' files are."""
    random_model("gpt2").save_pretrained(tmp_path)
    expected = load_pretrained(tmp_path).model.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
    save_file(tensors, tmp_path / "model.safetensors")
    for name, tensor in load_pretrained(tmp_path).model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("gpt2", {"n_head": 5}, "n_head=5.*a divisor of n_embd=64"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\].*for each layer"),
        ("ministral", {"layer_types": ["linear_attention"] * 2}, "layer_types="),
        ("mistral-window", {"sliding_window": -4}, "sliding_window=-4 must be a positive"),
        ("phi3-longrope", {"partial_rotary_factor": 0.3}, "elements"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be a finite number above 0"),
        ("gemma2", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers=10+ is"),
        ("smollm3", {"num_hidden_layers": 10**9}, "num_hidden_layers=10+ is not supported"),
        (
            "qwen2-yarn",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2}},
            "theta",
        ),
        ("qwen3-dynamic", {"head_dim": 2}, "dynamic needs more than 2 rotated elements"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\].*Infinity"),
        ("mamba2", {"head_dim": 20}, "head_dim=20 is not supported.* 8 heads have 128 elements"),
        ("bamba", {"mamba_d_head": {}}, "mamba_d_head={} must be of type int"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_num_groups=3 must divide the 8 heads"),
        ("nemotron_h", {"layers_block_type": ["mamba", "gru"]}, "layers_block_type=.*one of mamba"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "MX", "layers_block_type": None},
            "hybrid_override_pattern='MX'.* letters",
        ),
        ("nemotron_h-experts", {"topk_group": 3}, "topk_group=3.*half of num_experts_per_tok=4"),
        ("nemotron_h-latent", {"num_experts_per_tok": 1}, "norm_topk_prob=True is.*: false with"),
        ("nemotron_h-latent", {"norm_topk_prob": False}, "norm_topk_prob=False is.*: true with"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types=.* for each layer"),
        ("cohere", {"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
        ("mixtral", {"num_local_experts": 0}, "num_moe_experts=0 must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 5}, "moe_router_topk=5.*num_moe_experts=4"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported.*: False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*greedy, group_limit"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0 must be a positive integer"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported; supported: 1.702"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; supported: null"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not supported"),
        (
            "qwen2-yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e300}},
            "factor=1e\\+300",
        ),
    ],
)
def test_wrong_values_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    values = {**CONFIGS[name]().to_dict(), "architectures": None}
    if "partial_rotary_factor" in changes:
        values["rope_parameters"] = {**values["rope_parameters"], **changes}
    with pytest.raises(CheckpointError, match=message):
        convert_config(Path("config.json"), {**values, **changes})


@pytest.mark.parametrize("kind", ["relu", "squared_relu", "geglu"])
def test_activations_of_megatron(kind: Any) -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_kv_heads=2, head_dim=8,
        ffn_hidden_size=24, vocab_size=32, max_sequence_length=64, activation=kind,
        normalization="LayerNorm", zero_centered_gamma=True, rotary_fraction=0.5,
    )  # fmt: skip
    from megatron_async.models.build import build_random_model

    model: Any = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    x = torch.randn(5, 16)
    mlp = model.decoder.layers[0].mlp
    h = x @ mlp.linear_fc1.weight.T
    if kind == "geglu":
        gate, up = h.chunk(2, dim=-1)
        h = torch.nn.functional.gelu(gate) * up
    else:
        h = h.relu() if kind == "relu" else h.relu().square()
    torch.testing.assert_close(mlp(x)[0], h @ mlp.linear_fc2.weight.T)
    norm = model.decoder.final_layernorm
    assert not norm.weight.any() and not norm.bias.any()
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (16,)))


def test_l2_norm_has_no_weights() -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_kv_heads=2, head_dim=8,
        ffn_hidden_size=24, vocab_size=32, max_sequence_length=64, qk_norm=True, qk_norm_kind="l2",
    )  # fmt: skip
    from megatron_async.models.build import build_random_model

    model: Any = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    attention = model.decoder.layers[0].self_attention
    assert not list(attention.q_layernorm.parameters())
    query, key, _ = attention.get_query_key_value_tensors(torch.randn(3, 1, 16))
    for x in (query, key):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(3, 1, 2), atol=2e-2, rtol=0)
    plain = dataclasses.replace(config, qk_norm=False)
    assert features(config) == [
        *features(plain),
        "norms of each head's query and key, without weights",
    ]


def of_transformers(config: Any, seed: int = 5) -> Any:
    """A random model of ``config``, whose attention is not close to even."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    return model.float().eval()


def differs_by(theirs: Any, folder: Path, length: int) -> float:
    """The largest difference of log-probabilities from transformers' over ``length`` tokens."""
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder).model
    ids = torch.randint(1, 100, (1, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits.log_softmax(-1)
        found = ours(ids, torch.arange(length)[None], None, runtime_gather_output=True)
    return float((found.log_softmax(-1) - expected).abs().max())


SMALL = {
    "vocab_size": 100, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA3 = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}


@pytest.mark.parametrize(("window", "longest"), ((40, 80), (80, 80), (81, 80), (4096, 96)))
def test_layers_with_a_window_rotate_by_their_own_theta_however_long_it_is(
    window: int, longest: int, tmp_path: Path
) -> None:
    config = transformers.Gemma3TextConfig(
        **GEMMA3,
        sliding_window=window,
        max_position_embeddings=longest,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    assert differs_by(of_transformers(config), tmp_path, 70) < 1e-4


def test_ropes_of_other_kinds_of_layers_are_refused_by_name() -> None:
    values = transformers.Gemma3TextConfig(**GEMMA3).to_dict() | {"architectures": None}
    values["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match="rope_parameters="):
        convert_config(Path("config.json"), values)


@pytest.mark.parametrize(
    "rope",
    (
        {"rope_type": "default", "original_max_position_embeddings": 16},
        {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 24},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
    ),
)  # fmt: skip
def test_queries_grow_from_the_same_length_with_every_kind_of_rope(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.Ministral3Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={**rope, "rope_theta": 1e4, "llama_4_scaling_beta": 0.4},
    )
    assert differs_by(of_transformers(config), tmp_path, 100) < 1e-4


def test_a_length_that_queries_grow_from_must_be_there() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}
    values = transformers.Ministral3Config(**SMALL).to_dict() | {"architectures": None}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings"):
        convert_config(Path("config.json"), {**values, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("heads", "fraction", "scaling"),
    ((4, 0.25, {}), (4, 0.6, {}), (2, 0.22, {}), (4, 0.1, {}),
     (4, 0.25, {"rope_type": "linear", "factor": 4.0})),
)  # fmt: skip
def test_an_odd_number_of_rotated_elements_is_rotated_in_whole_pairs(
    heads: int, fraction: float, scaling: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, **scaling}
    config = transformers.GPTNeoXConfig(
        **{**SMALL, "num_attention_heads": heads},
        max_position_embeddings=64,
        rope_parameters={**rope, "partial_rotary_factor": fraction},
    )
    converted = convert_config(Path("c"), {**config.to_dict(), "architectures": None})
    assert converted.rotary_span % 2 and converted.rotary_dim == converted.rotary_span + 1
    assert differs_by(of_transformers(config), tmp_path, 60) < 1e-4


@pytest.mark.parametrize("name", ["glm", "glm4"])
def test_odd_rotated_parts_of_neighbouring_pairs_are_transformers(
    name: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]()
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        pytest.skip("this release of transformers has no rope_parameters")
    config.rope_parameters = {**rope, "partial_rotary_factor": 0.45}
    config.eos_token_id = config.pad_token_id = None
    assert convert_config(Path("c"), {**config.to_dict(), "architectures": None}).rotary_span % 2
    assert differs_by(of_transformers(config), tmp_path, 60) < 1e-4

"""megatron dist_checkpointing directories: exact both ways, and clear errors."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint import describe_pretrained, load_pretrained, save_distributed
from megatron_async.checkpoint.native import write_config
from megatron_async.checkpoint.reading.distributed_metadata import read_metadata
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at
from tests.support.programs import run_program

from megatron.core.transformer.enums import LayerType  # isort: skip

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=64,
    max_sequence_length=128,
    qk_norm=True,
)
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}
HYBRID: dict[str, Any] = {
    "num_layers": 4,
    "hybrid_override_pattern": "ME*-",
    "mamba_state_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "position_embedding": "none",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied_mtp": {"tie_word_embeddings": True, "mtp_num_layers": 2},
    "biased": {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "gelu": {"activation": "gelu", "normalization": "LayerNorm"},
    "experts": {**EXPERTS, "moe_router_bias": True, "mlp_bias": True},
    "experts_in_some_layers": {**EXPERTS, "moe_layer_freq": [0, 1], "moe_latent_size": 16},
    "hybrid": {**EXPERTS, **HYBRID, "mamba_proj_bias": True},
}

# A program of a megatron user: stock model, stock save, nothing of this package.
STOCK = """
import argparse, contextlib, functools, os, sys, types
import torch
if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
# Nothing is compiled here, and what would compile takes seconds to import.
torch.compile = lambda function=None, **options: function
from megatron.core import jit
jit.disable_jit_fuser()
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec, get_gpt_layer_local_spec, get_gpt_mtp_block_spec)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer, TransformerLayerSubmodules)

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()

def build(mtp_num_layers=None):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=48, normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, mtp_num_layers=mtp_num_layers)
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    mtp = mtp_num_layers and get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    model = GPTModel(
        config=config, vocab_size=64, max_sequence_length=128, transformer_layer_spec=layer,
        position_embedding_type="learned_absolute" if mtp else "none", mtp_block_spec=mtp,
        share_embeddings_and_output_weights=False)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * (0.3 if mtp else 1))
    return model

ARGUMENTS = argparse.Namespace(
    num_layers=2, hidden_size=32, num_attention_heads=4, group_query_attention=True,
    num_query_groups=2, kv_channels=8, ffn_hidden_size=48, normalization="RMSNorm",
    norm_epsilon=1e-5, qk_layernorm=True, add_bias_linear=False, add_qkv_bias=False, swiglu=True,
    position_embedding_type="learned_absolute", max_position_embeddings=128, rotary_percent=1.0,
    untie_embeddings_and_output_weights=True, padded_vocab_size=64, vocab_size=60, mtp_num_layers=2,
    params_dtype=torch.float32, attention_backend=AttnBackend.auto, num_experts=None, seed=1234,
    tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/nowhere/at/all", data_path=["a", "b"])

def save_with_mtp(root):
    # Under the names of both layer specs, with the logits that training sees.
    model = build(mtp_num_layers=2).eval()
    outputs = []
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    model.output_layer.register_forward_hook(
        lambda module, given, out: outputs.append(out[0].detach()[:, 0].clone()))
    ids = torch.arange(40)[None] * 7 % 64
    mask = torch.ones(1, 1, 40, 40).triu(1).bool()
    model(ids, torch.arange(40)[None], mask, labels=ids)
    # In training the MTP layers come first.
    torch.save(outputs, f"{root}/mtp_logits.pt")
    for name, has_map in (("mtp_te", True), ("mtp_local", False)):
        if not has_map:
            for module in model.modules():
                if hasattr(module, "submodules_config"):
                    module.submodules_config.sharded_state_dict_keys_map = {}
        sharded = model.sharded_state_dict()
        for layer in ("decoder.layers", "mtp.layers.1.transformer_layer"):
            key = f"{layer}.self_attention.core_attention._extra_state"
            sharded[key] = ShardedObject(key, torch.zeros(8), (1,), (0,))
        sharded |= {"args": ARGUMENTS, "checkpoint_version": 3.0, "iteration": 7}
        os.makedirs(f"{root}/{name}/iter_0000007")
        dist_checkpointing.save(sharded, f"{root}/{name}/iter_0000007")
        open(f"{root}/{name}/latest_checkpointed_iteration.txt", "w").write("7")

def with_experts(frequency):
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=48, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, num_moe_experts=4, moe_ffn_hidden_size=24,
        moe_router_topk=2, moe_router_score_function="sigmoid", moe_layer_freq=frequency,
        moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True, moe_router_load_balancing_type="none")
    model = GPTModel(
        config=config, vocab_size=64, max_sequence_length=128,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"),
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=False)
    torch.manual_seed(3)
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model.eval()

def save_with_experts(root):
    # Stacked, and with a dense layer between, under the names of both layer specs.
    moe_utils.te_general_gemm = None
    arguments = argparse.Namespace(**vars(ARGUMENTS))
    arguments.__dict__.update(
        num_layers=3, num_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2, mtp_num_layers=None,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True, qk_layernorm=False)
    single = {"singleton_local_shards": True}
    mask = torch.ones(1, 1, 40, 40).triu(1).bool()
    for name, frequency, has_map, metadata in (
        ("moe_all", 1, False, {}), ("moe_single", [1, 0, 1], True, single)):
        model = with_experts(frequency)
        if not has_map:
            for module in model.modules():
                if hasattr(module, "submodules_config"):
                    module.submodules_config.sharded_state_dict_keys_map = {}
        sharded = model.sharded_state_dict(metadata=metadata)
        arguments.moe_layer_freq = frequency
        sharded |= {"args": arguments, "checkpoint_version": 3.0, "iteration": 7}
        os.makedirs(f"{root}/{name}")
        dist_checkpointing.save(sharded, f"{root}/{name}")
        logits = model(torch.arange(40)[None] * 7 % 64, torch.arange(40)[None], mask)
        torch.save(logits.detach(), f"{root}/{name}.pt")

def save_hybrid(root):
    # MambaModel imports kernels that building and saving never call.
    class RMSNorm(torch.nn.Module):
        def __init__(self, size, **kwargs):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))

    def nothing(*args, **kwargs):
        raise AssertionError("building and saving call no kernel")

    nothing = {**dict.fromkeys(("rearrange", "repeat", "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined", "selective_state_update"), nothing),
        "__version__": "2.2.6"}
    for name in ("einops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton",
        *(f"mamba_ssm.ops.triton.{name}" for name in
          ("layernorm_gated", "ssd_combined", "selective_state_update"))):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(nothing, RMSNorm=RMSNorm)
    try:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_layer, mamba_mixer
        try:
            from megatron.core.models.hybrid import hybrid_block as mamba_block  # since 0.18
        except ImportError:
            from megatron.core.ssm import mamba_block
    except ImportError as error:
        open(f"{root}/no_hybrid.txt", "w").write(str(error))
        return
    linears = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    whole = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    norm = mamba_block.TENorm = whole.input_layernorm
    add, layer = whole.self_attn_bda, functools.partial(ModuleSpec, TransformerLayer)
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer, submodules=mamba_mixer.MambaMixerSubmodules(*linears))
    spec = ModuleSpec(mamba_block.MambaStack, submodules=mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            mamba_layer.MambaLayer, submodules=mamba_layer.MambaLayerSubmodules(
                norm, mixer, add, {"norm.": "mixer.in_proj.layer_norm_"})),
        attention_layer=layer(submodules=TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=whole.self_attention, self_attn_bda=add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_"})),
        mlp_layer=layer(submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm, mlp=whole.mlp, mlp_bda=add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}))))
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=48, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, mamba_state_dim=8,
        mamba_head_dim=16, mamba_num_groups=2)
    model = MambaModel(config, spec, 64, 128, hybrid_override_pattern="M-*M")
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    arguments = argparse.Namespace(**vars(ARGUMENTS))
    arguments.__dict__.update(
        num_layers=4, qk_layernorm=False, mtp_num_layers=None, position_embedding_type="none",
        is_hybrid_model=True, hybrid_override_pattern="M-*M", mamba_state_dim=8, mamba_head_dim=16,
        mamba_num_groups=2, mamba_num_heads=None, hybrid_attention_ratio=0.0, hybrid_mlp_ratio=0.0,
        spec=["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"])
    os.makedirs(f"{root}/hybrid")
    dist_checkpointing.save({**model.sharded_state_dict(), "args": arguments}, f"{root}/hybrid")
    torch.save(dict(model.named_parameters()), f"{root}/hybrid.pt")

if __name__ == "__main__":
    root = sys.argv[1]
    model = build()
    torch.save(dict(model.named_parameters()), f"{root}/stock.pt")
    save_with_mtp(root)
    save_with_experts(root)
    save_hybrid(root)
    for name, metadata in (("stacked", {}), ("single", {"singleton_local_shards": True})):
        sharded = model.sharded_state_dict(metadata=metadata)
        sharded["args"] = {"iteration": 3}
        os.mkdir(f"{root}/{name}")
        dist_checkpointing.save(sharded, f"{root}/{name}")
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), f"{root}/ours"))
    torch.save(dict(model.named_parameters()), f"{root}/loaded.pt")
    # The interpreter takes a second to end. What wrote for it is killed with its process group.
    os._exit(0)
"""


def build(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    model = build_model(config, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


@pytest.mark.parametrize("name", VARIANTS)
def test_roundtrip_is_exact(tmp_path: Path, name: str) -> None:
    config = ModelConfig.from_dict({**CONFIG.to_dict(), **VARIANTS[name]})
    model = build(config)
    save_distributed(tmp_path / "d", model, config, eos_token_ids=[3])
    assert {"metadata.json", "common.pt", ".metadata", "config.json"} <= {
        path.name for path in (tmp_path / "d").iterdir()
    }
    loaded = load_pretrained(tmp_path / "d")
    assert loaded.config == config and loaded.eos_token_ids == (3,)
    assert_same(dict(model.named_parameters()), dict(loaded.model.named_parameters()))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stock program saved, and what it loaded of ours."""
    tmp_path = tmp_path_factory.mktemp("stock")
    save_distributed(tmp_path / "ours", build(CONFIG), CONFIG)
    program = tmp_path / "stock.py"
    program.write_text(STOCK)
    run_program(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return tmp_path


def test_stock_megatron_and_we_load_each_other_exactly(stock: Path) -> None:
    loaded = torch.load(stock / "loaded.pt", weights_only=True)
    assert_same(dict(build(CONFIG).named_parameters()), loaded)
    saved = torch.load(stock / "stock.pt", weights_only=True)
    for name in ("stacked", "single"):
        write_config(stock / name, CONFIG)
        assert_same(saved, dict(load_pretrained(stock / name).model.named_parameters()))


@pytest.mark.parametrize("name", ("mtp_te", "mtp_local"))
@torch.no_grad()
def test_mtp_layers_as_training_saves_them_draft_what_training_sees(stock: Path, name: str) -> None:
    """And is loaded from its root, by the arguments that training keeps."""
    changes = {"mtp_num_layers": 2, "position_embedding": "learned_absolute"}
    assert describe_pretrained(stock / name).config == ModelConfig(
        **{**CONFIG.to_dict(), **changes}
    )
    stored = read_metadata(stock / name / "iter_0000007")
    assert ("mtp.layers.1.transformer_layer.input_layernorm.weight" in stored) == (
        name == "mtp_local"
    )
    model: Any = load_pretrained(stock / name).model
    first, second, target = torch.load(stock / "mtp_logits.pt", weights_only=True)
    ids, positions = torch.arange(40)[None] * 7 % 64, torch.arange(40)[None]
    torch.testing.assert_close(model(ids, positions, None)[0], target, atol=1e-4, rtol=1e-4)
    hidden = model.decoder_hidden_states
    for layer, expected in enumerate((first, second)):
        at = layer + 1
        hidden = model.mtp_hidden_states(layer, hidden[:-1], ids[:, at:], positions[:, at:])
        torch.testing.assert_close(model.logits(hidden)[0], expected[:-at], atol=1e-4, rtol=1e-4)
    assert drafted(stock / name, depth=1, drafts=2) == drafted(stock / name, depth=0, drafts=0)


@pytest.mark.parametrize(("name", "frequency"), [("moe_all", None), ("moe_single", (1, 0, 1))])
@torch.no_grad()
def test_experts_as_training_saves_them(
    stock: Path, name: str, frequency: tuple[int, ...] | None
) -> None:
    """Stacked over experts and layers, or each by itself; norms under the names of both specs."""
    loaded = load_pretrained(stock / name)
    changes = {
        "num_layers": 3, "position_embedding": "learned_absolute", "qk_norm": False,
        "moe_layer_freq": frequency, **EXPERTS,
    }  # fmt: skip
    assert loaded.config == ModelConfig.from_dict({**CONFIG.to_dict(), **changes})
    assert loaded.model.decoder.layers[2].mlp.router.expert_bias.any()
    found = loaded.model(torch.arange(40)[None] * 7 % 64, torch.arange(40)[None], None)
    expected = torch.load(stock / f"{name}.pt", weights_only=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_hybrid_model_as_training_saves_it(stock: Path) -> None:
    """``MambaModel`` of megatron-core: z, x, B, C and dt apart, norms under the names of layers
    that hold them."""
    if (stock / "no_hybrid.txt").exists():
        pytest.skip((stock / "no_hybrid.txt").read_text())
    loaded = load_pretrained(stock / "hybrid")
    config = {**CONFIG.to_dict(), **HYBRID, "qk_norm": False, "hybrid_override_pattern": "M-*M"}
    assert loaded.config == ModelConfig.from_dict(config)
    saved = torch.load(stock / "hybrid.pt", weights_only=True)
    saved["decoder.final_layernorm.weight"] = saved.pop("decoder.final_norm.weight")
    # The convolution's are parameters of the mixer itself since 0.19.
    saved = {name.replace("conv1d_", "conv1d."): value for name, value in saved.items()}
    assert_same(saved, dict(loaded.model.named_parameters()))


def drafted(path: Path, depth: int, drafts: int) -> list[list[int]]:
    """Tokens of an engine over ``path``."""
    config = config_at(depth, device="cpu", num_speculative_tokens=drafts, max_requests=2)
    params = [
        SamplingParams(num_tokens_to_generate=16, temperature=t, seed=1, termination_id=-1)
        for t in (0.0, 0.8)
    ]
    with DynamicInferenceEngine.from_pretrained(path, config) as engine:
        requests = engine.generate([[1, 2, 3], [7]], params)
        assert (engine.counters.tokens_drafted > 0) == (drafts > 0)
    return [request.generated_tokens for request in requests]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_distributed(tmp_path / "d", build(CONFIG), CONFIG)
    return tmp_path / "d"


def test_training_arguments_in_common_are_plain_data(saved: Path) -> None:
    args = argparse.Namespace(lr=1e-3, layer_type=LayerType.encoder)
    torch.save({"args": args, "iteration": 3}, saved / "common.pt")
    load_pretrained(saved)


class ByGetattr:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_as_older_pythons_pickle_them(saved: Path) -> None:
    torch.save({"layer_type": ByGetattr(LayerType, "encoder")}, saved / "common.pt")
    load_pretrained(saved)
    for owner, name in ((argparse.Namespace, "__init__"), (LayerType, "__class__")):
        torch.save({"any": ByGetattr(owner, name)}, saved / "common.pt")
        with pytest.raises(CheckpointError, match=r"common\.pt: content refused: "):
            load_pretrained(saved)


def rewrite_metadata(path: Path, edit: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(edit(metadata) or metadata))


def test_metadata_may_name_no_file_outside_the_directory(saved: Path) -> None:
    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    rewrite_metadata(saved, edit)
    with pytest.raises(CheckpointError, match="is not a file of the directory"):
        load_pretrained(saved)


def test_metadata_that_leaves_a_gap_is_refused(saved: Path) -> None:
    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()

    rewrite_metadata(saved, edit)
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight: its chunks do not cover it"):
        load_pretrained(saved)


def test_wrong_architecture_is_named(saved: Path) -> None:
    for changes, message in (
        ({"vocab_size": 65}, r"embedding.* has shape \[64, 32\], expected \[65, 32\]"),
        ({"mtp_num_layers": 1}, r"tensor mtp\.layers\.0.* is missing"),
        ({"qk_norm": False}, r"unexpected tensor decoder\.layers\.self_attention\.k_layernorm"),
    ):
        write_config(saved, ModelConfig.from_dict({**CONFIG.to_dict(), **changes}))
        with pytest.raises(CheckpointError, match=message):
            load_pretrained(saved)


def test_optimizer_state_is_skipped(saved: Path) -> None:
    def edit(metadata: Any) -> None:
        tensors = metadata.state_dict_metadata
        tensors["optimizer.state.exp_avg.x"] = tensors["embedding.word_embeddings.weight"]
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == "embedding.word_embeddings.weight":
                copy = type(index)("optimizer.state.exp_avg.x", index.offset, index.index)
                metadata.storage_data[copy] = info

    rewrite_metadata(saved, edit)
    assert "optimizer.state.exp_avg.x" in read_metadata(saved)
    load_pretrained(saved)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".metadata", "No such file"),
        ("common.pt", r"common\.pt: cannot be read: No such file"),
        ("metadata.json", r"metadata\.json: cannot be read"),
        ("*.distcp", "cannot be read: No such file"),
        ("config.json", r"common\.pt: has no args of Megatron.*config\.json.*write_config"),
    ],
)
def test_missing_file_is_named(saved: Path, name: str, message: str) -> None:
    for path in list(saved.glob(name)):
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(saved)


def test_truncated_data_and_unknown_backend_are_named(saved: Path) -> None:
    for path in saved.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"distcp: (truncated|.* refused)"):
        load_pretrained(saved)
    (saved / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="sharded_backend='zarr' is not supported"):
        load_pretrained(saved)


def test_corrupt_common_archive_is_one_line(saved: Path) -> None:
    with zipfile.ZipFile(saved / "common.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"junk")
    with pytest.raises(CheckpointError, match=r"common\.pt: content refused") as raised:
        load_pretrained(saved)
    assert "\n" not in str(raised.value)

"""A program of a megatron user: stock models, stock saves, nothing of this package."""

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

    nothing = dict.fromkeys(("rearrange", "repeat", "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined", "selective_state_update", "__version__"))
    for name in ("einops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton",
        *(f"mamba_ssm.ops.triton.{name}" for name in
          ("layernorm_gated", "ssd_combined", "selective_state_update"))):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(nothing, RMSNorm=RMSNorm)
    try:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer
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
    os._exit(0)  # the interpreter takes a second to end

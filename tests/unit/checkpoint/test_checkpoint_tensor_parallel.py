"""Each tensor-parallel rank loads its share of a model, from every format."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.weights.parallel_layouts import relay
from tests.support.child_environment import child_environment
from tests.support.fp8_models import kept_bytes
from tests.support.huggingface_models import random_model
from tests.support.mxfp4_models import write_packed
from tests.support.programs import run_program
from tests.unit.checkpoint.test_fp8_weights import write
from tests.unit.checkpoint.test_kept_distributed import count_pending

PROGRAM = """
import logging, os, sys
from pathlib import Path
import torch
from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.errors import CheckpointError
from megatron_async import megatron_compat as compat
from megatron_async.models import parallel
from megatron_async.models.parallel import ModelParallel
from megatron_async.models.quantized.linear import weight_of
from megatron_async.models.quantized.mxfp4 import packed_layers
from megatron_async.ranks.layout import Layout
from megatron_async.weights.place import place
from tests.support.fp8_models import kept_bytes

said = []
log = logging.getLogger("megatron_async.checkpoint.quantized.packed")
log.addFilter(lambda record: said.append(record.getMessage()))
# Forked from a process of one thread, so that the modules are imported once.
other = os.fork()
rank, root = int(other == 0), Path(sys.argv[1])
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
compat.ensure_parallel_state(tensor=2)
parallel.set_current(ModelParallel(Layout(tensor=2), rank))
ids = torch.arange(20)[None]
for name in sys.argv[2:]:
    loaded = load_pretrained(root / name, quantization="mxfp4" if name == "kept" else None)
    if name == "packed":
        assert not said
        found = load_pretrained(root / name, quantization="mxfp4").model.named_parameters()
        meant = dict(loaded.model.named_parameters())
        assert all(each.equal(meant[name]) for name, each in found)
        assert len(said) == 1 and "experts of 2 layers are multiplied out" in said[0], said
    if name == "kept":
        layers = packed_layers(loaded.model).values()
        before = [weight_of(layer, torch.float32) for layer in layers]
        for layer in layers:
            layer.weight.zero_(), layer.weight_scale.zero_()
        new = torch.load(root / "kept.pt")
        place(loaded.model, new, whole=True, all_parameters=True).copy()
        for layer, meant in zip(layers, before):
            assert weight_of(layer, torch.float32).equal(meant)
        loaded = load_pretrained(root / name, quantization="mxfp4")
    if name.endswith("distributed"):
        save_distributed(root / f"{name}_by_two", loaded.model, loaded.config)
    if name == "distributed":
        try:
            save_native(root / "never", loaded.model, loaded.config)
        except CheckpointError as error:
            assert "use save_distributed" in str(error)
    logits = loaded.model(ids, ids, None, runtime_gather_output=True)
    torch.save(logits, root / f"{name}.{rank}.pt")
    torch.save(dict(loaded.model.named_parameters()), root / f"{name}.{rank}.weights.pt")
# E4m3 of shares, from chunks of the whole: each rank quantizes its own rows.
for name in ("native", "experts", "latents"):
    stored = "distributed" if name == "native" else f"{name}_distributed"
    one, two = (kept_bytes(load_pretrained(root / each, quantization="fp8").model)
                for each in (name, stored))
    assert any(key.endswith("weight_scale") for key in one) and one.keys() == two.keys()
    assert not [key for key in one if not one[key].equal(two[key])], name
# A rank that leaves while the other still talks to it takes gloo's threads down with a crash.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
os._exit(0)  # the interpreter takes a second to end
"""
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=64,
    max_sequence_length=64,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    mtp_num_layers=1,
)
OF_HEADS = {
    "latents": replace(
        CONFIG, num_kv_heads=4, qkv_bias=False, mtp_num_layers=0,
        latent_attention=LatentAttention(
            kv_lora_rank=12, q_lora_rank=20, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
    ),
    "sinks": replace(CONFIG, attention_sinks=True, mtp_num_layers=0),
}  # fmt: skip
EXPERTS = replace(
    CONFIG, num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2, mtp_num_layers=0,
    moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True,
)  # fmt: skip
"""Each expert is shared by the ranks, biases included."""
NATIVE = {**OF_HEADS, "experts": EXPERTS}


HUGGINGFACE = ("mixtral", "qwen2_moe")
"""transformers' models with experts, each by itself or stacked."""


FP8 = ("deepseek", "compressed-channel")
"""Scales by blocks that are no whole shares, and by rows."""


def logits_of(path: Path) -> torch.Tensor:
    ids = torch.arange(20)[None]
    logits: torch.Tensor = load_pretrained(path).model(ids, ids, None, runtime_gather_output=True)
    return logits


def save_all_formats(root: Path) -> None:
    from megatron_async.models.build import build_model

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=64,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(config)
    ours = build_model(CONFIG, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in [*theirs.parameters(), *ours.parameters()]:
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(root / "huggingface")
    save_native(root / "native", ours, CONFIG)
    save_distributed(root / "distributed", ours, CONFIG)
    for name in HUGGINGFACE:
        random_model(name).save_pretrained(root / name)
    write_packed(root / "packed")  # whose columns do not divide, 48 for each rank
    kept = load_pretrained(write_packed(root / "kept", intermediate_size=64)).model
    torch.save(dict(kept.named_parameters()), root / "kept.pt")  # which ranks pack again
    for kind in FP8:
        write(root / kind, root / "huggingface", kind)
    for name, config in NATIVE.items():
        model = build_model(config, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        save_native(root / name, model, config)
        save_distributed(root / f"{name}_distributed", model, config)


def test_two_ranks_give_the_logits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all_formats(tmp_path)
    names = ["huggingface", "native", "distributed", "packed", "kept", *HUGGINGFACE, *FP8]
    names += [f"{name}{end}" for name in NATIVE for end in ("", "_distributed")]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_program(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path), *names],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
    )
    for name in names:
        expected = logits_of(tmp_path / name)
        for rank in range(2):
            actual = torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
    for name in names:
        check_layouts(tmp_path, name)
    for name in ("distributed", "experts_distributed"):
        one, two = (
            dict(load_pretrained(tmp_path / each).model.named_parameters())
            for each in (name, f"{name}_by_two")
        )
        assert all(torch.equal(one[name], two[name]) for name in one)
    pending = count_pending(monkeypatch)
    for name, by_two in (("native", "distributed"), ("experts", "experts_distributed")):
        one, two = (
            kept_bytes(load_pretrained(tmp_path / each, quantization="fp8").model)
            for each in (name, f"{by_two}_by_two")
        )
        assert one.keys() == two.keys()
        assert not [key for key in one if not one[key].equal(two[key])], name
        # Of experts that ranks share, halves of all of a layer lie in one chunk.
        assert max(pending) == (1 if name == "native" else 4) and pending[-1] == 0


def check_layouts(root: Path, name: str) -> None:
    """What two ranks have loaded are the shards of what one has, and together all of it."""
    model = load_pretrained(root / name, quantization="mxfp4" if name == "kept" else None).model
    assert any(each.dtype == torch.uint8 for each in model.parameters()) == (name == "kept")
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shards = [
        torch.load(root / f"{name}.{rank}.weights.pt", weights_only=True) for rank in range(2)
    ]
    gated = model.model_config.gated
    joined = relay(shards, gated=gated, by_expert=(False, False))
    assert joined.keys() == whole.keys() and gated
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    for rank, shard in enumerate(shards):
        found = relay([whole], gated=gated, rank=rank, size=2, by_expert=(False, False))
        assert all(torch.equal(found[name], shard[name]) for name in whole)
        # Norms alone are on each rank as a whole.
        assert sum(found[name].shape != whole[name].shape for name in whole) > len(whole) // 2

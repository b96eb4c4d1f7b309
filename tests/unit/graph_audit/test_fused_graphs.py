"""Addresses in the parameters of fused kernels, and in TMA descriptors. What the kernels compute is
left out here: their launches alone hold addresses, and the wrappers that make them are the real
ones. ``test_gpu_audit.py`` has the kernels themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import IntegrityError
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.gemm import skinny_gemm, tile_choice
from megatron_async.kernels.launch_watch import watch
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks.mlp_block import MlpBlock
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.quantized.activations import linears_in_e4m3
from megatron_async.models.quantized.linear import weight_of
from megatron_async.models.served import ServedModel
from tests.support import emulator
from tests.support.audited import model_of, state_of, tokens
from tests.support.decode_rig import bfloat16_model, small
from tests.support.decode_rig import state_of as state_of_parameters
from tests.support.engines import config_at, greedy
from tests.unit.models.test_fused_e4m3_inputs import quantized_model

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


class LaunchedKernel:
    """A kernel that is told its arguments, and leaves memory as it is."""

    shared_bytes, threads = 2**15, 256

    def __init__(self, source: str, defines: Mapping[str, int], device: torch.device) -> None:
        self.name = source

    def launch(self, grid: tuple[int, int, int], *records: Any) -> None:
        for record in records:
            cuda.check_arguments(self.name, record)
        if watch.seen is not None:
            watch.seen(itertools.chain.from_iterable(records))


@pytest.fixture
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Fused kernels where there is no GPU; whether their weights come by TMA."""
    by_tma: bool = getattr(request, "param", False)
    monkeypatch.setattr(emulator, "kernel", LaunchedKernel)
    emulator.install(monkeypatch, sm_count=4)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(rope_append, "rope_append", rope_append.rope_append_reference)
    if by_tma:
        monkeypatch.setattr(cuda, "architecture", lambda device_index: "sm_90a")
        monkeypatch.setattr(tile_choice, "_favours_tma", lambda *problem: True)
        tile_choice.choose.cache_clear()
    return by_tma


def fused_engine(
    drafts: int = 0, made: Any = None, values: Mapping[str, int] | None = None
) -> DynamicInferenceEngine:
    config = replace(small("qwen3"), num_layers=1, mtp_num_layers=1 if drafts else 0)
    network = GPTNetwork(made or bfloat16_model(config, torch.device("cpu")))
    assert network.fused_decode_off is None
    values = {"max_requests": 2, "block_count": 20, "block_size_tokens": 16, **(values or {})}
    engine_config = config_at(
        1, max_sequence_length=64, num_speculative_tokens=drafts, audit_graphs=True, **values
    )
    return DynamicInferenceEngine(ServedModel(network=network), engine_config)


def held_names(engine: DynamicInferenceEngine) -> set[str]:
    """Parameters that graphs hold."""
    audit = engine.runner.audit
    assert audit is not None
    held = {place.begin for place in audit._memory.held}
    return {n for n, p in model_of(engine).named_parameters() if p.data_ptr() in held}


@pytest.mark.parametrize("launched", [False, True], indirect=True, ids=["mma", "TMA"])
def test_all_weights_of_fused_blocks_are_seen_and_pass(launched: bool) -> None:
    with fused_engine() as engine:
        tokens(engine)
        assert held_names(engine) == dict(model_of(engine).named_parameters()).keys()
        audit = engine.runner.audit
        assert audit is not None
        descriptors = sum(held.storage is None for held in audit._memory.held.values())
        assert (descriptors > 3) == launched
        engine.update_weights(state_of(engine))
        engine.reset()
        tokens(engine)
        engine.audit_graphs()


@pytest.mark.parametrize("launched", [True], indirect=True, ids=["TMA"])
def test_rows_that_a_kernel_quantizes_are_scratch(launched: bool) -> None:
    """Of steps of 20 rows, whose weights are e4m3."""
    model = quantized_model("qwen3", torch.device("cpu"))
    layers = linears_in_e4m3(model)
    state = state_of_parameters(model)
    state |= {f"{n}.weight": weight_of(layer, torch.bfloat16) for n, layer in layers.items()}
    with fused_engine(made=model, values={"max_requests": 20, "block_count": 90}) as engine:
        engine.generate([[5, 6, 7]] * 20, greedy(4))
        held = {n for n in held_names(engine) if ".linear_" in n}
        assert held == {f"{name}.weight" for name in layers}
        network: Any = engine.model.network
        assert network._fused._workspace._quantized.keys() == {128, 256}
        engine.update_weights(state)
        engine.reset()
        engine.generate([[5, 6, 7]] * 20, greedy(4))
        engine.audit_graphs()


def test_fused_layers_that_draft_pass(launched: bool) -> None:
    with fused_engine(drafts=1) as engine:
        network: Any = engine.model.network
        assert network.fused_mtp() is not None
        tokens(engine)
        assert {n for n in held_names(engine) if n.startswith("mtp.layers.0.transformer_layer")}
        engine.update_weights(state_of(engine))
        weight = model_of(engine).get_parameter("mtp.layers.0.eh_proj.weight")
        old, weight.data = weight.data, weight.data.clone()
        with pytest.raises(IntegrityError, match=r"mtp\.layers\.0\.eh_proj\.weight is at"):
            engine.audit_graphs()
        del old


@pytest.mark.parametrize("launched", [False, True], indirect=True, ids=["mma", "TMA"])
def test_an_old_address_in_a_parameter_block_is_named(launched: bool) -> None:
    """A module gets another parameter, and the blocks that were built go on with the old one."""
    with fused_engine() as engine:
        tokens(engine)
        weight = model_of(engine).get_parameter(FC1)
        old = weight.data  # alive: only its name says that it is old
        weight.data = old.clone()
        says = rf"model\.{FC1} is at 131072 bytes at 0x\w+ now, and graph"
        with pytest.raises(IntegrityError, match=says):
            engine.update_weights(state_of(engine))
        del old


def test_a_descriptor_of_freed_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    monkeypatch.setattr(cuda, "architecture", lambda device_index: "sm_90a")
    monkeypatch.setattr(tile_choice, "_favours_tma", lambda *problem: True)
    tile_choice.choose.cache_clear()
    make = skinny_gemm.SkinnyGemm._weight_map

    def of_a_copy(gemm: Any, weight: Tensor) -> cuda.TensorMap:
        with _disable_current_modes():  # it is none that a capture makes, and goes away at once
            return make(gemm, weight.clone())

    monkeypatch.setattr(skinny_gemm.SkinnyGemm, "_weight_map", of_a_copy)
    with fused_engine() as engine:
        tokens(engine)
        with pytest.raises(IntegrityError, match=r"holds \d+ bytes .*a descriptor.*nobody has"):
            engine.reset()


def with_padded_weight(block: MlpBlock, change: Callable[[Tensor], Tensor]) -> None:
    """The block keeps a copy of its weight in a form of its own."""
    linear = block._fc1._linear
    block._padded = change(linear.weight)  # type: ignore[attr-defined]

    class Linear:
        weight, bias = block._padded, linear.bias  # type: ignore[attr-defined]

    block._fc1._linear = Linear


def test_a_weight_that_a_block_keeps_in_a_form_of_its_own_must_be_declared(launched: bool) -> None:
    with fused_engine() as engine:
        network: Any = engine.model.network
        (block,) = (p.fused for p in network._fused._places if isinstance(p.fused, MlpBlock))
        with_padded_weight(block, lambda weight: weight.detach().clone())
        tokens(engine)
        with pytest.raises(IntegrityError, match=r"fused\._padded, which graph .* is neither"):
            engine.update_weights(state_of(engine))

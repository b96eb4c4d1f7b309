"""What a decode step of a model launches whose blocks are all fused: these kernels, in this order.

The sequence is written out here as straight lines. Kernels are fakes that write down how they are
called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_attention import DecodeAttentions, Heads
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    FEW_ROWS,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    padded,
)
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks import embedding, gemms
from megatron_async.models.fused.decoder import FusedDecoder
from tests.support import emulator
from tests.support.decode_rig import BLOCK_SIZE, TOKENS, DecodeRig, bfloat16_model, small
from tests.support.e4m3_modules import make_layers_e4m3

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A kernel, what it is built for, and its arguments, with tensors by their names."""


class Recorder:
    """Stands for the kernels of ``models/fused``; tensors are named by their address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Mapping[str, torch.Tensor]) -> None:
        emulator.install(monkeypatch)
        monkeypatch.setattr(where, "device_why_not", lambda model: None)
        monkeypatch.setattr(gemms, "SkinnyGemm", self._gemm)
        monkeypatch.setattr(embedding, "Embed", self._embed)
        monkeypatch.setattr(DecodeAttentions, "get", self._attention)
        self.calls: list[Call] = []
        self._names = {tensor.data_ptr(): name for name, tensor in names.items()}

    def know(self, names: Mapping[str, torch.Tensor]) -> None:
        self._names.update({tensor.data_ptr(): name for name, tensor in names.items()})

    def _named(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._names.setdefault(value.data_ptr(), f"buffer of {value.shape[-1]}")
        return tuple(map(self._named, value)) if isinstance(value, tuple) else value

    def _note(self, kernel: str, built: tuple[Any, ...], given: Any, options: Any) -> None:
        values = {name: self._named(value) for name, value in options.items()}
        arguments = dict(enumerate(map(self._named, given)), **values)
        self.calls.append((kernel, built, {str(k): v for k, v in arguments.items()}))

    def _gemm(
        self, n: int, k: int, rows: int, norm: int, epilogue: int, statistics: int, tiling: Any,
        device: Any, sends: Any = None, scale_columns: int = 0, e4m3_inputs: bool = False,
    ) -> Any:  # fmt: skip
        built = n, k, rows, norm, epilogue, statistics, scale_columns

        def call(*given: Any, **options: Any) -> None:
            self._note("gemm", built, given, options)

        call.statistic_rows = tiling.statistic_rows(rows)  # type: ignore[attr-defined]
        return call

    def _embed(self, hidden: int, per_tile: int, norm: int, *, positions: bool, device: Any) -> Any:
        def call(*given: Any, **options: Any) -> None:
            self._note("embed", (hidden, per_tile, norm, positions), given, options)

        return call

    def _attention(self, heads: Heads, rows: int, capacity: int) -> Any:
        def call(*given: Any, **options: Any) -> None:
            self._note("attention", (heads, rows, capacity), given, options)

        return call


def straight_lines(model: Any, rows: int, capacity: int, per_tile: int) -> list[Call]:
    """The launches of a step, one layer after the other."""
    config, calls = model.config, []
    most, hidden = padded(rows), config.hidden_size
    is_rms = config.normalization == "RMSNorm"
    norm = RMS_NORM if is_rms else LAYER_NORM
    heads, kv_heads, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    x = "scaled" if is_rms else "hidden"
    group = heads // kv_heads
    packed, inner = (group + 2) * kv_heads * dim, config.ffn_hidden_size
    first, activation = (2 * inner, SILU_GATE) if is_rms else (inner, GELU_TANH)
    has_bias, has_positions = not is_rms, not is_rms
    has_head_norms = config.qk_layernorm
    parameters_of = dict(model.named_parameters())

    def scale(name: str) -> str | None:
        return name + "_scale" if name + "_scale" in parameters_of else None

    def bias(name: str) -> str | None:
        return f"{name}.bias" if has_bias else None

    def parameters(name: str) -> tuple[Any, ...]:
        return f"{name}.weight", bias(name), config.layernorm_epsilon

    def scaled(name: str) -> tuple[str, str] | None:
        return (f"{name}.weight", "scaled") if is_rms else None

    def gemm(
        n: int, k: int, normed: int, epilogue: int, given: tuple[str, ...], **options: Any
    ) -> None:
        scales = parameters_of.get(given[1] + "_scale")
        columns = 0 if scales is None else k // scales.shape[1]
        built = n, k, most, normed, epilogue, norm, columns
        if n != model.vocab_size:
            options["weight_scale"] = scale(given[1])
        if epilogue == ADD:
            options["input_scale"] = None
        calls.append(("gemm", built, {**dict(zip("012", given, strict=True)), **options}))

    at = "decoder.layers.{}."
    norms = [at.format(n) + "input_layernorm" for n in range(config.num_layers)]
    norms.append("decoder.final_layernorm")
    words = "embedding.word_embeddings.weight"
    positions = "embedding.position_embeddings.weight" if has_positions else None
    given = ("ids", "positions", words, positions, "hidden", "layer statistics", scaled(norms[0]))
    calls.append(
        ("embed", (hidden, per_tile, norm, has_positions), dict(zip("0123456", given, strict=True)))
    )
    for layer in range(config.num_layers):
        here = at.format(layer)
        attention, mlp = here + "self_attention.", here + "mlp."
        gemm(
            packed, hidden, norm, STORE, (x, attention + "linear_qkv.weight", "qkv"),
            bias=bias(attention + "linear_qkv"), norm=parameters(norms[layer]),
            statistics="layer statistics",
        )  # fmt: skip
        shape = Heads(dim, group, kv_heads, BLOCK_SIZE, has_head_norms, not has_positions)
        given = (
            "qkv", f"keys {layer}", f"values {layer}", "block table", "slots", "positions",
            "mapping", "attended",
        )  # fmt: skip
        calls.append((
            "attention", (shape, rows, capacity),
            {
                **dict(zip("01234567", given, strict=True)),
                "scale": 1 / math.sqrt(dim),
                "cos_sin": None if has_positions else "rotary",
                "q_weight": attention + "q_layernorm.weight" if has_head_norms else None,
                "k_weight": attention + "k_layernorm.weight" if has_head_norms else None,
                "eps": config.layernorm_epsilon if has_head_norms else 0.0,
                "scales": None,
                "sinks": None,
            },
        ))  # fmt: skip
        gemm(
            hidden, heads * dim, NO_NORM, ADD,
            ("attended", attention + "linear_proj.weight", "hidden"),
            bias=bias(attention + "linear_proj"), residual="hidden",
            scaled=scaled(here + "pre_mlp_layernorm"), statistics_out="half statistics",
        )  # fmt: skip
        gemm(
            first, hidden, norm, activation, (x, mlp + "linear_fc1.weight", "activated"),
            bias=bias(mlp + "linear_fc1"), norm=parameters(here + "pre_mlp_layernorm"),
            statistics="half statistics",
        )  # fmt: skip
        gemm(
            hidden, inner, NO_NORM, ADD, ("activated", mlp + "linear_fc2.weight", "hidden"),
            bias=bias(mlp + "linear_fc2"), residual="hidden", scaled=scaled(norms[layer + 1]),
            statistics_out="layer statistics",
        )  # fmt: skip
    tied = model.share_embeddings_and_output_weights
    gemm(
        model.vocab_size, hidden, norm, STORE,
        (x, words if tied else "output_layer.weight", "logits"), norm=parameters(norms[-1]),
        statistics="layer statistics",
    )  # fmt: skip
    return calls


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        *((name, rows, {}) for name in ("llama", "qwen3", "gpt2") for rows in (1, 3, 20, 32)),
        ("llama", 3, {"qkv": 32, "projection": 0, "fc1": 128, "fc2": 64}),
        ("gpt2", 20, {"projection": 64, "fc2": 0}),
        *((name, rows, {}) for name in ("llama", "qwen3") for rows in (65, 100, 128)),
    ],
)
def test_a_model_whose_blocks_are_all_fused_launches_these_kernels_in_this_order(
    name: str, rows: int, columns: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights are e4m3 with scales for so many ``columns``, with these scales."""
    config = replace(small(name), num_layers=3)
    if rows > FEW_ROWS:  # in GEMMs with three stages, on a GPU with wgmma
        config = replace(config, hidden_size=192, head_dim=64)
        monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    device = torch.device("cpu")
    model = bfloat16_model(config, device)
    make_layers_e4m3(model, columns)
    recorder = Recorder(monkeypatch, dict(model.named_parameters()))
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows)
    assert not fused.coverage.fallbacks
    stream = fused._workspace.residual(rows)
    recorder.know(
        {
            "hidden": stream.hidden,
            "qkv": fused._workspace.buffer("qkv", fused.gemms["qkv"].n),
            "attended": fused._workspace.buffer("attended", fused.gemms["projection"].k),
            "activated": fused._workspace.buffer("activated", fused.gemms["fc2"].k),
            "layer statistics": fused._workspace._statistics[0],
            "half statistics": fused._workspace._statistics[1],
        }
    )
    if config.normalization == "RMSNorm":
        recorder.know({"scaled": fused._workspace.buffer("scaled", config.hidden_size)})
    if model.rotary is not None:
        recorder.know({"rotary": model.rotary.cos_sin})

    def forward(ids: Any, positions: Any, context: Any, logits: Any) -> None:
        recorder.calls.clear()
        recorder.know({"ids": ids, "positions": positions, "logits": logits})
        recorder.know({"block table": context.block_table, "slots": context.token_slots})
        recorder.know({"mapping": context.slot_mapping})
        for layer, (keys, values) in enumerate(context.kv_cache):
            recorder.know({f"keys {layer}": keys, f"values {layer}": values})
        assert fused.takes(logits, context)
        fused.forward(ids, positions, context, logits)

    context = rig.context()
    rig.decode(forward, context)
    tiling = fused.gemms["fc2"].tiling(padded(rows))
    assert tiling is not None
    capacity = context.block_table.shape[1] * BLOCK_SIZE
    expected = straight_lines(model, rows, capacity, tiling.statistic_rows(padded(rows)))
    assert len(expected) == 2 + 5 * config.num_layers
    for found, wanted in zip(recorder.calls, expected, strict=True):
        assert found == wanted


@pytest.mark.parametrize(
    ("window", "fused_windows", "by_token"), [(3, True, False), (3, False, True), (17, True, True)]
)
def test_a_window_of_drafts_is_a_row_of_the_attention_and_several_of_the_gemms(
    window: int, fused_windows: bool, by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled ahead is what a step launches."""
    monkeypatch.setattr(decode_attention, "FUSED_WINDOWS", fused_windows)
    config, device = small("qwen3"), torch.device("cpu")
    model = bfloat16_model(config, device)
    recorder, compiled = Recorder(monkeypatch, {}), []
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: compiled.extend(work))
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows=1)
    context = rig.context(window=window)
    packed: list[int] = []

    def attend_packed(layer: int, qkv: torch.Tensor, *_: Any) -> torch.Tensor:
        packed.append(qkv.shape[0])
        return qkv.new_zeros(qkv.shape[0], config.num_attention_heads, config.head_dim)

    monkeypatch.setattr(context, "attend_packed", attend_packed)
    rig.decode_windows(fused.forward, context)
    steps = -(-TOKENS // window) * config.num_layers
    attentions = [built for kernel, built, _ in recorder.calls if kernel == "attention"]
    assert packed == [window] * (steps if by_token else 0)
    assert len(attentions) == steps - len(packed)
    assert {built[2] for kernel, built, _ in recorder.calls if kernel == "gemm"} == {padded(window)}
    fused.compile([window], context)
    made = [macros for source, macros in compiled if source == "attention"]
    for heads, rows, capacity in attentions:
        assert (heads.window, rows) == (window, 1)
        assert made == [heads.defines(padded(rows), capacity, emulator.SM_COUNT)]
    assert bool(made) == bool(attentions)


def test_hidden_states_that_nobody_wants_cost_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = small("llama"), torch.device("cpu")
    model = bfloat16_model(config, device)
    recorder = Recorder(monkeypatch, {})
    fused, rig = FusedDecoder(model), DecodeRig(config, device)
    normed: list[int] = []
    model.decoder.final_layernorm.register_forward_hook(lambda *_: normed.append(1))
    rig.decode(fused.forward)
    assert recorder.calls and not normed
    hidden = torch.empty(rig.rows, config.hidden_size).bfloat16()
    rig.decode(lambda *step: fused.forward(*step, hidden))
    assert normed

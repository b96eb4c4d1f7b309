"""Fused blocks of models whose linear layers quantize their inputs, beside the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.drafting.mtp_input import DraftInput
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, NO_NORM, RMS_NORM, padded
from megatron_async.models.build import build_model
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks import gemms, linears, mtp_blocks
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.mtp import FusedMtp
from megatron_async.models.fused.quantized_rows import quantized_rows
from megatron_async.models.quantized.activations import linears_in_e4m3, quantize_activations
from megatron_async.models.quantized.inputs import product_of
from megatron_async.models.quantized.linear import keep, quantizable, quantize_in_place
from tests.support import decode_rig, emulator
from tests.support.cuda_kernels import device, on_both, on_gpu, relative_error
from tests.support.decode_rig import DecodeRig, bfloat16_model, small

__all__ = ["device"]

ROWS = 20
"""More than the kernels of few rows take: 32, padded."""


@pytest.fixture(autouse=True)
def _as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator counts as a GPU with wgmma; a token a row is enough there."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)
        monkeypatch.setattr(cuda, "has_wgmma", lambda device_index: True)
        monkeypatch.setattr(decode_rig, "TOKENS", 1)


def quantized_model(
    name: str, device: torch.device, static: float | None = None, **values: Any
) -> Any:
    """One layer whose weights and inputs are e4m3, with a scale for each row, or one for all."""
    config = replace(small(name), num_layers=1, **values)
    plain = bfloat16_model(config, device)
    made = build_model(
        config, device=device, dtype=torch.bfloat16, initialize=False, may_be_quantized=True
    ).eval()
    for layer in quantizable(made).values():
        keep(layer, None)
    made.load_state_dict(plain.state_dict(), strict=False)
    for layer in quantizable(made).values():
        quantize_in_place(layer)
    scales = None
    if static is not None:
        scales = {name: torch.tensor([static]) for name in linears_in_e4m3(made)}
    quantize_activations(made, scales)
    return made


def decoded(model: Any, rig: DecodeRig, most: int = MAX_ROWS) -> Tensor:
    """Logits of fused steps; those of layers that are left to modules from ``most`` rows on."""
    fused = FusedDecoder(model)
    if padded(rig.rows) > most:
        begin, *layers, end = fused._places
        chosen: list[Any] = [begin.fused, *(place.module for place in layers), end.fused]
        fused._chosen[padded(rig.rows), decode_rig.BLOCK_SIZE, 0, rig.grids_may_wait] = chosen
    return rig.decode(fused.forward)


@on_both(
    *("name", "static"),
    gpu=[("llama", None), ("gpt2", None), ("qwen3", 0.05)],
    small=[("llama", None)],
)
def test_a_fused_step_gives_what_the_modules_do(
    device: torch.device, name: str, static: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what rounds otherwise: a bfloat16 may become the next number of e4m3."""
    seen = _counted(monkeypatch)
    model = quantized_model(name, device, static)
    rig = DecodeRig(model_config(name), device, ROWS)
    found, meant = decoded(model, rig), decoded(model, rig, 16).double()
    assert relative_error(found, meant) < 0.025
    # Of each token two inputs are normed, and two are as the block has made them.
    steps = decode_rig.TOKENS
    assert seen == {"quantized_stream": 2 * steps, "quantized_rows": 2 * steps}


@pytest.mark.sweep
@on_both(
    *("name", "static"),
    gpu=[("llama", None), ("qwen3", 0.05)],
    small=[("llama", None), ("gpt2", None), ("qwen3", 0.05)],
)
def test_and_not_what_inputs_in_16_bits_give(
    device: torch.device, name: str, static: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other norms, biases and static scales too."""
    if device.type == "cpu":
        monkeypatch.setattr(decode_rig, "TOKENS", 2)
    model = quantized_model(name, device, static)
    rig = DecodeRig(model_config(name), device, ROWS)
    found, meant = decoded(model, rig), decoded(model, rig, 16).double()
    monkeypatch.setattr(gemms, "LEAST_E4M3_ROWS", MAX_ROWS + 1)
    wide, error = decoded(model, rig), relative_error(found, meant)
    assert error < 0.025 and relative_error(wide, meant) > 1.2 * error


def model_config(name: str) -> Any:
    return replace(small(name), num_layers=1)


def _counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often inputs are quantized, by function."""
    seen = dict.fromkeys(("quantized_stream", "quantized_rows"), 0)
    for name in seen:
        own: Callable[..., Any] = getattr(linears, name)

        def counted(*given: Any, name: str = name, own: Callable[..., Any] = own) -> Any:
            seen[name] += 1
            return own(*given)

        monkeypatch.setattr(linears, name, counted)
    return seen


def test_the_projection_of_a_layer_that_drafts_quantizes_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    cpu = torch.device("cpu")
    model = quantized_model("llama", cpu, mtp_num_layers=1)
    seen: list[Tensor] = []

    def noted(linear: Any, x: Tensor, workspace: Any) -> tuple[Tensor, Tensor]:
        seen.append(x.clone())
        return quantized_rows(linear, x, workspace)

    monkeypatch.setattr(mtp_blocks, "quantized_rows", noted)
    for rows, count in ((ROWS, 1), (8, 0)):
        tokens, nothing = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        hidden = torch.randn(rows, 1, model.config.hidden_size).bfloat16()
        of = DraftInput(0, 0, tokens[:, None], nothing, hidden, nothing, nothing, hidden[:1])
        found = FusedMtp(model, {}).project(of)
        assert len(seen) == count and found.isfinite().all()
        if count:
            projection = model.mtp.layers[0].eh_proj
            assert relative_error(found, product_of(projection, seen.pop()).double()) < 4e-3


def test_which_rows_are_multiplied_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 and more, where each row of the weight has one scale."""
    emulator.install(monkeypatch)
    model = quantized_model("llama", torch.device("cpu"))
    found = FusedDecoder(model).gemms
    for name in ("qkv", "projection", "fc1", "fc2"):
        for rows in (1, 8, 16, 32, 48, 64):
            gemm, reads = found[name], rows > 8
            assert gemm.reads_e4m3(rows) == reads == gemm.case(rows).e4m3_inputs
            tiling = gemm.tiling(rows)
            assert tiling is not None and (tiling.tma or not reads)
            if reads:
                assert gemm.case(rows).norm == NO_NORM
    assert found["qkv"].case(8).norm == RMS_NORM
    assert not any(found["head"].reads_e4m3(rows) for rows in (32, 64))
    assert not replace(found["qkv"], tma=False).reads_e4m3(64)
    fc2 = model.decoder.layers[0].mlp.linear_fc2
    quantize_in_place(fc2, 2)
    by_group = FusedDecoder(model).gemms
    assert not by_group["fc2"].reads_e4m3(32) and by_group["fc1"].reads_e4m3(32)


def test_what_is_compiled_ahead_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    cpu = torch.device("cpu")
    model = quantized_model("llama", cpu)
    fused, context = FusedDecoder(model), DecodeRig(model_config("llama"), cpu, 1).context()
    for rows, count in ((8, 0), (16, 4)):
        work = list(fused.kernels_of([rows], context))
        assert sum(macros.get("X8", 0) for _, macros in work) == count
        assert all(macros["NORM"] == 0 for _, macros in work if macros.get("X8"))


@pytest.mark.parametrize("model", [pytest.param(n, marks=on_gpu) for n in ("tiny", "tiny-hybrid")])
def test_depths_change_no_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 rows from the first step to the last one, greedily and sampled."""
    seen = _counted(monkeypatch)
    meant = None
    for depth in (0, 1, 2, 4):
        config = EngineConfig(
            device="cuda", dtype="bfloat16", max_requests=24, block_size_tokens=16, block_count=200,
            max_sequence_length=96, prefill_chunk_tokens=1024, depth=depth, quantization="fp8",
            quantize_activations=True, enable_prefix_caching=False,
        )  # fmt: skip
        params = [
            SamplingParams(
                temperature=row % 2, seed=row, num_tokens_to_generate=40, termination_id=-1
            )
            for row in range(24)
        ]
        with DynamicInferenceEngine.from_pretrained(model, config) as engine:
            made = engine.generate([[row + 5] * 12 for row in range(24)], params)
        found = [each.generated_tokens for each in made]
        meant = meant or found
        assert found == meant, depth
    assert all(seen.values())

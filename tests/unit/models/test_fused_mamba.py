"""Hybrid models decode in fused kernels: the mixer next to attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.kernels import trial
from megatron_async.kernels.mamba.reference import mix_rows
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks import mamba_block
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, MAMBA, MLP
from megatron_async.models.fused.timed_step import first_layers
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.recurrent_states import StepStates
from megatron_async.sampling_params import SamplingParams
from tests.support.cuda_kernels import device, emulated, on_gpu, relative_error
from tests.support.decode_rig import DecodeRig
from tests.support.e4m3_modules import make_e4m3, round_in_place
from tests.support.engines import config_at
from tests.unit.models.test_forward_accuracy import draw_weights

__all__ = ["device"]

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

CONFIG = replace(SHAPES["tiny-nemotron-h"], hidden_size=128, head_dim=32)
"""The smallest that the GEMMs take, of layers M-M*-."""
MIXERS = replace(CONFIG, num_layers=2, hybrid_override_pattern="MM")
LIMIT = 2e-2


def model_on(device: Any, config: ModelConfig = CONFIG) -> Any:
    model = build_model(config, device=device, dtype=torch.bfloat16, initialize=False)
    draw_weights(model)
    for layer in model.decoder.layers:
        if hasattr(layer, "mixer"):
            torch.nn.init.uniform_(layer.mixer.A_log, 0, 1)
            torch.nn.init.uniform_(layer.mixer.dt_bias, -2, 1)
    return model.eval()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=on_gpu)],
    indirect=True,
)  # fmt: skip
@pytest.mark.parametrize("columns", [None, pytest.param(64, marks=pytest.mark.sweep)])
def test_fused_mixers_and_modules_make_one_forward(
    device: torch.device, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With e4m3 weights in the mixers too, that have a scale for ``columns``. In the emulator the
    mixer's kernel, which is Triton's, is its reference."""
    monkeypatch.setattr(trial, "MAMBA", True)
    config = CONFIG
    if device.type == "cpu":
        config = MIXERS
        monkeypatch.setattr(where, "device_why_not", lambda model: None)
        mixed = torch.zeros(64, CONFIG.mamba.inner, dtype=torch.bfloat16)
        kernels = SimpleNamespace(mixed=lambda rows: mixed[:rows], mix_rows=mix_rows)
        monkeypatch.setattr(mamba_block, "kernels_of", lambda *_: kernels)
    model = model_on(device, config)
    linears = []
    if columns is not None:
        mixers = [layer.mixer for layer in model.decoder.layers if hasattr(layer, "mixer")]
        linears = [each for mixer in mixers for each in (mixer.in_proj, mixer.out_proj)]
    for each in linears:
        round_in_place(each, columns)
    fused = FusedDecoder(model)
    for kind, letter in ((MAMBA, "M"), (MLP, "-"), (ATTENTION, "*")):
        layers = [
            n + 1 for n, each in enumerate(config.hybrid_override_pattern or "") if each == letter
        ]
        assert fused.coverage.fused(kind) == tuple(layers)
    plain = GPTNetwork(model, fused_decode=False)
    rig = DecodeRig(config, device)
    for rows in (65, 128):
        assert fused.covered([rows], rig.context()).off == "more than 64 rows"
    reasons = {place.why_not(128, rig.context()) for place in fused._places}
    assert "more than 64 rows of a Mamba-2 layer" in reasons

    def run(forward: Any) -> torch.Tensor:
        context = rig.context()
        assert plain.recurrent_state_spec is not None
        states = context.keep_states(plain.recurrent_state_spec, 0)
        context.finished[: rig.rows] = False

        def step(ids: Any, positions: Any, context: Any, logits: torch.Tensor) -> None:
            rows = states.decode_rows(context.token_slots, positions, context.finished, 1)
            states.begin(StepStates(rows))
            forward(ids, positions, context, logits)

        return rig.decode(step, context)

    wanted = run(lambda *args: args[3].copy_(plain.forward(*args[:3])))
    for each in linears:
        make_e4m3(each, columns, powers=True)
    if linears:
        before, fused = fused, FusedDecoder(model)
        assert fused.coverage == before.coverage and fused.gemms != before.gemms
    assert relative_error(run(fused.forward), wanted.double()) < LIMIT


def test_a_tuned_step_has_layers_of_all_kinds() -> None:
    assert first_layers(CONFIG, 2).hybrid_override_pattern == "M-M*"
    assert first_layers(SHAPES["gpt2"], 3).num_layers == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def engine(self, monkeypatch: pytest.MonkeyPatch, *, kernels: bool, **values: Any) -> Any:
        monkeypatch.setattr(trial, "MAMBA", kernels)
        torch.manual_seed(0)
        wrapper = GPTNetwork(model_on("cuda"))
        config = config_at(1, device="cuda", max_requests=8, **values)
        return DynamicInferenceEngine(ServedModel(network=wrapper), config)

    @pytest.mark.parametrize("drafts", (0, 2))
    def test_steady_steps_neither_synchronise_nor_allocate(
        self, monkeypatch: pytest.MonkeyPatch, drafts: int
    ) -> None:
        values = {"num_speculative_tokens": drafts}
        if drafts:
            values["speculative_method"] = "ngram"
        with self.engine(monkeypatch, kernels=True, **values) as engine:
            params = SamplingParams(num_tokens_to_generate=400, temperature=0.8, termination_id=-1)
            for request_id in range(8):
                engine.add_request(request_id, list(range(1 + request_id, 90)), params)
            for _ in range(12):
                engine.step_modern()
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(60):
                    engine.step_modern()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
            engine.reset()

    def test_prompts_in_chunks_and_decoding_agree_with_torch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Log-probabilities of the same tokens, of which 90 are prefilled in chunks of 32 and one
        of 26, with kernels and without."""
        found = []
        for kernels in (False, True):
            with self.engine(monkeypatch, kernels=kernels, prefill_chunk_tokens=32) as engine:
                params = SamplingParams(
                    num_tokens_to_generate=1, termination_id=-1, temperature=0.0,
                    return_log_probs=True, skip_prompt_log_probs=False,
                )  # fmt: skip
                prompt = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(1))
                (request,) = engine.generate([prompt], [params])
                found.append(torch.tensor(request.prompt_log_probs))
        assert (found[0] - found[1]).abs().max() < 0.1

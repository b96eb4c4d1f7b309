"""Decode steps over an e4m3 KV cache run in fused kernels, and compute what other paths compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.e4m3_cache import E4M3, encode
from megatron_async.models.fused import where
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.sampling_params import SamplingParams
from tests.support.cuda_kernels import device, on_both
from tests.support.decode_rig import DecodeRig, bfloat16_model, small, state_of
from tests.unit.models.test_forward_accuracy import TOLERANCE, Float64Model, Rig

pytestmark = pytest.mark.sweep

__all__ = ["device"]

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

LIMIT = 2 * TOLERANCE[torch.bfloat16]
"""Of keys and values that are off by bfloat16's rounding, some go to the next number of e4m3."""
NAMES = ("qwen3", "gpt2")


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)


class Float64OverE4m3(Float64Model):
    """A float64 forward that keeps keys and values as e4m3 with scales ``[layers, 2, heads]``."""

    scales: Tensor

    def kept(self, key: Tensor, value: Tensor, at: str) -> tuple[Tensor, Tensor]:
        scales = self.scales[int(at.split(".")[2])]
        key, value = (
            encode(x[:, :, 0], scale).double()[:, :, None] * scale.double()[:, None, None]
            for x, scale in zip((key, value), scales, strict=True)
        )
        return key, value


def reference_of(config: Any, state: dict[str, Tensor], scales: Tensor) -> Float64OverE4m3:
    model = Float64OverE4m3(config, state)
    model.scales = scales
    return model


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Windows of the fused attention, with whether its cache is e4m3."""
    calls: list[tuple[bool, int]] = []
    attend = decode_attention.DecodeAttention.__call__

    def noted(self: decode_attention.DecodeAttention, *values: Any, **given: Any) -> None:
        calls.append((values[1].dtype == values[2].dtype == E4M3, self._window))
        attend(self, *values, **given)

    monkeypatch.setattr(decode_attention.DecodeAttention, "__call__", noted)
    return calls


@pytest.fixture
def only_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decode step appends or attends in kernels of its own."""
    attend = CacheAttention.attend_appended

    def attend_appended(self: CacheAttention, tokens: Any, *values: Any) -> Tensor:
        assert tokens.chunks is not None, "a decode step"
        return attend(self, tokens, *values)

    monkeypatch.setattr(CacheAttention, "attend_appended", attend_appended)


@pytest.mark.slow
@pytest.mark.usefixtures("only_fused")
@on_both(
    *("name", "window"),
    gpu=[(name, window) for name in NAMES for window in (1, 2, 3)],
    small=[("qwen3", 1), ("gpt2", 2)],
)
def test_steps_over_e4m3_have_no_fallback(
    device: torch.device,
    name: str,
    window: int,
    attended: list[tuple[bool, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small(name)
    model = bfloat16_model(config, device)
    state, fused, rig = state_of(model), FusedDecoder(model), DecodeRig(config, device, rows=2)
    context = rig.context(window=window, kept=E4M3)
    assert context.scales is not None
    shape = context.scales.shape
    powers = torch.arange(shape.numel(), device=device).view(shape) % 3 - 9  # some are cut off
    context.scales.copy_(2.0**powers)
    compiled: list[Any] = []
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: compiled.extend(work))
    fused.compile([2 * window], context)
    macros = [macros for kernel, macros in compiled if kernel == "attention"]
    assert [each["E4M3"] for each in macros] == [1], "it is compiled ahead"
    assert fused.covered([2 * window], context).fallbacks == ()
    logits = rig.decode_windows(fused.forward, context)
    assert attended and set(attended) == {(True, window)}
    reference = reference_of(config, state, context.scales)
    error = rig.error(logits, state, reference)
    reference.scales = context.scales / 64
    cut = rig.error(logits, state, reference)
    assert error < LIMIT < cut / 4, "what is kept matters"


@pytest.mark.slow
@on_both("name", gpu=[(name,) for name in NAMES], small=[("qwen3",)])
def test_an_engine_decodes_over_e4m3_in_fused_kernels(
    device: torch.device, name: str, attended: list[tuple[bool, int]]
) -> None:
    """On a GPU inside captured graphs. Prompts are read by other kernels from the same cache."""
    config = small(name)
    values: dict[str, Any] = {"num_cuda_graphs": 1, "kv_cache_dtype": "fp8"}
    rig = Rig(config, torch.bfloat16, str(device), 3, kept=E4M3, **values)
    with rig.engine as engine:
        assert engine.model.network.decode_coverage().fallbacks == ()
        scales = engine.runner._program._batch.scales
        state = rig.reference.state
        rig.reference = reference_of(config, state, scales)
        errors = rig.worst_errors(3)
    assert max(errors) < LIMIT, errors
    assert attended and all(is_e4m3 for is_e4m3, _ in attended)


@on_both("window", gpu=[(2,), (3,), (5,)], small=[])
def test_tokens_of_an_engine_with_drafts_are_the_references(
    device: torch.device, window: int, attended: list[tuple[bool, int]]
) -> None:
    """Each is the best one of a float64 forward that keeps e4m3, or next to it."""
    values: dict[str, Any] = {"num_cuda_graphs": 1, "kv_cache_dtype": "fp8"}
    drafts = {"num_speculative_tokens": window - 1, "speculative_method": "ngram"}
    config = small("qwen3")
    rig = Rig(config, torch.bfloat16, str(device), 2, kept=E4M3, **values, **drafts)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, rig.vocab_size, (9 + n,), generator=generator).repeat(2) for n in range(2)
    ]
    params = [
        SamplingParams(temperature=0, num_tokens_to_generate=n, termination_id=-1) for n in (9, 12)
    ]
    with rig.engine as engine:
        reference = reference_of(
            config, rig.reference.state, engine.runner._program._batch.scales.clone()
        )
        requests = engine.generate([prompt.tolist() for prompt in prompts], params)
        assert engine.counters.tokens_drafted > 0
    assert {each for each in attended if each[1] > 1} == {(True, window)}
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = request.generated_tokens
        sequence = torch.tensor([*prompt.tolist(), *tokens[:-1]], device=device)
        logits = reference.logits(sequence)[len(prompt) - 1 :]
        short = logits.amax(1) - logits[range(len(tokens)), tokens]
        assert (short < LIMIT * logits.norm(dim=1)).all()

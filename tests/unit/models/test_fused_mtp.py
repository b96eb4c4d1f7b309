"""MTP layers that draft in fused kernels, block by block, compared with megatron's modules: through
the emulated kernels and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.drafting.mtp import MtpDrafter
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from megatron_async.models.fused import report, where
from megatron_async.models.fused.blocks import mtp_blocks
from megatron_async.models.fused.report import ATTENTION, HEAD, MLP, PROJECTION
from megatron_async.models.fused.timed_step import FusedStep
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.runner.drafter import SampledRows
from tests.support import emulator
from tests.support.batches import new_batch
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.decode_rig import bfloat16_model, small
from tests.support.e4m3_modules import make_e4m3, round_in_place
from tests.unit.models.test_forward_accuracy import TOLERANCE

pytestmark = pytest.mark.sweep

__all__ = ["device"]

mtp_norms = pytest.importorskip(
    "megatron_async.kernels.drafting.mtp_norms", reason="needs Triton", exc_type=ImportError
)

LIMIT = TOLERANCE[torch.bfloat16]
LAYERS = (3, 4)
"""The MTP layers, behind two of the decoder."""


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels; what is said once is said again."""
    report.warn_of_module.cache_clear()
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    compiled = rope_append.rope_append

    def by_device(packed: Tensor, *args: Any) -> Tensor:
        kernel = compiled if packed.is_cuda else rope_append.rope_append_reference
        return kernel(packed, *args)

    monkeypatch.setattr(rope_append, "rope_append", by_device)


def mtp_model(name: str, device: torch.device, **values: Any) -> Any:
    return bfloat16_model(replace(small(name), mtp_num_layers=len(LAYERS), **values), device)


def subclass(module: Any) -> None:
    """Of the same behaviour, which nobody can know."""
    module.__class__ = type(f"Own{type(module).__name__}", (type(module),), {})


class DraftRig:
    """Two steps of ``rows`` rows that draft ``count`` tokens, from hidden states and tokens that
    are the same for all models; drafts themselves are given too, so that they do not decide."""

    def __init__(self, model: Any, device: torch.device, rows: int, count: int) -> None:
        self.device, self.rows, self.count = device, rows, count
        config = model.model_config
        self.context = new_batch(
            params_dtype=torch.bfloat16,
            num_layers=config.num_layers + config.mtp_num_layers,
            kv_channels=config.head_dim,
            num_attention_heads=config.num_kv_heads,
            max_sequence_length=32,
            block_count=2 * rows,
            max_requests=rows,
            num_speculative_tokens=count,
            block_size_tokens=16,
            device=device,
        )
        state = self.context.slots
        state.block_table[:rows] = torch.arange(2 * rows).view(rows, 2).to(device) + 1
        state.finished[:rows] = False
        state.max_total[:rows] = 32
        self.logits: list[Tensor] = []

    def run(self, wrapper: GPTNetwork, *, fused: bool) -> list[Tensor]:
        """Logits of all drafts, and the tails that they leave, if there are any."""
        drafter = MtpDrafter(wrapper, self.context, self.rows)
        if not fused:
            drafter._fused = None
        else:
            assert drafter._fused is not None
            window = self.count + 1
            assert drafter._fused.takes(0, self.rows, window, self.context)
        generator = torch.Generator().manual_seed(1)
        vocab, width = wrapper.vocab_size, drafter._pending.shape[1]
        drafted = torch.randint(0, vocab, (2, self.count, self.rows), generator=generator)
        given = iter(drafted.flatten(0, 1).to(self.device))

        def sample(logits: Tensor, slots: Any, drafts: Any, draft: int, into: Tensor) -> None:
            self.logits.append(logits.clone())
            into.copy_(next(given))

        drafter._sample = sample  # type: ignore[method-assign]
        window = self.count + 1
        first = torch.full((self.rows,), 5)
        for last in (torch.zeros(self.rows).long(), torch.arange(self.rows) % window):
            hidden = torch.randn(self.rows * window, width, generator=generator)
            drafter._pending[: self.rows * window] = hidden.to(self.device)
            tokens = torch.randint(0, vocab, (self.rows, window), generator=generator)
            slots = torch.arange(self.rows)
            step = SampledRows(*(x.to(self.device) for x in (slots, tokens, last, first)))
            drafter.draft(step, self.count)
            first = first + last + 1
        return [*self.logits, *drafter._tails[: self.rows, 1:].unbind(1)]


Change = Callable[[Any], None]
CASES: dict[str, tuple[Change, dict[str, tuple[int, ...]]]] = {
    "all fused": (lambda model: None, {}),
    "own projection": (lambda model: subclass(model.mtp.layers[0].eh_proj), {PROJECTION: (4,)}),
    "own attention": (
        lambda model: subclass(model.mtp.layers[1].transformer_layer.self_attention),
        {ATTENTION: (3,)},
    ),
    "own norm": (lambda model: subclass(model.mtp.layers[0].final_layernorm), {HEAD: (4,)}),
    "own transformer layer": (
        lambda model: subclass(model.mtp.layers[1].transformer_layer),
        {ATTENTION: (3,), MLP: (3,)},
    ),
}


@on_both(
    "name",
    "case",
    "rows",
    "count",
    gpu=(
        (name, case, rows, count)
        for name in ("qwen3", "gpt2")
        for case in CASES
        for rows, count in ((1, 1), (3, 3), (8, 3))
    ),
    small=[
        ("qwen3", "all fused", 2, 2),
        ("qwen3", "all fused", 1, 3),
        ("qwen3", "own projection", 2, 2),
        ("qwen3", "own transformer layer", 2, 2),
        ("gpt2", "own attention", 1, 2),
        ("gpt2", "own norm", 1, 2),
    ],
)
@torch.inference_mode()
def test_fused_blocks_draft_as_modules_do(
    device: torch.device, name: str, case: str, rows: int, count: int
) -> None:
    model = mtp_model(name, device)
    CASES[case][0](model)
    wrapper = GPTNetwork(model)
    covered = report.DecodeCoverage(wrapper.decode_coverage().drafting)
    for kind in (PROJECTION, ATTENTION, MLP, HEAD):
        assert covered.fused(kind) == CASES[case][1].get(kind, LAYERS), kind
    wanted = DraftRig(model, device, rows, count).run(wrapper, fused=False)
    got = DraftRig(model, device, rows, count).run(wrapper, fused=True)
    made = wrapper.fused_mtp()._attentions._made  # type: ignore[union-attr]
    windows = {(count + 1, True)}
    if count > len(LAYERS) and LAYERS[-1] in covered.fused(ATTENTION):
        windows.add((1, False))  # the last layer drafts again
    assert {(heads.window, heads.gaps) for heads, *_ in made} == windows
    assert len(got) == len(wanted) == 2 * count + (count > 1)
    for one, other in zip(got, wanted, strict=True):
        assert one.isfinite().all()
        assert relative_error(one, other.double()) < LIMIT


@on_both("columns", gpu=[(32,), (64,), (256,)], small=[(64,)])
@torch.inference_mode()
def test_projections_with_e4m3_weights_draft_as_modules_do(
    device: torch.device, columns: int
) -> None:
    model = mtp_model("qwen3", device)
    projections = [layer.eh_proj for layer in model.mtp.layers]
    for each in projections:
        round_in_place(each, columns)
    wanted = DraftRig(model, device, 2, 2).run(GPTNetwork(model), fused=False)
    for each in projections:
        make_e4m3(each, columns, powers=True)
    wrapper = GPTNetwork(model)
    covered = report.DecodeCoverage(wrapper.decode_coverage().drafting)
    assert covered.fused(PROJECTION) == LAYERS
    got = DraftRig(model, device, 2, 2).run(wrapper, fused=True)
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other.double()) < LIMIT


@emulated
@pytest.mark.parametrize("in_gemm", (False, True))
@torch.inference_mode()
def test_a_draft_takes_these_kernels(in_gemm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the sampler; what the last layer puts out for itself is one token."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(mtp_blocks, "NORM_IN_GEMM", in_gemm)
    launched: list[str] = []
    launch = emulator.EmulatedKernel.launch

    def noted(kernel: Any, *given: Any) -> None:
        launched.append("gemm or attention")
        launch(kernel, *given)

    monkeypatch.setattr(emulator.EmulatedKernel, "launch", noted)
    for name in ("input", "output"):
        kernel = getattr(mtp_norms, f"mtp_{name}_reference")

        def norm(*given: Any, name: str = name, kernel: Any = kernel) -> None:
            launched.append(name)
            kernel(*given)

        monkeypatch.setattr(mtp_norms, f"mtp_{name}_reference", norm)
    model, rows, count = mtp_model("qwen3", torch.device("cpu")), 1, 3
    DraftRig(model, torch.device("cpu"), rows, count).run(GPTNetwork(model), fused=True)
    each = ["input", *6 * ["gemm or attention"], *([] if in_gemm else ["output"])]
    assert launched == 2 * count * [*each, "gemm or attention"]


@torch.inference_mode()
def test_reasons_are_told_for_each_block_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    model = mtp_model("qwen3", torch.device("cpu"))
    first, second = model.mtp.layers
    first.eh_proj.register_forward_hook(lambda *_: None)
    subclass(first.final_layernorm)
    subclass(second)
    covered = GPTNetwork(model).decode_coverage()
    assert covered.off is None and covered.fused(MLP) == (1, 2)
    own = "OwnMultiTokenPredictionLayer is not covered"
    assert [str(fallback) for fallback in covered.fallbacks] == [
        "the projection of layer 3: a module has forward hooks",
        "the head of layer 3: norm OwnRMSNorm is not covered",
        f"the projection of layer 4: {own}",
        f"attention of layer 4: {own}",
        f"the MLP of layer 4: {own}",
        f"the head of layer 4: {own}",
    ]
    drafting = covered.to_dict()["drafting"]
    assert drafting == {"projection": [], "attention": [3], "mlp": [3], "head": []}
    alone = GPTNetwork(model, fused_decode=False)
    assert alone.fused_mtp() is None
    heads = [f.layers for f in alone.decode_coverage().fallbacks if f.kind == HEAD]
    assert heads == [(), LAYERS], "the decoder's, and those of MTP layers"
    assert {block.reason for block in alone.decode_coverage().drafting} == {"fused_decode=False"}


@emulated
@pytest.mark.parametrize("rows", [5, 100])
@torch.inference_mode()
def test_the_projection_is_measured_with_the_decoder(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    model = mtp_model("qwen3", torch.device("cpu"))
    step = FusedStep(model, {})
    size = model.config.hidden_size
    gemm = step.gemms["eh_proj"]
    assert (gemm.n, gemm.k) == (size, 2 * size)
    assert set(step.gemms) == {"qkv", "projection", "fc1", "fc2", "head", "eh_proj"}
    monkeypatch.setattr(step.decoder, "forward", lambda *_: None)
    tokens = torch.tensor([3, 1, 4, 1, 5]).repeat(20)[:rows]
    found = step.forward(tokens, tokens, None, torch.empty(0))
    assert found is not None
    hidden, first = step._hidden[:rows, 0], model.mtp.layers[0]
    embedded = first.enorm(model.embedding.word_embeddings.weight[tokens])
    wanted = first.eh_proj(torch.cat([embedded, first.hnorm(hidden)], 1))[0]
    assert relative_error(found, wanted.double()) < LIMIT
    plain = bfloat16_model(small("qwen3"), torch.device("cpu"))
    assert "eh_proj" not in FusedStep(plain, {}).gemms


@pytest.mark.parametrize("has_wgmma", [False, True])
@torch.inference_mode()
def test_what_drafts_need_is_compiled_at_start(
    has_wgmma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 64 tokens, and those of the tokens beyond the last layer; without wgmma a projection
    leaves its GEMM to a module above 32. A GPU with wgmma drafts no more."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: has_wgmma)
    compiled: list[tuple[str, dict[str, int]]] = []
    monkeypatch.setattr(cuda, "compile_together", lambda work, on: compiled.extend(work))
    model = mtp_model("qwen3", torch.device("cpu"), ffn_hidden_size=384)
    wrapper, rig = GPTNetwork(model), DraftRig(model, torch.device("cpu"), 2, 2)
    wrapper.prepare([3, 60, 120], rig.context)
    size = 2 * model.config.hidden_size
    assert not [macros for _, macros in compiled if macros.get("K") == size], "nobody drafts"
    fused = wrapper.fused_mtp()
    assert fused is not None and wrapper.fused_mtp() is fused
    wrapper.prepare([3, 60, 120], rig.context)
    rows = {macros["MT"] * 8 for _, macros in compiled if macros.get("K") == size}
    # Of 1, 20 and 40 rows: 3 tokens, one of each; 60 and 120 tokens have no projection.
    assert rows == ({8, 32, 64} if has_wgmma else {8, 32})
    windows = {(macros["WINDOW"], macros["GAPS"]) for _, macros in compiled if "GAPS" in macros}
    assert windows == {(1, 0), (3, 0), (3, 1)}, "1: of drafts beyond the last layer"
    covered = report.DecodeCoverage((), wrapper.decode_coverage().drafting)
    told = [str(f) for f in covered.fallbacks if f.kind == PROJECTION]
    assert len(told) == (not has_wgmma)
    if told:
        reason = "the projection of layers 3-4 at 64 rows: no tile config for eh_proj"
        assert told[0].startswith(reason)
    many = fused.covered([40], 3, rig.context)
    assert {block.reason for block in many} == {"more than 64 tokens"}
    assert fused.takes(1, 20, 3, rig.context) and not fused.takes(1, 40, 3, rig.context)
    assert fused.takes(1, 32, 1, rig.context) and not fused.takes(1, 65, 1, rig.context)

"""Each block of a model decodes in fused kernels or in its modules, next to blocks of either kind.

Logits and hidden states of whole models are compared with a float64 forward, on a GPU and through
the emulated kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, TileConfig
from megatron_async.kernels.ranks import peer_sum
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.fused import coverage, where
from megatron_async.models.fused.blocks import rank_sums
from megatron_async.models.fused.blocks.gemms import SkinnyGemms
from megatron_async.models.fused.blocks.kernel_parameters import output_weight
from megatron_async.models.fused.blocks.linears import RowParallel
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, EMBEDDING, HEAD, MLP, DecodeCoverage
from megatron_async.models.gpt_network import GPTNetwork
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.decode_rig import TOKENS, DecodeRig, bfloat16_model, small, state_of
from tests.unit.models.test_forward_accuracy import TOLERANCE, Float64Model, Rig

pytestmark = pytest.mark.sweep

__all__ = ["device"]

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

LIMIT = TOLERANCE[torch.bfloat16]
NAMES = ("qwen3", "gpt2")
"""RMSNorm, norms of heads, rotation, one weight at both ends; LayerNorm, biases, positions."""


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)


class Experts(torch.nn.Module):
    """Somebody's own module with the call signature of megatron's MLP, and a bias of its own."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, hidden_states: Tensor, padding_mask: Any = None) -> tuple[Tensor, Any]:
        output, bias = self.inner(hidden_states)
        assert output.shape == hidden_states.shape
        return output, bias


def subclass(module: Any) -> None:
    """Of the same behaviour, which nobody can know."""
    module.__class__ = type(f"Own{type(module).__name__}", (type(module),), {})


def own_mlp(model: Any, layer: int) -> None:
    model.decoder.layers[layer].mlp = Experts(model.decoder.layers[layer].mlp)


def own_attention(model: Any, layer: int) -> None:
    subclass(model.decoder.layers[layer].self_attention)


def own_addition(model: Any, layer: int) -> None:
    """Dropout and addition as megatron does it, by another name."""
    add = model.decoder.layers[layer].mlp_bda
    model.decoder.layers[layer].mlp_bda = lambda *args: add(*args)


def everything_but(model: Any, layer: int) -> None:
    """One fused MLP in a model of modules."""
    for number, each in enumerate(model.decoder.layers):
        subclass(each.self_attention)
        if number != layer:
            subclass(each)
    subclass(model.embedding)
    subclass(model.output_layer)


def ends(model: Any, layer: int) -> None:
    subclass(model.embedding)
    subclass(model.decoder.final_layernorm)


Change = Callable[[Any, int], None]
CASES: dict[str, tuple[Change, int, dict[str, tuple[int | None, ...]]]] = {
    "all fused": (lambda *_: None, 0, {}),
    "an MLP that nobody knows": (own_mlp, 0, {MLP: (2,)}),
    "the last one": (own_mlp, 1, {MLP: (1,)}),
    "attention that nobody knows": (own_attention, 0, {ATTENTION: (2,)}),
    "the last attention": (own_attention, 1, {ATTENTION: (1,)}),
    "a layer": (lambda m, n: subclass(m.decoder.layers[n]), 0, {ATTENTION: (2,), MLP: (2,)}),
    "an addition": (own_addition, 0, {MLP: (2,)}),
    "embedding and head": (ends, 0, {EMBEDDING: (), HEAD: ()}),
    "one fused MLP": (everything_but, 1, {ATTENTION: (), MLP: (2,), EMBEDDING: (), HEAD: ()}),
}


@pytest.mark.slow
@on_both(
    "name",
    "case",
    gpu=((name, case) for name in NAMES for case in CASES),
    small=[(NAMES[n % 2], case) for n, case in enumerate(CASES)],
)
def test_fused_blocks_and_modules_make_one_forward(
    device: torch.device, name: str, case: str
) -> None:
    config = small(name)
    model = bfloat16_model(config, device)
    state = state_of(model)
    change, layer, expected = CASES[case]
    change(model, layer)
    fused = FusedDecoder(model)
    everything = {EMBEDDING: (None,), ATTENTION: (1, 2), MLP: (1, 2), HEAD: (None,)}
    for kind, layers in {**everything, **expected}.items():
        assert fused.coverage.fused(kind) == layers, kind
    rig = DecodeRig(config, device)
    assert rig.error(rig.decode(fused.forward), state) < LIMIT


@on_both(
    *("window", "fused_windows"),
    gpu=[(1, True), (2, True), (3, True), (2, False)],
    small=[(2, True)],
)
def test_layers_with_and_without_an_attention_window(
    device: torch.device, window: int, fused_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a soft cap: each layer has its own kernel, compiled ahead."""
    monkeypatch.setattr(decode_attention, "FUSED_WINDOWS", fused_windows)
    config = replace(small("qwen3"), sliding_window=3, sliding_layers=(1,), attention_soft_cap=1.5)
    model = bfloat16_model(config, device)
    state, fused = state_of(model), FusedDecoder(model)
    assert fused.coverage.fused(ATTENTION) == (1, 2)
    compiled: list[Any] = []
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: compiled.extend(work))
    rig = DecodeRig(config, device, rows=2)
    context = rig.context(window=window)
    fused.compile([2 * window], context)
    windows = [macros["SLIDING_WINDOW"] for name, macros in compiled if name == "attention"]
    assert sorted(windows) == ([0, 3] if fused_windows else [])
    logits = rig.decode_windows(fused.forward, context)
    assert rig.error(logits, state) < LIMIT
    for without in ({"sliding_window": None, "sliding_layers": None}, {"attention_soft_cap": None}):
        rig.config = replace(config, **without)
        assert rig.error(logits, state) > LIMIT, "they matter"


@on_both("name", gpu=[(name,) for name in NAMES], small=[("gpt2",)])
def test_layers_of_other_shapes_have_kernels_of_their_own(device: torch.device, name: str) -> None:
    config = replace(small(name), num_layers=3)
    model = bfloat16_model(config, device)
    wide = bfloat16_model(replace(config, ffn_hidden_size=384), device)
    model.decoder.layers[1].mlp = wide.decoder.layers[1].mlp
    fused = FusedDecoder(model)
    names = {"qkv", "projection", "fc1", "fc2", "head", "fc1 of layer 2", "fc2 of layer 2"}
    assert set(fused.gemms) == names and fused.gemms["fc2 of layer 2"].k == 384
    rig = DecodeRig(config, device)
    assert rig.error(rig.decode(fused.forward), state_of(model)) < LIMIT
    assert len(fused._gemms._kernels) == len(names), "layers of one shape share a kernel"


@on_both("name", gpu=[(name,) for name in NAMES], small=[("qwen3",)])
def test_a_block_size_that_attention_does_not_read_leaves_the_mlps_fused(
    device: torch.device, name: str
) -> None:
    config = small(name)
    model = bfloat16_model(config, device)
    fused, rig = FusedDecoder(model), DecodeRig(config, device)
    context = rig.context(block_size=8)
    covered = fused.covered([rig.rows], context)
    assert covered.fused(ATTENTION) == () and covered.fused(MLP) == (1, 2)
    (fallback,) = covered.fallbacks
    assert str(fallback) == "attention of layers 1-2: block size 8 is not a multiple of 16"
    assert rig.error(rig.decode(fused.forward, context), state_of(model)) < LIMIT


@on_both(
    "name",
    "window",
    "fused_windows",
    gpu=((name, w, f) for name in NAMES for w in (2, 3, 4) for f in (True, False)),
    small=[("qwen3", 2, True)],
)
def test_rows_of_several_tokens(
    device: torch.device,
    name: str,
    window: int,
    fused_windows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows of drafts in one kernel, or appended first and attended token by token."""
    monkeypatch.setattr(decode_attention, "FUSED_WINDOWS", fused_windows)
    config = small(name)
    model = bfloat16_model(config, device)
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows=2)
    by_token: list[int] = []
    context = rig.context(window=window)
    right = context.attend_packed

    def attend_packed(layer: int, *values: Any) -> Tensor:
        by_token.append(layer)
        return right(layer, *values)

    monkeypatch.setattr(context, "attend_packed", attend_packed)
    assert rig.error(rig.decode_windows(fused.forward, context), state_of(model)) < LIMIT
    assert bool(by_token) != fused_windows


@on_both("name", gpu=[(name,) for name in NAMES], small=[("qwen3",)])
def test_an_engine_decodes_through_blocks_of_either_kind(device: torch.device, name: str) -> None:
    """On a GPU inside captured graphs."""

    def change(model: Any) -> None:
        own_mlp(model, 0)
        own_attention(model, 1)

    rig = Rig(small(name), torch.bfloat16, str(device), 3, change=change, num_cuda_graphs=1)
    with rig.engine:
        covered = rig.engine.model.network.decode_coverage()
        assert covered.fused(ATTENTION) == (1,) and covered.fused(MLP) == (2,)
        assert max(rig.worst_errors(3)) < LIMIT


@on_both("soft_cap", gpu=[(None,), (1.5,)], small=[])
def test_blocks_behind_an_attention_window_come_free_and_are_not_read(
    device: torch.device, soft_cap: float | None
) -> None:
    config = replace(small("qwen3"), sliding_window=9, attention_soft_cap=soft_cap)
    values = {"num_cuda_graphs": 1, "block_size_tokens": 16}
    rig = Rig(config, torch.bfloat16, str(device), 2, **values)
    with rig.engine:
        covered = rig.engine.model.network.decode_coverage()
        assert covered.fused(ATTENTION) == (1, 2)
        rig.engine.cache.kv[:, :, 0] = torch.nan
        assert max(rig.worst_errors(2, prompt_tokens=40)) < LIMIT


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "statistics of something else": lambda given: given["statistics"].mul_(4),
    "no scaled stream": lambda given: given["scaled"][1].zero_(),
    "another norm's weight": lambda given: given["scaled"][1].mul_(1.5),
}


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_what_a_module_hands_on_would_be_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels.norm import add_statistics

    emulator.install(monkeypatch)
    right = add_statistics.add_statistics_reference

    def wrong(*values: Any, **given: Any) -> None:
        right(*values, **given)
        if given["statistics"] is not None:
            FAULTS[fault](given)

    monkeypatch.setattr(add_statistics, "add_statistics_reference", wrong)
    config, cpu = small("qwen3"), torch.device("cpu")
    model = bfloat16_model(config, cpu)
    state, rig = state_of(model), DecodeRig(config, cpu)
    own_mlp(model, 0)
    assert rig.error(rig.decode(FusedDecoder(model).forward), state) > LIMIT


# --- hidden states -----------------------------------------------------------------------------
@on_both(
    "name",
    "path",
    gpu=((name, path) for name in NAMES for path in ("fused", "head of modules", "own forward")),
    small=[("gpt2", "fused"), ("qwen3", "head of modules"), ("qwen3", "own forward")],
)
def test_hidden_states_are_those_after_the_final_norm(
    device: torch.device, name: str, path: str
) -> None:
    config = small(name)
    model = bfloat16_model(config, device)
    state = state_of(model)
    if path == "head of modules":
        subclass(model.decoder.final_layernorm)
    wrapper = GPTNetwork(model, fused_decode=path != "own forward")
    assert (wrapper.fused_decode_off is None) == (path != "own forward")
    rig = DecodeRig(config, device)
    found: list[Tensor] = []

    def forward(ids: Tensor, positions: Tensor, context: Any, logits: Tensor) -> None:
        hidden = torch.full((rig.rows, config.hidden_size), float("nan"), device=device).bfloat16()
        wrapper.forward_into(logits, ids, positions, context, hidden)
        found.append(hidden)
        # The output layer makes the step's logits of them.
        again = model.logits(hidden.unsqueeze(1)).squeeze(0)
        assert relative_error(again, logits.double()) < LIMIT

    logits = rig.decode(forward)
    assert rig.error(logits, state) < LIMIT
    hidden, reference = torch.stack(found, 1), Float64Model(config, state)
    for row in range(rig.rows):
        assert relative_error(hidden[row], reference.hidden_states(rig.tokens[row])) < LIMIT
    assert rig.decode(lambda i, p, c, out: wrapper.forward_into(out, i, p, c)).equal(logits)


# --- several ranks -----------------------------------------------------------------------------


class Ranks:
    """Two ranks in turns: the first one's partial sums wait for the second one's."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=120)
        self.parts: list[Tensor | None] = [None, None]
        self.sums = self.sent = self.summed = 0
        self.lock = threading.Lock()

    def all_reduce(self, rank: int) -> Callable[[Tensor], None]:
        def reduce(tensor: Tensor) -> None:
            self.parts[rank] = tensor
            self.meet(tensor)  # each has a stream of its own
            if rank == 0:
                one, other = self.parts
                assert one is not None and other is not None and not one.equal(other)
                total = one.float() + other.float()
                one.copy_(total), other.copy_(total)
                self.sums += 1
            self.meet(tensor)

        return reduce

    def meet(self, tensor: Tensor) -> None:
        """Both have computed what they launched."""
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.barrier.wait()

    def summed_at_once(self, multiply: Callable[..., None]) -> Callable[..., None]:
        """:meth:`at_once` of GEMMs that sum where they end."""

        def launched(gemm: SkinnyGemm, x: Tensor, *given: Any, **options: Any) -> None:
            if gemm._sends is None or not gemm._sends.sums:
                multiply(gemm, x, *given, **options)
                return
            if x.is_cuda:  # what is in front of it is over, so both have all SMs
                torch.cuda.current_stream().synchronize()
            self.barrier.wait()
            with self.lock:
                multiply(gemm, x, *given, **options)
                self.summed += 1
            self.barrier.wait()
            if x.is_cuda:
                torch.cuda.current_stream().synchronize()
                self.barrier.wait()

        return launched

    def at_once(self, sum_up: Callable[..., None]) -> Callable[..., None]:
        """Both launch before either goes on: on one GPU what comes next may wait for all kernels.
        And in the emulator they run with the second launch."""

        def launched(kernel: PeerSum, *given: Any, **options: Any) -> None:
            partial, hidden, *rest = given
            self.sent += partial is None
            if hidden.is_cuda:  # no rows wait for nobody, and load the kernel
                none = None if partial is None else partial[:0]
                with self.lock:
                    sum_up(kernel, none, hidden[:0], *rest, **options)
            self.barrier.wait()
            with self.lock:
                sum_up(kernel, *given, **options)
                self.sums += kernel.words.rank
            self.barrier.wait()

        return launched


def rank_of(model: Any, config: ModelConfig, rank: int) -> tuple[Any, ModelConfig]:
    """Half of the heads, of the MLP and of the vocabulary; the rest is whole on either rank."""
    half = replace(
        config,
        vocab_size=config.vocab_size // 2,
        num_attention_heads=config.num_attention_heads // 2,
        num_kv_heads=config.num_kv_heads // 2,
        ffn_hidden_size=config.ffn_hidden_size // 2,
    )
    share = bfloat16_model(half, next(model.parameters()).device)
    whole = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in share.named_parameters():
            value = whole[name].detach()
            if "linear_fc1" in name and config.activation == "swiglu":
                value = torch.cat([part.chunk(2)[rank] for part in value.chunk(2)])
            elif any(part in name for part in ("linear_qkv", "linear_fc1", "word_emb", "output_")):
                value = value.chunk(2)[rank]
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                value = value.chunk(2, dim=1)[rank]
            parameter.copy_(value)
    share.config.tensor_model_parallel_size, share.vocab_size = 2, config.vocab_size
    share.embedding.word_embeddings.vocab_start_index = rank * half.vocab_size
    return share, half


@on_both(
    *("name", "way"),
    gpu=(
        (name, way)
        for name in NAMES
        for way in ("all-reduce", "kernel", "two steps", "sent", "summed", "no room")
    ),
    small=[
        ("gpt2", "all-reduce"),
        ("qwen3", "kernel"),
        ("qwen3", "two steps"),
        ("gpt2", "sent"),
        ("qwen3", "sent"),
        ("gpt2", "summed"),
        ("qwen3", "summed"),
        ("qwen3", "no room"),
    ],
)
def test_partial_sums_of_two_ranks_make_the_whole_model(
    device: torch.device, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An all-reduce in front of the residual stream, here of threads, behind the embedding and each
    row-parallel GEMM; or the kernel that does without, of what was stored or sent; or the GEMM, if
    all its CTAs have room at once. Sums of two steps are never the GEMM's, and what is launched was
    compiled ahead."""
    sends = way in ("sent", "two steps")
    monkeypatch.setattr(rank_sums, "LEAST_SENT_ROWS", 1 if sends else MAX_ROWS + 1)
    config = replace(small(name), head_dim=64, ffn_hidden_size=512, vocab_size=128)
    model = bfloat16_model(config, device)
    state, ranks = state_of(model), Ranks()
    if device.type == "cpu":
        one_at_a_time(monkeypatch)
        monkeypatch.setattr(peer_sum, "CTAS", 1)
    if way == "no room":
        for kind in (cuda.Kernel, emulator.EmulatedKernel):
            monkeypatch.setattr(kind, "runs_at_once", lambda self, ctas: False)
    words: list[Any] = [None, None]
    if way != "all-reduce":
        monkeypatch.setattr(PeerSum, "__call__", ranks.at_once(PeerSum.__call__))
        monkeypatch.setattr(SkinnyGemm, "__call__", ranks.summed_at_once(SkinnyGemm.__call__))
        memory = tuple(torch.zeros(8192, dtype=torch.int64, device=device) for _ in words)
        for rank in range(2):
            launches = torch.zeros(peer_sum.LAUNCHES, dtype=torch.int32, device=device)
            least = 0 if way == "two steps" else None
            words[rank] = PeerWords(rank, memory, launches, 4096, two_steps_from=least)
    ahead, used = set(), set()

    def used_kernel(source: str, macros: dict[str, int], on: torch.device) -> Any:
        used.add((source, *sorted(macros.items())))
        return load(source, macros, on)

    load = peer_sum.kernel
    monkeypatch.setattr(peer_sum, "kernel", used_kernel)
    whole, streams = DecodeRig(config, device), ([], [])

    def run(rank: int) -> Tensor:
        share, half = rank_of(model, config, rank)
        fused = FusedDecoder(share, all_reduce=ranks.all_reduce(rank), words=words[rank])
        rig = DecodeRig(half, device)
        waits = way in ("summed", "no room", "two steps")
        rig.tokens, rig.grids_may_wait = whole.tokens, waits
        assert not fused.covered([rig.rows], rig.context()).fallbacks
        for source, macros in fused.kernels_of([rig.rows], rig.context()):
            ahead.add((source, *sorted(macros.items())))

        return decoded_by_rank(fused, rig, streams[rank])

    with ThreadPoolExecutor(2) as pool:
        logits = torch.cat(list(pool.map(run, range(2))), dim=2)
    first, second = (torch.stack(stream) for stream in streams)
    assert first.equal(second), "all ranks have the same residual stream"
    assert whole.error(logits, state) < LIMIT
    in_layers = 2 * config.num_layers * TOKENS
    assert ranks.sums == TOKENS + (in_layers if way != "summed" else 0)
    assert ranks.sent == (2 * in_layers if way == "sent" else 0)
    assert ranks.summed == (2 * in_layers if way == "summed" else 0)
    steps = {dict(macros)["STEPS"] for _, *macros in used}
    assert used <= ahead and steps == ({2} if way == "two steps" else {1} if any(words) else set())


def decoded_by_rank(fused: FusedDecoder, rig: DecodeRig, stream: list[Tensor]) -> Tensor:
    """A rank's logits of all steps, on a GPU stream of its own; what a step leaves in the residual
    stream is added to ``stream``."""

    def forward(ids: Tensor, positions: Tensor, context: Any, logits: Tensor) -> None:
        hidden = logits.new_empty(rig.rows, rig.config.hidden_size)
        fused.forward(ids, positions, context, logits, hidden)
        stream.append(hidden)

    if rig.device.type == "cpu":
        return rig.decode(forward)
    with torch.cuda.stream(torch.cuda.Stream()):
        logits = rig.decode(forward)
        torch.cuda.current_stream().synchronize()  # others read them on another stream
        return logits


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels are built and launched by several threads."""
    lock = threading.RLock()

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any) -> Any:
            with lock:
                return call(*values)

        return wrapped

    monkeypatch.setattr(emulator, "_kernel", locked(emulator._kernel))
    launch = locked(emulator.EmulatedKernel.launch)
    monkeypatch.setattr(emulator.EmulatedKernel, "launch", lambda self, *v: launch(self, *v))


def test_ranks_that_add_up_and_stages_that_hand_on_have_no_fallbacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    model = bfloat16_model(small("qwen3"), torch.device("cpu"))
    for size, given in {
        "tensor_model_parallel_size": {"parallel": True},
        "pipeline_model_parallel_size": {"stages": True},
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(model.config, size, 2)
            assert DecodeCoverage(coverage.blocks(model)).off == f"config {size}=2"
            covered = DecodeCoverage(coverage.blocks(model, **given))
            assert not covered.fallbacks
            assert covered.fused(ATTENTION) == covered.fused(MLP) == (1, 2)


class Handed:
    """A stage of two that run one after the other."""

    def __init__(self, messages: list[Tensor], *, is_last: bool) -> None:
        self.messages, self.is_first, self.is_last = messages, not is_last, is_last

    def receive_(self, hidden: Tensor) -> Tensor:
        return hidden.copy_(self.messages.pop(0))

    def send(self, hidden: Tensor) -> None:
        self.messages.append(hidden.clone())


@on_both("name", gpu=((name,) for name in NAMES), small=[("gpt2",), ("qwen3",)])
def test_stages_hand_the_residual_stream_on(device: torch.device, name: str) -> None:
    """Two stages of one layer each put out the logits of the whole model."""
    config = small(name)
    model = bfloat16_model(config, device)
    state, rig, messages = state_of(model), DecodeRig(config, device), list[Tensor]()
    layers = model.decoder.layers
    model.output_layer.weight = output_weight(model)  # the last stage has its own copy
    for is_last in (False, True):
        model.decoder.layers = layers[1:] if is_last else layers[:1]
        model.pre_process, model.post_process = not is_last, is_last
        fused = FusedDecoder(model, stages=Handed(messages, is_last=is_last))
        assert not fused.covered([rig.rows], rig.context()).fallbacks
        logits = rig.decode(fused.forward)
        assert bool(logits.any()) == is_last
        assert len(messages) == (0 if is_last else TOKENS)
    assert rig.error(logits, state) < LIMIT


@emulated
def test_the_kernel_of_many_rows_sends_nothing_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stores what they add up, whatever the table says of 64 rows."""
    emulator.install(monkeypatch)
    sums: Any = SimpleNamespace(summing=lambda rows, context: None, sending=lambda rows: "there")
    linear = torch.nn.Linear(256, 64, bias=False).bfloat16()
    for multicast, sent in ((0, "there"), (1, None)):
        config = TileConfig(2, 1, 1, 1, 2, stream_x=True, tma=True, multicast=multicast)
        gemms = SkinnyGemms(torch.device("cpu"), {"projection": config})
        block = RowParallel("projection", linear, gemms, 0, sums, 0)
        assert block._way(64, None) == (block.gemm, sent)

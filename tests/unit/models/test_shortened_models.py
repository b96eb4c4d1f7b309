"""A rehearsal of few layers launches what one of all layers does.

Launches are written down and run nothing, as in a rehearsal, and tensors pass for a GPU's.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.kernels import trial
from megatron_async.kernels.compile_ahead import CompileAhead, can_rehearse
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.fused import where
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers import alike
from megatron_async.models.layers.alike import enough_of, kinds_of
from megatron_async.models.quantized.linear import keep, quantizable, quantize_in_place
from megatron_async.models.served import ServedModel
from tests.support import emulator
from tests.support.engines import config_at
from tests.support.interpreter import INTERPRETED
from tests.support.stock_hybrid import stock_hybrid
from tests.support.stock_model import no_gpu, stock_model
from tests.unit.kernels.test_step_state import InterpretedDevice

__all__ = ["no_gpu"]

SIZES: dict[str, Any] = dict(
    hidden_size=128, num_attention_heads=4, num_kv_heads=2, head_dim=32,
    ffn_hidden_size=256, vocab_size=256, max_sequence_length=512,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_moe_experts=8, moe_ffn_hidden_size=64, moe_router_topk=2)
BIASES = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), True)
EVERY_OTHER = {"sliding_window": 48, "sliding_layers": (0, 2, 4, 6)}
GEMMA = tuple(n for n in range(14) if n % 6 != 5)


class Case(NamedTuple):
    """A model, and which of its layers are rehearsed."""

    config: ModelConfig
    layers: list[int]
    is_quantized: bool = False
    batch_invariant: bool = False


DENSE = ModelConfig(num_layers=6, **SIZES, qk_norm=True)
CASES = {
    "dense": Case(DENSE, [0, 1, 5]),
    "batch-invariant": Case(DENSE, [0, 1, 5], batch_invariant=True),
    "e4m3": Case(DENSE, [0, 1, 5], is_quantized=True),
    "with MTP": Case(ModelConfig(num_layers=5, **SIZES, mtp_num_layers=2), [0, 1, 4]),
    "as GPT-2": Case(
        ModelConfig(
            num_layers=5, **SIZES, **BIASES, normalization="LayerNorm", activation="gelu_tanh",
            position_embedding="learned_absolute",
        ),
        [0, 1, 4],
    ),
    "as Gemma 3": Case(
        ModelConfig(
            num_layers=14, **SIZES, sliding_window=48, sliding_layers=GEMMA, attention_soft_cap=30.0
        ),
        [0, 1, 4, 5, 6, 13],
    ),
    "as Gemma 2": Case(
        ModelConfig(num_layers=8, **SIZES, **EVERY_OTHER, norm_placement="both"), [0, 1, 2, 7]
    ),
    "as GPT-OSS": Case(
        ModelConfig(
            num_layers=8, **SIZES, **EXPERTS, **EVERY_OTHER, **BIASES, attention_sinks=True,
            moe_router_bias=True, activation="clamped_swiglu", activation_limit=7.0,
        ),
        [0, 1, 2, 7],
    ),
    "dense layers first": Case(
        ModelConfig(
            num_layers=7, **SIZES, **EXPERTS, moe_layer_freq=(0, 0, 1, 1, 1, 1, 1),
            moe_shared_expert_intermediate_size=128,
        ),
        [0, 1, 2, 3, 6],
    ),
    "as DeepSeek": Case(
        ModelConfig(
            num_layers=6, **{**SIZES, "num_kv_heads": 4, "head_dim": 48}, **EXPERTS,
            moe_layer_freq=(0, 1, 1, 1, 1, 1),
            latent_attention=LatentAttention(
                kv_lora_rank=64, q_lora_rank=32, qk_pos_emb_head_dim=16, v_head_dim=32
            ),
        ),
        [0, 1, 2, 5],
    ),
    "hybrid": Case(
        ModelConfig(
            num_layers=18, **SIZES, **EXPERTS, hybrid_override_pattern="M-M-M*-M-M*-M-MEME",
            mamba_state_dim=64, mamba_head_dim=16, mamba_num_groups=1,
        ),
        [0, 1, 2, 3, 4, 5, 6, 14, 15, 16, 17],
    ),
}  # fmt: skip
FULL = ("as GPT-OSS",)
"""What a run without ``--all`` has, too."""
cases = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FULL else pytest.mark.sweep) for n in CASES],
)
Launches = set[tuple[Any, ...]]
needs_rehearsals = pytest.mark.skipif(
    INTERPRETED or not can_rehearse(), reason="Triton compiles in no other threads"
)


class CapturingDevice(InterpretedDevice):
    """One whose steps have the shapes that are captured on a GPU."""

    captures = True


class Rig:
    """An engine whose kernels are written down."""

    def __init__(self, case: Case, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime.jit import JITFunction

        self._of_cuda: Launches = set()
        patch.setattr(emulator, "kernel", self._kernel)
        emulator.install(patch)
        patch.setattr(trial, "MAMBA", True)
        patch.setattr(where, "device_why_not", lambda model: None)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        properties = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        stream = SimpleNamespace(wait_event=lambda event: None)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(JITFunction, "run", lambda *_, **__: None)
        drafts = case.config.mtp_num_layers
        self.network = network_of(case)
        self.engine = DynamicInferenceEngine(
            ServedModel(network=self.network, tokenizer=None),
            config_at(
                1, max_requests=24, block_size_tokens=16, block_count=60,
                num_speculative_tokens=drafts, batch_invariant=case.batch_invariant,
            ),
            device=CapturingDevice(),  # type: ignore[arg-type]
        )  # fmt: skip

    def _kernel(self, source: str, defines: Mapping[str, int], device: torch.device) -> Any:
        """Stands for ``compile.kernel``."""
        key = source, *sorted(defines.items())

        def launch(*_: Any, **__: Any) -> None:
            self._of_cuda.add(key)

        return SimpleNamespace(launch=launch, shared_bytes=0)

    def rehearsed(self, *, whole: bool = False) -> Launches:
        """What a rehearsal launches: kernels, each with its variant."""
        graphs, ahead = self.engine.runner._graphs, CompileAhead(torch.device("cuda", 0))
        self._of_cuda.clear()
        with pytest.MonkeyPatch.context() as patch:
            if whole:
                patch.setattr(self.network, "shortened", lambda: self.network)
            for launch in (graphs._launch_around_the_model, graphs._launch_decode_forwards):
                graphs._rehearse(ahead, self.network, launch, None)  # type: ignore[arg-type]
        names = {number: kernel.__name__ for number, kernel in ahead._asked.items()}
        return {(names[number], *variant) for number, *variant in ahead._launched} | self._of_cuda


def network_of(case: Case) -> GPTNetwork:
    device = torch.device("cpu")
    model = build_model(
        case.config, device=device, dtype=torch.bfloat16, initialize=False,
        may_be_quantized=case.is_quantized,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.data.zero_()
    if case.is_quantized:
        for layer in quantizable(model).values():
            keep(layer, None)
            quantize_in_place(layer, 1)
    return GPTNetwork(model.eval(), batch_invariant=case.batch_invariant)


@needs_rehearsals
@cases
def test_few_layers_launch_what_all_of_them_do(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig, case = Rig(CASES[name], monkeypatch), CASES[name]
    assert enough_of(kinds_of(rig.network.model)) == case.layers
    wanted = rig.rehearsed(whole=True)
    assert rig.rehearsed() == wanted and len(wanted) > 15
    assert "not compiled ahead" not in caplog.text
    rig.engine.close()


@needs_rehearsals
@pytest.mark.parametrize("name", ["as Gemma 3", "dense layers first"])
def test_layers_of_one_kind_do_not_launch_what_those_of_others_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(CASES[name], monkeypatch)
    wanted = rig.rehearsed(whole=True)
    monkeypatch.setattr(alike, "kinds_of", lambda model: [0] * len(model.decoder.layers))
    monkeypatch.setattr(alike, "enough_of", lambda kinds: [0])
    assert rig.rehearsed() < wanted
    rig.engine.close()


@needs_rehearsals
def test_one_kernel_around_the_model_is_for_many_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(CASES["with MTP"], monkeypatch)
    assert rig.engine.runner.row_buckets == [1, 2, 4, 8, 16, 24]
    found = Counter(name for name, *_ in rig.rehearsed())
    rig.engine.close()
    one_token, windows = found["_read_packet_and_begin_kernel"], 2
    assert one_token == found["_read_packet_and_begin_windows_kernel"] == 3
    assert found["_finish_and_publish_windows_kernel"] == windows * 3
    assert found["_merge_kernel"] == windows


def test_a_shortened_model_leaves_the_whole_one_as_it_is() -> None:
    network = network_of(CASES["as Gemma 3"])
    model = network.model
    layers, norms = list(model.decoder.layers), [vars(x)["next_norm"] for x in model.decoder.layers]
    few = network.shortened().model
    assert list(model.decoder.layers) == layers
    assert [vars(layer)["next_norm"] for layer in layers] == norms
    assert len(few.decoder.layers) == 6 and few.decoder.final_layernorm is norms[-1]
    for layer, behind in zip(few.decoder.layers, few.decoder.layers[1:], strict=False):
        assert vars(layer)["next_norm"] is behind.input_layernorm
    assert vars(few.decoder.layers[-1])["next_norm"] is norms[-1]
    assert {id(p) for p in few.parameters()} < {id(p) for p in model.parameters()}


def test_models_of_users_are_shortened_too() -> None:
    network = GPTNetwork(stock_hybrid("M-M-M-M*M-M-"))
    few, ids = network.shortened(), torch.arange(5)
    numbers = [layer.layer_number for layer in few.model.decoder.layers]
    assert numbers == [1, 2, 3, 6, 7, 8, 9, 12]
    assert few.forward(ids, ids).isfinite().all()
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    first, second = kinds_of(GPTNetwork(stock_model(**recomputed)).model)
    assert first == second


def _hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)


def _unaligned(layer: Any) -> None:
    weight = layer.mlp.linear_fc2.weight
    weight.data = torch.zeros(weight.numel() + 1, dtype=weight.dtype)[1:].view(weight.shape)


def _wide(layer: Any) -> None:
    layer.pre_mlp_layernorm.weight.data = layer.pre_mlp_layernorm.weight.data.float()


def _limited(layer: Any) -> None:
    layer.self_attention.limit(64, None, None)


def _biased(layer: Any) -> None:
    linear = layer.self_attention.linear_proj
    linear.bias = torch.nn.Parameter(torch.zeros(linear.weight.shape[0]))


@pytest.mark.parametrize("change", [_hooked, _unaligned, _wide, _limited, _biased])
def test_a_layer_that_may_launch_something_else_is_of_another_kind(
    change: Callable[[Any], None],
) -> None:
    model = network_of(CASES["dense"]).model
    alike_before = kinds_of(model)
    change(model.decoder.layers[3])
    kinds = kinds_of(model)
    assert len(set(alike_before)) == 1
    assert [kind == kinds[0] for kind in kinds] == [n != 3 for n in range(6)]


def _neighbourhoods(kinds: list[int]) -> set[tuple[int, ...]]:
    ends = [-1, *kinds, -1]
    return set(zip(ends, ends[1:], ends[2:], strict=False))


def test_few_kinds_of_many_keep_their_neighbours(seed: int = 3) -> None:
    draw = random.Random(seed)
    saved = 0
    for _ in range(400):
        period = [draw.randrange(3) for _ in range(draw.randint(1, 5))]
        kinds = [*period * draw.randint(0, 6), *(draw.randrange(3) for _ in range(4))]
        if draw.random() < 0.3:
            kinds = kinds[: draw.randint(0, 3)]
        places = enough_of(kinds)
        assert places == sorted(set(places))
        assert places[:1] + places[-1:] == ([0, len(kinds) - 1] if kinds else [])
        found = [kinds[place] for place in places]
        assert not kinds or _neighbourhoods(found) == _neighbourhoods(kinds)
        saved += len(kinds) - len(found)
    assert saved > 1000
    assert enough_of([0] * 48) == [0, 1, 47]

"""Kernels of a decode step's experts with MXFP4 weights, and engines whose experts have such."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, EngineConfig
from megatron_async.checkpoint import load_pretrained
from megatron_async.kernels.moe.mxfp4 import (
    NOT_A_NUMBER,
    arrange,
    pack,
    unpack,
    unpack_stored,
)
from megatron_async.kernels.moe.shape import MoeShape
from megatron_async.kernels.moe.tiles import MoeTiles, Tile
from megatron_async.kernels.shared_memory import HOPPER_BYTES
from megatron_async.models.fused.blocks.moe_block import experts_why_not
from megatron_async.models.fused.report import MLP
from megatron_async.models.moe import layer as moe_layer
from tests.support import launches
from tests.support.compiled_kernels import HOPPER, Compiled, compiles, compiling_for
from tests.support.cuda_kernels import LIMIT
from tests.support.interpreter import HAS_TRITON, compiled, interpreted, on_devices
from tests.support.mxfp4_models import write_packed
from tests.support.sweeps import some

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.moe import mxfp4_triton
    from megatron_async.kernels.moe.decode import MoeDecode
    from tests.unit.kernels.test_moe_e4m3 import tokens_of
    from tests.unit.kernels.test_moe_kernels import (
        GPT_OSS,
        LARGE,
        SWIGLU,
        Case,
        experts_alone,
        settings,
        tiles,
    )

    # Tiles that divide rows and not, rows of three scales, splits with a step less, both orders.
    CASES: Any = (
        (
            MoeShape(96, 64, settings(4, 1), SWIGLU),
            3,
            {"tiles": tiles((64, 32), (32, 16, 2))},
        ),
        (
            MoeShape(96, 96, settings(3, 2), GPT_OSS),
            17,
            {"tiles": tiles((64, 64), (32, 64, 2), swap=True), "bias": True},
        ),
    )
else:
    CASES = ()


@on_devices
@pytest.mark.parametrize(
    ("case", "dtype"),
    some(list(itertools.product(range(len(CASES)), (torch.float32, torch.bfloat16))), 2),
)
def test_small_layers(device: str, case: int, dtype: torch.dtype) -> None:
    shape, rows, options = CASES[case]
    layer = Case(shape, rows, device, dtype, packed=True, **options)
    if dtype is torch.float32:
        layer.check()
    assert layer.of_experts() < (1e-6 if dtype is torch.float32 else 2 * LIMIT)


@on_devices
def test_products_are_those_of_the_weights_in_bfloat16(device: str) -> None:
    """Bit for bit: nothing is rounded on the way, from the smallest to the largest scale."""
    shape, given = MoeShape(64, 64, settings(3, 1), SWIGLU), tiles((64, 64), (32, 32, 1))
    packed = Case(shape, 3, device, torch.bfloat16, packed=True, tiles=given)
    plain = Case(shape, 3, device, torch.bfloat16, tiles=given)
    weights = packed.weights
    assert weights.w1_scale is not None and weights.w2_scale is not None
    weights.w1.copy_(torch.arange(weights.w1.numel()).view_as(weights.w1) % 256)
    weights.w1_scale[:, ::3] = 127 - 93
    weights.w2_scale[0, 5], weights.w2_scale[1, 7] = 127 + 33, 127 + 1
    wide = {
        "w1": unpack(weights.w1, weights.w1_scale).bfloat16(),
        "w2": unpack(weights.w2, weights.w2_scale).bfloat16(),
    }
    plain.weights = weights._replace(**wide, w1_scale=None, w2_scale=None)
    for found, meant in zip(packed.run(), plain.run(), strict=True):
        assert torch.equal(found, meant)


@on_devices
@pytest.mark.parametrize("scale", [127 + 34, NOT_A_NUMBER])
def test_a_scale_that_is_too_large_is_no_number(device: str, scale: int) -> None:
    """In the Triton kernels; ``moe_row.cu``, which takes one row else, knows larger ones."""
    case = Case(MoeShape(32, 32, settings(1, 1), SWIGLU), 1, device, torch.bfloat16, packed=True)
    case.kernels = MoeDecode(case.shape, torch.device(device), one_kernel=False)
    assert case.weights.w2_scale is not None
    assert case.run()[0].isfinite().all()
    case.weights.w2_scale[0, 3] = scale
    out = case.run()[0]
    assert not out[:, 3].isfinite().any() and out[:, :3].isfinite().all()


def packed_launches(name: str, rows: int) -> list[Compiled]:
    """The two grouped GEMMs of a large layer with the tiles that it gets, compiled for Hopper."""
    shape = LARGE[name]
    with compiling_for(HOPPER) as found:
        _, launch = launches.experts(
            shape.hidden, shape.inner, rows, torch.bfloat16, packed=True, tiles=None,
            count=shape.settings.num_experts,
        )  # fmt: skip
        launch(routes=False)
    assert [kernel.name for kernel in found] == ["up_kernel", "down_kernel"]
    return found


@compiles
@pytest.mark.sweep
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("name", ["gpt-oss", "mixtral", "qwen3-30b-a3b"])
def test_large_layers_compile(name: str, rows: int) -> None:
    for kernel in packed_launches(name, rows):
        assert kernel.shared <= HOPPER_BYTES
        assert ("wgmma" in kernel.ptx) == (rows == 64 or (rows == 32 and kernel.name[0] == "u"))


@compiles
def test_no_reshape_feeds_a_product() -> None:
    """Triton 3.6 cannot compile that for 33 to 64 rows: numbers get their type behind it."""
    for kernel in packed_launches("qwen3-30b-a3b", 64):
        made = re.findall(r"tt\.reshape %\w+ .*-> tensor<(?:\d+x)+(\w+)>", kernel.ttir)
        assert "i16" in made and "bf16" not in made


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_multiplied_out_as_the_reference_does(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    packed = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8, device=device)
    packed[0, 0, :16] = torch.arange(16) * 17
    scale = torch.randint(3, 254, (3, 5, 3), dtype=torch.uint8, device=device)
    scale[1, 1, 1], scale[2, 2, 2] = 254, NOT_A_NUMBER
    if dtype is torch.float32:  # Triton's interpreter has no subnormals in bfloat16
        scale[0, 0, 0] = 0
    found = mxfp4_triton.multiply_out(packed, scale, dtype)
    torch.testing.assert_close(
        found, unpack(packed, scale).to(dtype), rtol=0, atol=0, equal_nan=True
    )


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-x for x in E2M1]


def every_number_at_every_place() -> tuple[torch.Tensor, torch.Tensor]:
    """Packed numbers of a checkpoint ``[256, 16]``, and what they are: each of 16 at each of 8
    places, beside itself and beside each other one."""
    one, other = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    one, other = one.reshape(-1, 1), other.reshape(-1, 1)
    place = torch.arange(32)
    # Of the four words of a row each has another half of its places from `one`.
    is_one = torch.stack([place[:8] >> bit & 1 == 0 for bit in range(3)] + [place[:8] >= 0])
    codes = torch.where(is_one.flatten(), one, other)
    stored = codes[:, ::2] | codes[:, 1::2] << 4
    return stored.to(torch.uint8), torch.tensor(E2M1)[codes]


def test_every_number_at_every_place_of_a_word_is_its_value() -> None:
    stored, meant = every_number_at_every_place()
    arranged = arrange(stored)
    scale = torch.full((256, 1), 127, dtype=torch.uint8)
    assert torch.equal(unpack(arranged, scale), meant)
    assert torch.equal(unpack_stored(stored, scale), meant)
    assert len(arranged.unique(dim=0)) == 256
    # A word stays what it is when others beside it are cut off.
    assert torch.equal(arrange(stored[:, 4:12]), arranged[:, 4:12])


def test_each_bit_of_a_word_has_a_place_of_its_own() -> None:
    """The order of bits is linear over them, and loses none."""
    bits = (1 << torch.arange(32)).to(torch.int32)
    alone = arrange(bits.view(torch.uint8).view(32, 4)).view(torch.int32).flatten()
    words = torch.randint(-(2**31), 2**31, (500,), dtype=torch.int32)
    added = torch.zeros_like(words)
    for bit in range(32):
        added ^= torch.where(words >> bit & 1 == 1, alone[bit], 0)
    assert torch.equal(arrange(words.view(torch.uint8)).view(torch.int32), added)
    basis: list[int] = []
    for word in alone.tolist():
        rest = word & 0xFFFFFFFF
        for known in basis:
            rest = min(rest, rest ^ known)
        assert rest, "a bit that others have too"
        basis.append(rest)


@on_devices
def test_kernels_read_every_number_at_every_place(device: str) -> None:
    stored, meant = every_number_at_every_place()
    packed = arrange(stored.to(device))
    scale = torch.full((256, 1), 127, dtype=torch.uint8, device=device)
    found = mxfp4_triton.multiply_out(packed, scale, torch.bfloat16)
    assert torch.equal(found.cpu().float(), meant)


def test_values_are_packed_as_the_specification_says() -> None:
    """OCP MX 1.0, 6.3: the scale is that of the largest value; ties go to the even number, and what
    is too large to the largest."""
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    given = [*halfway, 7.99, *(-x for x in halfway), 0.26, 0.24]
    meant = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    meant += [*(-x for x in meant[:7]), 0.5, 0.0]
    for power in (-120, -3, 0, 100):
        row = torch.tensor([given + [0.0] * 15]) * 2.0**power
        packed, scale = pack(row)
        assert scale.tolist() == [[127 + power]]
        assert unpack(packed, scale)[0, : len(given)].tolist() == [x * 2.0**power for x in meant]
    torch.manual_seed(5)
    packed = torch.randint(0, 256, (7, 64), dtype=torch.uint8)
    values = unpack(packed, torch.randint(1, 253, (7, 4), dtype=torch.uint8))
    assert torch.equal(unpack(*pack(values)), values)
    assert pack(torch.zeros(1, 32))[0].sum() == 0


@pytest.mark.parametrize("rows", [1, 7, 32, 33, 64])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-30b-a3b"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_large_layers(device: str, name: str, rows: int) -> None:
    case = Case(
        LARGE[name], rows, device, torch.bfloat16, bias=name == "gpt-oss", packed=True
    )  # fmt: skip
    case.check()
    assert case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_swapped_operands_on_tensor_cores(device: str) -> None:
    swapped = MoeTiles(Tile(64, 64, 3, swap=True), Tile(64, 64, 4, splits=4, swap=True))
    case = Case(LARGE["gpt-oss"], 40, device, torch.bfloat16, tiles=swapped, bias=True, packed=True)
    case.check()
    assert case.of_experts() < 2 * LIMIT


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)],
)
def test_an_engine_decodes_with_experts_in_mxfp4_at_all_depths(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS, with biases and clamps. Without a GPU the other blocks run their modules."""
    path = write_packed(
        tmp_path / "model", intermediate_size=32, num_hidden_layers=1,
        layer_types=["full_attention"],
    )  # fmt: skip
    if device == "cpu":
        experts_alone(monkeypatch)
    multiplied: list[Any] = []
    weight_of = moe_layer.weight_of
    monkeypatch.setattr(
        moe_layer, "weight_of", lambda *given: [multiplied.append(given), weight_of(*given)][1]
    )
    found = []
    for depth in (0, 1, 2):
        asked = EngineConfig(
            device=device, dtype="bfloat16", quantization="mxfp4", depth=depth, max_requests=3,
            block_size_tokens=16, block_count=12, max_sequence_length=32, num_cuda_graphs=1,
        )  # fmt: skip
        multiplied.clear()
        with DynamicInferenceEngine.from_pretrained(path, asked) as engine:
            covered = engine.model.network.decode_coverage()
            assert covered.fused(MLP) == (1,)
            found.append(tokens_of(engine))
        if device == "cpu":  # a captured step calls nothing
            assert len(multiplied) == 2, "the prompts' step alone multiplies out, both weights"
    assert found[0] == found[1] == found[2]
    assert len({token for tokens in found[0] for token in tokens}) > 1


def test_weights_that_the_kernels_do_not_take_say_why(tmp_path: Path) -> None:
    model = load_pretrained(
        write_packed(tmp_path), quantization="mxfp4", dtype=torch.bfloat16
    ).model
    mlp = model.decoder.layers[0].mlp
    fc1 = mlp.experts.linear_fc1
    assert experts_why_not(mlp, model.config) is None
    weight, scale = fc1.weight, fc1.weight_scale
    fc1.weight_scale = scale.mT.contiguous().mT
    assert "its MXFP4 w1 is not contiguous" in str(experts_why_not(mlp, model.config))
    fc1.weight_scale = scale
    shifted = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight)
    fc1.weight = torch.nn.Parameter(shifted, requires_grad=False)
    assert "from a multiple of 16 bytes on" in str(experts_why_not(mlp, model.config))
    wide = torch.nn.Parameter(mlp.weights.w2, requires_grad=False)
    fc1.weight, mlp.experts.linear_fc2.weight = weight, wide
    assert "torch.uint8 and of torch.bfloat16" in str(experts_why_not(mlp, model.config))

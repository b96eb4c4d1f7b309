"""What kernels are launched with is what their parameters are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention.decode_arguments import (
    AttentionArguments,
    E4m3AttentionArguments,
)
from megatron_async.kernels.attention.prefill_attention import PrefillArguments
from megatron_async.kernels.gemm.skinny_gemm import (
    E4m3Arguments,
    MmaArguments,
    SendingArguments,
    SkinnyGemm,
    WgmmaArguments,
    WgmmaE4m3Arguments,
    WgmmaInputsArguments,
)
from megatron_async.kernels.gemm.tile_config import NO_NORM, RMS_NORM, STORE, TileConfig
from megatron_async.kernels.moe.row import PackedRowScales, RowArguments, RowScales, RowSumming
from megatron_async.kernels.moe.widened.experts import WidenedArguments
from megatron_async.kernels.norm.embed import EmbedArguments, EmbedShareArguments
from megatron_async.kernels.ranks.mailbox import MailboxArguments
from megatron_async.kernels.ranks.peer_best import PeerBestArguments
from megatron_async.kernels.ranks.peer_rows import PeerRowsArguments
from megatron_async.kernels.ranks.peer_sum import PeerSumArguments
from megatron_async.kernels.ranks.peers import Peers
from tests.support import emulator
from tests.support.cuda_kernels import emulated

RECORDS: dict[str, Any] = {
    "skinny_gemm_mma": MmaArguments,
    "skinny_gemm_wgmma": WgmmaArguments,
    "attention": AttentionArguments,
    "prefill_attention": PrefillArguments,
    "embed": EmbedArguments,
    "embed_share": EmbedShareArguments,
    "moe_row": RowArguments,
    "peer_sum": PeerSumArguments,
    "peer_best": PeerBestArguments,
    "peer_rows": PeerRowsArguments,
    "mailbox": MailboxArguments,
}
POINTERS = {
    "u16": torch.bfloat16, "char": torch.bfloat16, "u32": torch.int32, "i64": torch.int64,
    "u64": torch.int64, "int": torch.int32,
    "byte": torch.uint8, "Scale": torch.uint8, "Out": torch.bfloat16,
    "float": torch.float32, "float2": torch.float32, "float4": torch.float32,
}  # fmt: skip
"""Elements of a tensor, by the C++ type that a kernel reads them as."""
SCALING = {
    "skinny_gemm_mma": ("weight_scale",),
    "skinny_gemm_wgmma": ("weight_scale",),
    "moe_row": ("w1_scale", "shared_w1_scale", "w2_scale", "shared_w2_scale"),
}
"""What kernels read with e4m3 weights, where their text says SCALING."""
WEIGHTS = torch.bfloat16, torch.float8_e4m3fn
NUMBERS = torch.bfloat16, torch.float16
VALUES = {"int": int, "float": float, "TensorMap": cuda.TensorMap}


Parameter = tuple[str, type, tuple[torch.dtype, ...]]


def parameters_of(
    kernel: str,
    *,
    sends: bool = False,
    e4m3: bool = False,
    inputs: bool = False,
    scale: str = "float",
    sinks: bool = False,
) -> list[Parameter]:
    """Name, type and element types of the parameters in a kernel's source."""
    pattern = rf'extern "C" __global__.*?\b{kernel}\((.*?)\) \{{'
    (text,) = re.findall(pattern, cuda.own_text(kernel), re.DOTALL)
    found: list[Parameter] = []
    names = (*SCALING.get(kernel, ()), *(("input_scale",) if inputs else ()))
    scaling = "".join(f", const {scale}* {name}" for name in names)
    text = text.replace(" SCALING", scaling if e4m3 else "")
    text = text.replace(" SCALES", ", const float* scales" if e4m3 else "")
    text = text.replace(" SINK_LOGITS", ", const u16* sinks" if sinks else "")
    text = text.replace("KEPT*", "char*" if e4m3 else "u16*")
    sending = ", int place, const u64* received, u32* launches, PEERS" if sends else ""
    summing = ", int own_rank, const u64* received, u32* rank_launches, PEERS" if sends else ""
    text = text.replace(" SENDING", sending).replace(" SUMMING", summing)
    text = text.replace("PEERS", ", ".join(f"u64* to_{place}" for place in range(8)))
    for parameter in text.split(","):
        words = parameter.replace("*", " * ").split()
        kind = next(word for word in words if word not in ("const", "__grid_constant__"))
        if "*" in words and e4m3 and kind == "char":
            found.append((words[-1], torch.Tensor, (torch.float8_e4m3fn,)))
        elif "*" in words:
            of_weights = WEIGHTS + ((torch.uint8,) if kernel == "moe_row" else ())
            several = {"Weight": of_weights, "Number": NUMBERS}
            of_kind = several[kind] if kind in several else (POINTERS[kind],)
            found.append((words[-1], torch.Tensor, of_kind))
        else:
            found.append((words[-1], VALUES[kind], ()))
    return found


def fields(record: Any) -> list[Parameter]:
    return [field[:3] for field in cuda.fields_of(record)]


@pytest.mark.parametrize("kernel", RECORDS)
def test_fields_are_the_kernels_parameters_in_order(kernel: str) -> None:
    further = fields(Peers) if kernel in ("mailbox", "peer_best", "peer_rows", "peer_sum") else []
    assert fields(RECORDS[kernel]) + further == parameters_of(kernel)


@pytest.mark.parametrize("kernel", ("skinny_gemm_mma", "skinny_gemm_wgmma"))
def test_gemms_that_send_have_more_behind_them(kernel: str) -> None:
    records = (RECORDS[kernel], SendingArguments, Peers)
    found = [field for each in records for field in fields(each)]
    assert found == parameters_of(kernel, sends=True)


@pytest.mark.parametrize("e4m3", [False, True])
def test_experts_that_sum_over_ranks_have_more_behind_them(e4m3: bool) -> None:
    records = (RECORDS["moe_row"], *((RowScales,) if e4m3 else ()), RowSumming, Peers)
    found = [field for each in records for field in fields(each)]
    assert found == parameters_of("moe_row", sends=True, e4m3=e4m3)


@pytest.mark.parametrize("sends", [False, True])
def test_gemms_with_e4m3_weights_have_their_scales_behind_the_others(sends: bool) -> None:
    further = (SendingArguments, Peers) if sends else ()
    for kernel, record in (
        ("skinny_gemm_mma", E4m3Arguments),
        ("skinny_gemm_wgmma", WgmmaE4m3Arguments),
    ):
        found = [field for each in (record, *further) for field in fields(each)]
        assert found == parameters_of(kernel, sends=sends, e4m3=True)


@pytest.mark.parametrize("sends", [False, True])
def test_gemms_with_e4m3_inputs_have_their_scales_behind_those_of_weights(sends: bool) -> None:
    further = (SendingArguments, Peers) if sends else ()
    found = [field for each in (WgmmaInputsArguments, *further) for field in fields(each)]
    assert found == parameters_of("skinny_gemm_wgmma", sends=sends, e4m3=True, inputs=True)
    text = (cuda.SOURCES / "include" / "skinny_gemm.cuh").read_text()
    assert "#define SCALING , const float* weight_scale, const float* input_scale\n" in text


def test_experts_in_e4m3_have_their_scales_behind_the_others() -> None:
    found = [field for each in (RowArguments, RowScales) for field in fields(each)]
    assert found == parameters_of("moe_row", e4m3=True)


def test_experts_in_mxfp4_have_bytes_for_scales() -> None:
    found = [field for each in (RowArguments, PackedRowScales) for field in fields(each)]
    assert found == parameters_of("moe_row", e4m3=True, scale="byte")


def test_widened_experts_have_one_record_for_all_formats_and_both_layers() -> None:
    found = {name: (kind, dtypes) for name, kind, dtypes in fields(WidenedArguments)}
    given = {name: (kind, dtypes) for name, kind, dtypes in parameters_of("moe_widened")}
    assert list(found) == list(given)
    formats = {
        "w": (torch.bfloat16, torch.float8_e4m3fn, torch.uint8),
        "scale": (torch.float32, torch.uint8),
        "out": (torch.bfloat16, torch.float32),
    }
    for name, (kind, dtypes) in found.items():
        assert (kind, dtypes) == (given[name][0], formats.get(name, given[name][1]))


def test_attention_over_e4m3_has_its_scales_behind_the_others() -> None:
    assert fields(E4m3AttentionArguments) == parameters_of("attention", e4m3=True)


def good() -> EmbedArguments:
    ids, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64).bfloat16()
    return EmbedArguments(ids, ids, table, None, table, None, None, torch.zeros(1, 4, 2))


def test_arguments_of_the_right_types_pass() -> None:
    cuda.check_arguments("embed", good())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": torch.zeros(1, dtype=torch.int32)}, "embed: token_ids must be torch.int64"),
        ({"hidden": None}, "embed: hidden must be a Tensor, not a NoneType"),
        ({"table": 3}, "embed: table must be a Tensor, not a int"),
        ({"stats_out": torch.zeros(1).double()}, "embed: stats_out must be torch.float32"),
    ],
)
def test_a_wrong_argument_is_an_error_before_the_launch(changes: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        cuda.check_arguments("embed", good()._replace(**changes))


@pytest.mark.parametrize(
    ("field", "value"), [("M", 1.0), ("M", True), ("M", None), ("eps", 0), ("w_map", 3)]
)
def test_numbers_and_tensor_maps_are_checked_too(field: str, value: Any) -> None:
    out = torch.zeros(1, 16).bfloat16()
    tensor_map = cuda.TensorMap(None, 0, 0)
    right = WgmmaArguments(
        None, None, None, None, None, None, 0, 0.0, None, out, None, None, None, 1, 16, None, None,
        tensor_map, tensor_map,
    )  # fmt: skip
    cuda.check_arguments("gemm", right)
    with pytest.raises(TypeError, match=f"gemm: {field} must be"):
        cuda.check_arguments("gemm", right._replace(**{field: value}))


def test_a_missing_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'stats_out'"):
        EmbedArguments(*good()[:-1])


@emulated
def test_a_gemm_of_another_dtype_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    config = TileConfig(1, 2, 1, 1, 2)
    gemm = SkinnyGemm(32, 128, 1, NO_NORM, STORE, RMS_NORM, config, torch.device("cpu"))
    out = torch.full((1, 32), 7.0).bfloat16()
    with pytest.raises(TypeError, match="x must be torch\\.bfloat16"):
        gemm(torch.zeros(1, 128), torch.zeros(32, 128).bfloat16(), out)
    assert (out == 7).all()
    gemm(torch.zeros(1, 128).bfloat16(), torch.zeros(32, 128).bfloat16(), out)
    assert (out == 0).all()

"""Parameters of ``attention.cu``."""

from __future__ import annotations

from typing import NamedTuple

from megatron_async.kernels.compile import Bf16, E4m3, Fp32, Int32, Int64


class AttentionArguments(NamedTuple):
    """Those over a cache of bfloat16, in order."""

    qkv: Bf16
    keys: Bf16
    values: Bf16
    block_table: Int64
    columns: int
    slots: Int64
    positions: Int64
    slot_mapping: Int64
    cos_sin: Fp32 | None
    q_weight: Bf16 | None
    k_weight: Bf16 | None
    eps: float
    scale_log2: float
    out: Bf16
    rows: int
    splits_out: Fp32
    splits_stats: Fp32
    arrivals: Int32


class E4m3AttentionArguments(NamedTuple):
    """Those with ``E4M3``, in order: the same and the scales."""

    qkv: Bf16
    keys: E4m3
    values: E4m3
    block_table: Int64
    columns: int
    slots: Int64
    positions: Int64
    slot_mapping: Int64
    cos_sin: Fp32 | None
    q_weight: Bf16 | None
    k_weight: Bf16 | None
    eps: float
    scale_log2: float
    out: Bf16
    rows: int
    splits_out: Fp32
    splits_stats: Fp32
    arrivals: Int32
    scales: Fp32


class SinkArguments(NamedTuple):
    """With ``SINKS``, behind the others."""

    sinks: Bf16

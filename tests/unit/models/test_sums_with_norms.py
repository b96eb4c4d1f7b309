"""Layers whose partial sums are added up over ranks in one kernel with the norm behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.norm import add_norm as norms
from megatron_async.kernels.ranks import peer_rows
from megatron_async.kernels.ranks.peer_rows import RowWords
from megatron_async.kernels.ranks.peer_sum import PeerWords
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers import decoder_layer, norm
from megatron_async.models.parallel import ModelParallel
from tests.support import emulator
from tests.support.batches import new_batch
from tests.support.cuda_kernels import emulated

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=256,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=80,
    vocab_size=97,
    max_sequence_length=64,
)
ROWS = 8


class _Doubles:
    """Two ranks with the same parts.

    Attributes:
        joins: sums and norms are one kernel's.
        joined: how many were.
    """

    def __init__(self) -> None:
        self.joins, self.joined, self.summed = True, 0, 0

    def sum_rows(self, partial: Tensor) -> Tensor:
        self.summed += 1
        return 2 * partial

    def norms_behind_sum(self, like: Tensor) -> _Doubles | None:
        assert like.shape == (ROWS, 1, CONFIG.hidden_size)
        return self if self.joins else None

    def add_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        self.joined += 1
        return norms.add_norm_reference(
            2 * partial, residual, weight, None, eps, bias, center=False, offset=offset
        )


class Rig:
    """A model of two ranks, as one of them computes a decode step; norms are torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        for module in (decoder_layer, norm):
            monkeypatch.setattr(module, "fusable", lambda x: True)
        monkeypatch.setattr(norms, "add_norm", self._add_norm)
        model = build_model(CONFIG, device="cpu", dtype=torch.bfloat16)
        self.layers = model.decoder.layers
        self.ranks = _Doubles()
        for layer in self.layers:
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                monkeypatch.setitem(vars(linear), "_ranks", self.ranks)
        self.network = GPTNetwork(model)

    @staticmethod
    def _add_norm(*given: Any, in_segments: bool, **named: Any) -> tuple[Tensor, Tensor]:
        assert not in_segments
        return norms.add_norm_reference(*given, **named)

    def logits(self) -> Tensor:
        """Of the first tokens of as many requests."""
        kept = self.network.kv_cache_spec
        context = new_batch(
            params_dtype=kept.dtype, num_layers=kept.num_layers, kv_channels=kept.head_dim,
            num_attention_heads=kept.num_kv_heads, max_sequence_length=64, max_requests=ROWS,
            block_size_tokens=4, block_count=ROWS * 16, device="cpu",
        )  # fmt: skip
        context.block_table[:ROWS] = torch.arange(1, 1 + ROWS * 16).view(ROWS, 16)
        context.finished[:ROWS] = False
        context.begin_forward(
            torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64), decode_rows=ROWS, chunks=None,
            last_token_index=torch.arange(ROWS), read_lengths=True,
        )  # fmt: skip
        ids = torch.arange(ROWS) * 11 % CONFIG.vocab_size
        found: Tensor = self.network.forward(ids, context.position_ids, context)
        return found


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with torch.inference_mode():
        yield Rig(monkeypatch)


def test_logits_are_those_of_sums_and_norms_apart(rig: Rig) -> None:
    together = rig.logits()
    assert (rig.ranks.joined, rig.ranks.summed) == (4, 0), "two in each layer"
    rig.ranks.joins = False
    apart = rig.logits()
    assert (rig.ranks.joined, rig.ranks.summed) == (4, 4)
    assert torch.equal(together, apart) and together.isfinite().all()


@pytest.mark.parametrize("part", ["self_attention", "mlp"])
def test_watched_modules_are_called(rig: Rig, part: str) -> None:
    expected, seen = rig.logits(), []
    layer = rig.layers[0]
    getattr(layer, part).register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(rig.logits(), expected)
    assert len(seen) == 1
    assert (rig.ranks.joined, rig.ranks.summed) == (4 + 2, 2)


def test_a_watched_product_is_called(rig: Rig) -> None:
    expected, seen = rig.logits(), []
    rig.layers[0].mlp.linear_fc2.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(rig.logits(), expected)
    assert len(seen) == 1
    assert (rig.ranks.joined, rig.ranks.summed) == (4 + 3, 1)


def parallel_with(words: PeerWords | None) -> ModelParallel:
    """What a rank knows of its group, but for the group."""
    ranks = ModelParallel.__new__(ModelParallel)
    ranks.tensor_words, ranks._peer_sums, ranks._peer_rows = words, {}, {}
    return ranks


def words_of_two(rank: int, memory: tuple[Tensor, ...], capacity: int) -> PeerWords:
    launches = torch.zeros(peer_rows.CTAS, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int64)
    many = RowWords(rank, memory, launches, capacity)
    return PeerWords(rank, (none, none), launches, 0, None, many)


def test_few_and_too_many_rows_go_other_ways() -> None:
    capacity = peer_rows.capacity_of(2)
    memory = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(2))
    ranks = parallel_with(words_of_two(0, memory, capacity))

    def joins(rows: int, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> bool:
        return ranks.norms_behind_sum(torch.empty(rows, 1, size, dtype=dtype)) is not None

    assert [rows for rows in (1, 64, 65, 512, 513) if joins(rows)] == [65, 512]
    assert joins(256, 8192) and not joins(257, 8192)
    assert not joins(65, 128), "Triton's norm has another order there"
    assert not joins(65, dtype=torch.float16)
    assert not ranks.norms_behind_sum(torch.empty(4096, 65, dtype=torch.bfloat16).t())
    assert parallel_with(None).norms_behind_sum(torch.empty(65, 4096)) is None


@emulated
def test_many_rows_are_added_up_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    torch.manual_seed(0)
    capacity, rows = 70 * 256, 70
    memory = tuple(
        torch.zeros(peer_rows.word_count(2, capacity), dtype=torch.int64) for _ in range(2)
    )
    parts = [torch.randn(rows, 1, 256).bfloat16() for _ in range(2)]
    expected = (parts[0].float() + parts[1].float()).bfloat16()
    # In the emulator a launch is over when all ranks have called it.
    found = [
        parallel_with(words_of_two(rank, memory, capacity)).sum_rows(part)
        for rank, part in enumerate(parts)
    ]
    assert all(each is part for each, part in zip(found, parts, strict=True))
    assert all(torch.equal(each, expected) for each in found)

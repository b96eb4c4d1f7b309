"""Batch-invariant mode: a token's bits do not depend on the forward that computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers import decoder_layer
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.batches import new_batch

pytestmark = pytest.mark.sweep

BLOCK_SIZE = 4
COLUMNS = 80
VOCAB_SIZE = 97
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = {
    "llama": ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=6,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=80,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=BLOCK_SIZE * COLUMNS,
        qk_norm=True,
        qkv_bias=True,
    ),
    "gpt2": ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_hidden_size=256,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=BLOCK_SIZE * COLUMNS,
        normalization="LayerNorm",
        activation="gelu_tanh",
        position_embedding="learned_absolute",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
}
SEGMENTED = ModelConfig(
    num_layers=3,
    hidden_size=2048,
    num_attention_heads=16,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden_size=8192,
    vocab_size=VOCAB_SIZE,
    max_sequence_length=BLOCK_SIZE * COLUMNS,
)
"""K of both row-parallel layers has segments, on a GPU."""
Chunks = list[int]
"""Lengths of consecutive pieces of the sequence; 1 is a decode step."""


class Rig:
    """One model whose sequence 0 is computed in different ways, beside other sequences."""

    def __init__(self, name: str, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(2)
        model = build_model(MODELS.get(name, SEGMENTED), device=device, dtype=dtype)
        self.wrapper = GPTNetwork(model, batch_invariant=True)
        self.device = device
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCAB_SIZE, (4, BLOCK_SIZE * COLUMNS), generator=generator)

    def context(self, slots: int) -> ForwardBatch:
        """Slots own scattered blocks, other ones in each context; NaN in all of them."""
        spec = self.wrapper.kv_cache_spec
        context = new_batch(
            params_dtype=spec.dtype,
            num_layers=spec.num_layers,
            kv_channels=spec.head_dim,
            num_attention_heads=spec.num_kv_heads,
            max_sequence_length=BLOCK_SIZE * COLUMNS,
            max_requests=slots,
            block_size_tokens=BLOCK_SIZE,
            block_count=slots * COLUMNS,
            device=self.device,
            batch_invariant=True,
        )
        context.kv_cache.fill_(float("nan"))
        context.kv_cache[:, :, 0] = 0
        order = torch.randperm(slots * COLUMNS, generator=torch.Generator().manual_seed(slots)) + 1
        context.block_table[:slots] = order.view(slots, COLUMNS).to(self.device)
        context.finished[:slots] = False
        return context

    def forward(self, context: ForwardBatch, pieces: list[tuple[int, int, int]]) -> Tensor:
        """Logits [pieces, vocab] after (slot, first position, tokens), decode steps first."""
        pieces = sorted(pieces, key=lambda piece: piece[2] > 1)
        ids, slots, positions, last, chunk_table = [], [], [], [], []
        for slot, start, count in pieces:
            if count > 1:
                chunk_table.append((slot, len(ids), count, start))
            ids += self.tokens[slot % 4, start : start + count].tolist()
            slots += [slot] * count
            positions += range(start, start + count)
            last.append(len(ids) - 1)
        decode_rows = sum(count == 1 for _, _, count in pieces)
        # As the step program pads: tokens and rows to a multiple of 8.
        padding = -len(ids) % 8
        if not chunk_table:
            decode_rows += padding
        rows = last + [0] * (-len(last) % 8)

        def on_device(values: list[int] | list[tuple[int, ...]]) -> Tensor:
            return torch.tensor(values, device=self.device)

        context.begin_forward(
            on_device(slots + [context.null_slot] * padding),
            on_device(positions + [0] * padding),
            decode_rows=decode_rows,
            chunks=on_device(chunk_table).int() if chunk_table else None,
            last_token_index=on_device(rows),
            read_lengths=self.device == "cpu",
        )
        token_ids = on_device(ids + [0] * padding)
        logits = self.wrapper.forward(token_ids, context.position_ids, context)
        order = [slot for slot, _, _ in pieces]
        return logits[: len(pieces)][torch.tensor(order).argsort().to(self.device)]

    def compute(self, chunks: Chunks, others: int = 0, other_step: int = 1) -> tuple[Tensor, ...]:
        """Sequence 0 in ``chunks``, beside ``others`` that take ``other_step`` tokens a forward:
        (logits after each chunk, keys, values)."""
        context = self.context(1 + others)
        logits, at, other_at = [], 0, 0
        for chunk in chunks:
            pieces = [(0, at, chunk)]
            if other_at + other_step <= BLOCK_SIZE * COLUMNS:
                pieces += [(slot, other_at, other_step) for slot in range(1, 1 + others)]
            logits.append(self.forward(context, pieces)[0])
            at, other_at = at + chunk, other_at + other_step
        cache = context.kv_cache[:, :, context.block_table[0]].flatten(2, 3)[:, :, :at]
        return torch.stack(logits), cache[:, 0], cache[:, 1]


def assert_same_bits(rig: Rig, length: int, ways: list[tuple[Chunks, int, int]]) -> None:
    """All ways give the logits and the cache of one prefill and of token after token."""
    stepwise, keys, values = rig.compute([1] * length)
    assert stepwise.isfinite().all()
    for chunks, others, other_step in ways:
        assert sum(chunks) == length
        logits, other_keys, other_values = rig.compute(chunks, others, other_step)
        ends = torch.tensor(chunks).cumsum(0) - 1
        assert torch.equal(logits, stepwise[ends.to(logits.device)]), (chunks, others)
        assert torch.equal(other_keys, keys), (chunks, others)
        assert torch.equal(other_values, values), (chunks, others)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_cpu_bits_do_not_depend_on_chunks_or_neighbours(name: str, dtype: torch.dtype) -> None:
    ways: list[tuple[Chunks, int, int]] = [
        ([77], 0, 1),
        ([64, 13], 0, 1),
        ([13, 64], 3, 1),
        ([2] * 38 + [1], 1, 3),
        ([7] * 11, 2, 5),
        ([40] + [1] * 37, 6, 1),
        ([1] * 77, 17, 2),
    ]
    assert_same_bits(Rig(name, dtype, "cpu"), 77, ways)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
class TestOnGpu:
    @torch.inference_mode()
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_bits_do_not_depend_on_chunks_or_neighbours(
        self, name: str, dtype: torch.dtype, device: str
    ) -> None:
        ways: list[tuple[Chunks, int, int]] = [
            ([300], 0, 1),
            ([257, 43], 0, 1),
            ([43, 256, 1], 3, 1),
            ([100] * 3, 2, 5),
            ([280] + [1] * 20, 30, 1),
            ([1] * 300, 6, 1),
        ]
        assert_same_bits(Rig(name, dtype, device), 300, ways)

    @torch.inference_mode()
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_captured_steps_have_the_bits_of_a_prefill(
        self, dtype: torch.dtype, device: str
    ) -> None:
        rig = Rig("llama", dtype, device)
        whole, keys, values = rig.compute([90])
        for rows in (1, 2, 40):
            context = rig.context(rows)
            for slot in range(rows):
                rig.forward(context, [(slot, 0, 80)])
            slots = torch.arange(rows, device=device)
            positions = torch.full((rows,), 80, device=device)
            tokens = torch.zeros(rows, dtype=torch.int64, device=device)

            def step() -> Tensor:
                context.begin_forward(slots, positions, decode_rows=rows)  # noqa: B023
                return rig.wrapper.forward(tokens, positions, context)  # noqa: B023

            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = step()
            for position in range(80, 90):
                tokens.copy_(rig.tokens[torch.arange(rows) % 4, position])
                positions.fill_(position)
                graph.replay()
            assert torch.equal(logits[0], whole[0])
            cache = context.kv_cache[:, :, context.block_table[0]].flatten(2, 3)[:, :, :90]
            assert torch.equal(cache[:, 0], keys)
            assert torch.equal(cache[:, 1], values)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@torch.inference_mode()
def test_products_have_the_bits_of_modules_with_what_is_behind_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SwiGLU in a product, and norms that add up segments; rows of a step and chunks alike."""
    rig = Rig("segmented", torch.bfloat16, device)
    segments: list[bool] = []

    def noted(*given: Any) -> Tensor | None:
        parts = segments_of(*given)
        segments.append(parts is not None)
        return parts

    segments_of = decoder_layer._segments_of
    monkeypatch.setattr(decoder_layer, "_segments_of", noted)
    together = rig.compute([70, 1, 1, 200, 1], others=2)
    assert any(segments)
    otherwise = rig.compute([1, 70, 1, 200, 1], others=3, other_step=9)
    assert torch.equal(together[0][-1], otherwise[0][-1])
    monkeypatch.setattr(decoder_layer.DecoderLayer, "may_join_products", lambda self: False)
    segments.clear()
    apart = rig.compute([70, 1, 1, 200, 1], others=2)
    assert not segments
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))

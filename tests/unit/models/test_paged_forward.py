"""Paged, chunked forwards against a plain causal forward of the same megatron-core model."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_async.device import memory
from megatron_async.kernels.attention import paged_decode
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.batches import new_batch

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def wrapper() -> GPTNetwork:
    torch.manual_seed(2)
    config = ModelConfig(
        num_layers=3,
        hidden_size=48,
        num_attention_heads=6,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=80,
        vocab_size=97,
        max_sequence_length=64,
        qk_norm=True,
        qkv_bias=True,
    )
    return GPTNetwork(build_model(config, device="cpu", dtype=torch.float32))


def context_for(wrapper: GPTNetwork, slots: int) -> ForwardBatch:
    """A context whose slots own scattered, interleaved blocks; garbage in all of them."""
    spec = wrapper.kv_cache_spec
    context = new_batch(
        params_dtype=spec.dtype,
        num_layers=spec.num_layers,
        kv_channels=spec.head_dim,
        num_attention_heads=spec.num_kv_heads,
        max_sequence_length=64,
        max_requests=slots,
        block_size_tokens=BLOCK_SIZE,
        block_count=slots * 16,
        device="cpu",
    )
    context.kv_cache.fill_(float("nan"))
    context.kv_cache[:, :, 0] = 0
    order = torch.randperm(slots * 16, generator=torch.Generator().manual_seed(1)) + 1
    context.block_table[:slots] = order.view(slots, 16)
    context.finished[:slots] = False
    return context


def test_a_context_on_cuda_is_on_one_gpu_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda device: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    with FakeTensorMode():  # tensors of a GPU that is not there
        context = new_batch(
            params_dtype=torch.bfloat16,
            num_layers=1,
            kv_channels=64,
            num_attention_heads=1,
            max_sequence_length=64,
            block_count=8,
            device="cuda",
        )
    assert context.device == context.kv_cache.device
    assert context.device.index is not None


@torch.inference_mode()
def test_mixed_chunks_and_decodes_equal_a_plain_forward(wrapper: GPTNetwork) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (37, 22, 9)
    sequences = [torch.randint(0, 97, (n,), generator=generator) for n in lengths]
    plain = [wrapper.model(s[None], torch.arange(len(s))[None], None)[0] for s in sequences]
    context = context_for(wrapper, len(sequences))
    # Sequence i is prefilled in chunks of chunk[i], its last tokens are decoded one by one.
    chunks, decoded = (8, 5, 2), (6, 4, 5)
    done = [0] * len(sequences)
    checked = 0
    while any(done[i] < lengths[i] for i in range(3)):
        decoding = [i for i in range(3) if lengths[i] - decoded[i] <= done[i] < lengths[i]]
        ids, slots, positions, last = [], [], [], []
        for i in decoding:
            ids.append(sequences[i][done[i]].item())
            slots.append(i)
            positions.append(done[i])
            last.append((i, done[i], len(ids) - 1))
            done[i] += 1
        chunk_table = []
        for i in range(3):
            end = min(done[i] + chunks[i], lengths[i] - decoded[i])
            if i in decoding or end <= done[i]:
                continue
            chunk_table.append((i, len(ids), end - done[i], done[i]))
            ids += sequences[i][done[i] : end].tolist()
            slots += [i] * (end - done[i])
            positions += range(done[i], end)
            last.append((i, end - 1, len(ids) - 1))
            done[i] = end
        padding = -len(ids) % 8
        context.begin_forward(
            torch.tensor(slots + [context.null_slot] * padding),
            torch.tensor(positions + [0] * padding),
            decode_rows=len(decoding),
            chunks=torch.tensor(chunk_table, dtype=torch.int32).view(-1, 4),
            last_token_index=torch.tensor([index for _, _, index in last]),
            read_lengths=True,
        )
        logits = wrapper.forward(torch.tensor(ids + [0] * padding), context.position_ids, context)
        for row, (i, position, _) in enumerate(last):
            torch.testing.assert_close(logits[row], plain[i][position], rtol=1e-5, atol=1e-5)
            checked += 1
    assert checked >= sum(decoded) + 10


def test_static_and_grouped_decode_attention_agree() -> None:
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, 30, BLOCK_SIZE, 2, 16, generator=generator)
    table = torch.randperm(30, generator=generator)[:24].view(3, 8)
    query = torch.randn(3, 6, 16, generator=generator)
    lengths = [1, 17, 32]
    static = paged_decode.paged_decode_attention(
        query, keys, values, table, torch.tensor(lengths), 0.25
    )
    grouped = paged_decode.paged_decode_attention_by_length(
        query, keys, values, table, lengths, 0.25
    )
    torch.testing.assert_close(static, grouped, rtol=1e-5, atol=1e-6)
    # Row 1 by hand, in float64.
    flat_keys = keys[table[1]].flatten(0, 1)[:17].double().repeat_interleave(3, dim=1)
    flat_values = values[table[1]].flatten(0, 1)[:17].double().repeat_interleave(3, dim=1)
    scores = torch.einsum("hd,thd->ht", query[1].double(), flat_keys) * 0.25
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), flat_values)
    torch.testing.assert_close(grouped[1].double(), expected, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_the_other_rows_are(wrapper: GPTNetwork) -> None:
    """Row 0 alone, beside short rows and beside long rows."""
    results = []
    for others, length in ((7, 0), (7, 63), (15, 5), (31, 40)):
        context = context_for(wrapper, 1 + others)
        generator = torch.Generator().manual_seed(6)
        context.kv_cache.normal_(generator=generator)
        # The table of slot 0 and its blocks are the same in every run.
        context.block_table[0] = torch.arange(1, 17)
        context.kv_cache[:, :, 1:17] = torch.randn(
            context.kv_cache[:, :, 1:17].shape, generator=torch.Generator().manual_seed(7)
        )
        rows = 1 + others
        slots = torch.arange(rows)
        positions = torch.tensor([21] + [length] * others)
        context.block_table[1:rows] = context.block_table[1:rows].clamp(min=17)
        context.begin_forward(slots, positions, decode_rows=rows, read_lengths=True)
        results.append(wrapper.forward(torch.full((rows,), 5), positions, context)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])

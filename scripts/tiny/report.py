"""What the embedded model is worth: loss, acceptance of its drafts, texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import BEGIN, END, PAD, Document, tokens_of
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.models.gpt import GPTModel


def positions_like(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... for each row of ``[B, S]``."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def padded(rows: Sequence[Any]) -> Tensor:
    """Rows of token ids as int64 ``[B, longest]``."""
    tensors = [torch.as_tensor(np.asarray(row, np.int64)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD)


@torch.no_grad()
def validation_loss(
    model: GPTModel, documents: Sequence[Document], length: int, tokens_per_batch: int
) -> float:
    """Nats per byte of documents that start at position 0 after ``<|begin|>``.

    The end token's nats count too, its byte does not. Documents are cut at ``length`` tokens.
    """
    device = next(model.parameters()).device
    rows = sorted((tokens_of(d)[: length + 1] for d in documents), key=len)
    nats, num_bytes, start = 0.0, 0, 0
    while start < len(rows):
        # Rows are sorted, so the last one of a batch is its longest.
        stop = start + 1
        while stop < len(rows) and (stop + 1 - start) * rows[stop].size <= tokens_per_batch:
            stop += 1
        ids = padded(rows[start:stop]).to(device)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        logits = model(inputs, positions_like(inputs), None).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        nats += float((losses * (labels != PAD)).sum())
        num_bytes += int((labels < END).sum())
        start = stop
    return nats / max(num_bytes, 1)


@torch.no_grad()
def acceptance(model: GPTModel, tokens: Tensor, prompt_length: int) -> list[float]:
    """Share of each MTP layer's drafts that the model's own greedy continuation confirms; a deeper
    layer's counts only where all before it were right.

    Args:
        tokens: ``[B, S]``, prompts with their greedy continuations.
    """
    positions = positions_like(tokens)
    model(tokens, positions, None)
    hidden = model.decoder_hidden_states
    assert hidden is not None
    shares: list[float] = []
    alive = positions >= prompt_length - 1  # row p has its main token p + 1 from the model
    for depth in range(len(model.mtp.layers)):
        ahead = torch.roll(tokens, -(depth + 1), dims=1)
        hidden = model.mtp_hidden_states(depth, hidden, ahead, positions)
        drafts = model.logits(hidden).argmax(-1)
        truth = torch.roll(tokens, -(depth + 2), dims=1)
        alive &= (positions < tokens.shape[1] - (depth + 2)) & (truth != PAD)
        hits = alive & (drafts == truth)
        shares.append(float(hits.sum()) / max(int(alive.sum()), 1))
        alive = hits
    return shares


def report(
    model: GPTModel,
    directory: Path,
    documents: Sequence[Document],
    *,
    length: int,
    rows: int,
    new_tokens: int,
    tokens_per_batch: int,
) -> dict[str, Any]:
    """Measure everything and print it; returns the figures. Sets evaluation mode.

    Args:
        model: what was written to ``directory``, from where an engine decodes the texts.
    """
    model.eval()
    device = next(model.parameters()).device
    config = EngineConfig(device=str(device), max_requests=max(rows, 2))

    def decode(prompts: list[list[int]], temperature: float, most: int) -> list[list[int]]:
        """Generated tokens, the end token with them."""
        params = SamplingParams(temperature=temperature, num_tokens_to_generate=most)
        with DynamicInferenceEngine.from_pretrained(directory, config) as engine:
            return [request.generated_tokens for request in engine.generate(prompts, params)]

    library = [d for d in documents if not d.is_test]
    loss = validation_loss(model, documents, length, tokens_per_batch)
    library_loss = validation_loss(model, library, length, tokens_per_batch)
    figures: dict[str, Any] = {
        "validation_nats_per_byte": loss,
        "validation_bits_per_byte": loss / float(np.log(2)),
        "validation_nats_per_byte_without_test_suites": library_loss,
    }
    prompt_length = min(64, length // 2)
    stride = max(1, len(documents) // (2 * rows))
    long_enough = [d for d in documents if len(d.text) >= 2 * prompt_length][::stride][:rows]
    if long_enough and model.mtp_process:
        prompts = [tokens_of(d)[:prompt_length].tolist() for d in long_enough]
        greedy = decode(prompts, 0.0, min(new_tokens, 256))
        whole = padded([p + g for p, g in zip(prompts, greedy, strict=True)]).to(device)
        shares = acceptance(model, whole, prompt_length)
        figures["acceptance_by_depth"] = shares
        figures["tokens_per_step_with_drafts"] = 1 + float(np.cumprod(shares).sum())

    prompts = [list(text.encode()) for text in ("def fibonacci(n):", "class Stack:\n")]
    greedy = decode(prompts, 0.0, min(new_tokens, 512))
    sampled = decode([[BEGIN]] * rows, 0.8, new_tokens)
    texts = [text_of(tokens) for tokens in sampled]
    ends = [len(tokens) for tokens in sampled if END in tokens]
    starts = sum(text.split(" ")[0] in ("def", "class", "async") for text in texts)
    figures |= {
        "greedy": [text_of(prompt + more) for prompt, more in zip(prompts, greedy, strict=True)],
        "sampled_documents": rows,
        "sampled_end_share": len(ends) / rows,
        "sampled_median_length": float(np.median(ends)) if ends else None,
        "sampled": texts[:8],
        "sampled_starts_with_definition": starts / rows,
    }
    for name, value in figures.items():
        print(f"--- {name}", *(value if isinstance(value, list) else [value]), sep="\n", flush=True)
    return figures


def text_of(tokens: Sequence[int]) -> str:
    """Bytes as text; special tokens are left out, the end is marked."""
    body = bytes(t for t in tokens if t < END).decode("utf-8", errors="replace")
    return body + ("<|endoftext|>" if END in tokens else "...")

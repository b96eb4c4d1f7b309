"""What the embedded model is worth: loss, acceptance of its drafts, texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import BEGIN, END, PAD, Document, tokens_of
from torch import Tensor

from megatron_async.models.gpt import GPTModel


def positions_like(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... for each row of ``[B, S]``."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


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
        batch = np.full((stop - start, rows[stop - 1].size), PAD, np.int64)
        for row, tokens in zip(batch, rows[start:stop], strict=True):
            row[: tokens.size] = tokens
        ids = torch.from_numpy(batch).to(device)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        logits = model(inputs, positions_like(inputs), None).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        nats += float((losses * (labels != PAD)).sum())
        num_bytes += int((labels < END).sum())
        start = stop
    return nats / max(num_bytes, 1)


@torch.no_grad()
def generate(model: GPTModel, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Continue ``[B, P]`` without a cache; rows that have ended go on with padding.

    Returns ``[B, P + n]``, ``n <= new_tokens``. ``temperature`` 0 is greedy.
    """
    tokens = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    for step in range(new_tokens):
        logits = model(tokens, positions_like(tokens), None)[:, -1].float()
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(1)
        chosen = torch.where(ended, PAD, chosen)
        ended = ended | (chosen == END)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        if step % 16 == 15 and bool(ended.all()):
            break
    return tokens


@torch.no_grad()
def acceptance(model: GPTModel, tokens: Tensor, prompt_length: int) -> list[float]:
    """Share of each MTP layer's drafts that the model's own greedy continuation confirms.

    Args:
        tokens: ``[B, S]``, prompts with their greedy continuations (:func:`generate`).

    Returns:
        One share per MTP layer; a deeper one counts only where all before it were right.
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
        in_text = positions < tokens.shape[1] - (depth + 2)
        alive = alive & in_text & (truth != PAD)
        hits = alive & (drafts == truth)
        shares.append(float(hits.sum()) / max(int(alive.sum()), 1))
        alive = hits
    return shares


def text_of(tokens: Sequence[int]) -> str:
    """Bytes as text; special tokens are left out, the end is marked."""
    body = bytes(t for t in tokens if t < END).decode("utf-8", errors="replace")
    return body + ("<|endoftext|>" if END in tokens else "...")


def report(
    model: GPTModel,
    documents: Sequence[Document],
    *,
    length: int,
    rows: int,
    new_tokens: int,
    tokens_per_batch: int,
) -> dict[str, Any]:
    """Measure everything and print it; returns the figures. Sets evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    figures: dict[str, Any] = {}
    loss = validation_loss(model, documents, length, tokens_per_batch)
    figures["validation_nats_per_byte"] = loss
    figures["validation_bits_per_byte"] = loss / float(np.log(2))
    library = [d for d in documents if not d.is_test]
    library_loss = validation_loss(model, library, length, tokens_per_batch)
    figures["validation_nats_per_byte_without_test_suites"] = library_loss
    print(f"validation: {loss:.4f} nats/byte, {loss / np.log(2):.4f} bits/byte "
          f"({library_loss:.4f} nats/byte without test suites)", flush=True)  # fmt: skip

    prompt_length = min(64, length // 2)
    long_enough = [d for d in documents if len(d.text) >= 2 * prompt_length][
        :: max(1, len(documents) // (2 * rows))
    ][:rows]
    if long_enough and model.mtp_process:
        prompts = torch.stack(
            [torch.from_numpy(tokens_of(d)[:prompt_length].astype(np.int64)) for d in long_enough]
        ).to(device)
        greedy = generate(model, prompts, min(new_tokens, 256), 0.0)
        shares = acceptance(model, greedy, prompt_length)
        figures["acceptance_by_depth"] = shares
        figures["tokens_per_step_with_drafts"] = 1 + float(np.cumprod(shares).sum())
        print(f"acceptance by depth: {[round(s, 4) for s in shares]}, "
              f"{figures['tokens_per_step_with_drafts']:.3f} tokens/step", flush=True)  # fmt: skip
        for row in greedy[:2].tolist():
            print(f"--- greedy after {prompt_length} tokens of validation text\n{text_of(row)}")

    for prompt in ("def fibonacci(n):", "class Stack:\n"):
        ids = torch.tensor([list(prompt.encode())], device=device)
        text = text_of(generate(model, ids, min(new_tokens, 512), 0.0)[0].tolist())
        figures.setdefault("greedy", []).append(text)
        print(f"--- greedy, prompt {prompt!r}\n{text}")

    begin = torch.full((rows, 1), BEGIN, device=device)
    sampled = generate(model, begin, new_tokens, 0.8).tolist()
    ends = [row.index(END) for row in sampled if END in row]
    figures["sampled_documents"] = rows
    figures["sampled_end_share"] = len(ends) / rows
    figures["sampled_median_length"] = float(np.median(ends)) if ends else None
    for row in sampled[:4]:
        print(f"--- sampled, temperature 0.8\n{text_of(row)}")
    figures["sampled"] = [text_of(row) for row in sampled[:8]]
    first = [text_of(row).split(" ")[0] for row in sampled]
    starts = sum(word in ("def", "class", "async") for word in first) / rows
    figures["sampled_starts_with_definition"] = starts
    print(f"sampled: {len(ends)}/{rows} end within {new_tokens} tokens, median length "
          f"{figures['sampled_median_length']}, {starts:.0%} start with a definition",
          flush=True)  # fmt: skip
    return figures

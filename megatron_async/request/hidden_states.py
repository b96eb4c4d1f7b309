"""The hidden states of a prompt, from the steps that computed them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.codec import from_plain
from megatron_async.errors import IntegrityError
from megatron_async.step.plan import Plan
from megatron_async.step.records import HiddenStates


class PromptRows:
    """Hidden states by position. What has come before stays: a prompt that is computed again after
    an eviction adds nothing twice.

    Args:
        length: tokens of the prompt; rows behind them are of what it has generated.
    """

    __slots__ = ("_length", "_parts", "known")

    def __init__(self, length: int) -> None:
        self._length = length
        self._parts: list[Tensor] = []
        self.known = 0

    def put(self, start: int, rows: Tensor) -> None:
        """Keep ``rows`` [positions, layers, hidden] from position ``start`` on.

        Raises:
            IntegrityError: positions before ``start`` have not come.
        """
        if start > self.known:
            raise IntegrityError(
                f"hidden states of position {start} have come before those of {self.known}"
            )
        new = rows[self.known - start : self._length - start]
        if len(new):
            self._parts.append(new)
            self.known += len(new)

    def joined(self) -> Tensor | None:
        """``[tokens, layers, hidden]`` of those that are known; None of a request that nothing was
        computed of."""
        with torch.inference_mode(False):
            return torch.cat(self._parts) if self._parts else None


def rows_of_chunks(plan: Plan, found: HiddenStates) -> Iterator[tuple[int, int, Tensor]]:
    """For each chunk that asks for hidden states the key of its request, its first position, and
    its rows ``[tokens, layers, hidden]`` of the layers that it asks for."""
    at = 0
    for chunk in plan.prefills:
        if chunk.layers:
            columns = [found.layers.index(layer) for layer in chunk.layers]
            rows = found.rows[at : at + len(chunk.tokens)]
            at += len(chunk.tokens)
            yield plan.rows.keys[chunk.row], chunk.start, rows[:, columns]


def packed_states(states: Tensor) -> dict[str, Any]:
    """A tensor as its shape, its dtype and base64."""
    data = states.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(states.dtype).removeprefix("torch.")
    return {"shape": list(states.shape), dtype: base64.b64encode(data).decode()}


def unpacked_states(data: Any) -> Tensor:
    """The inverse of :func:`packed_states`; raises ValueError, KeyError or TypeError for others."""
    shape = from_plain(data["shape"], list[int])
    (name,) = data.keys() - {"shape"}
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{name} is no dtype of hidden states")
    words = bytearray(base64.b64decode(data[name], validate=True))
    flat = torch.frombuffer(words, dtype=getattr(torch, name)) if words else torch.empty(0)
    if flat.numel() != torch.Size(shape).numel():
        raise ValueError(f"shape={shape} is another one than that of {flat.numel()} values")
    return flat.reshape(shape)

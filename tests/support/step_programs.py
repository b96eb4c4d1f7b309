"""A decode step outside of an engine: the step program's torch code, and rings for its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.models.network import Network
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampling_stage import SamplingExtras
from megatron_async.runner.step_program import StepProgram
from megatron_async.step.packet import PacketLayout


class _Given(Network):
    """A network whose forward is given."""

    def __init__(self, vocab_size: int, forward: Callable[[Tensor, Tensor, Any], Tensor]) -> None:
        self.vocab_size, self._given = vocab_size, forward

    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        return self._given(token_ids, position_ids, context)


class ReferenceProgram:
    """A step program on the CPU whose packets and logits are given.

    Args:
        records: row records int32 ``[rows, ROW_WIDTH]`` of the pending logits.
        packets: int32 words, one array for each H2D.
        logits: ``[rows * window, vocabulary]``; the first are the pending ones, the others those
            of the forwards, and then the first again.
    """

    def __init__(
        self,
        context: ForwardBatch,
        layout: PacketLayout,
        records: Tensor,
        packets: Sequence[np.ndarray[Any, np.dtype[np.int32]]],
        logits: Sequence[Tensor],
        extras: SamplingExtras | None = None,
        drafter: Any = None,
        synthetic_acceptance: float | None = None,
    ) -> None:
        self.published: list[Tensor] = []
        """What each S has published."""
        self.batches: list[dict[str, Tensor]] = []
        """What each forward was to compute."""
        self._packets = [torch.from_numpy(words) for words in packets]
        self._logits = [*logits[1:], logits[0]]
        self.program = StepProgram(
            SimpleNamespace(torch_device=torch.device("cpu"), captures=True),  # type: ignore[arg-type]
            context,
            _Given(logits[0].shape[1], self._forward),
            layout,
            SimpleNamespace(read=self._read),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(publish=self.published.append),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            extras,
            logits_dtype=torch.float32,
            poison=False,
            drafter=drafter,
            synthetic_acceptance=synthetic_acceptance,
        )
        self.records = self.program._row_records[: len(records)]
        self.records.copy_(records)
        self.program._pending_logits[: len(logits[0])] = logits[0]

    def _read(self, into: Tensor, width: int) -> None:
        into[:width].copy_(self._packets.pop(0)[:width])

    def _forward(self, token_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        self.batches.append(
            {
                "token_ids": token_ids,
                "position_ids": position_ids,
                "slots": context.token_slots,
                "slot_mapping": context.slot_mapping,
                "lengths": context.metadata.decode_lengths,
            }
        )
        return self._logits.pop(0)


def kernel_ring(entries: int, width: int, begun: int, device: str) -> SimpleNamespace:
    """A ring as the kernels take one, of ``entries`` of ``width`` words of -7; ``begun`` have been
    used before."""
    on_gpu = device == "cuda"
    return SimpleNamespace(
        ring=torch.full((entries, width), -7, dtype=torch.int32, pin_memory=on_gpu),
        counter=torch.full((1,), begun, dtype=torch.int64, device=device),
        sequence=torch.full((1,), begun, dtype=torch.int32, pin_memory=on_gpu),
    )

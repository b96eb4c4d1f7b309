"""Allowed-token masks of guided rows, on their way to S in memory that the device reads itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from megatron_async.sampling.process_logits import mask_words

Mask = npt.NDArray[np.int32]
"""A bit for each token id: bit ``id % 32`` of word ``id // 32``; 1 is allowed."""


class MaskRing:
    """An entry for each ticket, for its S. S(n) has run before its record is taken, and that
    is before ticket ``n + entries`` is launched: no entry is overwritten before it is read.

    A position is that of a token in the step's windows: of row r those from ``r * window`` on.

    Attributes:
        masks: int32 ``[entries, positions, words]``, pinned.
        masked: int32 ``[entries, positions]``, pinned: 1 where the position's mask counts.
    """

    def __init__(self, entries: int, positions: int, vocab_size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        words = mask_words(vocab_size)
        self.masks = torch.zeros(entries, positions, words, dtype=torch.int32, pin_memory=pinned)
        self.masked = torch.zeros(entries, positions, dtype=torch.int32, pin_memory=pinned)
        self._masks: Mask = self.masks.numpy()
        self._masked: Mask = self.masked.numpy()

    @property
    def memory_bytes(self) -> int:
        """Bytes of pinned memory."""
        return self.masks.nbytes + self.masked.nbytes

    def entry(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Device: ``masks`` and ``masked`` of ticket ``number``."""
        entry = number % len(self.masks)
        return self.masks[entry], self.masked[entry]

    def copied(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``masks`` and ``masked`` of a ticket whose number, int64 [1], the device alone knows. All
        entries are copied: the kernels read what they need by themselves."""
        entry, on = number % len(self.masks), number.device
        masks, masked = (each.to(on, non_blocking=True) for each in (self.masks, self.masked))
        return masks[entry][0], masked[entry][0]

    def claim(self, number: int, positions: int) -> tuple[Mask, Mask]:
        """Host: ``masks`` and ``masked`` of the positions of ticket ``number``, none of which
        counts yet, to fill before its S is launched."""
        entry = number % len(self._masks)
        self._masked[entry] = 0
        return self._masks[entry, :positions], self._masked[entry, :positions]

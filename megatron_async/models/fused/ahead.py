"""What decode steps launch, compiled and loaded ahead of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch

from megatron_async.kernels import compile as cuda
from megatron_async.models.fused.blocks.gemms import Work

User = TypeVar("User")


class Refused(NamedTuple):
    """A kernel that the GPU does not run."""

    source: str
    reason: str


def compile_ahead(
    needed: Iterable[tuple[User, Work]], device: torch.device
) -> list[tuple[User, Refused]]:
    """Compile kernels side by side, each once, and load them, so that later calls find them.

    Args:
        needed: kernels, each with what needs it.

    Returns:
        What needs a kernel that the GPU does not run, and the kernel.
    """
    work: dict[tuple[str, tuple[tuple[str, int], ...]], Work] = {}
    users: dict[tuple[str, tuple[tuple[str, int], ...]], list[User]] = {}
    for user, (source, macros) in needed:
        key = source, tuple(sorted(macros.items()))
        work[key] = source, macros
        users.setdefault(key, []).append(user)
    cuda.compile_together(list(work.values()), cuda.architecture(device.index or 0))
    reasons = {key: cuda.too_large(*each, device) for key, each in work.items()}
    return [
        (user, Refused(work[key][0], reason))
        for key, reason in reasons.items()
        if reason is not None
        for user in users[key]
    ]

"""The optimizer step of the embedded model's training, as one CUDA graph where possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from report import positions_like
from torch import Tensor

from megatron_async.models.gpt import GPTModel


class Trainer:
    """bfloat16 weights, fp32 AdamW in flat buffers, a step in one CUDA graph where possible.

    ``tokens`` is the static input: int64 ``[batch_size, sequence_length + 1]``. ``loss`` is the
    last step's mean next-token loss in nats, on the device.
    """

    betas, epsilon, weight_decay, clip = (0.9, 0.95), 1e-8, 0.1, 1.0

    def __init__(self, model: GPTModel, batch_size: int, sequence_length: int) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.device = self.params[0].device
        self.master = torch.cat([p.detach().float().flatten() for p in self.params])
        self.grad, self.first, self.second = (torch.zeros_like(self.master) for _ in range(3))
        decays = [torch.full_like(p.flatten(), p.dim() > 1, dtype=torch.float) for p in self.params]
        self.decay = self.weight_decay * torch.cat(decays)
        self.master_views, self.grad_views = self._views(self.master), self._views(self.grad)
        self.lr, self.count, self.loss = torch.zeros(3, device=self.device).unbind()
        shape = (batch_size, sequence_length + 1)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.mask = torch.ones(shape[0], shape[1] - 1, device=self.device)
        self.positions = positions_like(self.tokens[:, :-1]).contiguous()
        self.replay: Callable[[], None] | None = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def eager_step(self) -> None:
        """Forward, backward, update."""
        self.model.zero_grad(set_to_none=True)
        inputs, labels = self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()
        losses = self.model(inputs, self.positions, None, labels=labels, loss_mask=self.mask)
        loss = losses.mean()
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(self.grad_views, [p.grad for p in self.params])
            self._adamw()
            torch._foreach_copy_(self.params, self.master_views)
            self.loss.copy_(loss.detach())

    def _adamw(self) -> None:
        # arXiv:1711.05101, all numbers on the device so that a graph can hold the update.
        beta1, beta2 = self.betas
        self.grad.mul_((self.clip / (self.grad.norm() + 1e-6)).clamp(max=1.0))
        self.count.add_(1)
        self.first.lerp_(self.grad, 1 - beta1)
        self.second.lerp_(self.grad.square(), 1 - beta2)
        scale = torch.sqrt(self.second / (1 - beta2**self.count)) + self.epsilon
        update = self.first / (1 - beta1**self.count) / scale
        self.master.sub_(self.lr * (update + self.decay * self.master))

    def capture(self) -> bool:
        """Record the step as a CUDA graph; False (and eager steps) if that does not work.

        Runs a few steps at learning rate 0 first: ``tokens`` must hold a batch.
        """
        self.lr.zero_()
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager_step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            self.model.zero_grad(set_to_none=True)
            # Other threads (NCCL's watchdog) may touch the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.eager_step()
            graph.replay()
            torch.cuda.synchronize()
            if not math.isfinite(float(self.loss)):
                raise RuntimeError(f"loss {float(self.loss)} after the first replay")
        except Exception as error:
            print(f"no CUDA graph, steps are eager: {error!r}", flush=True)
            torch.cuda.synchronize()
            return False
        finally:
            for state in (self.first, self.second, self.count):
                state.zero_()
        self.replay = graph.replay
        return True

    def step(self, tokens: Tensor, lr: float) -> None:
        """One update with a batch of int16 tokens on the device."""
        self.tokens.copy_(tokens)
        self.lr.fill_(lr)
        if self.replay is not None:
            self.replay()
        else:
            self.eager_step()

    @torch.no_grad()
    def restore(self, master: Tensor) -> None:
        """Take back weights saved as ``master.clone()``, optimizer state aside."""
        self.master.copy_(master)
        torch._foreach_copy_(self.params, self.master_views)


def learning_rate(progress: float, peak: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak; ``progress`` is from 0 to 1."""
    if progress < warmup:
        return peak * progress / warmup
    share = min((progress - warmup) / (1 - warmup), 1.0)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


def set_dropout(model: GPTModel, share: float) -> None:
    """Dropout of the residual branches and the embedding."""
    for module in model.modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = share
        if isinstance(module, torch.nn.Dropout):
            module.p = share

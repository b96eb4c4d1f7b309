"""Train the embedded model `tiny` with megatron-core on Python's standard library.

A byte-level GPT with two multi-token prediction layers; one H200 needs a few minutes::

    PYTHONPATH=. python scripts/train_tiny.py --out megatron_async/assets/tiny
"""

from __future__ import annotations

import argparse
import datetime
import io
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tiny_corpus import VOCAB_SIZE, Corpus, pack, read_corpus
from tiny_files import write_json, write_model
from tiny_report import positions_like, report, validation_loss
from torch import Tensor
from tqdm import tqdm

from megatron_async.models.build import build_model
from megatron_async.models.config import ModelConfig
from megatron_async.models.gpt import GPTModel

from megatron.core import __version__ as MEGATRON_CORE_VERSION  # isort: skip

CONFIG = ModelConfig(
    num_layers=5,
    hidden_size=256,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_hidden_size=704,
    vocab_size=VOCAB_SIZE,
    max_sequence_length=2048,
    tie_word_embeddings=True,
    mtp_num_layers=2,
)


class Trainer:
    """bfloat16 weights, fp32 AdamW in flat buffers, a step in one CUDA graph where possible.

    ``tokens`` is the static input: int64 ``[batch_size, sequence_length + 1]``. ``loss`` is the
    last step's mean next-token loss in nats, on the device.
    """

    betas, epsilon, weight_decay, clip = (0.9, 0.95), 1e-8, 0.1, 1.0

    def __init__(self, model: GPTModel, args: argparse.Namespace) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.device = self.params[0].device
        self.master = torch.cat([p.detach().float().flatten() for p in self.params])
        self.grad, self.first, self.second = (torch.zeros_like(self.master) for _ in range(3))
        decays = [torch.full_like(p.flatten(), p.dim() > 1, dtype=torch.float) for p in self.params]
        self.decay = self.weight_decay * torch.cat(decays)
        self.master_views, self.grad_views = self._views(self.master), self._views(self.grad)
        self.lr, self.count, self.loss = torch.zeros(3, device=self.device).unbind()
        shape = (args.batch_size, args.sequence_length + 1)
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


def batches(corpus: Corpus, args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """Endless epochs, each packed anew in a thread while the last one is used."""

    def epoch(number: int) -> Tensor:
        rows = pack(
            corpus.training,
            args.sequence_length,
            seed=args.seed * 100_003 + number,
            test_share=args.test_share,
        )
        return torch.from_numpy(rows)

    with ThreadPoolExecutor(1) as pool:
        coming, number = pool.submit(epoch, 0), 0
        while True:
            rows, number = coming.result().to(device), number + 1
            coming = pool.submit(epoch, number)
            if len(rows) < args.batch_size:
                raise SystemExit(f"the corpus has {len(rows)} rows: use a smaller --batch-size")
            for start in range(0, len(rows) - args.batch_size + 1, args.batch_size):
                yield rows[start : start + args.batch_size]


def learning_rate(progress: float, peak: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak; ``progress`` is from 0 to 1."""
    if progress < warmup:
        return peak * progress / warmup
    share = min((progress - warmup) / (1 - warmup), 1.0)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


def train(
    trainer: Trainer, corpus: Corpus, args: argparse.Namespace, start: float
) -> dict[str, Any]:
    """Until ``--minutes`` after ``start`` (or ``--steps``); keeps the weights with the best
    validation loss. Returns the figures."""
    model, device = trainer.model, trainer.device
    stream = batches(corpus, args, device)
    trainer.tokens.copy_(next(stream))
    captured = device.type == "cuda" and args.cuda_graph and trainer.capture()
    begun, deadline = time.monotonic(), start + 60 * args.minutes
    if args.steps is None and begun >= deadline:
        raise SystemExit("no time left to train: use more --minutes")
    history: list[dict[str, float]] = []
    best_loss, best = math.inf, trainer.master.clone()
    check_every = 1.0 / args.checks
    next_check, step, progress = check_every, 0, 0.0
    bar = tqdm(total=1000, unit="‰", mininterval=5, dynamic_ncols=False, file=sys.stdout)
    while progress < 1.0:
        trainer.step(next(stream), learning_rate(progress, args.lr))
        step += 1
        if step % args.log_every == 0 or step == args.steps:
            loss = float(trainer.loss)  # waits, so that the clock below is the device's
            if not math.isfinite(loss):
                print(f"\nloss {loss} at step {step}: stopping", flush=True)
                break
            rate = step * trainer.mask.numel() / (time.monotonic() - begun)
            bar.set_postfix_str(f"step {step} loss {loss:.4f} {rate / 1e6:.2f}M tokens/s")
        if args.steps is not None:
            progress = step / args.steps
        else:
            progress = (time.monotonic() - begun) / (deadline - begun)
        bar.update(min(int(1000 * progress), 1000) - bar.n)
        if progress >= next_check or progress >= 1.0:
            next_check += check_every
            model.eval()
            value = validation_loss(
                model, corpus.validation, args.sequence_length, args.tokens_per_batch
            )
            model.train()
            history.append({"step": step, "train": float(trainer.loss), "validation": value})
            print(f"\nstep {step} train {history[-1]['train']:.4f} "
                  f"validation {value:.4f} nats/byte", flush=True)  # fmt: skip
            if value < best_loss:
                best_loss, best = value, trainer.master.clone()
    bar.close()
    trainer.restore(best)
    seconds = time.monotonic() - begun
    tokens = step * trainer.mask.numel()
    return {
        "steps": step,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "train_seconds": seconds,
        "cuda_graph": bool(captured),
        "history": history,
    }


def set_dropout(model: GPTModel, share: float) -> None:
    """Dropout of the residual branches and the embedding."""
    for module in model.modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = share
        if isinstance(module, torch.nn.Dropout):
            module.p = share


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=6.0, help="start to end of training")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a step")
    parser.add_argument("--sequence-length", type=int, default=CONFIG.max_sequence_length)
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--mtp-scale", type=float, default=0.6, help="weight of the MTP losses")
    parser.add_argument("--test-share", type=float, default=0.5, help="of test suites, an epoch")
    parser.add_argument("--checks", type=int, default=12, help="validations during training")
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--tokens-per-batch", type=int, default=65536, help="in validation")
    parser.add_argument("--sample-rows", type=int, default=64)
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--limit-files", type=int, help="read only so many source files")
    parser.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if not 2 <= args.sequence_length <= CONFIG.max_sequence_length:
        parser.error(f"--sequence-length must be 2 to {CONFIG.max_sequence_length}")
    return args


def main() -> int:
    start = time.monotonic()
    args = parse_arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    corpus = read_corpus(args.sequence_length - 2, limit_files=args.limit_files)
    sizes = {
        name: sum(len(d.text) for d in part)
        for name, part in (("training", corpus.training), ("validation", corpus.validation))
    }
    print(f"{len(corpus.training)} documents, {sizes['training'] / 1e6:.1f} MB; validation: "
          f"{len(corpus.validation)}, {sizes['validation'] / 1e6:.2f} MB; "
          f"{time.monotonic() - start:.1f} s", flush=True)  # fmt: skip
    if not corpus.training or not corpus.validation:
        raise SystemExit("too few source files: use a larger --limit-files")
    model = build_model(CONFIG, device=device, dtype=torch.bfloat16)
    model.train()
    model.config.mtp_loss_scaling_factor = args.mtp_scale
    set_dropout(model, args.dropout)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters; {time.monotonic() - start:.1f} s", flush=True)

    trainer = Trainer(model, args)
    figures: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": MEGATRON_CORE_VERSION,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "out"},
        "parameters": parameters,
        "documents": len(corpus.training),
        "bytes": sizes["training"],
        "validation_bytes": sizes["validation"],
    }
    figures["training"] = train(trainer, corpus, args, start)
    # Weights first: a failing evaluation must not cost them.
    write_model(args.out, CONFIG, model)
    write_json(args.out / "training.json", figures)
    print(f"written to {args.out}; {time.monotonic() - start:.1f} s", flush=True)
    status = 0
    try:
        figures["evaluation"] = report(
            model,
            corpus.validation,
            length=args.sequence_length,
            rows=args.sample_rows,
            new_tokens=min(args.sample_tokens, args.sequence_length - 64),
            tokens_per_batch=args.tokens_per_batch,
        )
    except Exception:
        traceback.print_exc()
        figures["evaluation"] = None
        status = 1
    figures["seconds"] = time.monotonic() - start
    write_json(args.out / "training.json", figures)
    print(f"done; {figures['seconds']:.1f} s", flush=True)
    torch.distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())

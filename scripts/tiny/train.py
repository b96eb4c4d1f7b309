"""Train the embedded models with megatron-core on Python's standard library.

Byte-level models: ``tiny`` is a GPT with two multi-token prediction layers, ``tiny-moe`` a mixture
of experts, ``tiny-hybrid`` has Mamba-2 layers and one of attention; one H200 needs a few minutes::

    PYTHONPATH=. python scripts/tiny/train.py --model tiny --out tiny

The tokenizer, bytes and a few special tokens, is not trained: its files are those of the package.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from balance import LoadBalance
from corpus import BEGIN, END, VOCAB_SIZE, Corpus, pack, read_corpus
from report import positions_like, report, validation_loss
from rounding import STEP, round_to
from torch import Tensor
from tqdm import tqdm

from megatron_async.checkpoint.native import save_native
from megatron_async.megatron_compat import installed
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt import GPTModel

ASSETS = Path(__file__).parents[2] / "megatron_async" / "assets" / "tiny"
TOKENIZER_FILES = [ASSETS / "tokenizer.json", ASSETS / "tokenizer_config.json"]
_SIZES: dict[str, Any] = dict(
    hidden_size=256, num_attention_heads=4, num_kv_heads=2, head_dim=64, ffn_hidden_size=704,
    vocab_size=VOCAB_SIZE, max_sequence_length=2048, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "tiny": ModelConfig(num_layers=5, mtp_num_layers=2, **_SIZES),
    "tiny-moe": ModelConfig(
        num_layers=4, num_moe_experts=8, moe_ffn_hidden_size=64, moe_layer_freq=(0, 1, 1, 1),
        moe_shared_expert_intermediate_size=128, **_SIZES,
    ),
    "tiny-hybrid": ModelConfig(
        num_layers=7, hybrid_override_pattern="MM*-MM-", mamba_num_heads=8, mamba_head_dim=64,
        mamba_num_groups=1, mamba_state_dim=32, position_embedding="none",
        **{**_SIZES, "ffn_hidden_size": 640},
    ),
}  # fmt: skip
"""By the name of the embedded model."""
WARM_UP_SHARE, LAST_RATE = 0.02, 0.01


class Trainer:
    """bfloat16 weights, AdamW (arXiv:1711.05101) on fp32 copies, all numbers on the device so that
    a CUDA graph can hold a step.

    ``tokens`` is the static input: int64 ``[batch_size, sequence_length + 1]``. ``loss`` is the
    last step's mean next-token loss in nats, on the device.
    """

    def __init__(
        self, model: GPTModel, batch_size: int, sequence_length: int, balance: float = 0.0
    ) -> None:
        self.model = model
        self.balance, self.load_balance = balance, LoadBalance(model)
        self.params = list(model.parameters())
        self.device = self.params[0].device
        self.master = [p.detach().float() for p in self.params]
        self.grads = [torch.zeros_like(m) for m in self.master]
        for master, grad in zip(self.master, self.grads, strict=True):
            master.grad = grad
        self.lr, self.loss = torch.zeros(2, device=self.device).unbind()
        norms = {"params": [m for m in self.master if m.dim() < 2], "weight_decay": 0.0}
        matrices = {"params": [m for m in self.master if m.dim() > 1], "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(
            [matrices, norms], self.lr, betas=(0.9, 0.95), eps=1e-8, capturable=True, fused=True
        )
        shape = (batch_size, sequence_length + 1)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.mask = torch.ones(shape[0], shape[1] - 1, device=self.device)
        self.positions = positions_like(self.tokens[:, :-1]).contiguous()
        self.run = self.eager_step

    def eager_step(self) -> None:
        """Forward, backward, update."""
        self.model.zero_grad(set_to_none=True)
        inputs, labels = self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()
        losses = self.model(inputs, self.positions, None, labels=labels, loss_mask=self.mask)
        loss = losses.mean()
        (loss + self.balance * self.load_balance.loss()).backward()
        with torch.no_grad():
            torch._foreach_copy_(self.grads, [p.grad for p in self.params])
            torch.nn.utils.clip_grad_norm_(self.master, 1.0)
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.master)
            self.loss.copy_(loss.detach())

    def capture(self) -> None:
        """Record the step as a CUDA graph. Runs a few steps at learning rate 0 first: ``tokens``
        must hold a batch."""
        self.lr.zero_()
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager_step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.model.zero_grad(set_to_none=True)
        # Other threads (NCCL's watchdog) may touch the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.eager_step()
        graph.replay()
        for state in self.optimizer.state.values():
            torch._foreach_zero_(list(state.values()))
        self.run = graph.replay

    def step(self, tokens: Tensor, lr: float) -> None:
        """One update with a batch of int16 tokens on the device."""
        self.tokens.copy_(tokens)
        self.lr.fill_(lr)
        self.run()

    @torch.no_grad()
    def restore(self, master: list[Tensor]) -> None:
        """Take back weights saved as clones of ``master``, optimizer state aside."""
        torch._foreach_copy_(self.master, master)
        torch._foreach_copy_(self.params, self.master)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine; ``progress`` is from 0 to 1."""
    if progress < WARM_UP_SHARE:
        return peak * progress / WARM_UP_SHARE
    share = min((progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE), 1.0)
    return peak * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)


def set_dropout(model: GPTModel, share: float) -> None:
    """Dropout of the residual branches and the embedding."""
    for module in model.modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = share
        if isinstance(module, torch.nn.Dropout):
            module.p = share


def batches(corpus: Corpus, args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """Endless epochs, each packed anew in a thread while the last one is used."""

    def epoch(number: int) -> Tensor:
        seed = args.seed * 100_003 + number
        rows = pack(corpus.training, args.sequence_length, seed, args.test_share)
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


def train(
    trainer: Trainer, corpus: Corpus, args: argparse.Namespace, start: float
) -> dict[str, Any]:
    """Train until ``--minutes`` after ``start`` (or ``--steps``); keeps the weights with the best
    validation loss. Returns the figures."""
    model, captured = trainer.model, trainer.device.type == "cuda" and args.cuda_graph
    stream = batches(corpus, args, trainer.device)
    trainer.tokens.copy_(next(stream))
    if captured:
        trainer.capture()
    begun, deadline = time.monotonic(), start + 60 * args.minutes
    if args.steps is None and begun >= deadline:
        raise SystemExit("no time left to train: use more --minutes")
    history: list[dict[str, float]] = []
    best_loss, best = math.inf, [m.clone() for m in trainer.master]
    next_check, step, progress = 1.0 / args.checks, 0, 0.0
    bar = tqdm(total=1000, unit="‰", mininterval=20, dynamic_ncols=False, file=sys.stdout)
    while progress < 1.0:
        trainer.step(next(stream), learning_rate(progress, args.lr))
        step += 1
        if step % args.log_every == 0 or step == args.steps:
            loss = float(trainer.loss)  # waits, so that the clock below is the device's
            if not math.isfinite(loss):
                print(f"\nloss {loss} at step {step}: stopping", flush=True)
                break
            bar.set_postfix_str(f"step {step} loss {loss:.4f}")
        passed = (time.monotonic() - begun) / (deadline - begun)
        progress = passed if args.steps is None else step / args.steps
        bar.update(min(int(1000 * progress), 1000) - bar.n)
        if progress >= next_check or progress >= 1.0:
            next_check += 1.0 / args.checks
            model.eval()
            sizes = args.sequence_length, args.tokens_per_batch
            value = validation_loss(model, corpus.validation, *sizes)
            model.train()
            history.append({"step": step, "train": float(trainer.loss), "validation": value})
            print(f"\n{history[-1]}, in nats a byte", flush=True)
            if value < best_loss:
                best_loss, best = value, [m.clone() for m in trainer.master]
    bar.close()
    trainer.restore(best)
    seconds, tokens = time.monotonic() - begun, step * trainer.mask.numel()
    return {
        "steps": step,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "train_seconds": seconds,
        "cuda_graph": captured,
        "history": history,
    }


def parse_arguments() -> argparse.Namespace:
    """The options. Their defaults are those of the model in the package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=CONFIGS, default="tiny")
    add("--out", type=Path, required=True, help="directory to write")
    add("--minutes", type=float, default=1.8, help="start to end of training")
    add("--steps", type=int, help="train this many steps instead")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--batch-size", type=int, default=32, help="sequences in a step")
    add("--sequence-length", type=int, default=_SIZES["max_sequence_length"])
    add("--lr", type=float, default=2.5e-3, help="peak learning rate")
    add("--dropout", type=float, default=0.1)
    add("--mtp-scale", type=float, default=0.6, help="weight of the MTP losses")
    add("--balance", type=float, default=0.01, help="weight of the load balance of experts")
    add("--test-share", type=float, default=0.5, help="of test suites, an epoch")
    add("--checks", type=int, default=6, help="validations during training")
    add("--log-every", type=int, default=25)
    add("--tokens-per-batch", type=int, default=65536, help="in validation")
    add("--sample-rows", type=int, default=64)
    add("--sample-tokens", type=int, default=1024)
    add("--round-to", type=float, default=STEP, help="step of the written weights; 0 is none")
    add("--limit-files", type=int, help="read only so many source files")
    add("--cuda-graph", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if not 2 <= args.sequence_length <= _SIZES["max_sequence_length"]:
        parser.error(f"--sequence-length must be 2 to {_SIZES['max_sequence_length']}")
    return args


def main() -> None:
    """Train, write the model and its figures."""
    start = time.monotonic()
    args = parse_arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    corpus = read_corpus(args.sequence_length - 2, args.limit_files)
    if not corpus.training or not corpus.validation:
        raise SystemExit("too few source files: use a larger --limit-files")
    config = CONFIGS[args.model]
    model = build_model(config, device=device, dtype=torch.bfloat16)
    model.train()
    model.config.mtp_loss_scaling_factor = args.mtp_scale
    set_dropout(model, args.dropout)
    figures: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": installed().version,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "out"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "documents": len(corpus.training),
        "bytes": sum(len(d.text) for d in corpus.training),
        "validation_bytes": sum(len(d.text) for d in corpus.validation),
    }
    print(json.dumps(figures), flush=True)
    trainer = Trainer(model, args.batch_size, args.sequence_length, args.balance)
    figures["training"] = train(trainer, corpus, args, start)
    round_to(model.parameters(), args.round_to)
    # Weights first: a failing evaluation must not cost them.
    save_native(
        args.out, model, config, tokenizer_files=TOKENIZER_FILES, eos_token_ids=[END],
        bos_token_id=BEGIN, dtype=torch.bfloat16,
    )  # fmt: skip
    print(f"written to {args.out}; {time.monotonic() - start:.1f} s", flush=True)
    figures["evaluation"] = None
    try:
        new_tokens = min(args.sample_tokens, args.sequence_length - 64)
        figures["evaluation"] = report(
            model, args.out, corpus.validation, length=args.sequence_length,
            rows=args.sample_rows, new_tokens=new_tokens, tokens_per_batch=args.tokens_per_batch,
        )  # fmt: skip
    finally:
        figures["seconds"] = time.monotonic() - start
        (args.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"done; {figures['seconds']:.1f} s", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

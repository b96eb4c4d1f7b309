"""GRPO (arXiv:2402.03300) on the embedded model, trainer and engine in one process, in two minutes
on two CPU cores::

    python examples/grpo.py --plot docs/grpo.png

The model is given the first line of a function and writes the rest. What it writes is worth
something if it ends by itself and Python parses it, and more the longer it is, up to a length.

The engine generates the next batches in a thread of its own while the trainer learns from one that
is there: at most ``--staleness`` updates later. A request that is under way when new weights come
goes on with them, or begins again. What a token was sampled with is known by its log-probability
and the version of its weights, so that tokens that are too old are left out. With ``--exact`` the
trainer's log-probabilities have the bits of the engine's: beside the weights that sampled a token
its importance ratio is 1, and the KL error is 0.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_async import DynamicInferenceEngine, EngineConfig, Rollout, SamplingParams
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.request.request import RequestFuture
from megatron_async.request.rollouts import RolloutBatch, batch_of
from megatron_async.training import exact_numerics

PROMPTS = (
    "def read_lines(path):\n",
    "def add(self, value):\n",
    "def is_empty(self):\n",
    "def close(self):\n",
    "def get_name(self, default=None):\n",
    "def find(items, key):\n",
    "def write(self, data):\n",
    "def _check(self, name):\n",
)
WANTED_BYTES = 48
"""From which on a function is long enough."""
CLIP = 0.2
"""Importance ratios count from 1 - CLIP to 1 + CLIP."""


def reward_of(prompt: str, written: str, *, ended: bool) -> float:
    """0 for what does not end by itself or does not parse, else up to 1 by its length."""
    if not ended:
        return 0.0
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(prompt + written)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return min(1.0, len(written.strip()) / WANTED_BYTES)


@dataclasses.dataclass(frozen=True)
class Update:
    """What an update was made of, and how long after the first batch was asked for it was done."""

    seconds: float
    reward: float
    parsed: float
    tokens: int
    too_old: int
    mixed: int
    ratio_error: float
    kl_error: float | None
    trainer_waited: float
    copied: float


class Trainer:
    """Weights of its own in fp32, and one step of AdamW for each batch.

    Args:
        exact: compute log-probabilities as the engine does.
    """

    def __init__(self, learning_rate: float, *, exact: bool) -> None:
        self.model = load_pretrained("tiny", dtype=torch.float32, device="cpu").model.train()
        # Layers for multi-token prediction draft, and are no part of the policy.
        self.policy = {k: p for k, p in self.model.named_parameters() if not k.startswith("mtp.")}
        for parameter in self.policy.values():
            parameter.requires_grad_(True)
        self.exact = exact_numerics(self.model) if exact else None
        self._optimizer = torch.optim.AdamW(
            self.policy.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Of the tokens ``[B, T]`` but the first, ``[B, T - 1]``."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = self.model(tokens, positions, None)[:, :-1]
        if self.exact is not None:
            return self.exact.log_probs(logits, tokens[:, 1:])
        return -cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
            len(tokens), -1
        )

    def step(
        self, batch: RolloutBatch, advantages: Tensor, version: int
    ) -> tuple[float, float | None]:
        """Clipped policy gradient over all tokens of the mask; returns how far the mean importance
        ratio was from 1 before the step, and the KL error of the tokens that the trainer's own
        weights, ``version``, have sampled: None if there are none."""
        mask = batch.loss_mask[:, 1:].float()
        count = mask.sum().clamp(min=1.0)
        difference = self.log_probs(batch.tokens) - batch.log_probs[:, 1:]
        ratio = torch.exp(difference)
        gains = advantages[:, None] * torch.stack((ratio, ratio.clamp(1 - CLIP, 1 + CLIP)))
        loss = -(gains.amin(dim=0) * mask).sum() / count
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.values(), 1.0)
        self._optimizer.step()
        return float((ratio.detach() * mask).sum() / count) - 1.0, kl_error_of(
            difference.detach()[(batch.weight_versions == version)[:, 1:]]
        )


def kl_error_of(differences: Tensor) -> float | None:
    """The KL divergence that log-probabilities of the same weights seem to have, by its estimator
    that is never negative: 0 if they are equal."""
    return float((differences.expm1() - differences).mean()) if len(differences) else None


def say_kl_errors(errors: Sequence[float]) -> None:
    """Print the largest one, if there are any."""
    if errors:
        print(f"KL error: {max(errors)} at most")
    else:
        print("KL error: no token was of the trainer's own weights; --staleness 0 has some")


def advantages_of(rewards: Tensor) -> Tensor:
    """Of rewards ``[prompts, group]``: how much better than the group, in its deviations."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True) + 1e-2)).flatten()


class Rollouts:
    """Asks the engine for batches of groups, ahead of whom takes them."""

    def __init__(self, engine: DynamicInferenceEngine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._group = args.group
        self._prompts = args.prompts
        self._length = args.tokens
        self._numbers = itertools.count()
        self._cycle: Iterator[str] = itertools.cycle(PROMPTS)
        self._asked: collections.deque[list[tuple[str, RequestFuture]]] = collections.deque()

    def ask(self) -> None:
        """Queue one more batch."""
        batch = []
        for prompt in itertools.islice(self._cycle, self._prompts):
            for _ in range(self._group):
                number = next(self._numbers)
                params = SamplingParams(
                    temperature=1.0, num_tokens_to_generate=self._length, seed=number,
                    return_log_probs=True, skip_prompt_log_probs=True,
                )  # fmt: skip
                batch.append((prompt, self._engine.add_request(number, prompt, params)))
        self._asked.append(batch)

    def take(self) -> tuple[list[Rollout], Tensor]:
        """The oldest batch, once it is there, and its rewards ``[prompts, group]``."""
        rollouts, rewards = [], []
        for prompt, future in self._asked.popleft():
            request = future.result()
            rollouts.append(request.rollout())
            ended = not rollouts[-1].is_truncated
            rewards.append(reward_of(prompt, request.generated_text or "", ended=ended))
        return rollouts, torch.tensor(rewards).view(self._prompts, self._group)


def train(engine: DynamicInferenceEngine, args: argparse.Namespace) -> tuple[list[Update], float]:
    """All updates, and the share of the time in which the engine had nothing to do."""
    trainer, rollouts = Trainer(args.learning_rate, exact=args.exact), Rollouts(engine, args)
    done = list[Update]()
    start, busy_before = time.perf_counter(), engine.counters.step_ns
    for _ in range(1 + args.staleness):
        rollouts.ask()
    for number in range(args.updates):
        asked = time.perf_counter()
        taken, rewards = rollouts.take()
        waited = time.perf_counter() - asked
        oldest = engine.weight_version - args.staleness
        batch = batch_of(taken, oldest_version=oldest)
        ratio_error, kl_error = trainer.step(batch, advantages_of(rewards), engine.weight_version)
        began = time.perf_counter()
        # The trainer has none of the layers that draft.
        engine.update_weights(
            trainer.policy, partial_update=True, partial_rollouts=args.partial_rollouts
        )
        copied = time.perf_counter() - began
        if number + 1 + args.staleness < args.updates:
            rollouts.ask()
        generated = int((batch.weight_versions >= 0).sum())
        update = Update(
            seconds=time.perf_counter() - start,
            reward=float(rewards.mean()),
            parsed=float((rewards > 0).float().mean()),
            tokens=generated,
            too_old=generated - int(batch.loss_mask.sum()),
            mixed=sum(len(rollout.weight_spans) > 1 for rollout in taken),
            ratio_error=ratio_error,
            kl_error=kl_error,
            trainer_waited=waited,
            copied=copied,
        )
        done.append(update)
        print(
            f"update {number + 1:3d}  {update.seconds:6.1f} s  reward {update.reward:.3f}  parsed "
            f"{update.parsed:.2f}  tokens {update.tokens}, {update.too_old} too old  rollouts over "
            f"two versions or more {update.mixed}  ratio - 1 {update.ratio_error:+.4f}  KL error "
            f"{'-' if kl_error is None else f'{kl_error:.1e}'}",
            flush=True,
        )
    # From the last batch on there is nothing to generate, so the end does not count.
    last = 1 + args.staleness if len(done) > 1 + args.staleness else 1
    wall = done[-last].seconds
    busy = (engine.counters.step_ns - busy_before) / 1e9
    return done, max(0.0, 1.0 - busy / wall)


def plot(updates: Sequence[Update], path: Path, title: str) -> None:
    """Rewards over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    seconds = [update.seconds for update in updates]
    rewards = [update.reward for update in updates]
    axes.plot(seconds, rewards, ".", color="tab:blue", alpha=0.4, label="reward of a batch")
    window = 5
    means = [sum(rewards[max(0, i - window + 1) : i + 1]) / min(window, i + 1)
             for i in range(len(rewards))]  # fmt: skip
    axes.plot(seconds, means, color="tab:blue", label=f"mean of {window} batches")
    axes.plot(seconds, [u.parsed for u in updates], color="tab:orange", alpha=0.6,
              label="share that ends and parses")  # fmt: skip
    axes.set(xlabel="seconds", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. The defaults take less than two minutes on two cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--updates", type=int, default=40)
    add("--prompts", type=int, default=4, help="in a batch")
    add("--group", type=int, default=8, help="rollouts of a prompt")
    add("--tokens", type=int, default=96, help="most tokens of a rollout, which are bytes")
    add("--learning-rate", type=float, default=2e-4)
    add(
        "--staleness", type=int, default=1, help="updates that a token may be behind; 0 takes turns"
    )
    add("--partial-rollouts", choices=("continue", "restart"), default="continue")
    add("--exact", action="store_true", help="log-probabilities with the bits of the engine's")
    add("--depth", type=int, default=1, help="steps in flight of the engine")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, help="write the reward curve")
    add("--json", type=Path, help="write the figures of each update")
    args = parser.parse_args(arguments)
    if min(args.updates, args.prompts, args.tokens) < 1 or args.group < 2 or args.staleness < 0:
        parser.error("--updates, --prompts and --tokens take 1 or more, --group 2, --staleness 0")
    return args


def main(arguments: Sequence[str] | None = None) -> list[Update]:
    """Train, and say what came of it."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # one core for the trainer, one for the engine
    rows = args.prompts * args.group
    config = EngineConfig(
        device="cpu", dtype="float32", max_requests=rows, max_sequence_length=256,
        block_count=16 * rows * (2 + args.staleness), block_size_tokens=16,
        depth=args.depth, random_seed=args.seed, batch_invariant=args.exact,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        engine.start()
        updates, idle = train(engine, args)
    share = min(5, len(updates))
    first, last = (
        sum(update.reward for update in some) / share
        for some in (updates[:share], updates[-share:])
    )
    seconds = updates[-1].seconds
    tokens = sum(update.tokens for update in updates)
    waited = sum(update.trainer_waited for update in updates)
    print(
        f"reward {first:.3f} -> {last:.3f} (means of {share} batches) in {len(updates)} updates "
        f"and {seconds:.1f} s; {tokens / seconds:,.0f} tokens/s\n"
        f"the engine waited {idle:.1%} of the time, the trainer {waited / seconds:.1%}; new "
        f"weights took {1e3 * sum(update.copied for update in updates) / len(updates):.1f} ms each"
    )
    say_kl_errors([update.kl_error for update in updates if update.kl_error is not None])
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(u) for u in updates], indent=1) + "\n")
    if args.plot is not None:
        plot(updates, args.plot, f"GRPO on tiny, staleness {args.staleness}: Python that parses")
    return updates


if __name__ == "__main__":
    main(sys.argv[1:])

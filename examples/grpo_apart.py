"""GRPO as in ``grpo.py``, with trainer and engine in processes of their own, on CPUs::

    python examples/grpo_apart.py --updates 20

The trainer asks for the next batch, learns from the one that is there, and sends its weights by a
:class:`~megatron_async.weights.ShardGroup` when the engine is done with the batch: no token is more
than one update old. With ``--in-turns`` each token is of the trainer's own weights, and the KL
error is 0. A trainer of several ranks has one ``ShardGroup`` on each, with its own shards. On GPUs
of one host or several give both sides devices, and the group ``backend="nccl"``.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import socket
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from grpo import PROMPTS, Trainer, advantages_of, reward_of, say_kl_errors

from megatron_async import DynamicInferenceEngine, EngineConfig, Rollout, SamplingParams
from megatron_async.request.rollouts import batch_of
from megatron_async.weights import ShardGroup, TrainerLayout, open_sharded

Written = tuple[Rollout, str]


def serve(trainer: Connection, rows: int) -> None:
    """The engine's process. It takes prompts, for which it answers rollouts and texts, and handles
    of new weights, for which it answers their version, until the trainer closes its end."""
    torch.set_num_threads(1)
    config = EngineConfig(
        device="cpu", dtype="float32", max_requests=rows, max_sequence_length=256, depth=1,
        batch_invariant=True,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        trainer.send(engine.weight_version)
        while True:
            try:
                asked = trainer.recv()
            except EOFError:
                return
            if isinstance(asked, dict):
                # The trainer has none of the layers that draft.
                trainer.send(engine.update_weights(open_sharded(asked), partial_update=True))
                continue
            requests = engine.generate(*asked)
            trainer.send([(each.rollout(), each.generated_text or "") for each in requests])


class Engine:
    """The trainer's side.

    Args:
        rows: prompts of a batch, each as often as its group is large.
        group: rollouts of a prompt.
        tokens: most of a rollout.
    """

    def __init__(self, rows: int, group: int, tokens: int) -> None:
        self._rows, self._group, self._tokens = rows, group, tokens
        self._prompts: Iterator[str] = itertools.cycle(PROMPTS)
        self._numbers = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, rows), daemon=True)
        self._process.start()
        theirs.close()
        self.version: int = self._receive()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._shards = ShardGroup("127.0.0.1", port, TrainerLayout(), rank=0, trainers=1)
        self._written = collections.deque[list[Written]]()

    def ask(self) -> list[str]:
        """Ask for a batch; returns its prompts."""
        some = itertools.islice(self._prompts, self._rows // self._group)
        prompts = [prompt for prompt in some for _ in range(self._group)]
        params = [
            SamplingParams(
                temperature=1.0, num_tokens_to_generate=self._tokens, seed=next(self._numbers),
                return_log_probs=True, skip_prompt_log_probs=True,
            )
            for _ in prompts
        ]  # fmt: skip
        self._pipe.send((prompts, params))
        return prompts

    def take(self) -> list[Written]:
        """The oldest batch that was asked for."""
        return self._written.popleft() if self._written else self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("the engine's process has ended; what it says is above") from None

    def send(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the engine new weights when it is done with what was asked for."""
        self._pipe.send(self._shards.handles)
        self._shards.send(weights)
        while not isinstance(reply := self._receive(), int):
            self._written.append(reply)
        self.version = reply

    def close(self) -> None:
        """End the engine's process."""
        self._pipe.close()
        self._process.join()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; returns the KL error of each update, of tokens of the trainer's own weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="in a batch")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a rollout")
    parser.add_argument("--in-turns", action="store_true", help="generate, learn, generate, ...")
    args = parser.parse_args(arguments)
    if min(args.updates, args.prompts, args.tokens) < 1 or args.group < 2:
        parser.error("--updates, --prompts and --tokens take 1 or more, --group 2")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    errors = []
    engine = Engine(args.prompts * args.group, args.group, args.tokens)
    trainer = Trainer(2e-4, exact=True)
    asked = collections.deque([engine.ask()])
    for number in range(args.updates):
        prompts, written = asked.popleft(), engine.take()
        goes_on = number + 1 < args.updates
        if goes_on and not args.in_turns:  # the engine generates while the trainer learns
            asked.append(engine.ask())
        rollouts = [rollout for rollout, _ in written]
        rewards = torch.tensor(
            [
                reward_of(prompt, text, ended=not rollout.is_truncated)
                for prompt, (rollout, text) in zip(prompts, written, strict=True)
            ]
        ).view(args.prompts, args.group)
        batch = batch_of(rollouts, oldest_version=engine.version - 1)
        # Of tokens that these weights have sampled.
        _, error = trainer.step(batch, advantages_of(rewards), engine.version)
        errors += [] if error is None else [error]
        engine.send(trainer.policy)
        if goes_on and args.in_turns:
            asked.append(engine.ask())
        shown = "-" if error is None else f"{error:.1e}"
        print(
            f"update {number + 1:3d}  reward {float(rewards.mean()):.3f}  KL error {shown}",
            flush=True,
        )
    engine.close()
    say_kl_errors(errors)
    return errors


if __name__ == "__main__":
    main(sys.argv[1:])

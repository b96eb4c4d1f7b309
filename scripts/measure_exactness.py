"""How many log-probabilities of rollouts have the bits of a forward with autograd, by dtype, with
``batch_invariant`` or without, and with ``exact_numerics``: the table of ``docs/rl.md``, on a CPU.

    python scripts/measure_exactness.py --model tiny
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, Rollout, SamplingParams
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.training import ExactNumerics, exact_numerics

PROMPTS = ("def read_lines(path):\n", "def add(self, value):\n", "import ", "class A")
ROWS, LENGTH = 32, 64


def rollouts_of(model: str, dtype: str, *, batch_invariant: bool) -> list[Rollout]:
    """Rollouts at temperature 1, all of them in one batch."""
    config = EngineConfig(
        inference_async_scheduling=True, device="cpu", dtype=dtype, max_requests=ROWS,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    params = SamplingParams(
        temperature=1.0, num_tokens_to_generate=LENGTH, return_log_probs=True, seed=1,
        skip_prompt_log_probs=True, termination_id=-1,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained(model, config) as engine:
        prompts = list(itertools.islice(itertools.cycle(PROMPTS), ROWS))
        seeds = [dataclasses.replace(params, seed=row) for row in range(ROWS)]
        return [request.rollout() for request in engine.generate(prompts, seeds)]


def trained(model: Any, rollout: Rollout, exact: ExactNumerics | None) -> Tensor:
    """fp32 log-probabilities of the generated tokens, by a forward with autograd."""
    tokens = torch.tensor([rollout.tokens])
    logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[:, :-1]
    if exact is not None:
        chances = exact.log_probs(logits, tokens[:, 1:])[0]
    else:
        chances = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
    found: Tensor = chances[len(rollout.prompt_tokens) - 1 :].detach()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    path = parser.parse_args().model
    ways = ((False, False), (True, False), (True, True))
    for dtype, (invariant, is_exact) in itertools.product(("float32", "bfloat16"), ways):
        model = load_pretrained(path, dtype=getattr(torch, dtype)).model.train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        exact = exact_numerics(model) if is_exact else None
        rollouts = rollouts_of(path, dtype, batch_invariant=invariant)
        ours = torch.tensor([chance for rollout in rollouts for chance in rollout.log_probs])
        differences = ours - torch.cat([trained(model, rollout, exact) for rollout in rollouts])
        print(
            f"{dtype:8} batch_invariant={invariant!s:5} exact={is_exact!s:5} {len(ours)} tokens: "
            f"{100 * (differences == 0).float().mean():.0f} % equal, "
            f"largest {differences.abs().max():.0e}, mean {differences.mean():.0e}"
        )


if __name__ == "__main__":
    main()

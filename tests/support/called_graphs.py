"""Graphs on the CPU: a replay calls the function."""

from __future__ import annotations

import torch

from megatron_async.contrib.transformers.captured.graphs import Step


class CalledGraphs:
    """Counts eager runs, captures and replays."""

    def __init__(self) -> None:
        self.runs = self.captures = self.replays = 0

    def __call__(self, device: torch.device) -> CalledGraphs:
        return self

    def run(self, step: Step) -> None:
        self.runs += 1
        step()

    def capture(self, step: Step) -> Step:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            step()

        return replay

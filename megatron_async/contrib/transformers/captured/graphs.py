"""Capturing a function once, to launch it as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], None]


class Graphs(Protocol):
    """What captures steps. Tests have one whose replay calls the function."""

    def run(self, step: Step) -> None:
        """Run ``step`` eagerly, so that what it sets up lazily is there before a capture."""
        ...

    def capture(self, step: Step) -> Step:
        """Record ``step`` without running it; returns what replays it."""
        ...


class CudaGraphs:
    """CUDA graphs on a stream of their own, in the memory pool of each graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, step: Step) -> None:
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            step()
        main.wait_stream(self._stream)

    def capture(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            step()
        replay: Step = graph.replay
        return replay

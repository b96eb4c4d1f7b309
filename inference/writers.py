"""How ``generate`` shows its results: streamed, as texts under headers, or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

from megatron_async.request import DynamicInferenceRequest

from .progress import request_bar
from .prompts import Job

HEADER_WIDTH = 72


def make_writer(jobs: list[Job], *, as_json: bool, settle_steps: int) -> Writer:
    """The writer that fits the number of prompts and ``--json``."""
    if as_json:
        return JsonWriter(jobs, settle_steps)
    return StreamWriter() if len(jobs) == 1 else TextWriter(jobs, settle_steps)


def shown_text(request: DynamicInferenceRequest) -> str:
    """A request's text, or its token ids where the model has no tokenizer."""
    if request.generated_text is not None:
        return request.generated_text
    return " ".join(map(str, request.generated_tokens))


class Writer(ABC):
    """Takes what the engine commits and writes it to stdout."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since decoding began."""
        return time.perf_counter() - self._started

    def refuse(self, index: int, message: str) -> None:  # noqa: B027  (a hook)
        """The prompt could not be served."""

    def text(self, index: int, text: str) -> None:  # noqa: B027  (a hook)
        """More text of a request."""

    @abstractmethod
    def finish(self, request: DynamicInferenceRequest) -> None:
        """A request ended."""

    def end_step(self) -> None:  # noqa: B027  (a hook)
        """A step of the engine is over."""

    def close(self) -> None:  # noqa: B027  (a hook)
        """Nothing is in flight any more."""


class StreamWriter(Writer):
    """The raw text of a single prompt, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self._at_line_start = True

    def text(self, index: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def finish(self, request: DynamicInferenceRequest) -> None:
        if request.generated_text is None:
            self.text(request.request_id, shown_text(request))
        if sys.stdout.isatty() and not self._at_line_start:
            sys.stdout.write("\n")


class OrderedWriter(Writer):
    """Writes whole results in the order of the prompts, each as soon as its turn has come.

    A result is held back for ``settle_steps``, the engine's depth: until then its discarded tokens
    may still be counted.
    """

    def __init__(self, jobs: list[Job], settle_steps: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._settle_steps = settle_steps
        self._step = 0
        self._next = 0
        self._results: dict[int, tuple[int, str]] = {}
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._bar = request_bar(len(jobs))

    def refuse(self, index: int, message: str) -> None:
        self._results[index] = self._step, self.refused(index, message)
        self._bar.update()

    def finish(self, request: DynamicInferenceRequest) -> None:
        self._requests[request.request_id] = request
        self._results[request.request_id] = self._step + self._settle_steps, ""
        self._bar.update()

    def end_step(self) -> None:
        while self._next in self._results and self._results[self._next][0] <= self._step:
            _, text = self._results.pop(self._next)
            request = self._requests.pop(self._next, None)
            if request is not None:
                text = self.finished(self._next, request)
            # Clears the bar first where both are on the terminal.
            self._bar.write(text, file=sys.stdout, end="")
            sys.stdout.flush()
            self._next += 1
        self._step += 1

    def close(self) -> None:
        self._step += self._settle_steps
        self.end_step()
        self._bar.close()

    @abstractmethod
    def finished(self, index: int, request: DynamicInferenceRequest) -> str:
        """What is written for a request."""

    @abstractmethod
    def refused(self, index: int, message: str) -> str:
        """What is written for a prompt that could not be served."""


class TextWriter(OrderedWriter):
    """Texts under headers."""

    def finished(self, index: int, request: DynamicInferenceRequest) -> str:
        prompt = self._jobs[index].prompt
        shown = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
        shown = shown if len(shown) <= HEADER_WIDTH else shown[: HEADER_WIDTH - 3] + "..."
        text = shown_text(request)
        ending = "" if text.endswith("\n") else "\n"
        return f"=== {index + 1}/{len(self._jobs)}: {shown!r}\n{text}{ending}"

    def refused(self, index: int, message: str) -> str:
        return ""


class JsonWriter(OrderedWriter):
    """One JSON object a line."""

    def finished(self, index: int, request: DynamicInferenceRequest) -> str:
        reason = request.finish_reason
        return self._line(
            index,
            text=request.generated_text,
            token_ids=request.generated_tokens,
            finish_reason=None if reason is None else reason.value,
            counters=dataclasses.asdict(request.counters),
        )

    def refused(self, index: int, message: str) -> str:
        nothing = {"text": None, "token_ids": None, "finish_reason": None, "counters": None}
        return self._line(index, **nothing, error=message)

    def _line(self, index: int, **values: Any) -> str:
        return json.dumps({"prompt": self._jobs[index].prompt, **values}) + "\n"

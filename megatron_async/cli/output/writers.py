"""How results are shown: streamed, as texts under headers, or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options.prompts import Job
from megatron_async.cli.output.progress import progress_bar
from megatron_async.engine.stepping.drive import drive
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture, step_summary

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine

HEADER_WIDTH = 72


def make_writer(jobs: list[Job], *, as_json: bool, several: bool, settle_steps: int) -> Writer:
    """The writer that fits the number of prompts, of texts of each, and ``--json``."""
    if as_json:
        return JsonWriter(jobs, settle_steps)
    return TextWriter(jobs, settle_steps) if several or len(jobs) > 1 else StreamWriter()


def write_all(engine: DynamicInferenceEngine, writer: Writer, futures: list[RequestFuture]) -> None:
    """Decode all that ``engine`` has, and hand what it commits to ``writer``."""
    ended: list[Any] = []
    for future in futures:
        future.add_done_callback(ended.append)
    for step in drive(engine):
        for output in step["tokens"]:
            if output.text and output.request_id >= 0:  # no further text of a prompt
                writer.text(output.request_id, output.text)
        while ended:
            writer.finish(ended.pop(0).result())
        writer.end_step()
    writer.close()


def shown_text(request: DynamicInferenceRequest) -> str:
    """A request's text, or its token ids where the model has no tokenizer."""
    if request.generated_text is not None:
        return request.generated_text
    return " ".join(map(str, request.generated_tokens))


class Writer:
    """Takes what the engine commits; its hooks do nothing here."""

    def refuse(self, index: int, message: str) -> None:
        """The prompt could not be served."""

    def text(self, index: int, text: str) -> None:
        """More text of a request."""

    def finish(self, request: DynamicInferenceRequest) -> None:
        """A request ended."""

    def end_step(self) -> None:
        """A step of the engine is over."""

    def close(self) -> None:
        """Nothing is in flight any more."""


class BarWriter(Writer):
    """Nothing but a bar of the requests that have ended."""

    def __init__(self, count: int) -> None:
        self._bar = progress_bar(shown=count > 1, total=count, desc="requests", unit="request")

    def finish(self, request: DynamicInferenceRequest) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class StreamWriter(Writer):
    """The raw text of a single prompt, as it comes."""

    def __init__(self) -> None:
        self._at_line_start = True

    def text(self, index: int, text: str) -> None:
        print(text, end="", flush=True)
        self._at_line_start = text.endswith("\n")

    def finish(self, request: DynamicInferenceRequest) -> None:
        if request.generated_text is None:
            self.text(request.request_id, shown_text(request))
        if sys.stdout.isatty() and not self._at_line_start:
            print()


class InTurnWriter(Writer):
    """Streams several texts one after the other although they are decoded together: the first
    unfinished one is shown live, what the others have is shown when their turn comes.

    Args:
        heads: what is printed before each text.
    """

    def __init__(self, heads: list[str]) -> None:
        self._held = heads
        self._finished: set[int] = set()
        self._current = 0
        print(heads[0], end="", flush=True)

    def text(self, index: int, text: str) -> None:
        if index == self._current:
            print(text, end="", flush=True)
        else:
            self._held[index] += text

    def finish(self, request: DynamicInferenceRequest) -> None:
        if request.generated_text is None:
            self.text(request.request_id, shown_text(request))
        self._finished.add(request.request_id)
        while self._current in self._finished:
            print("\n", flush=True)
            self._current += 1
            if self._current < len(self._held):
                print(self._held[self._current], end="", flush=True)


class OrderedWriter(BarWriter):
    """Writes whole results in the order of the prompts, each as soon as its turn has come.

    A result is held back for ``settle_steps``, the engine's depth: until then its discarded tokens
    may still be counted.
    """

    def __init__(self, jobs: list[Job], settle_steps: int) -> None:
        super().__init__(len(jobs))
        self._jobs = jobs
        self._settle_steps = settle_steps
        self._step = 0
        self._next = 0
        self._results: dict[int, tuple[int, DynamicInferenceRequest | str]] = {}

    def refuse(self, index: int, message: str) -> None:
        self._results[index] = self._step, message
        self._bar.update()

    def finish(self, request: DynamicInferenceRequest) -> None:
        self._results[request.request_id] = self._step + self._settle_steps, request
        self._bar.update()

    def end_step(self) -> None:
        while self._next in self._results and self._results[self._next][0] <= self._step:
            _, result = self._results.pop(self._next)
            # Clears the bar first where both are on the terminal.
            self._bar.write(self.shown(self._next, result), file=sys.stdout, end="")
            sys.stdout.flush()
            self._next += 1
        self._step += 1

    def close(self) -> None:
        self._step += self._settle_steps
        self.end_step()
        super().close()

    @abstractmethod
    def shown(self, index: int, result: DynamicInferenceRequest | str) -> str:
        """What is written for a request, or for a prompt that was refused and why."""


class TextWriter(OrderedWriter):
    """Texts under headers."""

    def shown(self, index: int, result: DynamicInferenceRequest | str) -> str:
        if isinstance(result, str):
            return ""
        prompt = self._jobs[index].prompt
        head = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
        head = head if len(head) <= HEADER_WIDTH else head[: HEADER_WIDTH - 3] + "..."
        shown, choices = "", result.choices or [result]
        for number, choice in enumerate(choices, 1):
            which = f", {number} of {len(choices)}" if len(choices) > 1 else ""
            text = shown_text(choice).removesuffix("\n")
            shown += f"=== {index + 1}/{len(self._jobs)}{which}: {head!r}\n{text}\n"
        return shown


class JsonWriter(OrderedWriter):
    """One JSON object a line."""

    def shown(self, index: int, result: DynamicInferenceRequest | str) -> str:
        names = ("text", "token_ids", "finish_reason", "stop_reason", "seed", "counters", "steps")
        values: dict[str, Any] = {"prompt": self._jobs[index].prompt, **dict.fromkeys(names)}
        if isinstance(result, str):
            values["error"] = result
        else:
            counters, steps = dataclasses.asdict(result.counters), step_summary(result.steps)
            values |= _of_text(result) | {"counters": counters, "steps": steps}
            if result.choices:
                values["choices"] = [_of_text(choice) for choice in result.choices]
        return json.dumps(values) + "\n"


def _of_text(request: DynamicInferenceRequest) -> dict[str, Any]:
    text = {"text": request.generated_text, "token_ids": request.generated_tokens}
    text |= {name: getattr(request, name) for name in ("finish_reason", "stop_reason", "seed")}
    return text | {k: v for k, v in vars(request).items() if "_log" in k and v is not None}

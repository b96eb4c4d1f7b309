"""Launches plans and hands back their tokens: the one place between scheduler and device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_async.device.protocol import Device
from megatron_async.errors import ConfigError, RequestError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.cuda_graphs import StepGraphs, row_buckets, token_buckets
from megatron_async.runner.step_program import RESULT_FIELDS, StepProgram
from megatron_async.step.packet import PacketLayout, StepShape, write_packet
from megatron_async.step.plan import Plan, StepResult, Ticket

Progress = Callable[[Iterable[int], int], Iterable[int]]
"""Wraps an iterable of known length to show a progress bar."""


class InFlight(NamedTuple):
    """A launched step whose tokens the host has not taken."""

    ticket: Ticket
    controller: TextGenerationController

    def wait(self) -> tuple[Plan, StepResult]:
        """Block until the ticket's tokens are on the host. Oldest ticket first, once each."""
        return self.ticket.plan, self.controller.take(self.ticket)


class TextGenerationController:
    """Owns a model's step program: packets, graphs and results. Name is megatron-core's.

    Args:
        inference_wrapped_model: a :class:`~megatron_async.models.wrapper.GPTInferenceWrapper`, a
            megatron-core ``GPTModel``, or any object with ``vocab_size`` and ``forward``.
        tokenizer: an object with ``tokenize``, ``detokenize``, ``eod`` (and ``bos``), or None when
            prompts are token ids.
    """

    def __init__(self, inference_wrapped_model: Any, tokenizer: Any = None) -> None:
        if isinstance(inference_wrapped_model, torch.nn.Module):
            from megatron_async.models.wrapper import GPTInferenceWrapper

            inference_wrapped_model = GPTInferenceWrapper(inference_wrapped_model)
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.wait_ns = 0
        self.last_graph_rows: int | None = None
        self._attached = False
        self._pending: Ticket | None = None

    # --- text ---------------------------------------------------------------------------------

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Token ids of a text prompt.

        Raises:
            RequestError: the model came without a tokenizer, or it knows no begin token.
        """
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; give the prompt as token ids")
        ids = list(self.tokenizer.tokenize(prompt))
        if add_BOS:
            bos = getattr(self.tokenizer, "bos", None)
            if bos is None:
                raise RequestError(
                    "add_BOS=True but the tokenizer has no begin token; leave it out"
                )
            if ids[:1] != [bos]:
                ids.insert(0, bos)
        return ids

    # --- set-up -------------------------------------------------------------------------------

    def attach(
        self,
        device: Device,
        context: DynamicInferenceContext,
        *,
        max_tokens: int,
        max_grants: int,
        depth: int,
        poison: bool,
        capture_mixed: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Build rings and graphs for an engine; ``capture_mixed`` is about steps with prefill.

        Raises:
            ConfigError: the controller or the context serves an engine already, or the context
                does not suit the model.
        """
        if self._attached:
            raise ConfigError(
                "the controller serves another engine already; build a new "
                "TextGenerationController over the same model"
            )
        self._check_suits(context)
        self._attached = context.attached = True
        self.device = device
        self.context = context
        buckets = row_buckets(
            context.max_requests, captures=device.captures, count=context.num_cuda_graphs
        )
        max_rows = buckets[-1]
        tokens = token_buckets(max_tokens, captures=device.captures)
        self._layout = PacketLayout(max_rows, tokens[-1], max_grants)
        # A packet is consumed and a result taken before its ticket is committed, and no more than
        # depth + 1 tickets are ever in flight: the rings never wrap onto a live entry.
        entries = depth + 2
        self._packets = device.packet_ring(entries, self._layout.width)
        self._results = device.result_ring(entries, RESULT_FIELDS * max_rows)
        self._program = StepProgram(
            device,
            context,
            self.inference_wrapped_model,
            self._layout,
            self._packets,
            self._results,
            logits_dtype=getattr(
                self.inference_wrapped_model, "logits_dtype", context.params_dtype
            ),
            poison=poison,
        )
        self._graphs = StepGraphs(
            device, self._program, buckets, tokens, capture_mixed=capture_mixed
        )
        prepare = getattr(self.inference_wrapped_model, "prepare", None)
        if prepare is not None:
            prepare(buckets, context)
        captured: Iterable[int] = self._graphs.capture()
        if progress is not None:
            captured = progress(captured, self._graphs.capture_count)
        for _ in captured:
            pass
        device.enqueue(context.reset, "reset")
        device.synchronize()

    def _check_suits(self, context: DynamicInferenceContext) -> None:
        if context.attached:
            raise ConfigError(
                "the context serves another engine already; build a new DynamicInferenceContext"
            )
        model = self.inference_wrapped_model
        most = getattr(model, "max_sequence_length", None)
        if most is not None and context.max_sequence_length > most:
            raise ConfigError(
                f"the context's max_sequence_length={context.max_sequence_length} exceeds the "
                f"model's {most}; lower it"
            )
        spec = getattr(model, "kv_cache_spec", None)
        if spec is None:
            return
        layers, _, _, _, heads, head_dim = context.kv_cache.shape
        for name, has, needs in (
            ("num_layers", layers, spec.num_layers),
            ("num_attention_heads", heads, spec.num_kv_heads),
            ("kv_channels", head_dim, spec.head_dim),
            ("params_dtype", context.params_dtype, spec.dtype),
        ):
            if has != needs:
                raise ConfigError(f"the context has {name}={has} and the model needs {needs}")

    @property
    def graph_count(self) -> int:
        """Graphs that :meth:`attach` captured."""
        return self._graphs.graph_count

    # --- one step -----------------------------------------------------------------------------

    def launch(self, plan: Plan) -> InFlight:
        """Queue S of the pending logits, H2D and F of ``plan``; returns at once."""
        graphs = self._graphs
        rows = graphs.bucket(len(plan.rows))
        shape = StepShape(rows, rows)
        if not plan.is_decode_only:
            shape = graphs.mixed_shape(rows, plan.num_tokens)
        packet = self._packets.claim(plan.number)
        write_packet(packet, self._layout, plan, shape, self.context.null_slot)
        self.device.mark_ticket(plan.number)
        self.last_graph_rows = rows if plan.is_decode_only else None
        pending, self._pending = self._pending, Ticket(plan.number, plan, rows)
        if plan.is_decode_only and pending is not None and pending.row_bucket == rows:
            graphs.step(rows).replay()
        else:
            if pending is not None:
                self._sample(pending)
            if plan.is_decode_only:
                graphs.forward(rows).replay()
            else:
                graphs.launch_mixed(shape)
        return InFlight(self._pending, self)

    def flush(self, ticket: Ticket) -> None:
        """Launch the S of ``ticket`` if it is still to be: it rides at the head of the next launch,
        and there was none, as always at depth 0."""
        if self._pending is ticket:
            self._pending = None
            self._sample(ticket)

    def take(self, ticket: Ticket) -> StepResult:
        """Wait for the tokens of ``ticket``, whose S has been launched."""
        rows = ticket.row_bucket
        started = time.perf_counter_ns()
        values = self._results.wait(ticket.number, RESULT_FIELDS * rows)
        self.wait_ns += time.perf_counter_ns() - started
        columns = values.reshape(RESULT_FIELDS, rows)[:, : len(ticket.plan.rows)]
        return StepResult(*columns.tolist())

    def put_back(self, ticket: Ticket) -> None:
        """A signal came in the midst of :meth:`take`: the tokens are there to be taken again."""
        self._results.put_back(ticket.number)

    @property
    def weights_owner(self) -> Any:
        """The object whose weights are replaced: one may be under several controllers."""
        return getattr(self.inference_wrapped_model, "model", self.inference_wrapped_model)

    def read_weights(self, source: str | Path | Mapping[str, Any]) -> Callable[[], None]:
        """Read and check new weights. Calling the result replaces the model's in place; then
        nothing may be in flight.

        Raises:
            CheckpointError: they do not fit.
        """
        own = getattr(self.inference_wrapped_model, "update_weights", None)
        if own is not None:
            return functools.partial(own, source)
        from megatron_async.checkpoint.update import read_weights

        return read_weights(self.weights_owner, source)

    def poison_blocks(self, blocks: list[int]) -> None:
        """Queue garbage for freed KV blocks (debug mode)."""
        self.device.enqueue(lambda: self._program.poison_blocks(blocks), "poison")

    def _sample(self, pending: Ticket) -> None:
        self._graphs.sample(pending.row_bucket).replay()

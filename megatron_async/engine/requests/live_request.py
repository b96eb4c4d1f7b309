"""A live request: its record, its text and its future, from its start to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.engine.requests.log_probs import start_log_probs
from megatron_async.engine.requests.request_text import RequestText
from megatron_async.errors import ModelOutputError
from megatron_async.request.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    RequestFuture,
    Status,
    TokenLogProbs,
)
from megatron_async.sampling_params import LIMITING
from megatron_async.scheduler.events import Change

if TYPE_CHECKING:
    from megatron_async.request.hidden_states import PromptRows
    from megatron_async.request.routed_experts import TokenRoutes

logger = logging.getLogger(__name__)

STATUS_OF = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.COMPLETED,
    FinishReason.ABORT: Status.FAILED,
    FinishReason.ERROR: Status.FAILED,
}

EVENT_OF = {
    FinishReason.STOP: DynamicInferenceEventType.FINISH,
    FinishReason.LENGTH: DynamicInferenceEventType.FINISH,
    FinishReason.ABORT: DynamicInferenceEventType.FAIL,
    FinishReason.ERROR: DynamicInferenceEventType.FAIL,
}

STATUS_AFTER = {
    Change.ADMIT: Status.ACTIVE_AND_GENERATING_TOKENS,
    Change.PAUSE: Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
    Change.STALL: Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
    Change.RESUME: Status.ACTIVE_AND_GENERATING_TOKENS,
    Change.EVICT: Status.WAITING_IN_QUEUE,
}


class LiveRequest:
    """A request that still has a row in flight or to come.

    Args:
        stop_ids: tokens that end it.
    """

    __slots__ = (
        "_tokenizer", "forced", "forced_log_probs", "future", "hidden", "is_streamed", "last_time",
        "request", "routes", "started", "stop_ids", "text", "version",
    )  # fmt: skip

    text: RequestText

    def __init__(
        self, request: DynamicInferenceRequest, tokenizer: Any, stop_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.future = RequestFuture()
        self.stop_ids = stop_ids
        self.version: int | None = None
        """The version of the weights that its newest token is from."""
        self.forced: Sequence[int] = request.sampling_params.forced_token_ids or ()
        """Tokens of the output that are forced and yet to be handed out."""
        self.forced_log_probs: list[tuple[TokenLogProbs, int]] = []
        """Log-probabilities of the first of them, as far as they are known, each with the version
        of its weights."""
        self.started = self.last_time = time.perf_counter()
        self.routes: TokenRoutes | None = None
        """The experts of its tokens, if it asks for them."""
        if request.sampling_params.return_routed_experts:
            self._start_routes()
        self.hidden: PromptRows | None = None
        """The hidden states of its prompt, if it asks for them."""
        if request.sampling_params.prompt_hidden_states:
            self._start_hidden()
        self._tokenizer = tokenizer
        self.is_streamed = False
        """Somebody reads its text token by token."""
        if request.sampling_params.stop_words:
            self.start_text()

    def start_text(self) -> None:
        """Make what makes its text: when it is first admitted, and before if there are stop words
        to be looked for."""
        self.text = RequestText(
            self.request, self._tokenizer, self.stop_ids, is_streamed=self.is_streamed
        )

    def _start_routes(self) -> None:
        from megatron_async.request.routed_experts import TokenRoutes

        self.routes = TokenRoutes()

    def _start_hidden(self) -> None:
        from megatron_async.request.hidden_states import PromptRows

        self.hidden = PromptRows(len(self.request.prompt_tokens))

    def restart(self) -> None:
        """Forget what has been generated."""
        request, counters = self.request, self.request.counters
        counters.discarded += counters.committed
        counters.committed = 0
        counters.restarts += 1
        for of_tokens in (
            request.generated_tokens, request.steps, request.tpot, request.weight_spans
        ):  # fmt: skip
            of_tokens.clear()
        self.forget_prompt()
        if self.routes is not None:
            self._start_routes()
        request.drafted_rows = None
        self.start_text()
        self.version = None
        self.forced, self.forced_log_probs = request.sampling_params.forced_token_ids or (), []
        self.last_time = self.started

    def forget_prompt(self) -> None:
        """Forget log-probabilities and hidden states of the prompt, of one that has generated
        nothing."""
        request = self.request
        request.prompt_log_probs = request.prompt_top_n_logprobs = None
        request.prompt_token_ranks = request.prompt_entropies = None
        start_log_probs(request)
        if self.hidden is not None:
            self._start_hidden()

    def change(self, change: Change, cached: int, replayed: int, *, track_pauses: bool) -> None:
        """Record what the scheduler did: a ``change``, with tokens that it took from the prefix
        cache, or has to compute again."""
        request, counters = self.request, self.request.counters
        counters.cached += cached
        counters.replayed += replayed
        counters.stalls += change is Change.STALL
        counters.evictions += change is Change.EVICT
        if change is Change.ADMIT and request.queue_time is None:
            request.queue_time = time.perf_counter() - self.started
            if not request.sampling_params.stop_words:
                self.start_text()
        if change is Change.EVICT:
            request.add_event(DynamicInferenceEventType.EVICT)
        elif track_pauses and change in (Change.PAUSE, Change.STALL):
            request.add_event(DynamicInferenceEventType.PAUSE)
        if request.finish_reason is None:
            request.status = STATUS_AFTER[change]

    def end(
        self,
        reason: FinishReason,
        text: str | None,
        now: float,
        stop_token: int | None,
        eos_token_ids: frozenset[int],
    ) -> str | None:
        """Record the end; returns ``text`` of the last output with what was held back until now.

        Args:
            stop_token: the token that ended it, if one did.
            eos_token_ids: the model's own end tokens.
        """
        request = self.request
        if request.queue_time is None and not request.sampling_params.stop_words:
            self.start_text()  # it ends without an admission
        tokens = request.generated_tokens
        is_text = stop_token is None or self.text.includes_stop
        rest = self.text.finish(tokens if is_text else tokens[:-1])
        if rest is not None:
            text = (text or "") + rest
        word = self.text.stop_word
        if word is not None and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP  # the word was held back, incomplete, until here
        if reason is FinishReason.STOP:
            request.stop_reason = word
            if word is None:
                request.stop_reason = _stop_reason(request, stop_token, eos_token_ids)
        if self.routes is not None:
            length = len(request.prompt_tokens) + len(request.generated_tokens)
            request.routed_experts = self.routes.until(length - 1)
        if self.hidden is not None:
            request.prompt_hidden_states = self.hidden.joined()
        request.finish_reason = reason
        request.status = STATUS_OF[reason]
        request.latency = now - self.started
        if reason is FinishReason.ERROR:
            failure = ModelOutputError(_why_no_token(request))
            request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, failure)
            logger.warning("request %d has ended: %s", request.request_id, failure)
        request.add_event(EVENT_OF[reason])
        return text


def _stop_reason(
    request: DynamicInferenceRequest, token: int | None, eos_token_ids: frozenset[int]
) -> int | None:
    """The end token as a stop reason; as in vLLM the model's own is none."""
    params = request.sampling_params
    has_own = not params.ignore_eos and params.termination_id != -1
    return None if has_own and token in eos_token_ids else token


def _why_no_token(request: DynamicInferenceRequest) -> str:
    """The device tells that a row has no token to sample, not why."""
    at = f"the token after {len(request.generated_tokens)} generated ones"
    limits = [name for name in LIMITING if getattr(request.sampling_params, name)]
    if not limits:
        return f"the model gave NaN for {at}; look for overflow in its weights or activations"
    return f"{', '.join(limits)} left nothing that {at} may be, or the model gave NaN for it"

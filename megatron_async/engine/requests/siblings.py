"""Requests of several sequences (``n``, ``best_of``): each sequence is a request of its own, and
the user has one future of all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from megatron_async.engine.commands import AddRequest
from megatron_async.engine.requests.request_validation import RequestValidator, derive_seed
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.sampling_params import CheckedParams, SamplingParams


def sibling_seed(seed: int, index: int) -> int:
    """The seed of sequence ``index`` of a request with ``seed``. The first one's is the request's
    own; the numbers of the others are negative, so that no request derives its seed from them."""
    return seed if index == 0 else derive_seed(seed, -1 - index)


def sibling_of(
    command: AddRequest,
    params: SamplingParams,
    validator: RequestValidator,
    index: int,
    key: int,
    request_id: int,
    seed: int,
) -> tuple[AddRequest, SamplingParams]:
    """The command that queues sequence ``index`` of a request, and its parameters. ``command``
    queues the first one, with ``params`` and ``seed``."""
    params = dataclasses.replace(
        params,
        n=1,
        best_of=None,
        seed=sibling_seed(seed, index),
        skip_prompt_log_probs=True,  # the first one brings them
    )
    sibling = msgspec.structs.replace(
        command,
        key=key,
        request_id=request_id,
        values=validator.values(request_id, params),
        params=CheckedParams.of(params),
        prompt_log_probs=False,
        fork_of=command.key,
    )
    return sibling, params


class Siblings:
    """All sequences of one request.

    Args:
        asked: the request's parameters as its user gave them.
        requests: the sequences' records, and ``futures`` theirs; the first are the request's own.
        keys: of the sequences in the scheduler.

    Attributes:
        future: of the request: done when all sequences have ended. Its result is the first one's
            record if all are kept. Of ``best_of`` more it is a copy of the best one's, under the
            request's id.
    """

    def __init__(
        self,
        asked: SamplingParams,
        requests: list[DynamicInferenceRequest],
        futures: list[RequestFuture],
        keys: tuple[int, ...],
    ) -> None:
        self.future = RequestFuture()
        self.keys = keys
        self.first = requests[0]
        self._asked = asked
        self._requests = requests
        self._futures = futures
        self._ended = itertools.count(1)
        self.first.choices = list(requests)
        for future in futures:
            future.when_done(self._end)

    def changes_of(self, index: int, changes: dict[str, Any], seed: int) -> dict[str, Any]:
        """What ``changes`` of the request mean for sequence ``index``; ``seed`` is the new one."""
        return {**changes, "seed": sibling_seed(seed, index)} if "seed" in changes else changes

    def _end(self, future: Future[DynamicInferenceRequest]) -> None:
        """One has ended, in whatever thread."""
        if next(self._ended) < len(self._futures):
            return
        errors = [error for each in self._futures if (error := each.exception()) is not None]
        with contextlib.suppress(InvalidStateError):  # cancelled
            if errors:
                self.future.set_exception(errors[0])
            else:
                self.future.set_result(self._result())

    def _result(self) -> DynamicInferenceRequest:
        for request in self._requests:
            request.prompt_log_probs = self.first.prompt_log_probs
            request.prompt_top_n_logprobs = self.first.prompt_top_n_logprobs
            request.prompt_token_ranks = self.first.prompt_token_ranks
            request.prompt_entropies = self.first.prompt_entropies
        if self._asked.n == len(self._requests):
            return self.first
        ranked = sorted(self._requests, key=_likelihood, reverse=True)[: self._asked.n]
        best, *others = (self._shown(request) for request in ranked)
        best.request_id = self.first.request_id
        best.sampling_params = dataclasses.replace(
            best.sampling_params, n=self._asked.n, best_of=self._asked.best_of
        )
        best.choices = [best, *others]
        return best

    def _shown(self, request: DynamicInferenceRequest) -> DynamicInferenceRequest:
        """A copy without log-probabilities that were asked for to choose by them alone."""
        shown = dataclasses.replace(
            request,
            choices=[],
            sampling_params=dataclasses.replace(
                request.sampling_params,
                return_log_probs=self._asked.return_log_probs,
                skip_prompt_log_probs=self._asked.skip_prompt_log_probs,
            ),
        )
        if not self._asked.wants_log_probs:
            shown.generated_log_probs = shown.generated_top_n_logprobs = None
        return shown


def _likelihood(request: DynamicInferenceRequest) -> tuple[bool, float]:
    """Orders sequences: those that ran to their end by the mean log-probability of their tokens."""
    log_probs = request.generated_log_probs
    mean = math.fsum(log_probs) / len(log_probs) if log_probs else -math.inf
    return request.succeeded(), mean

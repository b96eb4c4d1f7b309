"""Stopping criteria that run on a stream of their own and are polled, not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from megatron_async.contrib.transformers.stopping.end_check import after_ends
from megatron_async.contrib.transformers.stopping.selection import INVALID, is_invalid
from megatron_async.contrib.transformers.stopping.streams import Copies, Streams, Ticket

Scores = tuple[Tensor, ...] | None
Criterion = TypeVar("Criterion")

HOST_MARK = "reads_on_host"


def reads_on_host(criterion: Criterion) -> Criterion:
    """Mark a criterion, or its class, as one that looks at token ids on the host.

    It is called with ``input_ids`` in host memory, as soon as the token has been copied there, and
    returns a bool or a bool tensor of shape ``(batch,)``. It sees the same calls, in the same
    order, as in stock ``generate``. Its ``scores`` stay on the device.
    """
    setattr(criterion, HOST_MARK, True)
    return criterion


def is_length(criterion: object) -> bool:
    return type(criterion) is MaxLengthCriteria


def is_known_at_launch(criterion: object) -> bool:
    """Whether the host decides a criterion without the token: lengths and time."""
    return is_length(criterion) or type(criterion) is MaxTimeCriteria


NO_IDS = torch.zeros((1, 1), dtype=torch.long)


def is_host_marked(criterion: object) -> bool:
    return bool(getattr(criterion, HOST_MARK, False))


@dataclass(eq=False)
class Check:
    """The stop check of one token, on its way.

    ``length`` is the sequence length in tokens with that token. ``unfinished`` (int64,
    ``(batch,)``) is on the device, and valid for the main stream after a join. ``results`` (int64,
    ``(2, batch)``), the tokens and ``unfinished``, is a host buffer, valid once the ticket is
    ready, and so is ``invalid`` (bool, scalar): the probabilities were not finite. ``read`` is what
    the side stream may still read: it lives until the check is joined.
    """

    length: int
    scores: Scores
    results: Tensor
    invalid: Tensor
    read: tuple[Tensor | None, ...]
    unfinished: Tensor | None = None
    on_side_stream: bool = True
    ticket: Ticket | None = None
    data: Any = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``unfinished`` (bool, ``(batch,)``, on the host); ``host_ended``: a host-marked criterion
    has ended a row that the device takes for unfinished."""

    unfinished: Tensor
    host_ended: bool


@dataclass
class HostIds:
    """All token ids on the host, for host-marked criteria."""

    ids: Tensor
    ended: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ended = torch.zeros(self.ids.shape[0], dtype=torch.bool)


class AsyncStoppingCriteriaList(StoppingCriteriaList):  # type: ignore[misc]
    """A ``StoppingCriteriaList`` whose checks can be submitted now and looked at later.

    Called as a list it is the synchronous one. The decoding loop calls :meth:`begin`, then for
    each token :meth:`submit`, and :meth:`settle` for the oldest check when :meth:`oldest_ready`.
    """

    def __init__(self, criteria: Iterable[Any] = (), streams: Streams | None = None) -> None:
        super().__init__(criteria)
        self.streams = streams
        self._outstanding: deque[Check] = deque()
        self._free: list[tuple[Tensor, Tensor]] = []
        self._host: HostIds | None = None
        self._at_launch = [c for c in self if is_known_at_launch(c)]
        self._criteria = self.on_device
        self._ends: Tensor | None = None
        self._end_ids: frozenset[int] | None = None

    @property
    def host_marked(self) -> list[Any]:
        return [c for c in self if is_host_marked(c)]

    @property
    def on_device(self) -> StoppingCriteriaList:
        """Criteria that need the token and look at it on the device."""
        return StoppingCriteriaList(
            c for c in self if not is_known_at_launch(c) and not is_host_marked(c)
        )

    @property
    def length_limit(self) -> int | None:
        """The smallest of the maximum lengths, in tokens."""
        return min((c.max_length for c in self if is_length(c)), default=None)

    @property
    def outstanding(self) -> int:
        """Checks submitted and not settled."""
        return len(self._outstanding)

    def __call__(self, input_ids: Tensor, scores: Scores, **kwargs: Any) -> Tensor:
        """Whether each row is done; bool, ``(batch,)``, on the device of ``input_ids``."""
        done: Tensor = StoppingCriteriaList(c for c in self if not is_host_marked(c))(
            input_ids, scores, **kwargs
        )
        if marked := self.host_marked:
            ids = input_ids.cpu()
            for criterion in marked:
                done = done | to_tensor(criterion(ids, scores, **kwargs), ids).to(done.device)
        return done

    def begin(self, input_ids: Tensor) -> None:
        """Take the prompts, int64 ``(batch, length)``. Host-marked criteria need them copied."""
        if self.host_marked:
            self._host = HostIds(input_ids.cpu())
        self._at_launch = [c for c in self if is_known_at_launch(c)]
        self._criteria = self.on_device
        self._ends = self._end_ids = None
        if all(type(c) is EosTokenCriteria for c in self._criteria):
            ends = [c.eos_token_id.reshape(-1) for c in self._criteria]
            self._ends = torch.cat([input_ids.new_zeros(0), *(e.to(input_ids) for e in ends)])
            if input_ids.shape[0] == 1:
                self._end_ids = frozenset(self._ends.tolist())

    @property
    def is_one_row_with_end_tokens(self) -> bool:
        """Whether the host can tell from the token alone that all is done: then there is nothing
        to compute for it on the device."""
        return self._end_ids is not None

    def known_at_launch(self, length: int) -> bool:
        """Whether all rows are done by length or time, with ``length`` tokens."""
        done = [
            length >= c.max_length if is_length(c) else bool(c(NO_IDS, None)[0])
            for c in self._at_launch
        ]
        return any(done)

    def submit(
        self,
        input_ids: Tensor,
        tokens: Tensor,
        scores: Scores,
        unfinished: Tensor,
        probabilities: Tensor | None = None,
    ) -> Check:
        """Start the check of the last column of ``input_ids``, which is ``tokens``.

        ``unfinished``: int64 ``(batch,)``, before that token. ``probabilities``: what the tokens
        were drawn from, float ``(batch, vocabulary)``.
        """
        if self.streams is None:
            raise RuntimeError("submit needs streams; on the CPU call the list instead")
        buffers = self._free.pop() if self._free else self._buffers(tokens.shape[0])
        read = (input_ids, tokens, unfinished, probabilities)
        check = Check(input_ids.shape[1], scores, *buffers, read=read)

        def work() -> Copies:
            after = self._after(input_ids, tokens, scores, unfinished)
            check.unfinished = after[1]
            copies = [(check.results, after)]
            if probabilities is not None:
                copies.append((check.invalid, is_invalid(probabilities)))
            return copies

        if self._end_ids is not None and probabilities is None:
            check.unfinished, check.on_side_stream = unfinished, False
            check.ticket = self.streams.fetch(check.results[0], tokens)
        else:
            check.ticket = self.streams.submit(work)
        self._outstanding.append(check)
        return check

    def _after(
        self, input_ids: Tensor, tokens: Tensor, scores: Scores, unfinished: Tensor
    ) -> Tensor:
        """The tokens, and which rows are unfinished after them; int64 ``(2, batch)``."""
        if self._ends is not None:
            return after_ends(tokens, unfinished, self._ends)
        return torch.stack((tokens, unfinished & ~self._criteria(input_ids, scores)))

    def _buffers(self, batch: int) -> tuple[Tensor, Tensor]:
        assert self.streams is not None
        return (
            self.streams.host_buffer((2, batch), torch.long),
            self.streams.host_buffer((), torch.bool),
        )

    def oldest_ready(self) -> bool:
        """Whether there is a check that can be settled without a wait."""
        if not self._outstanding:
            return False
        ticket = self._outstanding[0].ticket
        assert ticket is not None
        return ticket.ready()

    def wait_oldest(self) -> None:
        ticket = self._outstanding[0].ticket
        assert ticket is not None
        ticket.wait()

    def settle(self) -> tuple[Check, Verdict, Tensor]:
        """Take the oldest check: it, its verdict, and its tokens (a copy on the host).

        Raises:
            RuntimeError: probabilities were not finite, as ``torch.multinomial`` has it.
        """
        check = self._outstanding.popleft()
        if check.read[-1] is not None and check.invalid:
            raise RuntimeError(INVALID)
        results = check.results.clone()
        self._free.append((check.results, check.invalid))
        tokens = results[0]
        if self._end_ids is None:
            still = results[1] != 0
        else:
            still = torch.tensor([int(tokens) not in self._end_ids])
        if self._host is None:
            return check, Verdict(still, False), tokens
        host = self._host
        host.ids = torch.cat([host.ids, tokens[:, None]], dim=-1)
        for criterion in self.host_marked:
            host.ended = host.ended | to_tensor(criterion(host.ids, check.scores), host.ids)
        verdict = Verdict(still & ~host.ended, bool((still & host.ended).any()))
        return check, verdict, tokens

    def discard(self) -> None:
        """Drop the outstanding checks: their tokens are taken back."""
        for check in self._outstanding:
            assert check.ticket is not None
            check.ticket.wait()  # WAR: the buffers are written until then
            self._free.append((check.results, check.invalid))
        self._outstanding.clear()

    def finalize(self) -> None:
        """Drop all that is under way and give the buffers back. May be called again."""
        if self.streams is not None:
            self.streams.close()
        self._outstanding.clear()
        self._free.clear()
        self._host = self._ends = self._end_ids = None


def to_tensor(done: bool | Tensor, ids: Tensor) -> Tensor:
    """A criterion's answer as bool ``(batch,)`` on the host."""
    answer = torch.as_tensor(done, dtype=torch.bool, device="cpu")
    return answer.reshape(-1).expand(ids.shape[0])

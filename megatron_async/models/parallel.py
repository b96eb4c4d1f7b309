"""This process's place among the ranks of a model, and the collectives of a step.

They run in the order of the device's stream, and inside its graphs where there are any. What comes
out has the same bits on each rank that gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.sampling.sample import SampleInputs

if TYPE_CHECKING:
    from megatron_async.kernels.ranks.mailbox import Mailbox
    from megatron_async.kernels.ranks.peer_rows import PeerRows
    from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords


_CPU = torch.device("cpu")


class VocabularyColumns:
    """What kernels are told of a rank's columns of the logits.

    Attributes:
        first_id, count: the token ids that the columns are about.
        suit_kernels: noise comes by fours, and each rank has an id.
    """

    def __init__(
        self,
        first_id: int,
        count: int,
        *,
        suit_kernels: bool,
        best_of_all: Callable[[Tensor, int], Tensor],
    ) -> None:
        self.first_id, self.count = first_id, count
        self.suit_kernels = suit_kernels
        self._best_of_all = best_of_all

    def best_of_all(self, packed: Tensor) -> Tensor:
        """``[R, 1]`` of all ranks from this one's ``[R, splits]``: int64, a score above ``2**31 -
        1`` less the id, which counts from this rank's first, and of which the largest wins."""
        return self._best_of_all(packed, self.first_id)


class GivenGroups(NamedTuple):
    """Process groups of a model that its user has divided over ranks.

    Args:
        ranks: of torch.distributed, in the order of the layout: others may have other replicas.
        tensor, pipeline, expert: the groups that this process is in.
    """

    ranks: tuple[int, ...]
    tensor: Any
    pipeline: Any
    expert: Any


class ModelParallel:
    """A rank's groups. To be made by all ranks, at the same time.

    Args:
        layout: a :class:`~megatron_async.ranks.layout.Layout` of several ranks.
        rank: this process's, in the layout.
        device: this rank's.
        given: the user's groups; None takes megatron-core's, of which all processes are ranks.

    Attributes:
        is_given: the groups are the user's, and so are torch.distributed and the model.
        ranks: of torch.distributed, in the order of the layout.
        leader: rank 0 of the layout, as torch.distributed numbers it.
        everyone: the group of all ranks of the layout; None is torch.distributed's own.
        tensor_words: of the ranks that share layers, see ``kernels/ranks/peer_memory.py``.
        expert_words: of those that have some experts each, or a share of each.
        expert_rank: this process's among those that have some experts each.
        expert_tensor_rank: its place among those that have a share of each.
    """

    scratch: ClassVar[frozenset[str]] = frozenset(
        {"_peer_rows", "_sends", "expert_words", "tensor_words"}
    )
    """What ranks send each other holds nothing of the weights: see ``graph_audit``."""

    def __init__(
        self,
        layout: Any,
        rank: int,
        device: torch.device = _CPU,
        *,
        given: GivenGroups | None = None,
    ) -> None:
        self.is_given = given is not None
        if given is None:
            given = _own_groups(layout)
        self.ranks: tuple[int, ...] = given.ranks
        self.leader: int = self.ranks[0]
        self.layout = layout
        self.rank, self._device = rank, device
        self.stage: int = layout.stage(rank)
        self.tensor_rank: int = rank % layout.tensor
        self.is_first: bool = self.stage == 0
        self.is_last: bool = self.stage == layout.pipeline - 1
        self._samples = rank in layout.sampling_ranks
        self._tensor, self._pipeline = given.tensor, given.pipeline
        """The latter for hidden states alone: NCCL runs what one communicator does one after the
        other."""
        self._experts = self._tensor if layout.expert == 1 else given.expert
        self.expert_rank: int = 0 if layout.expert == 1 else dist.get_rank(self._experts)
        self.expert_tensor_rank: int = self.tensor_rank if layout.expert == 1 else 0
        self._source: int = self.ranks[layout.sampling_ranks[self.tensor_rank]]
        self.everyone = self._group(range(layout.world_size)) if self.is_given else None
        self._listeners = self._group_of(layout.listeners)
        self._copies = self._group_of(layout.copies)
        # A group of their own: what is broadcast to the listeners may overtake these messages.
        self._messages = self._group_of(layout.listeners) if layout.pipeline > 1 else None
        self._told = tuple(
            r for r in layout.listeners(self.tensor_rank) if layout.stage(r) < layout.pipeline - 1
        )
        self._sends: deque[tuple[Any, Tensor]] = deque()
        """Messages to stages that have not been waited for, with their memory."""
        from megatron_async.kernels.ranks import peer_memory

        self._mail: Mailbox | None = None
        if self._messages is not None:
            listeners = layout.listeners(self.tensor_rank)
            to = tuple(listeners.index(r) for r in self._told) if self._samples else ()
            self._mail = peer_memory.open_mail(self._messages, device, to)
        self.tensor_words: PeerWords | None = peer_memory.open_words(self._tensor, device)
        self._peer_sums: dict[int, PeerSum] = {}
        self._peer_rows: dict[int, PeerRows] = {}
        self.expert_words = self.tensor_words
        if layout.expert not in (1, layout.tensor):
            self.expert_words = peer_memory.open_words(self._experts, device)

    @property
    def tensor_group(self) -> Any:
        """The ranks that share each layer with this one."""
        return self._tensor

    @property
    def pipeline_group(self) -> Any:
        """The ranks in this one's place in all stages."""
        return self._pipeline

    def is_of(self, layout: Any, ranks: tuple[int, ...]) -> bool:
        """The groups are those of ``ranks`` of torch.distributed, in that layout."""
        return bool(self.layout == layout) and self.ranks == ranks

    def _group(self, members: Iterable[int]) -> Any:
        """A group of ranks of the layout. Where others have other replicas, its members make it."""
        ranks = [self.ranks[member] for member in members]
        if not self.is_given:
            return dist.new_group(ranks)
        from megatron_async.megatron_compat.process_groups import new_group_of_members

        return new_group_of_members(ranks)

    @property
    def agrees(self) -> bool:
        """These ranks may :meth:`agree` that their kernels wait for each other's: they share all
        layers, and run nothing else."""
        return not self.is_given and int(self.layout.pipeline) == 1

    def agree(self, reason: str | None, *alike: object) -> str | None:
        """The first reason that a rank has against something, on all ranks of the layout. To be
        called by all, at the same time.

        Args:
            alike: what all ranks must have alike; where they have not, that is a reason.
        """
        said: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(said, (reason, alike), group=self.everyone)
        for number, (other, theirs) in enumerate(said):
            if other is not None:
                return f"rank {number}: {other}"
            if theirs != said[0][1]:
                return f"rank {number} is not like rank 0: {theirs}, {said[0][1]}"
        return None

    def _neighbour(self, stages: int) -> int:
        """The rank in this one's place ``stages`` stages further, as torch numbers it."""
        neighbour: int = self.ranks[self.layout.neighbour(self.rank, stages)]
        return neighbour

    def _group_of(self, members: Callable[[int], tuple[int, ...]]) -> Any:
        """The group of those of this tensor-parallel rank; None for one. Each rank must make all
        groups."""
        own = None
        for tensor_rank in range(self.layout.tensor):
            ranks = members(tensor_rank)
            made = self._group(ranks) if len(ranks) > 1 else None
            if tensor_rank == self.tensor_rank:
                own = made
        return own

    # --- the ranks that share a layer ---------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """Add up over tensor-parallel ranks, in place."""
        if self.layout.tensor > 1:
            dist.all_reduce(x, group=self._tensor)
        return x

    def sum_rows(self, partial: Tensor) -> Tensor:
        """The sum over tensor-parallel ranks of ``[..., hidden size]``, which each has a part of;
        it may be in the place of that part. Up to some hundred rows go through each other's
        memory, where the ranks reach it."""
        size = partial.shape[-1]
        rows = partial.numel() // size
        many = self._rows_kernel(partial)
        if many is not None:
            many.sum_(partial.view(rows, size))
            return partial
        kernel = self._peer_sum(size, partial)
        if kernel is None or not rows or kernel.why_not(rows) is not None:
            return self.sum_(partial)
        total = torch.zeros_like(partial)
        kernel(partial.view(rows, size), total.view(rows, size), 1 << (rows - 1).bit_length())
        return total

    def norms_behind_sum(self, like: Tensor) -> PeerRows | None:
        """What adds up rows like these, adds the sum to the residual stream and norms it, in one
        kernel; None where these are kernels of their own."""
        kernel = self._rows_kernel(like)
        return kernel if kernel is not None and kernel.norms else None

    def _rows_kernel(self, like: Tensor) -> PeerRows | None:
        """The kernel that takes rows like these; None where others add them up."""
        if self.tensor_words is None or self.tensor_words.of_rows is None:
            return None
        if like.dtype != torch.bfloat16 or not like.is_contiguous():
            return None
        from megatron_async.kernels.ranks import peer_rows

        size = like.shape[-1]
        rows = like.numel() // size
        if rows < peer_rows.LEAST_ROWS:
            return None
        if size not in self._peer_rows:
            words = self.tensor_words.of_rows
            self._peer_rows[size] = peer_rows.PeerRows(words, size, like.device)
        kernel = self._peer_rows[size]
        return kernel if kernel.why_not(rows) is None else None

    def _peer_sum(self, size: int, like: Tensor) -> PeerSum | None:
        """The kernel for rows of ``size``; None where this rank has none."""
        if self.tensor_words is None or like.dtype != torch.bfloat16 or not like.is_contiguous():
            return None
        if size not in self._peer_sums:
            from megatron_async.kernels.ranks.peer_sum import PeerSum

            self._peer_sums[size] = PeerSum(self.tensor_words, size, like.device)
        return self._peer_sums[size]

    def max_(self, x: Tensor) -> Tensor:
        """The largest over tensor-parallel ranks, in place."""
        if self.layout.tensor > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._tensor)
        return x

    def holds_on_all(self, holds: bool) -> bool:
        """Whether something holds on all tensor-parallel ranks. To be called by all, at the same
        place of a step; it waits for the device."""
        against = torch.tensor([int(not holds)], device=self._device)
        return not self.max_(against).item()

    def sum_experts_(self, x: Tensor) -> Tensor:
        """Add up over the ranks that have some experts each, or a share of each, in place."""
        if self.layout.stage_ranks > 1:
            dist.all_reduce(x, group=self._experts)
        return x

    # --- stages -------------------------------------------------------------------------------

    @property
    def stages_behind(self) -> int:
        """Stages behind this one."""
        return int(self.layout.pipeline) - 1 - self.stage

    def receive_(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden`` with what the stage before has put out."""
        dist.recv(hidden, src=self._neighbour(-1), group=self._pipeline)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Hand hidden states to the next stage."""
        dist.send(hidden.contiguous(), dst=self._neighbour(1), group=self._pipeline)

    def share_from_first_stage_(self, weight: Callable[[], Tensor]) -> None:
        """Give the last stage's weight the values of the first stage's."""
        layout = self.layout
        if layout.pipeline == 1 or not (self.is_first or self.is_last):
            return
        if self.is_first:
            dist.send(weight().detach(), dst=self._neighbour(layout.pipeline - 1))
        else:
            dist.recv(weight().detach(), src=self._neighbour(1 - layout.pipeline))

    def tell_stages(self, sampled: Tensor) -> None:
        """Hand what the last stage has sampled to the others, which take it when they need it: this
        one goes on meanwhile."""
        if not self._samples:
            return
        if self._mail is not None and self._mail.holds(sampled):
            self._mail.post(sampled)
            return
        for rank in self._told:
            work = dist.isend(sampled, dst=self.ranks[rank], group=self._messages)
            self._sends.append((work, sampled))
        # The hidden states that were sampled here came behind all but the last of these.
        while len(self._sends) > len(self._told) * self.layout.pipeline:
            self._sends.popleft()[0].wait()

    def take_sampled_(self, sampled: Tensor) -> Tensor:
        """Fill ``sampled`` with what the last stage has told; the oldest that was not taken."""
        if self._mail is not None and self._mail.holds(sampled):
            return self._mail.take_(sampled)
        dist.recv(sampled, src=self._source, group=self._messages)
        return sampled

    def finish_sends(self) -> None:
        """Wait for what :meth:`tell_stages` has begun: at the end of a graph."""
        while self._sends:
            self._sends.popleft()[0].wait()

    # --- tokens -------------------------------------------------------------------------------

    def gather_logits(self, logits: Tensor, vocab_size: int, *, of_all: bool = False) -> Tensor:
        """Whole rows ``[R, vocab_size]`` from this rank's columns ``[R, W]``, on each rank of the
        last stage; ``of_all`` stages."""
        rows, width = logits.shape
        whole = logits
        if self._samples and self.layout.tensor > 1:
            parts = [logits.new_empty(rows, width) for _ in range(self.layout.tensor)]
            dist.all_gather(parts, logits.contiguous(), group=self._tensor)
            whole = torch.cat(parts, dim=1)
        elif not self._samples:
            whole = logits.new_empty(rows, width * self.layout.tensor)
        whole = whole[:, :vocab_size].contiguous()
        return self._tell_(whole, self._listeners if of_all else self._copies)

    def sample(
        self, whole_rows: Any, logits: Tensor, inputs: SampleInputs, *, vocab_size: int
    ) -> Tensor:
        """A token of each row, the same on all ranks of the last stage: int64 ``[R]``.

        Args:
            whole_rows: samples where one rank has all columns; called as ``sample_tokens``.
            logits: this rank's columns ``[R, W]``.
            inputs: of each row.
        """
        if not self._samples:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        elif self.layout.tensor == 1:
            tokens = whole_rows(logits, inputs, vocab_size=vocab_size)
        else:
            from megatron_async.sampling.sharded import sample_tokens_sharded

            tokens = sample_tokens_sharded(
                logits,
                inputs,
                first_id=self.tensor_rank * logits.shape[1],
                vocab_size=vocab_size,
                exchange=self,
            )
        return self._tell_(tokens, self._copies)

    def columns(self, width: int, vocab_size: int) -> VocabularyColumns:
        """This rank's columns of logits of that width, of which ids from ``vocab_size`` on are
        padding."""
        first_id = self.tensor_rank * width
        last = (self.layout.tensor - 1) * width
        return VocabularyColumns(
            first_id,
            max(0, min(width, vocab_size - first_id)),
            suit_kernels=width % 4 == 0 and last < vocab_size,
            best_of_all=self._best_of_all,
        )

    def _best_of_all(self, packed: Tensor, first_id: int) -> Tensor:
        best = None if self.tensor_words is None else self.tensor_words.best
        if best is not None and best.takes(len(packed)):
            found = best(packed, first_id)
        else:
            found = self.max_(packed.amax(1) - first_id)
        return self._tell_(found, self._copies)[:, None]

    def _tell_(self, x: Tensor, group: Any) -> Tensor:
        if group is not None:
            dist.broadcast(x, src=self._source, group=group)
        return x


def _own_groups(layout: Any) -> GivenGroups:
    """megatron-core's, of a group whose ranks are all processes."""
    from megatron.core import parallel_state

    return GivenGroups(
        tuple(range(layout.world_size)),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    )


_current: ModelParallel | None = None


def current() -> ModelParallel | None:
    """The ranks of this process, for models built from now on; None for one rank."""
    return _current


def set_current(parallel: ModelParallel | None) -> None:
    """Have models built from now on be those of a group of ranks; None ends it."""
    global _current
    _current = parallel

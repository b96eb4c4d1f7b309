"""The order in which pieces of several prompts are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from megatron_async.serving.front_end.job import Job, Piece


def ahead_of_others(
    pieces: AsyncIterator[tuple[int, Piece]], jobs: Sequence[Job]
) -> AsyncIterator[tuple[int, Piece]]:
    """``pieces`` in an order in which each prompt's log-probabilities, which come with its first
    choice, are there before any piece of the prompt."""
    are_due = any(job.params.wants_prompt_log_probs for job in jobs)
    return _in_order(pieces, jobs) if are_due else pieces


async def _in_order(
    pieces: AsyncIterator[tuple[int, Piece]], jobs: Sequence[Job]
) -> AsyncIterator[tuple[int, Piece]]:
    held: dict[int, list[Piece]] = {}
    async for number, piece in pieces:
        job = jobs[number]
        due = job.params.wants_prompt_log_probs and len(job.prompt) > 1
        if due and job.prompt_log_probs is None and piece.output.index:
            held.setdefault(number, []).append(piece)
            continue
        yield number, piece
        for earlier in held.pop(number, ()):
            yield number, earlier

"""Faults of drafting on the embedded model, and what finds each of them.

Some change tokens. Others change drafts alone, which lowers acceptance and nothing else: these are
found by drafts that differ from those of a forward without a cache, or by a write to a block that
the request does not hold.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.drafting import mtp
from megatron_async.drafting.mtp import MtpDrafter
from megatron_async.drafting.ngram import NgramDrafter
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import IntegrityError
from megatron_async.runner import step_program
from megatron_async.runner.drafter import SampledRows
from megatron_async.runner.memory import attention_metadata
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampling_stage import SamplingStage
from megatron_async.runner.step_program import StepProgram
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.scheduler import Scheduler
from tests.support.engines import config_at
from tests.unit.drafting import test_ngram
from tests.unit.drafting.test_mtp import Plain

PROMPT = "class Stack:\n    def push(self"
REPEATED = "for i in range(3):\n    x = i\nfor i in range(3):\n    y = "


class Tiny:
    """The weights that all engines of this file share, and what is right, which no fault of it
    touches and which is computed once."""

    def __init__(self) -> None:
        self.engine = DynamicInferenceEngine.from_pretrained("tiny", config_at(0, device="cpu"))
        self._plain = Plain(self.engine.model.network.model)
        self._logits: dict[tuple[int, ...], list[torch.Tensor]] = {}
        with drafting(self, 0, 0) as engine:
            self.undrafted = [r.generated_tokens for r in engine.generate(*asked())]

    def logits(self, tokens: list[int]) -> list[torch.Tensor]:
        """Of four drafts of what follows ``tokens``."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._plain.logits(tokens, 4)
        return self._logits[key]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


def drafting(tiny: Tiny, depth: int, drafts: int, **values: Any) -> DynamicInferenceEngine:
    values = {"max_requests": 3, "max_sequence_length": 160, "block_count": 60, **values}
    values = {"block_size_tokens": 8, "prefill_chunk_tokens": 16, **values}
    return tiny.engine.with_config(
        config_at(depth, device="cpu", num_speculative_tokens=drafts, debug=True, **values)
    )


def params(count: int, temperature: float = 0.0, **values: Any) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=count, temperature=temperature, termination_id=-1, **values
    )


# --- what finds them --------------------------------------------------------------------------


class WrongDraftsError(AssertionError):
    pass


class WrongTokensError(AssertionError):
    pass


class StrayWriteError(AssertionError):
    pass


def asked() -> tuple[list[str], list[SamplingParams]]:
    """Prompts and parameters of requests that come, go and end beside each other, while prompts
    arrive in chunks."""
    each = [
        (PROMPT, params(9)), ("x", params(14, 1.0, seed=3)), (REPEATED, params(7)),
        (PROMPT * 3, params(12, 0.8, seed=1)), ("import", params(20, 1.0, seed=2)),
        (REPEATED * 2, params(5)), (PROMPT, params(30, stop_token_ids=[ord("e")])),
    ]  # fmt: skip
    prompts, sampling = zip(*each, strict=True)
    return list(prompts), list(sampling)


def check_tokens(tiny: Tiny) -> None:
    with drafting(tiny, 1, 4) as engine:
        got = [r.generated_tokens for r in engine.generate(*asked())]
    if got != tiny.undrafted:
        raise WrongTokensError(f"{got} != {tiny.undrafted}")


def steps_of(
    engine: DynamicInferenceEngine, prompt: str, undrafted: int = 0
) -> Iterator[tuple[list[int], int, int]]:
    """Tokens, slot and room of a request behind each step that brought some of it; what is drafted
    beyond the room is nobody's token, and is computed without blocks. Its first tokens come without
    drafts."""
    tokens = engine.model.tokenize_prompt(prompt)
    total = len(tokens) + 18
    engine.add_request(1, prompt, params(18, num_speculative_tokens=0 if undrafted else None))
    while engine.has_unfinished_requests():
        if len(tokens) == total - 18 + undrafted:
            engine.update_sampling_params(1, num_speculative_tokens=None)
        outputs = engine.step_modern()["tokens"]
        new = [output.token_id for output in outputs if output.request_id == 1]
        tokens += new
        if new and len(tokens) < total:
            engine.device.synchronize()
            state = engine.cache.slots
            live = (state.max_total == total) & ~state.finished
            live[engine.cache.null_slot] = False
            ((slot,),) = live.nonzero().T.tolist()
            yield tokens, slot, total - len(tokens)


def check_mtp_drafts(tiny: Tiny) -> None:
    """Logits of all drafts: of a prompt in chunks, with a neighbour, of the same prompt found in
    the cache, and behind steps without drafts. Drafts themselves may be the same with a fault in
    what they come from."""
    slots: list[int] = []
    logits: list[torch.Tensor] = []
    draft, sample_tokens = MtpDrafter.draft, mtp.sample_tokens

    def watched(self: MtpDrafter, rows: SampledRows, count: int) -> torch.Tensor:
        slots[:] = rows.slots.tolist()
        logits.clear()
        return draft(self, rows, count)

    def watched_sample(of: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        logits.append(of.clone())
        return sample_tokens(of, *args, **options)

    with (
        patch.object(MtpDrafter, "draft", watched),
        patch.object(mtp, "sample_tokens", watched_sample),
        drafting(tiny, 0, 4, max_requests=2) as engine,
    ):
        engine.add_request(0, "import sys", params(26))
        cached = 0
        for undrafted in (0, 0, 7):
            compared = 0
            for tokens, slot, room in steps_of(engine, PROMPT * 2, undrafted):
                if not logits:
                    continue
                row = slots.index(slot)
                for got, wanted in zip(logits[:room], tiny.logits(tokens), strict=False):
                    error = (got[row, : len(wanted)] - wanted).abs().max()
                    if not error < 2e-3:
                        raise WrongDraftsError(f"logits differ by {error}")
                    compared += 1
            assert compared > (6 if undrafted else 12)
            cached, before = engine.counters.tokens_cached, cached
        assert cached > before + 30


def check_ngram_drafts(tiny: Tiny) -> None:
    compared = 0
    with drafting(tiny, 0, 3, max_requests=2, speculative_method="ngram") as engine:
        engine.add_request(0, "import sys", params(40))
        for tokens, slot, _ in steps_of(engine, REPEATED):
            drafts = engine.cache.slots.drafts[slot].tolist()
            if drafts != test_ngram.plain(tokens, 3):
                raise WrongDraftsError(f"{drafts} != {test_ngram.plain(tokens, 3)}")
            compared += 1
    assert compared > 3


def check_writes(tiny: Tiny) -> None:
    """Each slot writes to blocks of its request alone, when slots change hands."""
    written: set[tuple[int, int]] = set()
    allowed: set[tuple[int, int]] = set()
    begin, commit = ForwardBatch.begin, Scheduler.commit

    def watched(self: ForwardBatch, metadata: Any) -> None:
        blocks = metadata.slot_mapping // self.block_size_tokens
        written.update(zip(metadata.token_slots.tolist(), blocks.tolist(), strict=True))
        begin(self, metadata)

    def watched_commit(self: Scheduler, *args: Any) -> Any:
        for sequence in self.table.sequences.values():
            allowed.update((sequence.slot, block) for block in sequence.blocks)
        return commit(self, *args)

    asked = [
        (PROMPT * (i % 3 + 1), params(5 + i % 4, num_speculative_tokens=(None, 1)[i % 2]))
        for i in range(8)
    ]
    with (
        patch.object(ForwardBatch, "begin", watched),
        patch.object(Scheduler, "commit", watched_commit),
        drafting(tiny, 0, 5, block_size_tokens=1, block_count=300) as engine,
    ):
        written.clear()
        for number, (prompt, each) in enumerate(asked):
            engine.add_request(number, prompt, each)
        while engine.has_unfinished_requests():
            allowed.clear()
            engine.step_modern()
            engine.device.synchronize()
            stray = {w for w in written if w[1] != NULL_BLOCK} - allowed
            written.clear()
            if stray:
                raise StrayWriteError(f"slots and blocks {sorted(stray)}")


def check_counts(tiny: Tiny) -> None:
    """No row brings more than its request wants."""
    with drafting(tiny, 1, 4) as engine:
        wants = [0, 2, None]
        each = [params(20, num_speculative_tokens=count) for count in wants]
        requests = engine.generate([PROMPT] * 3, each)
    for request, count in zip(requests, wants, strict=True):
        rows = request.counters.launched - request.counters.discarded - 1
        if count is not None and request.counters.accepted > count * rows:
            raise WrongTokensError(f"{request.counters.accepted} of {rows} rows")


CHECKS = (check_tokens, check_mtp_drafts, check_ngram_drafts, check_writes, check_counts)


@pytest.mark.sweep
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_checks_pass_without_a_fault(check: Callable[..., None], tiny: Any) -> None:
    check(tiny)


# --- the faults -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``old`` in the source of a function of ``target`` is ``new``."""

    name: str
    target: Any
    function: str
    old: str
    new: str
    check: Callable[[Tiny], None]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The fault is in the code while this is entered."""
        original = getattr(self.target, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, source.count(self.old)
        made: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), original.__globals__, made)
        with patch.object(self.target, self.function, made[self.function]):
            # The step program has a name of its own for it.
            if self.target is attention_metadata:
                with patch.object(step_program, self.function, made[self.function]):
                    yield
            else:
                yield


FAULTS = (
    Fault("count one short", SamplingStage, "sample",
          "final + (~failed).long()", "final", check_tokens),
    Fault("draft kept past a stop id", SamplingStage, "sample",
          "final = torch.minimum(end, accepted)", "final = accepted", check_tokens),
    Fault("draft behind a wrong one accepted", SamplingStage, "sample",
          "right.long().cumprod(1).sum(1)", "right.long().sum(1)", check_tokens),
    Fault("accepted drafts not in the length", SamplingStage, "sample",
          "kv_length[target] += counted", "kv_length[target] += 0", check_tokens),
    Fault("noise of the row, not the position", SamplingStage, "sample",
          "    positions.flatten(),\n        ),",
          "    positions[:, :1].expand(-1, window).flatten(),\n        ),", check_tokens),
    Fault("decode rows cut by padding before them", attention_metadata, "metadata_of_mixed",
          "int(held[-1]) + 1 if len(held) else 0", "len(held)", check_tokens),
    Fault("window's last draft not in mixed steps", StepProgram, "forward_mixed",
          "torch.minimum(self._offsets[: shape.window], drafts[:, None])",
          "0 * self._offsets[: shape.window]", check_tokens),
    Fault("tails of chunks not kept", MtpDrafter, "prefill",
          "self._tails[target, layer] = hidden[lasts]", "pass", check_mtp_drafts),
    Fault("tokens without drafts not seen", MtpDrafter, "draft",
          "for draft in range(passes)", "for draft in range(count)", check_mtp_drafts),
    Fault("drafts of the step accepted, not the row's", SamplingStage, "sample",
          "offsets[1:] < samples[:, None]", "offsets[1:] < window", check_counts),
    Fault("tails of windows not kept", mtp, "hidden_before",
          "of.tails[of.slots, draft] = hidden[:, window - draft]", "pass", check_mtp_drafts),
    Fault("tail of the row before the last", mtp, "hidden_before",
          "hidden[:, window - draft]", "hidden[:, window - draft - 1]", check_mtp_drafts),
    Fault("tail met by the row before", mtp, "hidden_before",
          "window - 1 - draft - of.last", "window - 2 - draft - of.last", check_mtp_drafts),
    Fault("states of a window one place back", mtp, "hidden_before",
          "of.last[:, None] - (window - 1)", "of.last[:, None] - window",
          check_mtp_drafts),
    Fault("tokens of a window one place on", mtp, "draft_rows",
          "index.clamp(0, window - 1)", "(index + 1).clamp(0, window - 1)", check_mtp_drafts),
    Fault("rejected drafts not computed again", mtp, "draft_rows",
          "+ layer >= 0", "+ layer > 0", check_mtp_drafts),
    Fault("rows without a state computed again", mtp, "draft_rows",
          "+ layer >= 0", "+ layer >= -1", check_mtp_drafts),
    Fault("drafts beyond the last layer one place on", mtp, "draft_rows",
          "end[None, :, None] + ahead", "end[None, :, None] + ahead + 1", check_mtp_drafts),
    Fault("a chunk's first row has the row before it", MtpDrafter, "prefill",
          "padded.index_put_((at,), self._tails[target, layer])[:-1]", "padded[:-1]",
          check_mtp_drafts),
    Fault("rows of windows one place on", mtp, "draft_rows",
          "(end - window)[:, None]", "(end - window + 1)[:, None]", check_mtp_drafts),
    Fault("rows of chunks one place on", MtpDrafter, "prefill",
          "tokens.positions - layer - 1", "tokens.positions - layer", check_mtp_drafts),
    Fault("chunks begin one place on", MtpDrafter, "prefill",
          "skipped - layer - 1", "skipped - layer", check_mtp_drafts),
    Fault("rows of a prefix hit computed again in chunks", MtpDrafter, "prefill",
          "positions >= state.computed_from[tokens.slots]", "positions >= 0", check_mtp_drafts),
    Fault("hit not known at admission", StepProgram, "_admit",
          "self._state.computed_from[slots] = self._state.kv_length[slots]",
          "self._state.computed_from[slots] = 0", check_mtp_drafts),
    Fault("last layer drafts from the first one's state", mtp, "hidden_before",
          "return hidden[:, -1:]", "return hidden[:, :1]", check_mtp_drafts),
    Fault("block table not cleared at admission", StepProgram, "_admit",
          "self._state.block_table.index_fill_(0, slots, NULL_BLOCK)", "pass", check_writes),
    Fault("history not appended", NgramDrafter, "draft",
          "self._tokens[target, at] = torch.where(counts, tokens, 0).int()", "pass",
          check_ngram_drafts),
    Fault("history of another slot", NgramDrafter, "draft",
          "self._tokens[slots]", "self._tokens[slots.roll(1)]", check_ngram_drafts),
    Fault("history of a prompt not taken", NgramDrafter, "admit",
          "self._tokens[slot, : len(tokens)].copy_(known, non_blocking=True)", "pass",
          check_ngram_drafts),
)  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, tiny: Tiny) -> None:
    finders = (WrongDraftsError, WrongTokensError, StrayWriteError, IntegrityError)
    with fault.active(), pytest.raises(finders):
        fault.check(tiny)

"""Groups of forked ranks for tests: modules are imported once, by a process of one thread.

``python -m tests.support.ranked FOLDER CASE...`` runs :func:`case` on each layout, such as
``dense:2,1,1`` (tensor, pipeline, expert), :func:`meeting_case` for ``meeting:1,2,1``,
:func:`soak_case` for ``soak:2,1,1`` with as many requests as ``SOAK`` says, and
:func:`kill_case` for ``killed:`` and ``stopped:``, one after the other, and writes what rank 0
found to ``FOLDER/CASE.json``. With ``RANKED_DEVICE=cuda`` layouts run on GPUs, in bfloat16, and
find less: their tokens at all depths and with drafts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.build.model import load_share
from megatron_async.build.rank_process import follow
from megatron_async.build.ranks import config_of_ranks
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import MegatronAsyncError
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import LoadModel
from megatron_async.ranks.start import device_of_rank, lead
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import Plan
from tests.support.cut_models import write_layers
from tests.support.forks import run_together
from tests.support.own_thread import OwnThread, check_idle_for_a_reason, watched_waiters
from tests.support.patience import PATIENCE_SECONDS
from tests.support.sweeps import choose_seed, drawn

Found = dict[str, Any]

DEVICE = os.environ.get("RANKED_DEVICE", "cpu")
ON_GPUS = DEVICE == "cuda"
DEPTHS = (0, 1, 2, 4)
FULL_DEPTHS = (1, 2, 4)
"""One of them, by the commit, is that of the engine's own thread."""
COMMON = "import os\nimport sys\nfrom pathlib import Path\n\n\n"
PROMPTS = [
    COMMON + "def read(path):\n", "class A:\n    def", COMMON + "def write(path):\n", "x = [1, ",
    COMMON + "def read(path):\n", "for i in range(", "try:\n", "while True:",
]  # fmt: skip
ABORTED = 2
KILLS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NEW_TOKENS = 13
SIZES = {
    "max_requests": 3, "block_size_tokens": 8, "block_count": 40, "prefill_chunk_tokens": 16,
    "max_sequence_length": 128, "batch_invariant": True, "debug": True,}  # fmt: skip


def params() -> list[SamplingParams]:
    each: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.0, "structured_outputs": {"regex": "[a-m]{2}, then [0-9]{3,9}"}},
        {"temperature": 0.0, "return_log_probs": True, "top_n_logprobs": 2},
        {"temperature": 0.0},
    ]
    return [
        SamplingParams(seed=n, num_tokens_to_generate=NEW_TOKENS, termination_id=-1, **values)
        for n, values in enumerate(each)
    ]


def config_at(depth: int, **values: Any) -> EngineConfig:
    chain: dict[str, Any] = {"depth": depth}
    dtype = "bfloat16" if ON_GPUS else None
    return EngineConfig(device=DEVICE, dtype=dtype, **chain, **SIZES | values)


def play(engine: DynamicInferenceEngine) -> Found:
    """All requests, while some are paused, evicted, aborted, and get new parameters."""
    futures = [
        engine.add_request(n, prompt, each)
        for n, (prompt, each) in enumerate(zip(PROMPTS, params(), strict=True))
    ]
    script = {
        4: lambda: engine.pause_request(0), 7: lambda: engine.evict_request(1),
        10: lambda: engine.resume_request(0), 12: lambda: engine.evict_request(0),
        14: lambda: engine.abort_request(ABORTED), 18: engine.suspend, 20: engine.resume,
    }  # fmt: skip
    steps = 0
    while engine.has_unfinished_requests():
        script.get(steps, lambda: None)()
        engine.step_modern()
        check_idle_for_a_reason(engine)
        steps += 1
    found = [future.result() for future in futures]
    counters = engine.counters
    return {
        "tokens": [request.generated_tokens for request in found],
        "log_probs": log_probs_of(found[6]),
        "text": found[5].generated_text,
        "overlapped": counters.steps_overlapped,
        "events": dict(counters.to_dict()),
    }


def log_probs_of(request: DynamicInferenceRequest) -> list[float]:
    return [*(request.prompt_log_probs or []), *(request.generated_log_probs or [])]


def drafted(engine: DynamicInferenceEngine, **values: Any) -> Found:
    config = config_at(2, num_speculative_tokens=2, **values)
    with engine.with_config(config) as other:
        found = other.generate(PROMPTS[:6], params()[:6])
        accepted = other.counters.tokens_accepted
    return {"tokens": [request.generated_tokens for request in found], "accepted": accepted}


Work = list[tuple[str, SamplingParams]]


def full_cache(
    engine: DynamicInferenceEngine, depth: int, work: Work, block_count: int
) -> list[list[int]]:
    """The tokens of requests that are all there from the beginning, by the engine's own thread,
    over a cache that never has room for all that could run; nobody asks for anything meanwhile."""
    config = config_at(depth, block_count=block_count)
    with watched_waiters(), engine.with_config(config) as other:
        thread = OwnThread(other)
        futures = [other.add_request(n, *each) for n, each in enumerate(work)]
        thread.run_dry(100 * len(work))
        assert other.counters.evictions + other.counters.stalls > len(work) / 10, "not full"
        thread.stop()
    return [list(future.result(timeout=0).generated_tokens) for future in futures]


def refused(call: Any) -> str:
    try:
        call()
    except MegatronAsyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def case(engine: DynamicInferenceEngine, folder: Path, model: str, *, alone: bool) -> Found:
    """What one layout gives."""
    found: Found = {"depths": {}}
    record = folder / f"{model}.run"
    close_in_flight(engine)
    for depth in DEPTHS:
        file = str(record) if alone and depth == 2 else None
        batches = 2 if file else None
        recorded = config_at(depth, record=file, pipeline_micro_batches=batches)
        with engine.with_config(recorded) as other:
            found["depths"][depth] = play(other) | {"batches": other.limits.micro_batches}
    if not alone and not ON_GPUS:
        with engine.with_config(config_at(2, pipeline_micro_batches=2)) as other:
            result = replay(read_run(record), other)
            found["replay"] = [result.exact, list(result.differences), len(result.endings)]
    if not alone:
        work = list(zip(PROMPTS, params(), strict=True))
        depth = drawn(FULL_DEPTHS)
        found["full"] = {depth: full_cache(engine, depth, work, 11)}
    for method in ("ngram", "grammar"):
        found[method] = drafted(engine, speculative_method=method)
    if engine.model.network.kv_cache_spec.num_mtp_layers:
        found["mtp"] = drafted(engine)
    elif not alone:
        found["refused drafts"] = refused(lambda: drafted(engine))
    if engine.model.network.hidden_state_count:
        (score,) = engine.score([PROMPTS[1]], hidden_states=(0, 1, -1))
        found["hidden states"] = score.hidden_states.double().flatten().tolist()[::7]
    if not alone and not ON_GPUS:
        processors = SamplingParams(logits_processors=[lambda tokens, logits: logits])
        sizes = config_at(1, tensor_model_parallel_size=4)
        found["refused"] = {
            "processors": refused(lambda: engine.add_request(99, "x", processors)),
            "sizes": refused(lambda: engine.with_config(sizes)),
            "state dict": refused(lambda: engine.update_weights({})),
            "wrong weights": refused(lambda: engine.update_weights(folder / "wrong")),
            "hidden states": refused(lambda: engine.score(["x"], hidden_states=(0,))),
            "two at once": refused(lambda: step_both(engine)),
        }
    if model == "dense" and not ON_GPUS:
        engine.update_weights(folder / "new")
        requests = engine.generate(PROMPTS[:3], params()[:3])
        found["new"] = [request.generated_tokens for request in requests]
    return found


def close_in_flight(engine: DynamicInferenceEngine) -> None:
    """Another engine, with steps that nobody takes: those behind it must find nothing of it."""
    with engine.with_config(config_at(2)) as other:
        for n in range(3):
            other.add_request(n, "x", SamplingParams(num_tokens_to_generate=9, termination_id=-1))
        for _ in range(5):
            other.step_modern()
        assert other.in_flight_count >= 2


def step_both(engine: DynamicInferenceEngine) -> None:
    """While one engine has a step in flight the other may not launch."""
    engine.add_request(0, "x", SamplingParams(num_tokens_to_generate=4, termination_id=-1))
    engine.step_modern()
    assert engine.in_flight_count
    try:
        with engine.with_config(config_at(0)) as other:
            other.generate(["x"])
    finally:
        while engine.has_unfinished_requests():
            engine.step_modern()


def lead_case(folder: Path, model: str, layout: Layout, store: dist.Store) -> Found:
    """Rank 0 of a layout, or the one process."""
    with engine_over(folder / model, config_at(1), layout, store) as engine:
        return case(engine, folder, model, alone=layout.world_size == 1)


@contextmanager
def engine_over(
    path: Path, config: EngineConfig, layout: Layout, store: dist.Store
) -> Iterator[DynamicInferenceEngine]:
    """That of rank 0 of a layout, or of the one process."""
    device = device_of_rank(DEVICE)
    group: RankGroup | None = None
    if layout.world_size > 1:
        group = lead(layout, device, store, layout.world_size)
        group.tell(LoadModel(str(path), config_of_ranks(config)))
    model = load_share(path, config, device)
    if group is not None:
        group.await_answers()
        model = dataclasses.replace(model, group=group)
    engine = DynamicInferenceEngine(model, config, owned_group=group)
    with engine:
        yield engine


MEETINGS = 20


class Meetings:
    """Has the first of two stages compute step n + 1 only while the second computes step n: each
    waits in the midst of its layers until the other is there too.

    Args:
        other: the other stage's end.
        stage: 0 or 1.
    """

    def __init__(self, other: socket.socket, stage: int) -> None:
        self.seen: list[int] = []
        """What the other one was computing."""
        self._other = other
        self._stage = stage
        self._step = 0
        other.settimeout(PATIENCE_SECONDS)

    def meet(self) -> None:
        """This stage begins its next step."""
        step, self._step = self._step, self._step + 1
        if 0 <= step - (self._stage == 0) < MEETINGS:
            self._other.sendall(bytes([step]))
            self.seen += self._other.recv(1)

    def patch(self) -> None:
        """Have the models of this process meet where their layers begin."""
        numerics = GPTNetwork.numerics

        def met(wrapper: GPTNetwork) -> Any:
            self.meet()
            return numerics(wrapper)

        GPTNetwork.numerics = met  # type: ignore[method-assign]


def meeting_case(
    folder: Path, layout: Layout, store: dist.Store, meetings: Meetings, depth: int = 1
) -> Found:
    """Requests in two micro-batches, whose stages meet in each step."""
    rows: list[list[int]] = []

    class Watcher:
        def on_launch(self, plan: Plan) -> None:
            rows.append(list(plan.rows.keys))

    config = config_at(depth, max_requests=4)
    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=MEETINGS, termination_id=-1)
    with engine_over(folder / "dense", config, layout, store) as engine:
        engine.observe(Watcher())
        found = engine.generate(["a", "b", "c", "d"], greedy)
    return {
        "rows": rows,
        "seen": meetings.seen,
        "tokens": [len(request.generated_tokens) for request in found],
    }


def soak_case(folder: Path, layout: Layout, store: dist.Store, count: int) -> Found:
    """Requests by the engine's own thread over a cache that is always full; which of them got other
    tokens than in a cache with room for all."""
    kinds: Work = [
        (f"x = [{n}", SamplingParams(temperature=n % 2, seed=n, num_tokens_to_generate=6 + n % 3,
                                     termination_id=-1))
        for n in range(9)
    ]  # fmt: skip
    with engine_over(folder / "dense", config_at(1), layout, store) as engine:
        alone = engine.generate([prompt for prompt, _ in kinds], [each for _, each in kinds])
        expected = [list(request.generated_tokens) for request in alone]
        work = [kinds[n % len(kinds)] for n in range(count)]
        # Each needs a second block on its way, and there are three for three rows.
        found = full_cache(engine, 1, work, 3)
    return {
        "served": len(found),
        "wrong": [n for n, each in enumerate(found) if each != expected[n % len(expected)]],
    }


def kill_case(folder: Path, number: signal.Signals) -> Found:
    """What becomes of requests when a rank that was started here gets a signal; by itself, or by
    the timeout, whose error is the same."""
    config = EngineConfig(
        device="cpu",
        tensor_model_parallel_size=2,
        max_requests=2,
        rank_timeout_seconds=1 if number == signal.SIGSTOP else 0,
    )
    endless = SamplingParams(num_tokens_to_generate=2000, termination_id=-1)

    def step_for_ever() -> None:
        while True:
            engine.step_modern()

    with DynamicInferenceEngine.from_pretrained(folder / "dense", config) as engine:
        futures = [engine.add_request(n, "x", endless) for n in range(3)]
        for _ in range(5):
            engine.step_modern()
        group: RankGroup = engine.model.group
        os.kill(group.pids[1], number)
        found = {
            "step": refused(step_for_ever),
            "requests": [refused(future.result) for future in futures],
            "next": refused(lambda: engine.add_request(9, "x", endless)),
        }
    return {**found, "is gone": not os.path.exists(f"/proc/{group.pids[1]}")}


def run_layout(folder: Path, name: str) -> None:
    """Fork a layout's ranks, and wait for them."""
    model, _, sizes = name.partition(":")
    layout = Layout(*map(int, sizes.split(","))) if sizes else Layout()
    ends = socket.socketpair()

    def be_rank(rank: int) -> None:
        store = dist.FileStore(str(folder / f"{name}.store"), layout.world_size)
        meetings = Meetings(ends[min(rank, 1)], rank)
        if model == "meeting":
            meetings.patch()
        if rank:
            os.environ["LOCAL_RANK"] = str(rank)
            follow(layout, DEVICE, store=store, rank=rank)
        if model in KILLS:
            found = kill_case(folder, KILLS[model])
        elif model == "soak":
            found = soak_case(folder, layout, store, int(os.environ.get("SOAK", "32")))
        elif model == "meeting":
            found = meeting_case(folder, layout, store, meetings)
        else:
            found = lead_case(folder, model, layout, store)
        (folder / f"{name}.json").write_text(json.dumps(found))

    run_together(name, [partial(be_rank, rank) for rank in reversed(range(layout.world_size))])


def write_models(folder: Path) -> None:
    """The first layers of embedded models; ``new`` and ``wrong`` are other weights of the first.
    Another process writes them, since none that has used a GPU may fork ranks."""

    def write() -> None:
        write_layers("tiny", folder / "dense", 2)
        write_layers("tiny", folder / "new", 2, scale=1.3)
        write_layers("tiny", folder / "wrong", 1)
        write_layers("tiny-moe", folder / "experts", 2)

    run_together("the models", [write])


if __name__ == "__main__":
    choose_seed()
    root = Path(sys.argv[1])
    write_models(root)
    for layout_name in sys.argv[2:]:
        run_layout(root, layout_name)

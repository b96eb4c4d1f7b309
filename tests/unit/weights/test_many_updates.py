"""Two hundred updates by each way in of one process, beside requests that run: every token is of
the weights that its span says, and nothing grows."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.request_table import RequestTable
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.weights import GatheredWeights, SharedWeights, open_weights
from tests.support.cut_models import write_layers
from tests.support.engines import config_at

UPDATES = 200
SETTLED = 60
"""Updates after which nothing may grow any more."""
STEPS = 2
"""Between two updates."""
ROWS, LENGTH = 3, 20
SCALES = (1.0, 0.5, 2.0)
"""Of what makes queries, keys and values in each of the models, which take turns."""
TOLERANCE = 2e-3
State = dict[str, Tensor]
Source = Callable[[int], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for number, scale in enumerate(SCALES):
        write_layers("tiny", folder / str(number), 1)
        file = folder / str(number) / "model.safetensors"
        weights = load_file(file)
        weights["decoder.layers.0.self_attention.linear_qkv.weight"] *= scale
        save_file(weights, file, metadata={"format": "pt"})
    return [folder / str(number) for number in range(len(SCALES))]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [load_pretrained(folder, dtype=torch.float32).model for folder in folders]


def state_of(model: Any) -> State:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@contextlib.contextmanager
def directories(states: list[State], folders: list[Path]) -> Iterator[Source]:
    yield lambda number: folders[number]


@contextlib.contextmanager
def state_dicts(states: list[State], folders: list[Path]) -> Iterator[Source]:
    yield lambda number: states[number]


@contextlib.contextmanager
def shared(states: list[State], folders: list[Path]) -> Iterator[Source]:
    """One trainer, whose tensors change where they are."""
    own = {name: value.clone() for name, value in states[0].items()}

    def export(number: int) -> State:
        for name, value in own.items():
            value.copy_(states[number][name])
        return open_weights(weights.export())

    with SharedWeights(own) as weights:
        yield export


@contextlib.contextmanager
def gathered(states: list[State], folders: list[Path]) -> Iterator[Source]:
    """One tensor after the other through a buffer that the trainer uses again."""
    buffer = torch.empty(max(value.numel() for value in states[0].values()))

    def send(number: int) -> GatheredWeights:
        update = GatheredWeights(states[number])
        for name, value in states[number].items():
            update.add({name: buffer[: value.numel()].view(value.shape).copy_(value)})
        return update

    yield send


WAYS = {"directory": directories, "state dict": state_dicts, "shared": shared, "gathered": gathered}


def held() -> tuple[int, int]:
    """Open files of this process, and its mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/dev/shm/" in line for line in maps)


def run(engine: DynamicInferenceEngine, source: Source) -> tuple[list[Any], int]:
    """Update and step in turns; the requests that ended, and by how many bytes memory grew."""
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=LENGTH, termination_id=-1, return_log_probs=True,
        skip_prompt_log_probs=True,
    )  # fmt: skip
    process, numbers = psutil.Process(), itertools.count()
    ended: list[tuple[DynamicInferenceRequest, ...]] = []
    before = settled = (0, 0, 0)

    def measured() -> tuple[int, int, int]:
        return process.memory_info().rss, *held()

    def add() -> None:
        number = next(numbers)
        engine.add_request(number, [65 + number % 26] * (1 + number % 7), params)

    for _ in range(ROWS):
        add()
    for version in range(1, UPDATES + 1):
        for _ in range(STEPS):
            for record in engine.step_modern()["finished_request_records"]:
                kept = (record.prompt_tokens, record.generated_tokens)
                ended.append((*kept, record.generated_log_probs, record.weight_spans))
                add()
        assert engine.update_weights(source(version % len(SCALES))) == version
        if version == SETTLED:
            settled = measured()
    before, after = settled, measured()
    assert after[1:] == before[1:]
    return ended, after[0] - before[0]


@torch.no_grad()
def chances(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities of all tokens at each place, by one plain forward."""
    whole = torch.tensor([prompt + tokens])
    logits = model(whole, torch.arange(whole.shape[1])[None], None)[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(1)


def told_apart_by_spans(ended: list[Any], models: list[Any]) -> int:
    """Check that each token is of the weights that its span says; how many would not be of other
    ones."""
    told_apart = 0
    for prompt, tokens, log_probs, spans in ended:
        by_model = [chances(model, list(prompt), tokens) for model in models]
        assert spans[0].start == 0
        for place, (token, said) in enumerate(zip(tokens, log_probs, strict=True)):
            (version,) = [s.version for s in spans if s.start <= place][-1:]
            found = [float(each[place, token]) for each in by_model]
            at = version % len(SCALES)
            assert said == pytest.approx(found[at], abs=TOLERANCE), (place, version)
            assert float(by_model[at][place].max()) - found[at] < TOLERANCE  # a greedy choice
            told_apart += all(abs(said - each) > TOLERANCE for each in found[:at] + found[at + 1 :])
    return told_apart


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is held is read there")
@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_of_the_weights_of_its_span(
    way: str, folders: list[Path], models: list[Any]
) -> None:
    states = [state_of(model) for model in models]
    config = config_at(
        1, dtype="float32", max_requests=ROWS, max_sequence_length=32, block_size_tokens=16,
        audit_graphs=True,
    )  # fmt: skip
    with (
        DynamicInferenceEngine.from_pretrained(folders[0], config) as engine,
        WAYS[way](states, folders) as source,
    ):
        ended, grown = run(engine, source)
        assert engine.runner.audit is not None and engine.runner.audit.checks == UPDATES
    size = sum(value.numel() * value.element_size() for value in states[0].values())
    assert grown < (UPDATES - SETTLED) * size / 4  # no copy of each update stays
    told_apart = told_apart_by_spans(ended, models)
    assert all(len(spans) > LENGTH // STEPS // 2 for *_, spans in ended)
    count = sum(len(each[1]) for each in ended)
    assert count > UPDATES * STEPS * ROWS * 3 // 4 and told_apart > count * 9 // 10


# --- events in between --------------------------------------------------------------------------


class Eventful:
    """An engine to which something happens at each update."""

    def __init__(self, engine: DynamicInferenceEngine, states: list[State]) -> None:
        self.engine = engine
        self.states = states
        self.rng = random.Random(44)
        self.futures: dict[int, Any] = {}
        self.counted: Counter[str] = Counter()
        self.restarts = 0

    def live(self) -> list[int]:
        return [number for number, future in self.futures.items() if not future.done()]

    def fill(self) -> None:
        """Some wait, and neighbours begin alike."""
        while len(self.live()) < 2 * ROWS:
            number = len(self.futures)
            params = SamplingParams(
                temperature=0.0, num_tokens_to_generate=LENGTH, termination_id=-1,
                return_log_probs=True, skip_prompt_log_probs=True,
            )  # fmt: skip
            prompt = [65 + number // 4 % 26] * 9 + [80 + number % 4]
            self.futures[number] = self.engine.add_request(number, prompt, params)

    def count(self) -> None:
        for name in WITNESSES:
            self.counted[name] += getattr(self.engine.counters, name)

    def update(self, version: int, **options: Any) -> None:
        found = self.engine.update_weights(self.states[version % len(SCALES)], **options)
        assert found == version

    # Events, each with the update that comes with it.

    def abort(self, version: int) -> None:
        self.engine.abort_request(self.rng.choice(self.live()))
        self.update(version)

    def pause(self, version: int) -> None:
        self.engine.pause_request(min(self.live()))
        self.update(version)

    def resume(self, version: int) -> None:
        self.update(version)
        for number in self.live():
            self.engine.resume_request(number)

    def evict(self, version: int) -> None:
        self.engine.evict_request(min(self.live()))
        self.update(version)

    def suspend(self, version: int) -> None:
        self.engine.suspend()
        self.update(version)
        self.engine.resume()

    def sleep(self, version: int) -> None:
        self.engine.sleep(1)
        self.engine.wake_up()
        self.update(version)

    def sleep_without_weights(self, version: int) -> None:
        self.engine.sleep(2)
        self.engine.wake_up(["weights"])
        self.update(version)
        self.engine.wake_up(["kv_cache"])

    def restart(self, version: int) -> None:
        before = sum(self.engine.get_request(n).counters.restarts for n in self.live())
        self.update(version, partial_rollouts="restart")
        self.restarts += sum(self.engine.get_request(n).counters.restarts for n in self.live())
        self.restarts -= before

    def forget_prefixes(self, version: int) -> None:
        self.update(version)
        self.engine.reset_prefix_cache()

    def reset(self, version: int) -> None:
        """All end; seldom, since little is left behind it."""
        self.update(version)
        if version > UPDATES // 2 and not self.counted:
            self.count()
            self.engine.reset()


WITNESSES = (
    "evictions", "pauses", "resumes", "tokens_cached", "tokens_accepted", "tokens_discarded",
    "tokens_replayed", "barriers",
)  # fmt: skip
EVENTS = (
    Eventful.abort, Eventful.pause, Eventful.evict, Eventful.suspend, Eventful.resume,
    Eventful.sleep, Eventful.restart, Eventful.sleep_without_weights, Eventful.forget_prefixes,
    Eventful.reset,
)  # fmt: skip


def eventful_run(
    folder: Path, states: list[State], updates: int = UPDATES
) -> tuple[list[Any], Eventful]:
    """The requests of a run in which something happens at each update."""
    config = config_at(
        2, dtype="float32", max_requests=ROWS, max_sequence_length=32, block_size_tokens=4,
        block_count=20, enable_sleep_mode=True, num_speculative_tokens=2,
        speculative_method="ngram",
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained(folder, config) as engine:
        run = Eventful(engine, states)
        for version in range(1, updates + 1):
            run.fill()
            for _ in range(1 + version % 3):
                engine.step_modern()
            EVENTS[version % len(EVENTS)](run, version)
        for number in run.live():
            engine.resume_request(number)
        while engine.has_unfinished_requests():
            engine.step_modern()
        run.count()
    ended = [future.result(0) for future in run.futures.values()]
    kept = [e for e in ended if e.generated_tokens]
    return [
        (e.prompt_tokens, e.generated_tokens, e.generated_log_probs, e.weight_spans) for e in kept
    ], run


@pytest.mark.slow
def test_no_event_between_updates_makes_a_span_wrong(
    folders: list[Path], models: list[Any]
) -> None:
    """Aborts, pauses, evictions, suspensions, sleep, restarts, forgotten prefixes and a reset, with
    drafts, prefix hits and a cache that is too small."""
    ended, run = eventful_run(folders[0], [state_of(model) for model in models])
    told_apart = told_apart_by_spans(ended, models)
    count = sum(len(each[1]) for each in ended)
    assert count > 2 * UPDATES and told_apart > count * 9 // 10
    assert run.restarts and all(run.counted[name] for name in WITNESSES), run.counted


def one_version_late(patch: pytest.MonkeyPatch) -> None:
    """Tokens have the number of the weights before."""
    commit = OutputProcessor.commit

    def late(self: OutputProcessor, *of_step: Any) -> None:
        self.weight_version -= 1
        commit(self, *of_step)
        self.weight_version += 1

    patch.setattr(OutputProcessor, "commit", late)


def kept_keys(patch: pytest.MonkeyPatch) -> None:
    """Requests go on over keys and values of the weights before."""
    patch.setattr(Scheduler, "evict_all", lambda self: None)


def kept_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "forget_prefixes", lambda self: None)


@pytest.mark.parametrize("fault", (one_version_late, kept_keys, kept_prefixes))
def test_a_token_of_other_weights_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    folders: list[Path],
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    ended, _ = eventful_run(folders[0], [state_of(model) for model in models], updates=20)
    with pytest.raises(AssertionError):
        told_apart_by_spans(ended, models)

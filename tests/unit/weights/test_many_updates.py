"""Two hundred updates by each way in of one process, beside requests that run: every token is of
the weights that its span says, and nothing grows."""

from __future__ import annotations

import contextlib
import itertools
import os
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
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
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
    told_apart = 0
    for prompt, tokens, log_probs, spans in ended:
        by_model = [chances(model, list(prompt), tokens) for model in models]
        assert spans[0].start == 0 and len(spans) > LENGTH // STEPS // 2
        for place, (token, said) in enumerate(zip(tokens, log_probs, strict=True)):
            (version,) = [s.version for s in spans if s.start <= place][-1:]
            found = [float(each[place, token]) for each in by_model]
            at = version % len(SCALES)
            assert said == pytest.approx(found[at], abs=TOLERANCE), (place, version)
            assert float(by_model[at][place].max()) - found[at] < TOLERANCE  # a greedy choice
            told_apart += all(abs(said - each) > TOLERANCE for each in found[:at] + found[at + 1 :])
    count = sum(len(each[1]) for each in ended)
    assert count > UPDATES * STEPS * ROWS * 3 // 4 and told_apart > count * 9 // 10

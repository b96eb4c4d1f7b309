"""Two hundred updates by each way in over HTTP, beside completions that run: every token is of the
weights that its span says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import free_port, serving
from tests.support.sglang_trainers import TrainerGroup, bucket, serialized
from tests.unit.serving.test_development_api import PROMPT, llama

UPDATES, SEEDS, LENGTH, CLIENTS = 200, (1, 2, 3), 40, 2
TOLERANCE = 2e-3
Update = Callable[[httpx.Client, int], None]
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root: Path = tmp_path_factory.mktemp("llama")
    for number, seed in enumerate(SEEDS):
        llama(seed).save_pretrained(root / str(number))
    return [root / str(number) for number in range(len(SEEDS))]


def posted(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    return http.post(path, json=body).raise_for_status().json()


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in llama(seed).named_parameters()}


@contextlib.contextmanager
def by_directory(url: str, folders: list[Path]) -> Iterator[Update]:
    yield lambda http, at: posted(http, "/weights", {"path": str(folders[at])})


@contextlib.contextmanager
def by_disk(url: str, folders: list[Path]) -> Iterator[Update]:
    yield lambda http, at: posted(
        http, "/update_weights_from_disk", {"model_path": str(folders[at])}
    )


@contextlib.contextmanager
def by_group(url: str, folders: list[Path]) -> Iterator[Update]:
    """Broadcasts of a group of trainer and engine, held by a pause that keeps what runs."""
    models, name = [tensors_of(seed) for seed in SEEDS], "many"
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    more = {"world_size": 2, "backend": "gloo", "group_name": name}
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as own, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(posted, own, "/init_weights_update_group", where | more)
        group = TrainerGroup(name, int(where["master_port"]), PATIENCE_SECONDS)
        joined.result()

        def send(http: httpx.Client, at: int) -> None:
            posted(http, "/pause_generation", {"mode": "retract"})
            tensors = models[at]
            body = {
                "names": list(tensors), "dtypes": ["torch.float32"] * len(tensors),
                "shapes": [list(each.shape) for each in tensors.values()], "group_name": name,
            }  # fmt: skip
            taken = pool.submit(posted, own, "/update_weights_from_distributed", body)
            group.broadcast(list(tensors.values()))
            taken.result()
            posted(http, "/continue_generation", {})

        yield send
        posted(own, "/destroy_weights_update_group", {"group_name": name})
        group.close()


@contextlib.contextmanager
def by_tensors(url: str, folders: list[Path]) -> Iterator[Update]:
    """In two messages, held by a pause that keeps what runs."""
    halves = []
    for seed in SEEDS:
        tensors = tensors_of(seed)
        names = list(tensors)
        halves.append([bucket({n: tensors[n] for n in some}) for some in (names[:3], names[3:])])

    def send(http: httpx.Client, at: int) -> None:
        posted(http, "/pause_generation", {"mode": "retract"})
        for half in halves[at]:
            body = {"serialized_named_tensors": [serialized(half)], "flush_cache": False}
            posted(http, "/update_weights_from_tensor", body | {"load_format": "flattened_bucket"})
        posted(http, "/continue_generation", {})

    yield send


WAYS = {"directory": by_directory, "disk": by_disk, "tensors": by_tensors, "group": by_group}


def complete(url: str, stopped: threading.Event, answers: Answers) -> None:
    """One completion after the other."""
    body = {
        "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True, "return_weight_versions": True,
    }  # fmt: skip
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as http:
        while not stopped.is_set():
            (choice,) = posted(http, "/v1/completions", body)["choices"]
            answers.append(choice)


@pytest.fixture
def served(folders: list[Path]) -> Iterator[tuple[str, DynamicInferenceEngine]]:
    config = config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        audit_graphs=True,
    )  # fmt: skip
    engine = DynamicInferenceEngine.from_pretrained(folders[0], config)
    with serving(engine, NoParent(), development=True) as url:
        yield url, engine


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_of_the_weights_of_its_span(
    way: str, served: tuple[str, DynamicInferenceEngine], folders: list[Path]
) -> None:
    url, engine = served
    stopped, answers = threading.Event(), Answers()
    clients = [
        threading.Thread(target=complete, args=(url, stopped, answers)) for _ in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        with (
            WAYS[way](url, folders) as update,
            httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as http,
        ):
            for version in range(1, UPDATES + 1):
                update(http, version % len(SEEDS))
                assert engine.weight_version == version
            audit = engine.runner.audit
            assert audit is not None and audit.checks >= UPDATES
            while not answers:
                """All updates came before the first answer."""
    finally:
        stopped.set()
        for client in clients:
            client.join(PATIENCE_SECONDS)
    check(answers)


@torch.no_grad()
def check(answers: Answers) -> None:
    models = [llama(seed) for seed in SEEDS]
    told_apart = count = spans = 0
    for choice in answers:
        tokens, said = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        ids = torch.tensor([PROMPT + tokens])
        chances = [m(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(1) for m in models]
        versions = choice["weight_versions"]
        assert versions[0]["start"] == 0 and versions[-1]["end"] == len(tokens) == LENGTH
        spans += len(versions)
        for span in versions:
            at = int(span["version"]) % len(SEEDS)
            for place in range(span["start"], span["end"]):
                found = [float(each[place, tokens[place]]) for each in chances]
                assert said[place] == pytest.approx(found[at], abs=TOLERANCE), (place, span)
                assert float(chances[at][place].max()) - found[at] < TOLERANCE
                others = found[:at] + found[at + 1 :]
                told_apart += all(abs(said[place] - each) > TOLERANCE for each in others)
                count += 1
    assert told_apart > count * 9 // 10 and spans >= len(answers)

"""A server that the adapters of trainers call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async.contrib.trainers.client import Client
from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.engines import config_at
from tests.support.served_engine import NoParent
from tests.support.served_over_http import serving
from tests.unit.serving.test_development_api import llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    llama(1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    config = config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        enable_sleep_mode=True, audit_graphs=True,
    )  # fmt: skip
    engine = DynamicInferenceEngine.from_pretrained(directory, config)
    with serving(engine, NoParent(), development=True, weight_transfer_backend="gloo") as address:
        yield address


@pytest.fixture
def client(url: str, directory: Path) -> Iterator[Client]:
    """A client; the weights are those of the directory again when it has been used."""
    client = Client(url)
    yield client
    client.post("/continue_generation")
    client.post("/update_weights_from_disk", model_path=str(directory))
    client.close()

"""What tests of the server share: one server, or one engine over `tiny`, for each file."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.http_api import engine, http
from tests.support.served import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(engine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with http(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny() -> Iterator[DynamicInferenceEngine]:
    with DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device="cpu")) as engine:
        yield engine

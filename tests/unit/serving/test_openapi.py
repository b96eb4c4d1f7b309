"""The OpenAPI description against what the server does, by requests that schemathesis makes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.http.app import make_app
from megatron_async.serving.http.frontend import ServerConfig
from tests.support.engines import config_at
from tests.support.fake_engine_client import FakeEngineClient
from tests.support.scripted_client import tiny_tokenizer
from tests.support.served import NotedMetrics, make_front

api_fuzz = pytest.importorskip("tests.support.api_fuzz", reason="schemathesis is not installed")

EXAMPLES = int(os.environ.get("MEGATRON_ASYNC_API_EXAMPLES", "6"))
"""Of each kind for each operation; thousands take an hour."""
KEY = "key"


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """The application over the embedded model, whose texts are short here."""
    config = config_at(1, max_requests=4, max_sequence_length=64)
    engine = DynamicInferenceEngine.from_pretrained("tiny", config)
    options = ServerConfig(
        model_names=("tiny",), api_keys=(KEY,), max_choices=4, max_prompts=4, request_timeout=2.0
    )

    async def made() -> FakeEngineClient:
        return FakeEngineClient(engine)

    client = asyncio.run(made())
    templates = ChatTemplates.from_directory("tiny")
    yield make_app(make_front(client, options, tiny_tokenizer(), templates, NotedMetrics()))
    engine.close()


def test_answers_are_as_the_description_says(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        statuses = api_fuzz.explore(app, examples=EXAMPLES, key=KEY)
    for (label, mode, status), count in sorted(statuses.items()):
        print(f"{label:28} {mode:9} {status} {count:6}")
    assert [record for record in caplog.records if record.exc_info] == []
    answered = {label for label, _, status in statuses if status == 200}
    assert len(answered) >= 15, answered

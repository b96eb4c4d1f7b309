"""The parts of a front end, in whatever process it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_async.errors import ConfigError
from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.front_end.metrics import EngineCollector, EngineValues, ServerMetrics
from megatron_async.serving.front_end.protocols import Client
from megatron_async.serving.http.frontend import Frontend, ServerConfig
from megatron_async.serving.messages import Endpoint


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end serves, and how.

    Args:
        model: a model directory, or ``"tiny"``.
        endpoint: of the engine process; None where there are several, as replicas.
        tokenizer_model: a ``tokenizer.json``, or its directory, instead of the model's own.
        chat_template: a file with a Jinja template instead of the model's own.
        tool_call_format: how the model writes tool calls; None for what its template says.
        reasoning_parser: how it writes its thoughts; None leaves them in the content.
        skip_tokenizer_init: token ids alone are served, and the model needs no tokenizer.
        otlp_traces_endpoint: see ``make_provider``.
        metrics_directory: where front ends in several processes count together; None for one.
    """

    model: str
    endpoint: Endpoint | None = None
    config: ServerConfig
    tokenizer_model: str | None = None
    chat_template: str | None = None
    tool_call_format: str | None = None
    reasoning_parser: str | None = None
    skip_tokenizer_init: bool = False
    otlp_traces_endpoint: str | None = None
    metrics_directory: str | None = None


def build_frontend(settings: FrontendSettings) -> tuple[Frontend, EngineClient]:
    """A front end and its way to the engine process.

    Raises:
        CheckpointError: tokenizer or chat template cannot be read.
        ConfigError: the model has no tokenizer.
    """
    assert settings.endpoint is not None
    client = EngineClient(settings.endpoint)
    values = EngineCollector(
        settings.config.model_names[0], lambda: client.snapshot, lambda: client.state == "ready"
    )
    return frontend_over(client, values, settings), client


def frontend_over(client: Client, values: EngineValues, settings: FrontendSettings) -> Frontend:
    """A front end that has its way to the engine, or to several; raises as :func:`build_frontend`.

    Args:
        values: what they have counted.
    """
    config, directory = settings.config, settings.metrics_directory
    text = _no_text() if settings.skip_tokenizer_init else _text_of(settings)
    metrics = ServerMetrics(
        config.model_names[0], values, directory=None if directory is None else Path(directory)
    )
    return Frontend(
        config=config,
        generator=Generator(
            client,
            text.tokenizer,
            metrics,
            request_timeout=config.request_timeout,
            shows_aborts=config.shows_aborts,
        ),
        tokenizer=text.tokenizer,
        chat=text.chat,
        token_names=text.token_names,
        metrics=metrics,
    )


class Text(NamedTuple):
    """What makes tokens of texts, and texts of tokens."""

    tokenizer: Any
    chat: Chat
    token_names: TokenNames


def _text_of(settings: FrontendSettings) -> Text:
    from megatron_async.checkpoint.path import (
        load_tokenizer,
        model_directory,
        random_shape,
        tokenizer_directory,
    )
    from megatron_async.tokenizer.tokenizer import TOKENIZER_FILE

    if settings.tokenizer_model is None and random_shape(settings.model) is None:
        directory = model_directory(settings.model)
        if tokenizer_directory(directory, settings.tokenizer_model) is None:
            raise ConfigError(
                f"{directory} has no {TOKENIZER_FILE}; give --tokenizer-model PATH, or with "
                "--skip-tokenizer-init clients can send token ids and get token ids"
            )
    tokenizer = load_tokenizer(settings.model, settings.tokenizer_model)
    chat = Chat.from_directory(
        settings.model,
        chat_template=settings.chat_template,
        tokenizer_model=settings.tokenizer_model,
        tool_format=settings.tool_call_format,
        reasoning_format=settings.reasoning_parser,
    )
    return Text(tokenizer, chat, TokenNames(tokenizer))


def _no_text() -> Text:
    from megatron_async.serving.front_end.no_tokenizer import NoTemplates, NoTokenizer, TokenIds

    tokenizer: Any = NoTokenizer()
    return Text(tokenizer, Chat(NoTemplates()), TokenIds(tokenizer))

"""What the handlers of all endpoints share, and how the server is set up."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from megatron_async.errors import ConfigError
from megatron_async.sampling_params import LOG_PROBS_MODES, LogprobsMode, SamplingParams
from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.front_end.job import Job, usage_of
from megatron_async.serving.front_end.protocols import Metrics
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.http.keys import check_keys
from megatron_async.serving.http.pages import check_origins
from megatron_async.serving.tracing import spans

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import Tokenizer

MIB = 1 << 20
PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")
SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server behaves.

    Args:
        model_names: what the model is called; answers have the first.
        api_keys: one of them must come with a request; none lets everybody in.
        admin_api_keys: one of them must come with what changes the engine; none lets clients with a
            key change it.
        allow_origins: web pages from elsewhere that may call the server; "*" for all.
        request_timeout: seconds after which a request ends with the text that it has.
        shutdown_timeout: seconds that requests are given to end when the server is stopped.
        shows_aborts: a request that was aborted ends with the reason ``"abort"``, as vLLM's do, and
            not with OpenAI's nearest.
        stays_without_engine: do not end when the engine is given up.
        max_body_bytes: of a request.
        max_choices: most texts of a prompt (``n``).
        max_prompts: most prompts of a request.
        development: have the endpoints of vLLM's development mode, and let clients change the
            engine without a key where there are none.
        weight_transfer_backend: what a trainer's collective runs on, gloo or nccl; None for none.
        partial_weight_updates: a trainer's update may lack parameters, though it does not say so.
        prefix_cache_per_key: requests share cached prefixes with those of the same key alone.
        logprobs_mode: log-probabilities of requests that do not say: ``"raw_logprobs"`` or
            ``"processed_logprobs"``.
        sampling_defaults: fields of ``SamplingParams`` where a request in OpenAI's shape has none.

    Raises:
        ConfigError: a value is out of range.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    shows_aborts: bool = False
    stays_without_engine: bool = False
    max_body_bytes: int = 16 * MIB
    max_choices: int = 128
    max_prompts: int = 1024
    development: bool = False
    weight_transfer_backend: str | None = None
    partial_weight_updates: bool = False
    prefix_cache_per_key: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """What a request in OpenAI's shape gets where it says nothing."""
        return {**self.sampling_defaults, "logprobs_mode": self.logprobs_mode}

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served_model_name must not be empty")
        check_keys(self.api_keys, self.admin_api_keys)
        check_origins(self.allow_origins)
        if self.prefix_cache_per_key and not self.api_keys:
            raise ConfigError("prefix_cache_per_key needs api_key; give each client a key")
        if self.logprobs_mode not in LOG_PROBS_MODES:
            known = " or ".join(LOG_PROBS_MODES)
            raise ConfigError(f"logprobs_mode={self.logprobs_mode!r} must be {known}")
        for name in ("max_body_bytes", "max_choices", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"request_timeout={self.request_timeout} must be above 0 seconds")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The parts of one front end."""

    config: ServerConfig
    generator: Generator
    tokenizer: Tokenizer
    chat: Chat
    token_names: TokenNames
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name that answers give the model: the first where a request names none. Raises
        ApiError for a model that is not served."""
        names = self.config.model_names
        if name and name not in names:
            said = f"the model {name[:200]!r} does not exist; this server has {', '.join(names)}"
            raise ApiError(404, said, param="model", code="model_not_found")
        return name or names[0]

    def salted(self, request: Request, params: SamplingParams) -> SamplingParams:
        """``params`` with a salt of the client's key, where each key has cached prefixes of its
        own. Records and events show neither the key nor the client's own salt."""
        if not self.config.prefix_cache_per_key:
            return params
        own = f"{request.state.key_number} {params.cache_salt or ''}"
        salt = blake2b(own.encode(), digest_size=SALT_BYTES).hexdigest()
        return dataclasses.replace(params, cache_salt=salt)


def name_of(request: Request, asked: str | None) -> str:
    """The id of a request: what its client sent as ``request_id`` or ``x-request-id``, or one of
    its own. Answers and the log line have it, and it is aborted by it.

    Raises:
        ApiError: it is too long, or has other characters than those of a header.
    """
    if asked is not None and not PLAIN_ID.fullmatch(asked):
        said = "request_id must have 1 to 128 characters of ASCII, without spaces"
        raise ApiError(400, said, param="request_id")
    if asked is not None:
        request.state.log_more.append(lambda: {"request_id": asked})
        return asked
    name: str = request.state.request_id
    return name


def log_jobs(request: Request, jobs: Sequence[Job], model: str) -> None:
    """Say in the request's log line and its span what it was, in numbers known at its end."""
    spans.describe_request(request.scope["route"].path, model, jobs)

    def numbers() -> dict[str, Any]:
        usage = usage_of(jobs)
        shown: dict[str, Any] = {
            "model": model,
            "prompts": len(jobs),
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.generated,
            "finish_reasons": [reason for job in jobs for reason in job.reasons()],
        }
        queued = [job.queue_seconds for job in jobs if job.queue_seconds is not None]
        first = [job.first_token for job in jobs if job.first_token is not None]
        if queued:
            shown["queue_seconds"] = round(max(queued), 6)
        if first:
            shown["first_token_seconds"] = round(min(first), 6)
        return shown

    request.state.log_more.append(numbers)

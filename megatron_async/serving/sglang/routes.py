"""SGLang's routes: what asks for texts, and what looks. Those that change the engine are in
:mod:`megatron_async.serving.sglang.trainer_routes`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.serving.endpoints.engine_api import check_health
from megatron_async.serving.http.errors import json_response
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.keys import Access
from megatron_async.serving.http.rights import needs
from megatron_async.serving.messages import EngineInfo
from megatron_async.serving.sglang.generate import generate, name_of_weights
from megatron_async.serving.sglang.generate_body import GenerateRequest
from megatron_async.serving.trainers.asking import ask


def add_sglang_endpoints(app: FastAPI, front: Frontend) -> None:
    """Add those that are always there."""

    @app.put("/generate", response_model=None, include_in_schema=False)
    @app.post("/generate", response_model=None)
    @needs(Access.CLIENT)
    async def generate_texts(request: Request, body: GenerateRequest) -> Response:
        return await generate(front, request, body)

    @app.get("/get_model_info", response_model=None, include_in_schema=False)
    @app.get("/model_info", response_model=None)
    @needs(Access.CLIENT)
    async def model_info() -> Response:
        return json_response(model_of(front, await front.generator.client.info()))

    @app.get("/health_generate", response_model=None)
    @needs(Access.OPEN)
    async def health_generate() -> dict[str, Any]:
        return check_health(front)


def model_of(front: Frontend, info: EngineInfo) -> dict[str, Any]:
    """What SGLang's clients read of the model."""
    name = front.config.model_names[0]
    return {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": name_of_weights(info.kept.weight_version, info.kept),
    }


async def sglang_server_info(front: Frontend) -> dict[str, Any]:
    """What SGLang's clients read of the server. The ranks of an engine are one to a trainer."""
    state, info = await ask(front, "state"), await front.generator.info()
    return {
        **model_of(front, info),
        **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size"), 1),
        "dtype": info.dtype,
        "context_length": info.max_sequence_length,
        "max_running_requests": info.max_requests,
        "enable_memory_saver": bool(state.get("can_sleep")),
        "disaggregation_mode": "null",
        "version": info.version,
    }

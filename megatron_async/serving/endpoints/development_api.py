"""Endpoints of vLLM's development mode: sleep, and new weights from a trainer such as TRL's.

They change the engine and, without keys, need none, so they are there by option alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.serving.bodies.body import Body, Several, Text
from megatron_async.serving.endpoints.engine_api import PauseMode
from megatron_async.serving.http.errors import ApiError, json_response
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.keys import Access
from megatron_async.serving.http.rights import needs
from megatron_async.serving.http.sse import until_disconnect
from megatron_async.serving.sglang.routes import sglang_server_info
from megatron_async.serving.trainers.asking import MAX_TENSORS, ask, check_ids

WORLD_SIZE = 1
"""Processes of the engine that take part in a weight-transfer group."""
PATHS = frozenset(
    {
        "/sleep", "/wake_up", "/is_sleeping", "/is_paused", "/abort_requests", "/server_info",
        "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update",
        "/update_weights", "/finish_weight_update",
    }
)  # fmt: skip


class InitInfo(Body):
    """Where the trainer, rank 0 of ``world_size``, listens. The engine's rank is ``rank_offset``.
    ``packed``: all tensors come in buffers of bytes."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(default=1, ge=1)
    world_size: int = Field(ge=2)
    packed: bool = False


class InitRequest(Body):
    """``POST /init_weight_transfer_engine``."""

    init_info: InitInfo


class UpdateInfo(Body):
    """The tensors that the trainer sends now, in their order. Packed ones come in buffers that are
    full as the trainer's are."""

    names: Several[str] = Field(max_length=MAX_TENSORS)
    dtype_names: Several[str] = Field(max_length=MAX_TENSORS)
    shapes: Several[Several[int]] = Field(max_length=MAX_TENSORS)
    packed: bool = False
    packed_buffer_size_bytes: int | None = Field(default=None, ge=1)


class UpdateRequest(Body):
    """``POST /update_weights``."""

    update_info: UpdateInfo


class StartRequest(Body):
    """``POST /start_weight_update``. Weights are in the format of checkpoints in any case.
    ``partial``: parameters that do not come keep their values, which else is an error."""

    is_checkpoint_format: bool = True
    partial: bool = False


class AbortRequest(Body):
    """``POST /abort_requests``: those of these ids, as clients sent them or as answers have them;
    all of them where ``request_ids`` is left out."""

    request_ids: Several[Text] | None = None


def add_development_endpoints(app: FastAPI, front: Frontend) -> None:
    """Add them to ``app``."""
    _add_sleep(app, front)
    _add_weight_transfer(app, front)


def _add_sleep(app: FastAPI, front: Frontend) -> None:
    @app.post("/sleep", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def sleep(level: Annotated[int, Query()] = 1, mode: PauseMode = "keep") -> Response:
        return json_response(await ask(front, "sleep", level=level, mode=mode))

    @app.post("/wake_up", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        return json_response(await ask(front, "wake_up", tags=tags))

    @app.get("/is_sleeping", response_model=None)
    @needs(Access.CLIENT)
    async def is_sleeping() -> Response:
        return json_response(await _state(front, "is_sleeping"))

    @app.post("/abort_requests", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def abort_requests(body: AbortRequest | None = None) -> Response:
        names = None if body is None else body.request_ids
        check_ids("request_ids", names or ())
        done = await ask(front, "abort_requests", names=names)
        return json_response({"status": "aborted", **done})

    @app.get("/is_paused", response_model=None)
    @needs(Access.CLIENT)
    async def is_paused() -> Response:
        return json_response(await _state(front, "is_paused"))


async def _state(front: Frontend, name: str) -> dict[str, Any]:
    return {name: (await ask(front, "state"))[name]}


def _add_weight_transfer(app: FastAPI, front: Frontend) -> None:
    backend = front.config.weight_transfer_backend

    @app.get("/server_info", response_model=None)
    @needs(Access.CLIENT)
    async def server_info() -> Response:
        info = await front.generator.info()
        transfer = None if backend is None else {"backend": backend}
        model = {
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_sequence_length,
            "logprobs_mode": front.config.logprobs_mode,
        }
        shown = {
            "weight_transfer_config": transfer,
            "model_config": model,
            "parallel_config": {"data_parallel_size": 1},
            "lora_config": None,
        }
        return json_response({"vllm_config": shown, **await sglang_server_info(front)})

    @app.get("/get_world_size", response_model=None)
    @needs(Access.CLIENT)
    async def get_world_size() -> Response:
        return json_response({"world_size": WORLD_SIZE})

    @app.post("/init_weight_transfer_engine", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def init_weight_transfer_engine(request: Request, body: InitRequest) -> Response:
        if backend is None:
            said = "start the server with --weight-transfer-config"
            raise ApiError(400, f"there is no weight-transfer engine; {said}")
        info = body.init_info
        joined = ask(
            front, "init_weight_transfer", backend=backend, address=info.master_address,
            port=info.master_port, rank=info.rank_offset, world_size=info.world_size,
            packed=info.packed,
        )  # fmt: skip
        await until_disconnect(request.receive, joined)
        return json_response({"message": "Weight transfer initialized"})

    @app.post("/start_weight_update", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def start_weight_update(body: StartRequest | None = None) -> Response:
        partial = front.config.partial_weight_updates or (body is not None and body.partial)
        await ask(front, "start_weight_update", partial=partial)
        return json_response({"message": "Weight update started"})

    @app.post("/update_weights", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def update_weights(body: UpdateRequest) -> Response:
        info = body.update_info
        taken = await ask(
            front, "receive_weights", names=info.names, dtypes=info.dtype_names,
            shapes=info.shapes, packed=info.packed, buffer_bytes=info.packed_buffer_size_bytes,
        )  # fmt: skip
        return json_response({"message": "Weights updated", **taken})

    @app.post("/finish_weight_update", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def finish_weight_update() -> Response:
        done = await ask(front, "finish_weight_update")
        return json_response({"message": "Weight update finished", **done})

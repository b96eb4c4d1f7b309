"""SGLang's routes by which a trainer stops generation, aborts requests and sends weights."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from megatron_async.serving.bodies.body import Body, Several, Text
from megatron_async.serving.http.errors import ApiError, json_response
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.keys import Access
from megatron_async.serving.http.rights import needs
from megatron_async.serving.http.sse import until_disconnect
from megatron_async.serving.sglang.routes import model_of, sglang_server_info
from megatron_async.serving.trainers.asking import MAX_TENSORS, ask, check_ids

FLATTENED = "flattened_bucket"
WHOLE_BUCKET = 1 << 62
"""Bytes of a buffer that all tensors of a message have in common."""
GRAPHS = "cuda_graph"
"""A tag without effect: captured graphs stay where they are."""


class PauseGeneration(Body):
    """``POST /pause_generation``: what becomes of running requests."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortOne(Body):
    """``POST /abort_request``."""

    rid: str | None = None
    abort_all: bool = False


class Memory(Body):
    """``POST /release_memory_occupation``, ``/resume_memory_occupation``."""

    tags: Several[str] | None = None


class Weights(Body):
    """What messages of weights have in common. ``flush_cache``: it is the update's last message,
    unless generation is paused."""

    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Text | None = None


class FromDisk(Weights):
    """``POST /update_weights_from_disk``."""

    model_path: str = Field(min_length=1)


class FromTensor(Weights):
    """``POST /update_weights_from_tensor``: tensors of shared memory, once for each rank."""

    serialized_named_tensors: Several[str] = Field(min_length=1, max_length=1)


class FromDistributed(Weights):
    """``POST /update_weights_from_distributed``."""

    names: Several[str] = Field(max_length=MAX_TENSORS)
    dtypes: Several[str] = Field(max_length=MAX_TENSORS)
    shapes: Several[Several[int]] = Field(max_length=MAX_TENSORS)


class Group(Body):
    """``POST /init_weights_update_group``."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int | str
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: str = Field(default="weight_update_group", min_length=1, max_length=255)
    backend: Literal["nccl", "gloo"] = "nccl"
    pp_rank: int | None = Field(default=None, ge=0, le=0)


class Version(Body):
    """``POST /update_weight_version``."""

    new_version: Text
    abort_all_requests: bool = False


def add_trainer_endpoints(app: FastAPI, front: Frontend) -> None:
    """Add them to ``app``."""
    _add_generation(app, front)
    _add_weights(app, front)
    _add_state(app, front)


def _done(message: str, **more: Any) -> Response:
    return json_response({"success": True, "status": "ok", "message": message, **more})


def _add_generation(app: FastAPI, front: Frontend) -> None:
    @app.post("/pause_generation", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def pause_generation(body: PauseGeneration | None = None) -> Response:
        mode = "abort" if body is None else body.mode
        # First what may be refused: an update may be under way.
        await ask(front, "hold_weights", recompute=mode != "in_place")
        await ask(front, "pause", mode="abort" if mode == "abort" else "keep")
        return _done("Generation paused")

    @app.post("/continue_generation", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def continue_generation() -> Response:
        taken = await ask(front, "take_weights")
        await ask(front, "resume", when_awake=True)
        return _done("Generation continued", **taken)

    @app.post("/abort_request", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def abort_request(body: AbortOne) -> Response:
        if not (body.abort_all or body.rid):
            raise ApiError(400, "send rid, or abort_all=true", param="rid")
        names = None if body.abort_all or body.rid is None else [body.rid]
        check_ids("rid", names or ())
        return _done("Aborted", **await ask(front, "abort_requests", names=names))

    @app.get("/flush_cache", response_model=None)
    @app.post("/flush_cache", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def flush_cache() -> Response:
        await ask(front, "end_update")
        await ask(front, "reset_prefix_cache")
        return PlainTextResponse("Cache flushed.\n")

    @app.post("/release_memory_occupation", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def release_memory_occupation(body: Memory | None = None) -> Response:
        tags = None if body is None else body.tags
        if tags is not None and set(tags) - {GRAPHS} != {"weights", "kv_cache"}:
            said = "tags must be weights and kv_cache, which are released together"
            raise ApiError(400, f"{said}; leave it out", param="tags")
        await ask(front, "sleep", level=1, mode="keep")
        return _done("Memory released")

    @app.post("/resume_memory_occupation", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def resume_memory_occupation(body: Memory | None = None) -> Response:
        tags = None if body is None or body.tags is None else body.tags
        own = None if tags is None else [tag for tag in tags if tag != GRAPHS]
        if own or tags is None:
            await ask(front, "wake_up", tags=own)
        return _done("Memory resumed")


def _add_weights(app: FastAPI, front: Frontend) -> None:
    partial = front.config.partial_weight_updates

    async def begin(body: Weights, formats: tuple[str, ...]) -> None:
        if body.load_format is not None and body.load_format not in formats:
            said = f"load_format={body.load_format[:100]!r} is not supported; leave it out"
            raise ApiError(400, said, param="load_format", code="unsupported_parameter")
        if body.abort_all_requests:
            await ask(front, "abort_requests")

    @app.post("/update_weights_from_disk", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def update_weights_from_disk(body: FromDisk) -> Response:
        await begin(body, ("auto",))
        await ask(front, "weights", path=body.model_path, called=body.weight_version)
        return _done("Weights updated", num_paused_requests=0)

    @app.post("/update_weights_from_tensor", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def update_weights_from_tensor(body: FromTensor) -> Response:
        await begin(body, (FLATTENED,))
        taken = await ask(
            front, "add_weights", ends=body.flush_cache, partial=partial,
            called=body.weight_version, serialized=body.serialized_named_tensors[0],
            load_format=body.load_format,
        )  # fmt: skip
        return _done("Weights taken", **taken)

    @app.post("/update_weights_from_distributed", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def update_weights_from_distributed(body: FromDistributed) -> Response:
        await begin(body, (FLATTENED,))
        announced = {
            "names": body.names,
            "dtypes": [each.removeprefix("torch.") for each in body.dtypes],
            "shapes": body.shapes,
            "packed": body.load_format == FLATTENED,
            "buffer_bytes": WHOLE_BUCKET,
        }
        taken = await ask(
            front, "add_weights", ends=body.flush_cache, partial=partial,
            called=body.weight_version, announced=announced,
        )  # fmt: skip
        return _done("Weights taken", **taken)

    @app.post("/init_weights_update_group", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def init_weights_update_group(request: Request, body: Group) -> Response:
        port = str(body.master_port)
        if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
            said = f"master_port={port[:20]} must lie between 1 and 65535"
            raise ApiError(400, said, param="master_port")
        joined = ask(
            front, "init_weight_transfer", backend=body.backend, port=int(port),
            address=body.master_address.strip("[]"), rank=body.rank_offset,
            world_size=body.world_size, packed=False, group_name=body.group_name,
        )  # fmt: skip
        await until_disconnect(request.receive, joined)
        return _done("Group joined")

    @app.post("/destroy_weights_update_group", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def destroy_weights_update_group() -> Response:
        await ask(front, "leave_weight_transfer")
        return _done("Group left")

    @app.post("/update_weight_version", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def update_weight_version(body: Version) -> Response:
        if body.abort_all_requests:
            await ask(front, "abort_requests")
        await ask(front, "name_weights", called=body.new_version)
        return _done("Weight version updated", new_version=body.new_version)


def _add_state(app: FastAPI, front: Frontend) -> None:
    @app.get("/get_weight_version", response_model=None, include_in_schema=False)
    @app.get("/weight_version", response_model=None)
    @needs(Access.CLIENT)
    async def weight_version() -> Response:
        shown = model_of(front, await front.generator.client.info())
        return json_response({"weight_version": shown["weight_version"]})

    @app.get("/get_server_info", response_model=None)
    @needs(Access.CLIENT)
    async def get_server_info() -> Response:
        return json_response(await sglang_server_info(front))

    @app.get("/v1/loads", response_model=None)
    @needs(Access.CLIENT)
    async def loads() -> Response:
        client = front.generator.client
        if client.states and client.snapshot is not None:  # replicas: as they have last said
            gauges = client.snapshot.gauges
            count = int(gauges["requests_running"] + gauges["requests_waiting"])
        else:
            count = (await ask(front, "state"))["requests"]
        return json_response({"loads": [{"dp_rank": 0, "num_total_reqs": count}]})

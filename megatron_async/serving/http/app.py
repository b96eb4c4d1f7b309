"""The FastAPI application: which path is answered by what."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route

from megatron_async.serving.endpoints import answer_shapes as shapes
from megatron_async.serving.endpoints import engine_api
from megatron_async.serving.endpoints.chat_completions import create_chat_completion
from megatron_async.serving.endpoints.completions import create_completion
from megatron_async.serving.endpoints.development_api import add_development_endpoints
from megatron_async.serving.endpoints.json_body import JsonRoute
from megatron_async.serving.endpoints.megatron_api import MegatronRequest, megatron_generate
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from megatron_async.serving.endpoints.responses_api import ResponsesRequest, create_response
from megatron_async.serving.http.errors import install_error_handlers, json_response
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.keys import Access, Keys
from megatron_async.serving.http.middleware import BodyLimit, RequestLog
from megatron_async.serving.http.pages import Pages
from megatron_async.serving.http.rights import RightsCheck, check_routes, needs, rights_of
from megatron_async.serving.http.sse import EventStream
from megatron_async.serving.page import page_response
from megatron_async.serving.page.live_feed import LiveFeed
from megatron_async.serving.sglang.routes import add_sglang_endpoints
from megatron_async.serving.sglang.trainer_routes import add_trainer_endpoints
from megatron_async.serving.tracing import spans
from megatron_async.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/health_generate", "/version", "/metrics"})
"""Paths of the routes that need no key."""
LIVE_PATH = "/live"
UNTRACED_PATHS = OPEN_PATHS | {LIVE_PATH}
"""Are asked now and then, or last for as long as somebody looks."""
GENERATING_PATHS = frozenset(spans.OPERATIONS)
"""Paths of routes that are counted in the metrics."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def make_app(
    front: Frontend,
    *,
    lifespan: Lifespan | None = None,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """All endpoints of one front end.

    Args:
        lifespan: what is to be opened before the first request and closed after the last.
        tracer_provider: makes spans of requests; None takes OpenTelemetry's global one.

    Raises:
        ConfigError: a route does not say who may use it. One that comes later keeps the application
            from starting.
    """
    app = FastAPI(
        title="megatron-async",
        version=__version__,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        responses=shapes.ERRORS,
        lifespan=_checked(front, lifespan),
        strict_content_type=True,  # a page elsewhere can send what is not declared as JSON
        telemetry=spans.telemetry(tracer_provider, UNTRACED_PATHS),
    )
    app.router.route_class = JsonRoute
    _declare_description(app)
    install_error_handlers(app)
    _add_openai(app, front)
    _add_server(app, front)
    _add_engine(app, front)
    add_sglang_endpoints(app, front)
    if front.config.development:
        add_development_endpoints(app, front)
        add_trainer_endpoints(app, front)
    _add_page(app, front)
    _add_heads(app)
    _add_middleware(app, front)
    check_routes(app)
    return app


def _checked(front: Frontend, lifespan: Lifespan | None) -> Lifespan:
    """Begins with a look at all routes that there are by then."""

    @contextlib.asynccontextmanager
    async def checked(app: FastAPI) -> AsyncIterator[None]:
        check_routes(app)
        async with contextlib.nullcontext() if lifespan is None else lifespan(app):
            yield
        front.chat.close()
        front.generator.texts.close()

    return checked


def _declare_description(app: FastAPI) -> None:
    """``/openapi.json`` is FastAPI's own route, and so far the only one."""
    for route in app.routes:
        assert isinstance(route, Route) and route.path == app.openapi_url
        needs(Access.CLIENT)(route.endpoint)


def _add_middleware(app: FastAPI, front: Frontend) -> None:
    """The last one that is added is the outermost."""
    app.add_middleware(BodyLimit, most_bytes=front.config.max_body_bytes)
    config = front.config
    app.add_middleware(
        RightsCheck,
        routes=app.router.routes,
        keys=Keys(config.api_keys, config.admin_api_keys, development=config.development),
        pages=Pages(config.allow_origins),
    )
    if front.config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(front.config.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(
        RequestLog,
        routes=app.router.routes,
        metrics=front.metrics,
        counted_paths=GENERATING_PATHS,
    )


def _add_openai(app: FastAPI, front: Frontend) -> None:
    streams = shapes.answers(shapes.CompletionAnswer, streams=True)

    @app.post("/v1/completions", response_model=None, responses=streams)
    @needs(Access.CLIENT)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await create_completion(front, request, body)

    @app.post("/completions", response_model=None, include_in_schema=False)
    @needs(Access.CLIENT)
    async def megatrons_completions(request: Request, body: CompletionRequest) -> Response:
        return await create_completion(front, request, body.as_megatron())

    streams = shapes.answers(shapes.ChatAnswer, streams=True)

    @app.post("/v1/chat/completions", response_model=None, responses=streams)
    @needs(Access.CLIENT)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        return await create_chat_completion(front, request, body)

    @app.post("/chat/completions", response_model=None, include_in_schema=False)
    @needs(Access.CLIENT)
    async def megatrons_chats(request: Request, body: ChatCompletionRequest) -> Response:
        return await create_chat_completion(front, request, body.as_megatron())

    streams = shapes.answers(shapes.ResponseAnswer, streams=True)

    @app.post("/v1/responses", response_model=None, responses=streams)
    @needs(Access.CLIENT)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await create_response(front, request, body)

    @app.get("/v1/models", response_model=shapes.ModelsAnswer)
    @needs(Access.CLIENT)
    async def models() -> dict[str, Any]:
        return await engine_api.models(front)

    @app.get("/v1/models/{name:path}", response_model=shapes.ModelAnswer)
    @needs(Access.CLIENT)
    async def model(name: str) -> dict[str, Any]:
        return await engine_api.model(front, name)

    texts = shapes.answers(shapes.MegatronAnswer)

    @app.put("/api", response_model=None, responses=texts)
    @app.post("/api", response_model=None, responses=texts)
    @needs(Access.CLIENT)
    async def megatron(request: Request, body: MegatronRequest) -> Response:
        return await megatron_generate(front, request, body)


def _add_server(app: FastAPI, front: Frontend) -> None:
    @app.get("/health", response_model=shapes.HealthAnswer)
    @app.get("/v1/health", response_model=shapes.HealthAnswer)
    @needs(Access.OPEN)
    async def health() -> dict[str, Any]:
        return engine_api.check_health(front)

    @app.get("/version", response_model=shapes.VersionAnswer)
    @needs(Access.OPEN)
    async def version() -> dict[str, Any]:
        return engine_api.version()

    @app.get("/metrics", response_class=Response)
    @needs(Access.OPEN)
    async def metrics() -> Response:
        return Response(front.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.post("/tokenize", response_model=shapes.TokenizeAnswer)
    @needs(Access.CLIENT)
    async def tokenize(body: engine_api.TokenizeRequest) -> dict[str, Any]:
        return await engine_api.tokenize(front, body)

    @app.post("/detokenize", response_model=shapes.DetokenizeAnswer)
    @needs(Access.CLIENT)
    async def detokenize(body: engine_api.DetokenizeRequest) -> dict[str, Any]:
        return await engine_api.detokenize(front, body)


def _add_heads(app: FastAPI) -> None:
    """HEAD wherever GET is, as load balancers probe; uvicorn leaves the body out. Not where that
    has no end."""
    for route in list(app.routes):
        if not isinstance(route, APIRoute) or route.path == LIVE_PATH:
            continue
        rights = rights_of(route)
        if "GET" in (route.methods or ()) and rights is not None and not rights.own_pages:
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                response_model=None,
                include_in_schema=False,
            )


def _add_engine(app: FastAPI, front: Frontend) -> None:
    command = front.generator.command

    @app.post("/pause", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def pause(
        body: engine_api.PauseRequest | None = None,
        mode: engine_api.PauseMode | None = None,
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = False,
    ) -> Response:
        asked = body or engine_api.PauseRequest()
        default: engine_api.PauseMode = "wait" if wait_for_inflight_requests else "keep"
        chosen: dict[str, Any] = {"mode": asked.mode or mode or default}
        chosen["clear_cache"] = asked.clear_cache or clear_cache
        return json_response(await engine_api.pause(front, asked.model_copy(update=chosen)))

    @app.post("/resume", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def resume() -> Response:
        return json_response(await command("resume"))

    @app.post("/suspend", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def suspend() -> Response:
        return json_response(await command("suspend"))

    @app.post("/reset_prefix_cache", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def reset_prefix_cache() -> Response:
        return json_response(await command("reset_prefix_cache"))

    @app.post("/weights", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def weights(body: engine_api.WeightsRequest) -> Response:
        return json_response(await engine_api.weights(front, body))

    @app.post("/profile", response_model=None)
    @needs(Access.ADMINISTRATOR)
    async def profile(request: Request, body: engine_api.ProfileRequest | None = None) -> Response:
        return await engine_api.profile(front, request, body or engine_api.ProfileRequest())


def _add_page(app: FastAPI, front: Frontend) -> None:
    feed = LiveFeed(front)

    @app.get("/", response_model=None, include_in_schema=False)
    @needs(Access.OPEN)
    async def page() -> Response:
        return page_response()

    @app.get(LIVE_PATH, response_model=None, include_in_schema=False)
    @needs(Access.CLIENT, own_pages=True)
    async def live() -> Response:
        return EventStream(feed.events())

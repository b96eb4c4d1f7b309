"""Who may use which route.

Each endpoint says so itself, by :func:`needs`, and rights belong to the route that starlette finds
for a request: a path has many spellings, and no comparison of texts knows them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from megatron_async.errors import ConfigError
from megatron_async.serving.http.errors import ApiError, error_response
from megatron_async.serving.http.keys import Access, Keys
from megatron_async.serving.http.pages import Pages

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_ATTRIBUTE = "__megatron_async_rights__"


@dataclass(frozen=True, slots=True)
class Rights:
    """What a request must have to reach a route.

    Args:
        access: whose key.
        own_pages: a web page that makes the request must be this server's own, or be allowed by
            name.
    """

    access: Access
    own_pages: bool = False


UNKNOWN_PATH = Rights(Access.CLIENT)
"""Rights to what no route answers: strangers do not learn which paths there are."""


def needs(access: Access, *, own_pages: bool | None = None) -> Callable[[Endpoint], Endpoint]:
    """Decorates an endpoint. What changes the engine is for this server's own pages alone."""
    is_for_own = access is Access.ADMINISTRATOR if own_pages is None else own_pages

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, Rights(access, is_for_own))
        return endpoint

    return declare


def rights_of(route: BaseRoute) -> Rights | None:
    """What the endpoint of a route, or the application that is mounted there, has said."""
    for holder in (getattr(route, "endpoint", None), getattr(route, "app", None)):
        found = getattr(holder, _ATTRIBUTE, None)
        if isinstance(found, Rights):
            return found
    return None


def check_routes(app: FastAPI) -> None:
    """Raises ConfigError for a route that says nothing about its rights."""
    # FastAPI's static files are no routes of the list, and are asked last.
    for route in (*app.router.routes, *getattr(app.router, "_low_priority_routes", ())):
        if rights_of(route) is None:
            where = getattr(route, "path", type(route).__name__)
            raise ConfigError(
                f"the route {where} does not say who may use it; decorate its endpoint with "
                "needs(Access...)"
            )


def find_route(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route that starlette's router chooses: the first that takes path and method, else the
    first that takes the path."""
    partial: BaseRoute | None = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        if match is Match.PARTIAL and partial is None:
            partial = route
    return partial


def find_redirected(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route to which starlette redirects what no route takes: that of the path with a slash at
    its end, or without one."""
    path: str = scope["path"]
    other = path.rstrip("/") if path.endswith("/") else f"{path}/"
    return find_route(routes, {**scope, "path": other})


class RightsCheck:
    """Lets a request pass if it has what its route needs. :class:`RequestLog` has found the route.

    Nothing but HTTP passes: there is no route for anything else.

    Args:
        routes: of the application.
        pages: which may call.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], keys: Keys, pages: Pages) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        response = error_response(error)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        route = scope["state"]["route"] or find_redirected(self._routes, scope)
        rights = UNKNOWN_PATH if route is None else rights_of(route)
        if rights is None:  # it came after the start
            return ApiError(403, "this route does not say who may use it")
        headers = Headers(scope=scope)
        holder = self._keys.holder(headers)
        scope["state"]["key_number"] = self._keys.number(headers)
        refused = self._keys.refusal(rights.access, holder)
        if refused is None and rights.own_pages:
            refused = self._pages.refusal(headers, has_key=holder is not Access.OPEN)
        return refused

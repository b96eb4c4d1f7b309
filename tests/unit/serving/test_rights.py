"""Who may use which route: by keys, spellings, methods, and the pages that make requests."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

from megatron_async.cli.main import main
from megatron_async.cli.options.server_keys import ADMIN_KEY_VARIABLE, KEY_VARIABLE, keys_of
from megatron_async.errors import ConfigError
from megatron_async.serving.http.app import OPEN_PATHS, make_app
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.http.keys import Access
from megatron_async.serving.http.rights import check_routes, needs, rights_of
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_client import ScriptedClient
from tests.support.served import NotedMetrics, PlainTemplates, Served, make_front, served

CLIENT, ADMINISTRATOR = "client's key", "administrator's-key"
ADMINISTRATORS = {
    *("/pause", "/resume", "/suspend", "/weights", "/reset_prefix_cache", "/profile"),
    *("/sleep", "/wake_up", "/abort_requests", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
    # SGLang's
    *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/update_weight_version"),
    *("/update_weights_from_disk", "/update_weights_from_tensor"),
    *("/update_weights_from_distributed", "/init_weights_update_group"),
    "/destroy_weights_update_group",
}
CLIENTS = {
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/api", "/live"),
    *("/v1/models/{name:path}", "/tokenize", "/detokenize", "/openapi.json", "/is_sleeping"),
    *("/is_paused", "/server_info", "/get_world_size", "/completions", "/chat/completions"),
    *("/generate", "/model_info", "/get_model_info", "/weight_version", "/get_weight_version"),
    *("/get_server_info", "/v1/loads"),
}
SENDERS = {"nobody": None, "stranger": "wrong", "client": CLIENT, "administrator": ADMINISTRATOR}


def app_of(**config: Any) -> FastAPI:
    """An application that nobody asks."""
    tokenizer = hash_tokenizer()
    front = make_front(
        ScriptedClient(tokenizer, ["a"]),  # type: ignore[arg-type]
        ServerConfig(model_names=("tiny",), **config),
        tokenizer,
        PlainTemplates(),
        NotedMetrics(),
    )
    return make_app(front)


def routes_of(app: FastAPI) -> Iterator[tuple[str, str, Access]]:
    """Path, method and access of each."""
    for route in app.router.routes:
        rights = rights_of(route)
        assert rights is not None
        for method in sorted(getattr(route, "methods", ())):
            yield getattr(route, "path", ""), method, rights.access


# --- what routes say ------------------------------------------------------------------------------


def test_each_route_says_who_may_use_it() -> None:
    found = {(path, access) for path, _, access in routes_of(app_of(development=True))}
    assert found == {
        *((path, Access.OPEN) for path in OPEN_PATHS),
        *((path, Access.CLIENT) for path in CLIENTS),
        *((path, Access.ADMINISTRATOR) for path in ADMINISTRATORS),
    }


async def silent() -> PlainTextResponse:
    """Says nothing about its rights."""
    return PlainTextResponse("reached")


SILENT: dict[str, Any] = {
    "route": lambda app: app.add_api_route("/new", silent),
    "starlette's": lambda app: app.router.add_route("/new", silent),
    "websocket": lambda app: app.router.add_websocket_route("/new", silent),
    "mount": lambda app: app.mount("/new", StaticFiles(directory=".")),
    "application": lambda app: app.mount("/new", FastAPI()),
}


@pytest.mark.parametrize("kind", SILENT)
def test_an_application_with_a_silent_route_does_not_start(kind: str) -> None:
    async def start(app: FastAPI) -> None:
        async with app.router.lifespan_context(app):
            pass

    app = app_of()
    asyncio.run(start(app))
    SILENT[kind](app)
    for refused in (lambda: check_routes(app), lambda: asyncio.run(start(app))):
        with pytest.raises(ConfigError, match="does not say who may use it"):
            refused()


def test_a_silent_route_that_comes_after_the_start_answers_nobody() -> None:
    app = app_of(api_keys=(CLIENT,))
    app.add_api_route("/new", silent)
    app.mount("/files", StaticFiles(directory="."))
    app.add_api_route("/known", needs(Access.OPEN)(lambda: PlainTextResponse("reached")))
    assert asked(app, "GET", "/known").text == "reached"
    for path in ("/new", "/new/", "/new%0A", "/files/setup.py"):
        for key in (None, CLIENT):
            assert asked(app, "GET", path, key).status_code == 403, path


def asked(app: FastAPI, method: str, path: str, key: str | None = None, root: str = "") -> Any:
    """The answer of an application without a server."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=bearer(key))

    return asyncio.run(ask())


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def test_a_root_path_opens_nothing() -> None:
    app = app_of()
    for path in ("/pause", "/prefix/pause", "/prefix/pause%0A", "/prefix/pause/"):
        assert asked(app, "POST", path, root="/prefix").status_code == 403, path
    assert asked(app, "GET", "/prefix/health", root="/prefix").status_code == 200


@pytest.mark.parametrize("path", ("/", "/pause", "/live", "/nowhere"))
def test_nothing_but_http_gets_in(path: str) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b""}
    asyncio.run(app_of(development=True)(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


# --- who gets in ----------------------------------------------------------------------------------


def spellings(path: str) -> list[str]:
    """Of a request's target: some of them reach the route of ``path``."""
    first = f"/%{ord(path[1]):x}{path[2:]}"
    return [
        path, f"{path}%0A", f"{path}%0a?x=1", f"{path}?", f"{path}?a=/health", f"{path}/",
        f"{path}%2F", f"{path}//", f"{path}%20", f"{path}%00", f"{path}%0D%0A", f"{path}%0A%0A",
        f"{path};x", f"{path}%23", f"{path}%3F", f"/{path}", f"/.{path}", f"/x/..{path}",
        f"/health/..{path}", f"/health%0A{path}", path.upper(), path.replace("/", "/%2e/"), first,
        first.replace("%", "%25"), f"{first}%0A", f"{path}%E2%80%A8", f"{path}%FF", f"{path}%C2%85",
        f"http://127.0.0.1{path}", f"http://other{path}%0A",
    ]  # fmt: skip


class Asker:
    """Sends requests as they are written, on one connection."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=PATIENCE_SECONDS)

    def status(self, method: str, target: str, headers: dict[str, str] | None = None) -> int:
        """Of the answer, whose end is not waited for if it has none."""
        sent = {"Host": self._host, **(headers or {})}
        connection = self._connection
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            connection.putheader(name, value)
        if method not in ("GET", "HEAD", "OPTIONS") and "Content-Length" not in sent:
            connection.putheader("Content-Length", "0")
        connection.endheaders()
        answer = connection.getresponse()
        if answer.getheader("content-type", "").startswith("text/event-stream"):
            connection.close()
        else:
            answer.read()
        return answer.status

    def close(self) -> None:
        self._connection.close()


@contextmanager
def asking(**config: Any) -> Iterator[tuple[Served, Asker]]:
    """A server, and who asks it."""
    with served(hash_engine(1, max_requests=2, block_count=8), **config) as server:
        asker = Asker(server.url)
        try:
            yield server, asker
        finally:
            asker.close()


KEYS: dict[str, dict[str, Any]] = {
    "none": {},
    "clients": {"api_keys": ("other", CLIENT)},
    "both": {"api_keys": (CLIENT, "other"), "admin_api_keys": ("more", ADMINISTRATOR)},
    "administrators": {"admin_api_keys": (ADMINISTRATOR,)},
}


def expected(access: Access, sender: str, keys: str, *, development: bool) -> int | None:
    """The status of a refusal; None for who may."""
    known = {
        "none": {},
        "clients": {"client": "administrator"},
        "both": {"client": "client", "administrator": "administrator"},
        "administrators": {"administrator": "administrator"},
    }[keys]
    is_what = known.get(sender)
    if access is Access.OPEN or is_what == "administrator":
        return None
    if access is Access.CLIENT:
        return None if is_what == "client" or keys in ("none", "administrators") else 401
    if keys == "none":
        return None if development else 403
    return 403 if is_what == "client" else 401


@pytest.mark.parametrize("development", (False, True))
@pytest.mark.parametrize("keys", KEYS)
def test_routes_let_in_who_may_by_whatever_spelling(keys: str, development: bool) -> None:
    routes = [
        (path.replace("{name:path}", "tiny"), method, access)
        for path, method, access in routes_of(app_of(development=True))
    ]
    here = set(routes_of(app_of(development=development)))
    there = {path.replace("{name:path}", "tiny") for path, _, _ in here}
    with asking(**KEYS[keys], development=development) as (server, asker):
        for sender, key in SENDERS.items():
            for path, method, access in routes:
                want = expected(access, sender, keys, development=development)
                if path == "/live" and want is None:
                    continue  # an answer without an end
                status = asker.status(method, path, bearer(key))
                if path not in there:
                    unknown = expected(Access.CLIENT, sender, keys, development=development)
                    assert status == (unknown or 404), (sender, method, path)
                elif want is None:
                    assert status not in (401, 403, 404, 405), (sender, method, path, status)
                else:
                    assert status == want, (sender, method, path)
            reached = [name for name, _ in server.client.commands]
            server.client.commands.clear()
            may = expected(Access.ADMINISTRATOR, sender, keys, development=development) is None
            assert ("pause" in reached) == may


@pytest.mark.parametrize(("keys", "sender"), (("none", "stranger"), ("both", "client")))
def test_no_spelling_lets_in_who_may_not(keys: str, sender: str) -> None:
    development, headers = keys != "none", bearer(SENDERS[sender])
    with asking(**KEYS[keys], development=development) as (server, asker):
        for path, _, access in set(routes_of(app_of(development=development))):
            if access is not Access.ADMINISTRATOR:
                continue
            for target in spellings(path):
                status = asker.status("POST", target, headers)
                assert status in (403, 404), (target, status)
            for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
                assert asker.status(method, path, headers) == 403, (method, path)
        assert server.client.commands == []


def test_what_reaches_a_route_is_refused_as_the_route_is() -> None:
    with asking() as (_, asker):
        for target in ("/pause%0A", "/%70ause", "/pause/", "/pause%2F", "/pause?x", "/pause%0A?x"):
            assert asker.status("POST", target) == 403, target


def test_spellings_of_a_route_are_counted_as_the_route() -> None:
    with asking() as (server, asker):
        for target in ("/v1/completions", "/v1/completions%0A", "/v1%2Fcompletions?x=1"):
            server.metrics.noted.clear()
            assert asker.status("POST", target) == 400
            noted = [("opened", None), ("closed", None), ("refused", 400)]
            server.until(lambda: len(server.metrics.noted) == 3)
            assert server.metrics.noted == noted
        server.metrics.noted.clear()
        assert asker.status("POST", "/pause?path=/v1/completions") == 403
        assert asker.status("POST", "/v1/completions/") == 307
        assert server.metrics.noted == []


def test_a_refused_body_is_not_read() -> None:
    with asking(api_keys=(CLIENT,), max_body_bytes=10) as (_, asker):
        assert asker.status("POST", "/pause", {"Content-Length": "1000000"}) == 401


# --- pages ----------------------------------------------------------------------------------------

EVIL = "https://evil.example"


def page(origin: str | None, site: str | None = None, host: str | None = None) -> dict[str, str]:
    """What a browser adds to the request of a page."""
    given = {"Origin": origin, "Sec-Fetch-Site": site, "Host": host}
    return {name: value for name, value in given.items() if value is not None}


def test_pages_from_elsewhere_change_no_engine() -> None:
    """Without keys, in development mode: a simple request needs no leave to be sent."""
    with asking(development=True) as (server, asker):
        own = server.url
        port = own.rpartition(":")[2]
        foreign = [
            page(EVIL), page(EVIL, "cross-site"), page("null", "cross-site"), page("null"),
            page(None, "cross-site"), page(None, "same-site"), page(f"http://localhost:{port}"),
            page("http://127.0.0.1:1", "same-site"), page("http://127.0.0.1"), page(f"{own}.evil"),
            page(f"{own}/"), page(f"http://a@127.0.0.1:{port}"), page(""), page("http://"),
            page(f"{own},{EVIL}"), page("file://"), page(EVIL, "same-origin"),
            page(f"http://127.0.0.1:{port}0"), page("http://127.0.0.1:x"), page("http://[::1"),
            # By a name that somebody else has turned to this machine's address.
            page("http://evil.example", "same-origin", "evil.example"),
            page(f"http://evil.example:{port}", None, f"evil.example:{port}"),
            page("http://localhost.evil", "same-origin", "localhost.evil"),
            page("http://127.0.0.1.evil", "same-origin", "127.0.0.1.evil"),
        ]  # fmt: skip
        paths = sorted(ADMINISTRATORS)
        for headers in foreign:
            for path in paths:
                assert asker.status("POST", path, headers) == 403, (path, headers)
            for target in ("/pause%0A", "/pause/", "/%70ause"):
                assert asker.status("POST", target, headers) == 403, (target, headers)
            assert asker.status("GET", "/live", headers) == 403, headers
        assert server.client.commands == []
        assert asker.status("GET", "/live", page(None, "same-origin")) == 200
        server.client.commands.clear()
        for headers in (
            page(None), page(own), page(own, "same-origin"), page(None, "none"),
            page(f"http://localhost:{port}", "same-origin", f"localhost:{port}"),
            page("http://[::1]:5000", None, "[::1]:5000"),
            page("http://10.0.0.1", None, "10.0.0.1"),
            page("https://app.localhost", "same-origin", "app.localhost:443"),
        ):  # fmt: skip
            assert asker.status("POST", "/resume", headers) == 200, headers
        assert len(server.client.commands) == 8


def test_pages_from_elsewhere_need_leave_though_they_have_a_key() -> None:
    keys = {"api_keys": (CLIENT,), "admin_api_keys": (ADMINISTRATOR,)}
    for allowed, may in (((), False), (("https://other",), False), ((EVIL,), True), (("*",), True)):
        with asking(**keys, allow_origins=allowed) as (server, asker):
            for key, status in ((ADMINISTRATOR, 200 if may else 403), (CLIENT, 403), (None, 401)):
                headers = {**page(EVIL, "cross-site"), **bearer(key)}
                assert asker.status("POST", "/pause", headers) == status, (allowed, key)
            own = {**page("http://name", "same-origin", "name"), **bearer(ADMINISTRATOR)}
            assert asker.status("POST", "/pause", own) == 200
            assert len(server.client.commands) == 1 + may


def test_a_star_lets_no_page_change_the_engine_without_a_key() -> None:
    with asking(development=True, allow_origins=("*",)) as (_, asker):
        assert asker.status("POST", "/pause", page(EVIL)) == 403
        assert asker.status("GET", "/v1/models", page(EVIL)) == 200
    with asking(development=True, allow_origins=(EVIL,)) as (_, asker):
        assert asker.status("POST", "/pause", page(EVIL)) == 200


def test_the_api_stays_open_to_clients_of_any_origin() -> None:
    """A page needs leave to send JSON, which a browser asks for; others say what they like."""
    body = {"prompt": "a", "max_tokens": 1}
    with served(hash_engine(1, max_requests=2, block_count=8)) as server:
        for headers in ({}, page("vscode-webview://x"), page(EVIL, "cross-site")):
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS
            )
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers


SIMPLE = (None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
          "multipart/form-data; boundary=x", "text/plain; application/json")  # fmt: skip


def test_no_route_takes_a_body_that_a_page_may_send_without_leave() -> None:
    json = {
        "prompt": "a",
        "messages": [],
        "input": "a",
        "prompts": ["a"],
        "tokens": [1],
        "path": "x",
    }
    with served(hash_engine(1, max_requests=2, block_count=8), development=True) as server:
        content = httpx.Request("POST", server.url, json=json).content
        with httpx.Client(base_url=server.url) as client:
            for path, method, access in routes_of(app_of()):
                if access is not Access.CLIENT or method not in ("POST", "PUT"):
                    continue
                for kind in SIMPLE:
                    headers = {} if kind is None else {"content-type": kind}
                    answer = client.request(method, path, content=content, headers=headers)
                    assert answer.status_code == 400, (path, kind)
        assert server.client.running == {} and server.client.commands == []


@pytest.mark.parametrize("origin", ("", " ", "https://a/", "https://a b", "https://a\n"))
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origin"):
        ServerConfig(model_names=("tiny",), allow_origins=(origin,))


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ("api_keys", "admin_api_keys"))
@pytest.mark.parametrize(
    "key", ("", " ", "\t", "\n", "a\nb", "a\n", " a", "a ", "é", "日本", "\x00")
)
def test_keys_that_nobody_can_send_are_refused(field: str, key: str) -> None:
    name = field.removesuffix("s")
    with pytest.raises(ConfigError, match=name) as refused:
        ServerConfig(model_names=("tiny",), **{field: ("good", key)})
    assert "good" not in str(refused.value)


def test_a_clients_key_is_no_administrators() -> None:
    with pytest.raises(ConfigError, match="different"):
        ServerConfig(model_names=("tiny",), api_keys=("a", "b"), admin_api_keys=("b",))


def refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *options: str) -> int:
    """The exit status of ``serve``, which must not come to the model."""
    for name in (KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return main(["serve", "--port", "0", *options])


BLANK = ("", " ", "\t \n", "\u00a0")
WRONG = ("a\nb", "a\n", "a\u00a0b", "\u00e9", "\udcff")


@pytest.mark.parametrize("variable", (KEY_VARIABLE, ADMIN_KEY_VARIABLE))
@pytest.mark.parametrize("value", (*BLANK, *WRONG))
def test_a_variable_without_a_key_keeps_the_server_from_starting(
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(monkeypatch, {variable: value}) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and variable in said
    assert ("blank" in said) == (value in BLANK)


@pytest.mark.parametrize("option", ("--api-key", "--admin-api-key"))
@pytest.mark.parametrize("value", (*BLANK, *WRONG))
def test_an_option_without_a_key_keeps_the_server_from_starting(
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = {KEY_VARIABLE: "good", ADMIN_KEY_VARIABLE: "better"}
    assert refused(monkeypatch, good, option, "best", option, value) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and option.strip("-").replace("-", "_") in said
    assert not any(key in said for key in ("good", "best", "better"))


def test_keys_come_by_options_else_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, " a  b ")
    assert keys_of((), KEY_VARIABLE) == ("a", "b")
    assert keys_of(("c d",), KEY_VARIABLE) == ("c d",)
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert keys_of(("c",), KEY_VARIABLE) == ("c",)
    monkeypatch.delenv(KEY_VARIABLE)
    assert keys_of((), KEY_VARIABLE) == ()

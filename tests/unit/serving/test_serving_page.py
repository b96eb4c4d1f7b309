"""The page at ``/`` without a browser: what it is made of, and the feed that it shows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import EngineCounters, NotOverlapped
from megatron_async.errors import EngineDeadError
from megatron_async.serving import page
from megatron_async.serving.engine_side import live_steps
from megatron_async.serving.engine_side.live_steps import LiveSteps
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.page import live_feed
from megatron_async.serving.page.live_feed import LiveFeed
from tests.support.engines import config_at, hash_engine, sampling_params
from tests.support.oracle import Ask
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import served
from tests.support.served_engine import (
    client_of,
    control,
    engine_in_thread,
    outputs_of,
    run,
    until_idle,
)

HTML = (Path(page.__file__).parent / "page.html").read_text()
KEY = "s3cret"


class Parts(HTMLParser):
    """All tags with their attributes, and the text inside of styles and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(HTML)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.inside:
            self.inside[self.cdata_elem].append(data)


PARTS = Parts()
(SCRIPT,) = PARTS.inside["script"]


# --- the page -------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_elsewhere() -> None:
    assert not re.search(r"(https?|wss?):|//[a-z0-9-]+\.|@import|url\(|import\(", HTML)
    refers = [
        value
        for _, attributes in PARTS.tags
        for name, value in attributes.items()
        if name in ("href", "src", "srcset", "action", "data", "poster")
    ]
    assert len(refers) == 2 and all(value and value[0] in "#d" for value in refers)
    paths = re.findall(r'ask\("([^"]*)"', SCRIPT)
    assert sorted(paths) == ["/live", "/v1/chat/completions"] and SCRIPT.count("fetch(") == 1


def test_the_policy_allows_what_is_inside_the_page_and_nothing_else() -> None:
    allowed = {}
    for part in page.page_response().headers["content-security-policy"].split("; "):
        name, _, values = part.partition(" ")
        allowed[name] = values
    for tag in ("style", "script"):
        (inside,) = PARTS.inside[tag]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert allowed.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert allowed.pop("connect-src") == "'self'" and allowed.pop("img-src") == "data:"
    assert allowed.pop("require-trusted-types-for") == "'script'"
    assert allowed and set(allowed.values()) == {"'none'"} and "default-src" in allowed
    assert not [
        name for _, given in PARTS.tags for name in given if name == "style" or name[:2] == "on"
    ]


def test_text_never_becomes_html() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextual|srcdoc"
    assert not re.search(rf"{ways}|eval\(|Function\(|setTimeout\(['\"]", SCRIPT)


def test_what_the_script_looks_up_is_there() -> None:
    ids = [attributes["id"] for _, attributes in PARTS.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([^"]+)"\)', SCRIPT)) <= set(ids)
    assert set(re.findall(r'fill\("([^"]+)"', SCRIPT)) <= set(ids)
    counters = {field.name for field in dataclasses.fields(EngineCounters)}
    named = set(re.findall(r"counters\.(\w+)", SCRIPT))
    assert named and named <= counters


def test_fields_have_labels_and_the_page_a_language() -> None:
    labels = {attributes.get("for") for tag, attributes in PARTS.tags if tag == "label"}
    fields = [a for tag, a in PARTS.tags if tag in ("input", "textarea", "select")]
    assert fields and {field["id"] for field in fields} == labels
    assert ("html", {"lang": "en"}) in PARTS.tags
    assert {a["role"] for _, a in PARTS.tags if "role" in a} >= {"log", "status", "alert", "slider"}
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert ("meta", viewport) in PARTS.tags


# --- over http ------------------------------------------------------------------------------------


def picture_of(lines: Any) -> dict[str, Any]:
    data = next(line for line in lines if line.startswith("data: "))
    shown: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return shown


def test_the_page_is_open_and_its_data_need_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.02)
    with (
        served(hash_engine(1, max_requests=2, block_count=8), api_keys=(KEY,)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
    ):
        shown = client.get("/")
        assert shown.status_code == 200 and shown.text == HTML and KEY not in shown.text
        assert shown.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in shown.headers["content-security-policy"]
        for headers in ({}, {"authorization": "Bearer other"}):
            answer = client.get("/live", headers=headers)
            assert answer.status_code == 401 and "data:" not in answer.text
        login = {"authorization": f"Bearer {KEY}"}
        with client.stream("GET", "/live", headers=login) as stream:
            lines = stream.iter_lines()
            assert picture_of(lines)["model"] == "tiny"
            server.client.kill()
            while picture_of(lines)["state"] != "dead":  # the feed goes on
                pass
            server.front.generator.draining = True
            assert all(not line or line.startswith("data: ") for line in lines)  # to its end
        assert client.get("/live", headers=login).status_code == 200


# --- the feed -------------------------------------------------------------------------------------


class Noted:
    """A front end whose engine counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.draining = False
        self.config = SimpleNamespace(model_names=("tiny",))
        self.client = SimpleNamespace(states={}, state="ready", snapshot=None, info=self.info)
        self.generator = self

    async def info(self) -> Any:
        return SimpleNamespace(depth=1, max_requests=4)

    async def command(self, name: str) -> dict[str, Any]:
        assert name == "live"
        self.asked += 1
        return {"steps": [self.asked]}


@contextlib.asynccontextmanager
async def viewer(feed: LiveFeed) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    async with contextlib.aclosing(feed.events()) as events:
        yield events


def test_viewers_share_one_feed_which_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.02)

    async def test() -> None:
        front: Any = Noted()
        feed = LiveFeed(front)
        async with viewer(feed) as one:
            async with viewer(feed) as two:
                for _ in range(3):
                    pair = await asyncio.gather(anext(one), anext(two))
                    assert pair[0] == pair[1]  # each answer of the engine has its number
            await anext(one)  # the other one stays
        await asyncio.sleep(0.05)
        asked = front.asked
        await asyncio.sleep(0.1)
        assert front.asked == asked
        async with viewer(feed) as again:
            await anext(again)
        assert front.asked > asked

    run(test())


def test_viewers_are_not_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(live_feed, "MOST_VIEWERS", 1)

    async def test() -> None:
        front: Any = Noted()
        feed = LiveFeed(front)
        async with viewer(feed) as one, viewer(feed) as two:
            await anext(one)
            with pytest.raises(ApiError, match="viewers"):
                await anext(two)
            front.draining = True
            assert [shown async for shown in one] == []  # the end
        async with viewer(feed) as after:
            assert len([shown async for shown in after]) == 1

    run(test())


def test_a_dead_or_stuck_engine_is_shown_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.02)

    async def test() -> None:
        front: Any = Noted()

        async def dead(name: str) -> dict[str, Any]:
            raise EngineDeadError("the engine has died")

        async def stuck(name: str) -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        for front.command in (dead, stuck):
            async with viewer(LiveFeed(front)) as events:
                shown = picture_of((await anext(events)).decode().splitlines())
            assert shown["steps"] == [] and shown["max_requests"] == 4

    run(test())


NONE: Any = {"counters": {"steps_committed": 0}}
LONG = {"num_tokens_to_generate": 100, "termination_id": -1, "temperature": 0.0}


@pytest.mark.parametrize("depth", (0, 1))
def test_the_feed_shows_the_engines_last_steps(depth: int) -> None:
    engine = hash_engine(depth, max_requests=4, block_size_tokens=4, block_count=300)

    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                none: Any = None
                generator = Generator(client, none, none)
                front: Any = SimpleNamespace(
                    config=SimpleNamespace(model_names=("hash",)), generator=generator
                )
                async with viewer(LiveFeed(front)) as events:

                    async def picture() -> dict[str, Any]:
                        return picture_of((await anext(events)).decode().splitlines())

                    first = await picture()
                    while "device" not in first:  # the engine has not answered in time
                        first = await picture()
                    assert first["steps"] == [] and first["depth"] == depth
                    assert "CPU" in first["device"] and first["max_requests"] == 4
                    await outputs_of(client, [1, 2], LONG)
                    await until_idle(client)

                    def is_the_last(shown: dict[str, Any]) -> bool:
                        snapshot = shown["snapshot"] or NONE
                        is_idle = snapshot.get("gauges", {}).get("requests_running") == 0
                        return snapshot["counters"]["steps_committed"] >= 90 and is_idle

                    shown = await picture()
                    while not is_the_last(shown):
                        shown = await picture()
        check_steps(shown["steps"], depth)
        gauges = shown["snapshot"]["gauges"]
        assert gauges["blocks_total"] == 300 and gauges["requests_running"] == 0

    run(test())


def check_steps(steps: list[dict[str, Any]], depth: int) -> None:
    """Of one request that has ended."""
    tickets = [step["ticket"] for step in steps]
    assert tickets == list(range(tickets[0], tickets[-1] + 1))
    assert live_steps.STEPS - 2 <= len(tickets) <= live_steps.STEPS
    for step in steps[1:-1]:
        assert step["decode_rows"] == step["committed"] == step["tokens"] == 1
        assert step["prefill_rows"] == step["discarded"] == 0
        assert step["effective_depth"] == depth
        assert step["reason"] == (None if depth else NotOverlapped.SERIAL.value)
        assert [name for name, _, _ in step["host"]] == ["plan", "launch", "wait", "commit"]
        assert any(f"F{step['ticket']}" in name for name, _, _ in step["device"])
        (_, launched, _), (_, waited, lasted) = step["host"][1:3]
        began = min(start for _, start, _ in step["device"])
        assert 0 <= launched < began < waited + lasted
        assert all(length >= 0 for lane in ("host", "device") for _, _, length in step[lane])
    if depth:
        assert steps[-1]["reason"] == NotOverlapped.DRAINED.value


# --- the recording --------------------------------------------------------------------------------


def decoding(count: int = 4) -> DynamicInferenceEngine:
    """Steps of a request that goes on for long."""
    engine = hash_engine(1, max_requests=2, block_size_tokens=64, block_count=8, debug=False)
    engine.add_request(0, [4], sampling_params(Ask(prompt=(4,), max_new=200)))
    for _ in range(count):
        engine.step_modern()
    return engine


def test_drafts_of_the_last_steps_are_shown() -> None:
    with hash_engine(
        1, max_requests=2, block_count=8, num_speculative_tokens=2, speculative_method="ngram"
    ) as engine:
        live = LiveSteps(engine)
        live.read()
        engine.generate([[4, 5, 4, 5]], sampling_params(Ask(prompt=(4, 5, 4, 5), max_new=40)))
        first, *steps = live.read()
        counters = engine.counters
    assert (first["drafted"], first["accepted"]) == (0, 0)
    assert sum(step["drafted"] for step in steps) == counters.tokens_drafted > 0
    for step in steps:
        assert step["committed"] == step["accepted"] + (step["drafted"] > 0)


def is_recorded(engine: Any) -> bool:
    return engine.device.timeline is not None


def test_nothing_is_recorded_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding() as engine:
        live = LiveSteps(engine)
        assert not is_recorded(engine) and not live.is_over()
        assert live.read() == []
        engine.step_modern()
        engine.step_modern()
        assert live.read() and is_recorded(engine)
        live.stop()  # somebody has just read
        assert not live.is_over() and is_recorded(engine)
        monkeypatch.setattr(live_steps, "LEASE_SECONDS", -1.0)
        live.read()
        assert live.is_over()
        live.stop()
        assert not is_recorded(engine) and not live.is_over()
        monkeypatch.undo()
        assert live.read() == []  # a new one


def test_a_recording_holds_the_last_steps_alone() -> None:
    with decoding() as engine:
        live = LiveSteps(engine)
        live.read()
        for _ in range(150):
            engine.step_modern()
        check_middle = [step["ticket"] for step in live.read()]
        assert check_middle[-1] > 148 and len(check_middle) <= live_steps.STEPS
        assert len(engine.device.finished_spans()) <= live_steps.DEVICE_SPANS  # type: ignore
        host = vars(live)["_host"]
        assert len(host.reports) == len(host.launches) == live_steps.STEPS
        assert len(host.slices) <= 8 * live_steps.STEPS


def test_a_drift_of_the_devices_clock_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have taken tokens before the S that sampled them began."""
    with decoding() as engine:
        live = LiveSteps(engine)
        live.read()
        for _ in range(20):
            engine.step_modern()
        spans = engine.device.finished_spans()
        late = [span._replace(start_ns=span.start_ns + 10**9, end_ns=span.end_ns + 10**9)
                for span in spans]  # fmt: skip
        monkeypatch.setattr(engine.device, "finished_spans", lambda: late)
        *steps, last = live.read()
        assert len(steps) > 15 and last["device"]
        for step, following in itertools.pairwise(steps):
            (waited,) = (start + length for name, start, length in step["host"] if name == "wait")
            assert min(start for _, start, _ in following["device"]) <= waited + 0.001


def test_an_unwatched_step_makes_the_same_calls_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.test_step_functions import SCRIPT as COUNT
    from tests.unit.test_step_functions import script

    assert COUNT.exists()
    count = script.__wrapped__()  # type: ignore[attr-defined]
    with decoding(10) as engine:
        live = LiveSteps(engine)

        def functions_of_step() -> Any:
            with count.functions_called() as functions:
                engine.step_modern()
            return functions

        before = functions_of_step()
        live.read()
        watched = functions_of_step()
        monkeypatch.setattr(live_steps, "LEASE_SECONDS", -1.0)
        live.read()
        live.stop()
        assert functions_of_step() == before
        more = {function.split(".")[-1] for _, function in watched - before}
        assert more >= {"on_span", "on_launch", "on_commit"}


def test_a_profile_and_the_live_view_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        engine = hash_engine(1, max_requests=4, block_size_tokens=4, block_count=300)
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "live")
                path = str(tmp_path / "trace.json")
                profile = asyncio.create_task(control(client, "profile", path=path, steps=20))
                while not profile.done():
                    await outputs_of(client, [1], LONG)
                    await control(client, "live")
                assert (await profile)["steps"] >= 20
                events = json.loads(Path(path).read_text())["traceEvents"]
                assert {"launch", "commit", "S H2D F"} <= {each.get("cat") for each in events}
                await control(client, "live")
                await outputs_of(client, [1], LONG)
                steps = (await control(client, "live"))["steps"]
                assert steps and all(step["device"] for step in steps[1:])

    run(test())


def test_the_engine_process_ends_a_recording_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_steps, "LEASE_SECONDS", 0.2)

    async def test() -> None:
        engine = hash_engine(1, max_requests=4, block_size_tokens=4, block_count=300)
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "live")
                assert is_recorded(engine)
                end = time.monotonic() + PATIENCE_SECONDS
                while is_recorded(engine):
                    assert time.monotonic() < end
                    await asyncio.sleep(0.05)

    run(test())


def test_the_embedded_model_is_shown_too() -> None:
    engine = DynamicInferenceEngine.from_pretrained("tiny", config_at(1, max_requests=4))
    with engine:
        live = LiveSteps(engine)
        live.read()
        engine.generate(["def f(x):"], sampling_params(Ask(prompt=(4,), max_new=6)))
        steps = live.read()
    assert steps[0]["prefill_rows"] == 1 and all(step["device"] for step in steps)

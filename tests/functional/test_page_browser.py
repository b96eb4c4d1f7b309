"""The page at ``/`` in a browser: the command's own server, the embedded model, Chromium.

Skipped without Chromium (Debian's package ``chromium``) and ``pip install playwright``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import url_in

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs the package playwright, which is installed by hand"
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip(f"needs a browser: none of {', '.join(NAMES)}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
KEY = "s3cret"
MARKUP = '<img src=x onerror="hacked=1"><script>hacked=1</script><b>bold</b>'
NO_SCROLL = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
TOTAL = "document.getElementById('generated').textContent"


NOTE_PIECES = """
pieces = [];
new MutationObserver((seen) => seen.forEach(({target}) => pieces.push(target.data)))
    .observe(document.getElementById("log"), {characterData: true, subtree: true});
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ["--model", "tiny", "--inference-async-scheduling", "--port", "0", "--api-key", KEY]
    command = [sys.executable, "-m", "megatron_async", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield url_in(server.stderr)
            server.terminate()
            assert server.wait(PATIENCE_SECONDS) == 0
        finally:
            server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container's root may have no sandbox.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, *, key: str = KEY, **looks: Any) -> Iterator[Any]:
    """The page with a key; fails for what the browser complains of."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **looks})
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use key").click()
    yield page
    page.close()
    # Of the statuses of answers it complains by itself.
    assert [said for said in complaints if "the server responded" not in said] == []


def until(page: Any, expression: str) -> None:
    """Wait until ``expression`` holds. The page's policy forbids Playwright's own way."""
    while not page.evaluate(expression):
        page.wait_for_timeout(20)


def text_of(page: Any, element: str) -> str:
    text: str = page.locator(f"#{element}").text_content()
    return text


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """Texts are generated meanwhile."""
    over = threading.Event()

    def ask() -> None:
        asked = {"prompt": "def f(x):", "max_tokens": 100, "ignore_eos": True}
        headers = {"authorization": f"Bearer {KEY}"}
        while not over.is_set():
            httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=None)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)


def test_the_key_is_asked_for_and_kept_for_the_tab(browser: Any, url: str) -> None:
    with opened(browser, url, key="other") as page:
        page.get_by_text("The server does not know this key").wait_for()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use key").click()
        page.get_by_text("Serving").wait_for()
        assert not page.get_by_label("API key").is_visible()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0, 1, "",
        ]  # fmt: skip
        page.reload()
        page.get_by_text("Serving").wait_for()
        assert not page.get_by_label("API key").is_visible()


def test_numbers_and_steps_change_while_requests_run(browser: Any, url: str) -> None:
    with opened(browser, url) as page, busy(url):
        until(page, "parseInt(document.getElementById('running').textContent) > 0")
        until(page, "parseFloat(document.getElementById('rate').textContent) > 0")
        before, step = text_of(page, "generated"), text_of(page, "detail")
        until(page, f"{TOTAL} !== '{before}'")
        until(page, "document.querySelectorAll('#lanes .s-commit').length > 1")
        assert text_of(page, "detail") != step
        assert page.locator("#lanes .s-even, #lanes .s-odd").count() > 2
        assert page.locator("#bars rect").count() > 8
        # One step is looked at by keyboard, and the view stands still.
        page.get_by_role("slider").press("ArrowLeft")
        chosen = text_of(page, "detail")
        total = text_of(page, "generated")
        until(page, f"{TOTAL} !== '{total}'")
        assert text_of(page, "detail") == chosen == page.get_by_role("slider").get_attribute(
            "aria-valuetext"
        )  # fmt: skip
        page.get_by_role("slider").press("ArrowLeft")
        assert int(chosen.split()[1][:-1]) == int(text_of(page, "detail").split()[1][:-1]) + 1
        page.get_by_role("button", name="Follow").click()
        until(page, f"document.getElementById('detail').textContent !== '{chosen}'")


def test_chat_streams_an_answer(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.evaluate(NOTE_PIECES)
        page.get_by_label("Message").fill("def add(a, b):")
        page.get_by_text("Options").click()
        page.get_by_label("Most tokens").fill("60")
        page.get_by_label("Message").press("Enter")
        page.get_by_text("per second,").wait_for()
        answer = page.locator(".turn.assistant .said").text_content()
        pieces = page.evaluate("pieces")
        assert len(pieces) > 1 and pieces[-1] == answer  # it came bit by bit
        assert all(answer.startswith(piece) for piece in pieces)
        # The next message brings the whole chat.
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_label("Message").fill("and then?")
            page.get_by_role("button", name="Send").click()
        assert [each["role"] for each in json.loads(asked.value.post_data)["messages"]] == [
            "user", "assistant", "user",
        ]  # fmt: skip
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0


def test_an_answer_can_be_stopped(browser: Any, url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with opened(browser, url) as page:
        httpx.post(f"{url}/suspend", headers=headers)
        page.get_by_text("Suspended").wait_for()
        page.get_by_label("Message").fill("class A:")
        page.get_by_role("button", name="Send").click()
        until(page, "parseInt(document.getElementById('waiting').textContent) === 1")
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        until(page, "parseInt(document.getElementById('waiting').textContent) === 0")
        httpx.post(f"{url}/resume", headers=headers)
        page.get_by_text("Serving").wait_for()


def with_fields(**fields: Any) -> Any:
    """Add fields to what the page asks for."""

    def change(route: Any) -> None:
        asked = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps({**asked, **fields}))

    return change


def test_what_the_model_says_is_never_html(browser: Any, url: str) -> None:
    """The model is made to say it by its server's own means."""
    with opened(browser, url) as page:
        page.route("**/v1/chat/completions", with_fields(structured_outputs={"choice": [MARKUP]}))
        page.get_by_label("Message").fill(MARKUP)
        page.get_by_role("button", name="Send").click()
        page.get_by_text("per second,").wait_for()
        said = page.locator(".turn .said")
        assert said.all_text_contents() == [MARKUP, MARKUP]
        assert page.locator(".turn img, .turn script, .turn b").count() == 0
        assert page.evaluate("typeof hacked") == "undefined"


def test_errors_are_shown(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.route("**/v1/chat/completions", with_fields(stop=["<b>x</b>", 3]))
        page.get_by_label("Message").fill("a")
        page.get_by_role("button", name="Send").click()
        assert "stop" in page.locator(".turn [role=alert]").text_content()


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "light"), (360, "dark"), (768, "dark"), (1280, "light")]
)
def test_it_fits_every_screen_in_both_schemes(
    browser: Any, url: str, scheme: str, width: int
) -> None:
    looks: Any = {"viewport": {"width": width, "height": 740}, "color_scheme": scheme}
    with opened(browser, url, **looks) as page, busy(url):
        until(page, "document.querySelectorAll('#lanes .s-commit').length > 1")
        page.get_by_label("Most tokens").evaluate("field => field.value = 20")
        page.get_by_label("Message").fill("x" * 200)
        page.get_by_role("button", name="Send").click()
        page.get_by_text("per second,").wait_for()
        assert page.evaluate(NO_SCROLL)
        box = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.clientWidth && "
            "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
        )
        assert box == []
        colors = page.evaluate(
            "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])"
        )
        bright = [sum(map(int, color[4:-1].split(","))) for color in colors]
        assert (bright[0] > bright[1]) == (scheme == "light")

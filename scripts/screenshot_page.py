"""Show the server's page at work: docs/page-light.png and docs/page-phone-dark.png.

    python scripts/screenshot_page.py [CHROMIUM]

Serves the embedded model and keeps it busy. Needs Chromium and the package playwright.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
LOOKS: dict[str, dict[str, Any]] = {
    "page-light.png": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "page-phone-dark.png": {"viewport": {"width": 360, "height": 1640}, "color_scheme": "dark"},
}
SERVE = "-m megatron_async serve --model tiny --inference-async-scheduling --max-requests 8"


def keep_busy(url: str, over: threading.Event, number: int) -> None:
    """Ask for texts, one after the other, with pauses."""
    asked = {"prompt": "def f(x):", "max_tokens": 60 + 50 * number, "ignore_eos": True}
    while not over.wait(0.3 * (number + 1)):
        httpx.post(f"{url}/v1/completions", json=asked, timeout=None)


def take(browser: Browser, url: str, name: str, look: dict[str, Any]) -> None:
    """One picture."""
    page = browser.new_page(**look)
    page.goto(url)
    page.wait_for_timeout(20_000)
    page.get_by_label("Message").fill("def add(a, b):")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("per second,").wait_for()
    page.screenshot(path=DOCS / name)


if __name__ == "__main__":
    command, over = [sys.executable, *SERVE.split(), "--port", "0"], threading.Event()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if "http://" in line)
        with ThreadPoolExecutor() as pool, sync_playwright() as playwright:
            loads = [pool.submit(keep_busy, url, over, number) for number in range(4)]
            path = [*sys.argv[1:], shutil.which("chromium")][0]
            browser = playwright.chromium.launch(executable_path=path)
            for name, look in LOOKS.items():
                take(browser, url, name, look)
            over.set()
            wait(loads)
        server.terminate()

"""A real browser: Debian's Chromium, without a window and without a network of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

GUARD_S = 60.0
CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
NEEDS_BROWSER = (
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="needs playwright (the extra `browser`)"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1400, dark: bool = False) -> Iterator[Page]:
    """A page in which nothing goes wrong: no error of its scripts, no word on the console, no request of its own."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", locale="en-GB"
    )
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on(
        "request", lambda request: problems.append(f"request: {request.url}") if not _ours(request.url, url) else None
    )
    try:
        page.goto(url)
        yield page
        assert not problems, "\n".join(problems)
    finally:
        context.close()


def wait_until(page: Page, script: str) -> None:
    """Wait until an expression is true; the page's own policy forbids Playwright to wait within it."""
    deadline = time.monotonic() + GUARD_S
    while not page.evaluate(script):
        assert time.monotonic() < deadline, script
        page.wait_for_timeout(50)


def _ours(asked: str, url: str) -> bool:
    return asked == url or (url.startswith("http") and asked.startswith(url.partition("?")[0]))

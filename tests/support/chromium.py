"""Drives a headless Chromium by playwright: loads a file offline, presses, taps and types, and reads the page back."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = 600  # px; a narrower window is a phone's, with touch


def binary() -> str | None:
    """Returns the path of an installed browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def running() -> "Iterator[Browser]":
    """A browser for a fixture, ended afterwards. Skips the tests where none is installed."""
    if not binary():
        pytest.skip("no chromium on PATH; install one to test the page in a browser")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=binary())
        yield Browser(chromium)
        chromium.close()


class Browser:
    """One page. ``problems`` collects console errors, exceptions and failed requests; ``requests`` all addresses."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self._pages: dict[tuple[bool, bool], Any] = {}
        self.page: Any = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Load ``address`` anew in a window of that size, offline, and wait until it has been read."""
        if self.page:
            self.page.goto("about:blank")  # of an address that differs after its "#" alone, nothing would be loaded
        self.problems.clear()
        self.page = self._page(touch=width < PHONE, scripts=scripts)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(media="screen", color_scheme="dark" if dark else "light")
        self.page.goto(address)

    def open_cell(self, address: str, cell: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a report with ``cell`` open."""
        self.open(f"{address}#cell-{cell}", width=width, dark=dark)
        self.wait(f"document.querySelector('.cell')?.dataset.cell === {json.dumps(cell)}")

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def text(self, selector: str) -> str:
        """The text of the first element that matches, as it is shown."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match, shown or not."""
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"))

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression is true."""
        # The page's policy forbids eval, which playwright's own way of waiting needs.
        for _ in range(round(seconds / 0.01)):
            if self.run(condition):
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"{condition} did not become true; {self.problems}")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        return self.page.evaluate(expression)

    def click(self, selector: str) -> None:
        """Press the left button in the middle of the first element that matches."""
        self.page.mouse.click(*self._middle(selector))

    def tap(self, selector: str) -> None:
        """Touch the middle of the first element that matches."""
        self.page.touchscreen.tap(*self._middle(selector))

    def hover(self, selector: str) -> None:
        """Move the pointer to the middle of the first element that matches."""
        self.page.mouse.move(*self._middle(selector))

    def press(self, key: str) -> None:
        """Press and release one key, such as ``/`` or ``ArrowDown``."""
        self.page.keyboard.press(key)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        self.page.screenshot(path=file, full_page=whole)

    def _page(self, *, touch: bool, scripts: bool) -> Any:
        """The window of this kind, which is kept, because a new one takes longer than reading an address."""
        if (touch, scripts) not in self._pages:
            context = self._chromium.new_context(
                offline=True, has_touch=touch, is_mobile=touch, java_script_enabled=scripts
            )
            page = self._pages[touch, scripts] = context.new_page()
            page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: self.problems.append(str(error)))
            page.on("request", lambda request: self.requests.append(request.url))
        return self._pages[touch, scripts]

    def _middle(self, selector: str) -> tuple[float, float]:
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        # The scroll's event comes with the next frame, and the page hides its read-outs then.
        self.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        box = self.run(f"{find}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

"""A real browser without a screen, for tests of the page; they are skipped where there is none."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

AXE = Path(__file__).parents[1] / "build/node_modules/axe-core/axe.min.js"
"""`make axe` puts it there."""
PHONE, DESKTOP = (390, 844), (1280, 900)


class Browser:
    """One tab."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": width < 500})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, link: str) -> None:
        self.driver.get("about:blank")  # else another fragment alone loads nothing
        self.driver.get(link)

    def run(self, script: str, *arguments: object) -> Any:
        """What a function body returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def wait(self, state: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not state():
            assert time.monotonic() < deadline_s, self.text("header") + self.text("main")
            time.sleep(0.1)

    def press(self, selector: str, *keys: str) -> None:
        self.run("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def touch(self, selector: str, *fingers: tuple[float, float], rise: float = 0.0) -> None:
        """Fingers go down in an element, each moves from one part of its width to another, and up.

        Meanwhile they `rise` so many pixels. The middle of the element must be in sight.
        """
        box = """const b = document.querySelector(arguments[0]).getBoundingClientRect();
            return [b.left, b.width, b.top + b.height / 2]"""
        left, width, y = self.run(box, selector)

        def send(kind: str, part: float) -> None:
            places = [left + width * (start + part * (stop - start)) for start, stop in fingers]
            points = [{"x": x, "y": y - part * rise, "id": n} for n, x in enumerate(places)]
            touches = {"type": kind, "touchPoints": points if kind != "touchEnd" else []}
            self.driver.execute_cdp_cmd("Input.dispatchTouchEvent", touches)

        send("touchStart", 0.0)
        for step in range(1, 11):
            send("touchMove", step / 10)
        send("touchEnd", 1.0)

    def complaints(self) -> list[str]:
        """Of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def axe(self) -> list[str]:
        """Rules of accessibility that the page breaks, each with where it does."""
        if not AXE.is_file():
            pytest.skip(f"{AXE} is missing: make axe")
        self.run(AXE.read_text(encoding="utf-8"))
        script = "axe.run().then(found => arguments[0](found.violations), e => arguments[0]([e]))"
        found = self.driver.execute_async_script(script)
        return [f"{v['id']}: {[node['target'] for node in v['nodes']][:3]}" for v in found]


@contextmanager
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    control = shutil.which("chromedriver")
    if program is None or control is None:
        pytest.skip("no chromium with chromedriver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(control))
    try:
        driver.set_script_timeout(PATIENCE_S)
        yield Browser(driver)
    finally:
        driver.quit()

"""A headless Chromium for the tests of the page; without one they say so and are skipped."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")


class Browser:
    """One window. ``open`` loads a page; what it logged and requested is kept."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, address: str = "", *, width: int = 1280, dark: bool = False) -> None:
        """Load a page and wait until it says that it is ready."""
        command = self.driver.execute_cdp_cmd
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        command("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")  # only then is a page with another #address loaded anew
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(f"file://{path}{address}")
        self.until("document.documentElement.dataset.ready === '1'")

    def js(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).innerText"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def complaints(self) -> list[str]:
        """What the page wrote to the console as a warning or an error."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """Every address that the page asked for, itself and data: left out."""
        import json

        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = message["params"]["request"]["url"]
                if not address.startswith("data:") and message["params"].get("type") != "Document":
                    found.append(address)
        return found

    def cells(self, column: str) -> list[str]:
        """The visible cells of a column of the sample table, from top to bottom."""
        rows = f"[...document.querySelectorAll('.tabulator-cell[tabulator-field={column}]')]"
        return list(self.js(f"{rows}.map((cell) => cell.innerText)"))


@pytest.fixture(scope="session")
def _driver() -> Iterator[Any]:
    missing = [name for name, there in (("Chromium", _CHROMIUM), ("chromedriver", _DRIVER)) if not there]
    if importlib.util.find_spec("selenium") is None:
        missing.append("selenium")
    if missing:
        pytest.skip(f"the page is tested in a browser; not installed: {', '.join(missing)}")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(_CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(_DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def browser(_driver: Any) -> Browser:
    return Browser(_driver)


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., Path]:
    """Write a run and its report; returns the page."""
    pytest.importorskip("jinja2")

    def write(*, sweep: str | None = None, **run: Any) -> Path:
        from slime_instrument._analysis.corrections import parse_sweep
        from slime_instrument._report.build import write_report

        from .dumps import write_run

        swept = parse_sweep(sweep) if sweep else None
        return write_report([write_run(tmp_path / "run", **run)], tmp_path / "report.html", sweep=swept).path

    return write

"""Chromium, driven by ChromeDriver over WebDriver's HTTP interface (W3C WebDriver)."""

import base64
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from evenkeel_moe.engines.demo.processes import ChildProcess, free_ports
from tests.waiting import deadline, wait_until

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ARROW_RIGHT, ARROW_DOWN, TAB, ESCAPE = "\ue007", "\ue014", "\ue015", "\ue004", "\ue00c"


class Browser:
    """One window. What the page logs as an error, and requests that fail, are kept."""

    def __init__(self, base: str) -> None:
        self._http = httpx.Client(base_url=base, timeout=deadline(60), trust_env=False)
        self._session = ""
        self.pid = 0
        self.logged: list[dict[str, Any]] = []

    def start(self, *, width: int = 1280, height: int = 900) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--disable-dev-shm-usage", f"--window-size={width},{height}"]
        # No call home: the console must work offline, and so must its tests.
        arguments += ["--disable-background-networking", "--disable-component-update"]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        body = {"capabilities": {"alwaysMatch": wanted}}
        answer = self._http.post("/session", json=body).json()["value"]
        assert "sessionId" in answer, answer
        self._session = answer["sessionId"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One command; the error of a failed one is raised."""
        answer = self._http.request(method, f"/session/{self._session}/{path}", json=body)
        value = answer.json()["value"]
        assert answer.is_success, value
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url: str) -> None:
        self.call("POST", "url", {"url": url})

    def script(self, code: str, *arguments: Any) -> Any:
        return self.call("POST", "execute/sync", {"script": code, "args": list(arguments)})

    def wait_script(self, code: str, *arguments: Any) -> Any:
        """Run code that calls its last argument when it is done."""
        self.call("POST", "timeouts", {"script": int(deadline(60) * 1000)})
        return self.call("POST", "execute/async", {"script": code, "args": list(arguments)})

    def find(self, selector: str) -> str | None:
        """The element's reference; None if there is none now."""
        found = self.call("POST", "elements", {"using": "css selector", "value": selector})
        return found[0][_ELEMENT] if found else None

    def wait(self, selector: str, within_s: float = 30) -> str:
        what = f"{selector} on {self.text('body')[:1500]!r}"
        return str(wait_until(lambda: self.find(selector), within_s=within_s, what=what))

    def wait_text(self, words: str, within_s: float = 30) -> None:
        def seen() -> bool:
            return words in self.text("body")

        wait_until(seen, within_s=within_s, every_s=0.3, what=f"the words {words!r}")

    def wait_gone(self, selector: str, within_s: float = 30) -> None:
        wait_until(lambda: self.find(selector) is None, within_s=within_s, what=f"no {selector}")

    def text(self, selector: str) -> str:
        code = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(self.script(code, selector))

    def click(self, selector: str) -> None:
        """Click an element once it is there; what is outside the window is scrolled to."""
        self.wait(selector)
        code = "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})"
        self.script(code, selector)
        element = self.find(selector)
        self.call("POST", f"element/{element}/click", {})

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"element/{self.wait(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self.call("POST", f"element/{self.wait(selector)}/clear", {})

    def keys(self, text: str) -> None:
        """Press keys on whatever has the focus."""
        presses = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]}
        self.call("POST", "actions", body)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, as a user's change."""
        self.wait(selector)
        code = """const [selector, value] = arguments, field = document.querySelector(selector);
            field.value = value; field.dispatchEvent(new Event("change", {bubbles: true}))"""
        self.script(code, selector, value)

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def picture(self, file: Path, *, whole: bool = False) -> None:
        parameters: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            parameters |= {"captureBeyondViewport": True, "clip": clip}
        shown = self.devtools("Page.captureScreenshot", **parameters)
        file.write_bytes(base64.b64decode(shown["data"]))

    def errors(self) -> list[str]:
        """Messages since the last call: exceptions, CSP violations, requests that failed."""
        rows = self.call("POST", "se/log", {"type": "browser"})
        return [row["message"] for row in rows if row["level"] == "SEVERE"]

    def requests(self) -> list[dict[str, Any]]:
        """Answers since the last call: {url, status, bytes}."""
        found = []
        for row in self.call("POST", "se/log", {"type": "performance"}):
            event = json.loads(row["message"])["message"]
            if event["method"] == "Network.responseReceived":
                response = event["params"]["response"]
                found.append({"url": response["url"], "status": response["status"]})
        return found

    def quit(self) -> None:
        self._http.delete(f"/session/{self._session}")
        self._http.close()


def answers(url: str) -> bool:
    """True if a server answers at a URL that it is well."""
    try:
        return bool(httpx.get(url, trust_env=False).is_success)
    except httpx.TransportError:
        return False


@contextmanager
def chromium(**size: int) -> Iterator[Browser]:
    """A browser with a profile of its own; both end with the block."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "driver.log"
        driver = ChildProcess([DRIVER, f"--port={port}"], log)
        try:
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/status"), within_s=30, what="chromedriver")
            browser = Browser(base)
            browser.start(**size)
            try:
                yield browser
            finally:
                browser.quit()
        finally:
            driver.stop()


def installed() -> bool:
    """True if Chromium and its driver are here."""
    return Path(CHROMIUM).exists() and Path(DRIVER).exists()

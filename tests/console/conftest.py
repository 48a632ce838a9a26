from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.browser import Browser, chromium, installed
from tests.console.fleet import ADMIN, NAME, Fleet, running_fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    if not installed():
        pytest.skip("chromium and chromedriver are not installed")
    with running_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Visitor:
    """A person at the console: the browser, the fleet, and where the page is."""

    def __init__(self, browser: Browser, fleet: Fleet) -> None:
        self.browser, self.fleet = browser, fleet

    def sign_in(self, token: str = ADMIN) -> None:
        self.browser.open(self.fleet.url)
        self.browser.script("sessionStorage.clear()")
        self.browser.open(f"{self.fleet.url}#/")
        self.browser.call("POST", "refresh", {})
        self.browser.type("#token", token)
        self.browser.click("form button[type=submit]")

    def go(self, *view: str) -> None:
        path = "/".join(["#", "d", NAME, *view]) if view else "#/"
        self.browser.script("location.hash = arguments[0]", path)

    def confirm(self, button: str) -> None:
        """Press a button and the one that confirms it, and wait for the dialog to close."""
        self.browser.click(f"#{button}")
        self.browser.click(f"#{button}-confirm")
        self.browser.wait_gone("dialog[open]")

    def open_plan(self, plan_id: str) -> None:
        self.go("plans", plan_id)
        self.browser.wait_text(plan_id)

    @property
    def folder(self) -> Path:
        return self.fleet.token_file.parent


@pytest.fixture
def visitor(window, fleet) -> Iterator[Visitor]:
    """A visitor with role admin. The page may log no error, unless a test took it."""
    window.size(1280, 900)
    window.scheme("light")
    visitor = Visitor(window, fleet)
    visitor.sign_in()
    window.wait_text("Fleet now")
    window.errors()
    yield visitor
    assert window.errors() == []

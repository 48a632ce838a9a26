"""Takes the pictures of docs/console.md from a running fleet: `make console-images`."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests.console.browser import Browser, chromium
from tests.console.fleet import NAME, OPERATE, Fleet, running_fleet
from tests.waiting import wait_until

FOLDER = Path(__file__).parents[2] / "docs" / "images"
_COLOURS = 256
"""Colours of a picture: a small file, and no difference that can be seen."""


def settled(browser: Browser) -> bool:
    """Return True if the page shows newest data; ask again what was not answered in time."""
    if browser.find(".problem[role=alert], .fresh.stale") is not None:
        browser.call("POST", "refresh", {})
        return False
    live = browser.text(".fresh") == "Live"
    return live and browser.find("[aria-busy=true]") is None


def take(browser: Browser, name: str) -> None:
    """Store what the window shows, with fewer colours."""
    file = FOLDER / f"console-{name}.png"
    browser.picture(file)
    with Image.open(file) as seen:
        few = seen.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


def committed(fleet: Fleet, plan_id: str) -> Callable[[], bool]:
    return lambda: fleet.get(f"/plans/{plan_id}")["phase"] == "committed"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder)) as fleet:
        plan = fleet.wait_proposal()
        with chromium() as browser:

            def show(view: str, words: str, width: int = 1280, height: int = 800) -> None:
                browser.size(width, height, phone=width < 500)
                browser.script(
                    "location.hash = arguments[0]", f"#/d/{NAME}/{view}" if view else "#/"
                )
                wait_until(
                    lambda: settled(browser) and words in browser.text("body"),
                    within_s=120,
                    every_s=2,
                    what=f"the words {words!r} on a live page",
                )

            browser.size(1280, 800)
            browser.scheme("light")
            browser.open(fleet.url)
            browser.type("#token", OPERATE)
            browser.click("form button[type=submit]")
            show("", "Look at the proposal", height=420)
            browser.wait(".fleet-row canvas")
            take(browser, "fleet")
            show("why", "What would change it")
            take(browser, "why")
            show(f"plans/{plan['plan_id']}", "Held by ranks")
            take(browser, "proposal")
            show("load", "With the moves of plan", height=1190)
            browser.wait("canvas.heatmap")
            browser.wait_text("copies between ranks")
            take(browser, "load")
            show(f"plans/{plan['plan_id']}", "Held by ranks")
            browser.click("#approve")
            browser.click("#approve-confirm")
            wait_until(committed(fleet, plan["plan_id"]), within_s=120, every_s=0.5)
            browser.scheme("dark")
            show(f"plans/{plan['plan_id']}", "All waves were carried out.")
            take(browser, "plan-dark")
            show("ranks", "4 of 4 connected", width=390, height=844)
            take(browser, "phone-dark")


if __name__ == "__main__":
    main()

"""Each view in Chromium, with the data of a running fleet."""

import re

import pytest

from tests.console.browser import ARROW_DOWN, ARROW_RIGHT, ENTER, ESCAPE, TAB
from tests.console.conftest import Visitor
from tests.console.fleet import NAME
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
VIEWS = {
    "why": (
        "What the planner waits for",
        "Gates",
        "Earlier proposals have been answered",
        "How cycles ended",
    ),
    "plans": ("Made because", "Promised", "keel"),
    "load": ("Load of ranks", "times the layer's mean", "Slots of one layer", "Most load"),
    "ranks": ("node-0", "node-1", "4 of 4 connected"),
    "record": ("propose", "Requests for changes", "A proposal expires after"),
}


def test_the_fleet_shows_its_deployment_with_its_newest_reason(visitor: Visitor):
    visitor.browser.wait_text(NAME)
    visitor.browser.wait_text("4 of 4 ranks")
    visitor.browser.wait_text("Newest decision")
    visitor.browser.wait(".fleet-row canvas")


@pytest.mark.parametrize("view", ["", "why"])
def test_the_key_names_only_lines_that_are_drawn(visitor: Visitor, view: str):
    assert visitor.fleet.get()["time_balance"] is None, "or time balance is drawn"
    visitor.go(*([view] if view else []))
    visitor.browser.wait(".key")
    key = visitor.browser.text(".key")
    assert "balancedness" in key
    assert "time balance" not in key


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_what_the_fleet_does(visitor: Visitor, view: str):
    visitor.fleet.wait_proposal()
    visitor.go(view)
    for words in VIEWS[view]:
        visitor.browser.wait_text(words)


CUT_OFF = """return [...document.querySelectorAll("header *, main *")]
    .filter((each) => !each.closest(".scroll, .tabs, .hidden, .skip, dialog"))
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => `${each.tagName} ${each.className} ${each.innerText}`)"""
HEIGHTS = """return ["header", ".page-head"].map(
    (one) => document.querySelector(one).offsetHeight)"""


@pytest.mark.parametrize("view", ["", *VIEWS])
def test_a_phone_shows_every_view_whole_under_heads_of_two_lines(visitor: Visitor, view: str):
    visitor.browser.size(390, 844, phone=True)
    visitor.go(*([view] if view else []))
    visitor.browser.wait("#health" if view else ".fleet-row")
    visitor.browser.wait_gone("[aria-busy=true]")
    visitor.browser.wait("#main .card")
    wide = visitor.browser.script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0
    assert visitor.browser.script(CUT_OFF) == []
    header, head = visitor.browser.script(HEIGHTS)
    assert header < 90 and head < 90, "three lines take more"


def test_capacity_gives_the_recommendation_in_words(visitor: Visitor):
    visitor.fleet.wait_proposal()  # The page asks once, so the window must hold enough by then.
    visitor.go("capacity")
    visitor.browser.wait_text("Extra replicas against KV cache", within_s=120)
    # One advice, or one for each case: what is measured decides.
    advice = re.compile(r"KV cache (does not limit|limits) the batch")
    assert advice.search(visitor.browser.text("body"))
    visitor.browser.wait_text("advised by MoE time")
    visitor.browser.wait_text("predicted MoE time (by tokens)")
    visitor.browser.wait_text("KV tokens then")
    assert "A plan was started" not in visitor.browser.text("body")


def test_a_proposal_shows_before_and_after_and_its_copies(visitor: Visitor):
    plan = visitor.fleet.wait_proposal()
    visitor.open_plan(plan["plan_id"])
    for words in ("Before and after", "94 % interval", "Copies between ranks", "Held by ranks"):
        visitor.browser.wait_text(words)
    rows = visitor.browser.script(
        "return document.querySelectorAll('[aria-label=Copies] tbody tr').length"
    )
    assert rows == min(plan["moves"], 50)


def test_a_reader_with_a_keyboard_alone_can_walk_the_heat_map(visitor: Visitor):
    visitor.go("load")
    visitor.browser.wait("canvas.heatmap")
    visitor.browser.script("document.querySelector('canvas.heatmap').focus()")
    before = visitor.browser.text(".readout")
    assert before.startswith("Layer 0, rank 0:")
    visitor.browser.keys(ARROW_RIGHT + ARROW_DOWN)
    wait_until(lambda: visitor.browser.text(".readout").startswith("Layer 1, rank 1:"))
    visitor.browser.keys(ENTER)
    wait_until(
        lambda: visitor.browser.script("return document.querySelector('#slot-layer')?.value") == "1"
    )


STOPS = """const all = document.querySelectorAll(
      "a[href], button:enabled, input:enabled, select, summary, [tabindex='0']");
    return [...all].filter((each) => each.checkVisibility() && !each.closest("dialog"))
      .filter((each) => each.type !== "radio" || each.checked)
      .map((each) => each.outerHTML.slice(0, 90))"""
FOCUSED = """const at = document.activeElement, next = at.nextElementSibling;
    const marked = (one) => one && getComputedStyle(one).outlineStyle !== "none";
    return [at.outerHTML.slice(0, 90), marked(at) || (at.type === "radio" && marked(next))]"""


@pytest.mark.parametrize("view", ["", *VIEWS, "capacity"])
def test_the_keyboard_reaches_all_of_a_view_and_the_focus_can_be_seen(visitor: Visitor, view: str):
    visitor.go(*([view] if view else []))
    visitor.browser.wait("#rollback" if view else ".fleet-row canvas")
    visitor.browser.wait("#main .card")
    wait_until(lambda: visitor.browser.find("[aria-busy=true]") is None, within_s=120)
    stops = visitor.browser.script(STOPS)
    visitor.browser.script("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(len(stops) + 6):
        visitor.browser.keys(TAB)
        element, marked = visitor.browser.script(FOCUSED)
        if not element.startswith("<body"):
            assert marked, element
            reached.append(element)
    # The page lives: a proposal may come or go while it is walked through.
    missed = [
        each for each in visitor.browser.script(STOPS) if each in stops and each not in reached
    ]
    assert not missed, missed


def test_escape_closes_a_dialog_and_the_focus_returns_to_its_button(visitor: Visitor):
    visitor.go("why")
    visitor.browser.wait("#pause")
    for button in ("pause", "rollback"):
        if visitor.browser.find(f"#{button}:disabled") is not None:
            continue
        visitor.browser.script("document.getElementById(arguments[0]).focus()", button)
        visitor.browser.keys(ENTER)
        visitor.browser.wait("dialog[open]")
        inside = "return Boolean(document.activeElement.closest('dialog'))"
        assert visitor.browser.script(inside)
        visitor.browser.keys(ESCAPE)
        visitor.browser.wait_gone("dialog[open]")
        assert visitor.browser.script("return document.activeElement.id") == button


def test_a_phone_shows_the_tab_of_the_open_view(visitor: Visitor):
    visitor.browser.size(390, 844, phone=True)
    visitor.go("record")
    edges = """const tab = document.querySelector(".tabs [aria-current]").getBoundingClientRect();
        return [document.querySelector(".tabs [aria-current]").innerText, tab.left, tab.right]"""
    visitor.browser.wait(".tabs [href$=record][aria-current]")

    def seen() -> bool:
        words, left, right = visitor.browser.script(edges)
        return words == "Policy and record" and left >= 0 and right <= 390

    wait_until(seen, what="the tab inside the window")


def test_every_request_goes_to_the_controller_and_unchanged_answers_are_304(visitor: Visitor):
    visitor.go("record")
    visitor.browser.wait_text("Requests for changes")
    visitor.browser.requests()

    def repeated() -> bool:
        answers = visitor.browser.requests()
        assert all(row["url"].startswith(visitor.fleet.url) for row in answers), answers
        return any(row["status"] == 304 for row in answers)

    wait_until(repeated, within_s=60, every_s=1, what="a 304")

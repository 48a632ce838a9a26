"""The page with answers that a test chooses: of another leader, late, changed meanwhile, none."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator

import pytest

from evenkeel_moe.adapters.http_servers import RestServer
from evenkeel_moe.api import TokenSet, create_app
from evenkeel_moe.controller.policy_document import policy_document
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.ports.operations import LedElsewhere, NotLeading
from tests.api.fakes import (
    FakeOperations,
    make_operations,
    make_plan,
    make_rank,
)
from tests.console.browser import ESCAPE, Browser, chromium, installed
from tests.console.fleet import OPERATE, TOKENS
from tests.waiting import deadline, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


class Replica:
    """The REST application of a replica, in a thread; its operations can be changed at any time."""

    def __init__(self) -> None:
        self.operations: FakeOperations = make_operations()
        self.operations.document = policy_document(DeploymentPolicy())
        self._server = RestServer("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.port}/"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        app = create_app(self.operations, TokenSet.parse(TOKENS))
        self._loop.run_until_complete(self._server.run(app))
        self._loop.close()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join(deadline(20))
            assert not self._thread.is_alive()


@pytest.fixture
def replica() -> Iterator[Replica]:
    running = Replica()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def browser() -> Iterator[Browser]:
    if not installed():
        pytest.skip("chromium and chromedriver are not installed")
    with chromium() as window:
        yield window


def sign_in(browser: Browser, replica: Replica) -> None:
    browser.open(replica.url)
    browser.type("#token", OPERATE)
    browser.click("form button[type=submit]")
    browser.wait_text("Fleet now")
    browser.wait_text("demo")


LOST = "neither this controller nor another replica holds its lease"


def test_the_page_names_the_replica_that_leads(replica: Replica, browser: Browser):
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/ranks'")
    browser.wait_text("2 of 2 connected")
    led = LedElsewhere(DeploymentId("demo"), "keel-1", "10.0.0.7:50051")
    replica.operations.error = NotLeading(led)
    replica.operations.views.pop("demo")
    replica.operations.elsewhere = [led]
    browser.wait_text("Replica keel-1 at 10.0.0.7:50051 leads demo, and this is another replica.")
    browser.wait_text("Not live: the newest answer came")
    browser.wait_text("2 of 2 connected")
    browser.script("location.hash = '#/'")
    browser.wait_text("Replica keel-1 leads it; ask that replica.")
    assert all("503" in message for message in browser.errors())


@pytest.mark.fault("an operator at a replica that does not lead", "saw no balance of the past")
def test_a_replica_that_does_not_lead_draws_the_balance_of_the_past(
    replica: Replica, browser: Browser
):
    def decide(balance: float) -> str:
        """Keep three decisions, and return the selector of their chart."""
        decided = {"reason": "no_change", "numbers": {"balancedness_mean": balance}}
        now = time.time()
        replica.operations.decided = [{"at": now - n, "plan_id": None, **decided} for n in range(3)]
        return f"[data-deployment=demo] .chart[aria-label$='balancedness {balance}.'] canvas"

    demo = decide(0.625)
    sign_in(browser, replica)
    browser.wait(demo)
    replica.operations.views.pop("demo")
    replica.operations.elsewhere = [LedElsewhere(DeploymentId("demo"), None, None)]
    browser.wait_text(LOST)
    assert browser.find(demo) is not None
    browser.call("POST", "refresh", {})
    browser.wait(demo)
    browser.wait(decide(0.875))


def test_a_gain_by_tokens_does_not_claim_time(replica: Replica, browser: Browser):
    records = [make_plan("tokens"), make_plan("time")]
    records[1].plan.numbers.update(time_balance=0.9)
    replica.operations.records["demo"] = records
    sign_in(browser, replica)

    def shows(plan_id: str, title: str) -> None:
        browser.script("location.hash = arguments[0]", f"#/d/demo/plans/{plan_id}")
        wait_until(lambda: browser.text(".pairs").startswith(f"{title}\n"), what=title)

    shows("tokens", "Predicted MoE time (by tokens)")
    shows("time", "Predicted MoE time")


def test_load_that_no_rank_reports_any_more_is_not_shown_as_current(
    replica: Replica, browser: Browser
):
    def show(*, fresh: bool, age_s: float) -> None:
        ranks = tuple(make_rank(rank, fresh=fresh) for rank in range(2))
        replica.operations.show(ranks=ranks, newest_step_unix=time.time() - age_s)

    show(fresh=True, age_s=2)
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/load'")
    browser.wait_text("Now, last reported")
    assert browser.find(".notice") is None
    show(fresh=False, age_s=240)
    browser.wait_text("This is the past: last reported 4 min")
    browser.wait_text("no rank is connected.")
    assert "Now, " not in browser.text(".slider")
    browser.wait("canvas.heatmap")


def test_load_is_that_of_the_present_placement_also_without_new_steps(
    replica: Replica, browser: Browser
):
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/load'")
    browser.wait_text("0\t0\t1.13")
    replica.operations.views["demo"].placed = make_plan().plan.target
    browser.wait_text("0\t0\t1.50")


MANY = """const real = window.fetch, later = window.setTimeout;
    window.step = 0;
    window.setTimeout = (call, ms) => later(call, ms / 100);
    window.fetch = async (url, options) => {
      if (!String(url).includes("heatmap")) return real(url, options);
      const answer = await real(url, {...options, headers: {Authorization:
        options.headers.Authorization}});
      return new Response(JSON.stringify({...await answer.json(), newest_step: ++window.step}));
    }"""
CHOOSE = """const moment = document.querySelector("#moment"); moment.value = arguments[0];
    moment.dispatchEvent(new Event("input", {bubbles: true}))"""


def test_a_chosen_moment_stays_until_it_is_forgotten_or_the_phase_changes(
    replica: Replica, browser: Browser
):
    def seen(step: int) -> None:
        wait_until(lambda: browser.script("return window.step") >= step, what=f"step {step}")

    sign_in(browser, replica)
    browser.script(MANY)
    browser.script("location.hash = '#/d/demo/load'")
    browser.wait("#moment")
    seen(110)
    browser.script(CHOOSE, 99)
    browser.wait_text(" ago: ")
    (chosen,) = re.findall(r"up to step \d+\.", browser.text(".slider"))
    seen(browser.script("return window.step") + 30)
    assert chosen in browser.text(".slider")
    browser.script(CHOOSE, 2)
    browser.click("input[name=phase][value=decode]")
    seen(browser.script("return window.step") + 10)
    assert "Now, " in browser.text(".slider")


def test_figures_of_a_group_that_lost_a_rank_are_last_known(replica: Replica, browser: Browser):
    ranks = (make_rank(0), make_rank(1, fresh=False))
    decision = {"at": time.time(), "reason": "ranks_missing", "plan_id": None, "numbers": {}}
    replica.operations.show(ranks=ranks, last_decision=decision)
    sign_in(browser, replica)
    browser.wait_text("so the present load is unknown")
    browser.wait_text("Last known, while all ranks were connected.")
    assert browser.text(".fleet").count("Last known") == 1, "the other group is whole"
    browser.script("location.hash = '#/d/demo/ranks'")
    browser.wait_text("time balance 0.700 (last known); balancedness 0.800 (last known); ")
    cells = """return [...document.querySelectorAll("main table")[0].querySelectorAll("tbody tr")]
        .map((row) => [...row.querySelectorAll("td")].map((cell) => cell.innerText))"""
    alive, lost = browser.script(cells)
    past = "last known"
    # Load / mean, time / median (unknown), time per token, free memory
    assert [past in cell for cell in alive[-4:]] == [True, False, False, False]
    assert [past in cell for cell in lost[-4:]] == [True, False, True, True]


def test_a_rollback_goes_to_the_epoch_that_its_dialog_named(replica: Replica, browser: Browser):
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/why'")
    browser.click("#rollback")
    named = "from epoch 3 to the placement of epoch 2"
    browser.wait_text(named)
    replica.operations.show(epoch=4, rollback_epoch=3)
    browser.wait_text("State ready; epoch 4;")
    assert named in browser.text("dialog[open]")
    browser.click("#rollback-confirm")
    browser.wait_gone("dialog[open]")
    assert ("rollback", "demo", 2, "operator") in replica.operations.calls


def test_a_refusal_is_told_in_its_dialog_also_if_closed(replica: Replica, browser: Browser):
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/why'")
    browser.click("#pause")
    browser.script("""const real = window.fetch; window.fetch = (url, options) =>
        options.method === "GET" ? real(url, options) : new Promise((done) => (window.answer =
          () => done(new Response('{"title": "Conflict", "detail": "no"}', {status: 409}))))""")
    browser.click("#pause-confirm")
    browser.wait_text("Sending…")
    assert browser.find("dialog[open] .buttons button:enabled") is None
    browser.keys(ESCAPE)
    browser.wait_gone("dialog[open]")
    browser.click("#pause")
    browser.wait("dialog[open] #pause-confirm:disabled")
    browser.keys(ESCAPE)
    browser.wait_gone("dialog[open]")
    browser.script("window.answer()")
    browser.wait("dialog[open]")
    browser.wait_text("Conflict: no.")
    browser.keys(ESCAPE)
    browser.wait_gone("dialog[open]")


REFUSE = """const real = window.fetch;
    window.fetch = (url, options) => window.answers || !/decisions|placement/.test(url)
      ? real(url, options) : Promise.resolve(new Response('{"detail": "busy"}', {status: 503}))"""


@pytest.mark.parametrize(
    ("view", "early", "then"),
    [
        ("", "The last hour has no decision.", "The last hour has no decision."),
        ("d/demo/why", "There is none.", "No decision has a balance yet."),
        ("d/demo/load", "The placement is not known.", "Each box is a slot"),
        ("d/demo/plans/p-1", "Single copies", "Each box is a slot"),
    ],
)
def test_what_is_asked_for_once_is_asked_for_until_it_is_answered(
    replica: Replica, browser: Browser, view, early, then
):
    replica.operations.records["demo"] = [make_plan()]
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/record'")
    browser.wait_text("Requests for changes")
    browser.script(REFUSE)
    browser.script("location.hash = arguments[0]", f"#/{view}")
    browser.wait_text("Busy.")
    assert early not in browser.text("main")
    browser.script("window.answers = true")
    browser.wait_text(then)


def test_a_page_that_was_hidden_asks_for_what_it_needs_once_it_is_shown(
    replica: Replica, browser: Browser
):
    replica.operations.records["demo"] = [make_plan()]
    replica.operations.show(proposals=(make_plan(),))
    sign_in(browser, replica)
    browser.script("location.hash = '#/d/demo/why'")
    browser.wait_text("State ready")
    browser.script('Object.defineProperty(document, "hidden", {get: () => !window.visible})')
    browser.script("location.hash = '#/d/demo/load'")
    browser.wait_text("Slots of one layer")
    browser.script("window.visible = true; document.dispatchEvent(new Event('visibilitychange'))")
    browser.wait_text("With the moves of plan p-1")


def test_an_answer_that_takes_too_long_is_told_with_its_seconds(replica: Replica, browser: Browser):
    sign_in(browser, replica)
    # The time is over at once, and the answer does not come.
    browser.script("""AbortSignal.timeout = () => AbortSignal.abort(
        new DOMException("signal timed out", "TimeoutError"))""")
    browser.wait_text("The controller has not answered within 20 s. It may be busy.")
    browser.wait_text("Not live: the newest answer came")


def test_the_page_keeps_the_last_answer_and_says_how_old_it_is(replica: Replica, browser: Browser):
    sign_in(browser, replica)
    assert browser.errors() == []
    replica.stop()
    browser.wait_text("The controller does not answer.")
    browser.wait_text("Not live: the newest answer came")
    assert "demo" in browser.text(".fleet")
    assert all("ERR_CONNECTION" in message for message in browser.errors())

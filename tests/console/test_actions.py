"""Every button end to end, and what the page does when the API refuses or does not answer."""

import pytest

from tests.console.conftest import Visitor
from tests.console.fleet import ADMIN, NAME, OPERATE, READ
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def phase_of(visitor: Visitor, plan_id: str) -> str:
    return str(visitor.fleet.get(f"/plans/{plan_id}")["phase"])


def wait_phase(visitor: Visitor, plan_id: str, *phases: str) -> None:
    wait_until(
        lambda: phase_of(visitor, plan_id) in phases,
        within_s=90,
        every_s=0.5,
        what=" or ".join(phases),
    )


def settle(visitor: Visitor) -> None:
    """Wait until no plan is under way."""
    wait_until(lambda: visitor.fleet.get()["active_plan"] is None, within_s=90, every_s=0.5)


def test_a_proposal_is_rejected(visitor: Visitor):
    plan = visitor.fleet.wait_proposal()
    visitor.open_plan(plan["plan_id"])
    assert visitor.browser.find("#cancel") is None
    visitor.browser.click("#reject")
    visitor.browser.wait_text("Pause, or mode observe, stops that.")
    visitor.browser.click("#reject-confirm")
    visitor.browser.wait_gone("dialog[open]")
    wait_phase(visitor, plan["plan_id"], "cancelled")
    visitor.browser.wait_text("An operator rejected it. Nothing has moved.")


def test_a_plan_is_cancelled_under_way(visitor: Visitor):
    settle(visitor)
    plan = visitor.fleet.wait_proposal()
    visitor.open_plan(plan["plan_id"])
    visitor.confirm("approve")
    visitor.browser.wait("#cancel")
    visitor.browser.wait_text("Ranks now")
    visitor.confirm("cancel")
    wait_phase(visitor, plan["plan_id"], "cancelled", "committed")
    visitor.browser.wait_text("Cancellation requested")


def test_a_plan_is_approved_carried_out_and_rolled_back(visitor: Visitor):
    settle(visitor)
    plan = visitor.fleet.wait_proposal()
    before = visitor.fleet.get()["epoch"]
    visitor.open_plan(plan["plan_id"])
    visitor.confirm("approve")
    wait_phase(visitor, plan["plan_id"], "committed")
    visitor.browser.wait_text("All waves were carried out.")
    visitor.browser.wait_text("Timeline")
    took = [row["ranks"] for row in visitor.fleet.get(f"/plans/{plan['plan_id']}")["story"][2:3]]
    assert [rank["rank"] for rank in took[0]] == [0, 1, 2, 3]
    visitor.browser.wait_text("Ranks in wave 1")
    visitor.browser.wait_text("Rank 3\nvoted after")
    assert "No swap was measured here yet" not in visitor.browser.text("main"), "its own were"
    assert visitor.fleet.get(f"/plans/{plan['plan_id']}")["approved_by"] == "owner"
    assert visitor.fleet.get()["epoch"] > before
    visitor.browser.click("#rollback")
    visitor.browser.wait_text(
        f"to the placement of epoch {plan['base_epoch']}, which was there before plan"
        f" {plan['plan_id']} (made "
    )
    visitor.browser.wait_text("In mode propose proposals are still made")
    told = visitor.fleet.get("/rollback")
    assert told["to_epoch"] == plan["base_epoch"] and told["moves"] > 0
    visitor.browser.wait_text(f"Copies between ranks\n{told['moves']}\n")
    assert told["expected_stall_s"] is not None, "the swaps of the plan were measured"
    visitor.browser.wait_text("of one step for each wave")
    visitor.browser.click("#rollback-confirm")
    visitor.browser.wait_gone("dialog[open]", within_s=60)
    assert visitor.browser.find("#resume") is not None
    assert visitor.fleet.get()["held"]
    visitor.browser.wait_text("rollback")
    settle(visitor)
    visitor.browser.wait_text("automatic plans held")
    visitor.browser.wait_text("Effect")
    visitor.confirm("resume")
    wait_until(lambda: not visitor.fleet.get()["held"])
    visitor.browser.wait_gone("#resume")


def test_a_deployment_is_paused_and_resumed(visitor: Visitor):
    visitor.go("why")
    visitor.browser.click("#pause")
    visitor.browser.choose("#pause-seconds", "600")
    visitor.browser.click("#pause-confirm")
    visitor.browser.wait_text("paused, ends in")
    assert visitor.fleet.get()["frozen_until_unix"]
    visitor.browser.wait_text("An operator paused this deployment")
    visitor.confirm("resume")
    wait_until(lambda: visitor.fleet.get()["frozen_until_unix"] is None)
    visitor.browser.wait("#pause")


LATE = """const real = window.fetch, [name, wait] = arguments;
    window.fetch = async (url, options) => {
      const answer = await real(url, options);
      if (window.late || options.method !== "GET" || !String(url).endsWith(`/${name}`))
        return answer;
      window.late = "waits";
      await new Promise((done) => setTimeout(done, wait));
      window.late = "came";
      return answer;
    };
    setInterval(() => (window.lost ||= window.seen && !document.querySelector("#resume")), 20);"""


def test_an_older_answer_takes_back_nothing_that_an_action_showed(visitor: Visitor):
    visitor.go("why")
    visitor.browser.wait("#pause")
    visitor.browser.script(LATE, NAME, 8000)
    wait_until(lambda: visitor.browser.script("return window.late") == "waits")
    visitor.confirm("pause")
    assert visitor.browser.find("#resume") is not None
    assert visitor.browser.script("window.seen = true; return window.late") == "waits"
    wait_until(lambda: visitor.browser.script("return window.late") == "came", within_s=30)
    visitor.browser.wait_script("setTimeout(arguments[0], 1000)")
    assert not visitor.browser.script("return window.lost")
    visitor.confirm("resume")


def test_the_policy_is_changed_and_recorded(visitor: Visitor):
    visitor.go("record")
    visitor.browser.click("#policy")
    visitor.browser.wait_text("Nothing is changed yet.")
    assert visitor.browser.find("#policy-confirm:disabled") is not None
    visitor.browser.wait_text("with evenkeel policy")
    visitor.browser.choose("dialog select[name=mode]", "observe")
    visitor.browser.wait_text('{"mode":"observe"}')
    assert visitor.browser.find("#policy-confirm:disabled") is None
    visitor.browser.click("#policy-confirm")
    visitor.browser.wait_gone("dialog[open]")
    wait_until(lambda: visitor.fleet.get("/policy")["mode"] == "observe")
    visitor.browser.wait_text("PATCH /policy")
    visitor.browser.wait_text("Change the policy: mode=observe")
    visitor.browser.click("#policy")
    visitor.browser.choose("dialog select[name=mode]", "propose")
    visitor.browser.click("#policy-confirm")
    visitor.browser.wait_gone("dialog[open]")
    wait_until(lambda: visitor.fleet.get("/policy")["mode"] == "propose")


def test_a_value_that_the_controller_refuses_is_told_in_the_dialog(visitor: Visitor):
    visitor.go("record")
    visitor.browser.click("#policy")
    visitor.browser.clear("input[name=cycle_s]")
    visitor.browser.type("input[name=cycle_s]", "-1")
    visitor.browser.click("#policy-confirm")
    visitor.browser.wait_text("cycle_s: Input should be greater than 0; it is -1")
    assert any("422" in message for message in visitor.browser.errors())


def test_a_proposal_is_asked_for(visitor: Visitor):
    settle(visitor)
    visitor.go("plans")
    visitor.browser.click("#propose")
    visitor.browser.click("#propose-confirm")
    visitor.browser.wait_text("It waits for approval. Nothing has moved.", within_s=60)
    visitor.browser.wait_text("An operator asked for this plan.")
    visitor.confirm("reject")


def test_the_role_decides_which_buttons_there_are(visitor: Visitor):
    plan = visitor.fleet.wait_proposal()
    visitor.sign_in(READ)
    visitor.browser.wait_text("role read")
    visitor.open_plan(plan["plan_id"])
    for button in ("approve", "reject", "cancel", "pause", "rollback"):
        assert visitor.browser.find(f"#{button}") is None
    visitor.sign_in(OPERATE)
    visitor.browser.wait_text("role operate")
    visitor.go("record")
    visitor.browser.click("#policy")
    assert visitor.browser.find("input[name=plan_below]") is not None
    assert visitor.browser.find("input[name=max_moves]") is None
    visitor.browser.wait("#pause")


def test_a_wrong_token_is_refused_and_asked_for_again(visitor: Visitor):
    visitor.sign_in("wrong-token-0123456789")
    visitor.browser.wait_text("The token is not accepted.")
    assert visitor.browser.find("#token") is not None
    assert any("401" in message for message in visitor.browser.errors())


def test_a_revoked_token_ends_the_session(visitor: Visitor):
    visitor.browser.wait_text(NAME)
    tokens = visitor.fleet.token_file.read_text()
    try:
        visitor.fleet.token_file.write_text(tokens.replace(ADMIN, "another-token-0123456789"))
        visitor.browser.wait_text("The token is not accepted.", within_s=60)
        assert visitor.browser.script("return sessionStorage.length") == 0
        assert NAME not in visitor.browser.text("body")
    finally:
        visitor.fleet.token_file.write_text(tokens)
    assert all("401" in message for message in visitor.browser.errors())


def test_the_token_is_nowhere_but_in_the_session(visitor: Visitor):
    held = visitor.browser.script(
        "return [sessionStorage.getItem('evenkeel-token'), document.cookie, localStorage.length]"
    )
    assert held == [ADMIN, "", 0]
    assert ADMIN not in visitor.browser.script("return document.documentElement.outerHTML")


def test_inline_script_and_eval_are_blocked(visitor: Visitor):
    code = """const done = arguments[0], found = [];
        document.addEventListener("securitypolicyviolation",
          (event) => found.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.injected = 1"; document.body.append(script);
        const style = document.createElement("style");
        style.textContent = "body{display:none}"; document.body.append(style);
        const frame = document.createElement("img");
        frame.src = "http://127.0.0.2:9/x.png"; document.body.append(frame);
        setTimeout(() => done([window.injected ?? null, found]), 500)"""
    injected, blocked = visitor.browser.wait_script(code)
    assert injected is None
    assert {"script-src-elem", "style-src-elem", "img-src"} <= set(blocked)
    assert visitor.browser.errors()

import json
import re
import time
from dataclasses import replace

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.finding import Finding, FindingCode, Severity
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.ports.operations import LedElsewhere
from evenkeel_moe.ports.status import ResizeStatus
from tests.api.fakes import NOW, make_plan, make_rank
from tests.planning.signals.test_live_findings import LOST


def test_status_lists_deployments(run):
    code, out, _ = run("status")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["DEPLOYMENT", "STATE", "MODE", "EPOCH"]
    assert lines[1].split()[0] == "demo"
    assert "0.800" in lines[1]
    assert lines[2].split()[0] == "fresh"
    assert " - " in lines[2]


def test_status_of_one_shows_its_ranks(run):
    code, out, _ = run("status", "demo")
    assert code == 0
    assert "2 layers x 4 experts" in out
    assert "4 kB" not in out
    wide = run("status", "demo", "-o", "wide")[1]
    row = next(line for line in wide.splitlines() if "node-0" in line)
    assert row.split() == "0 node-0 yes".split() + row.split()[3:]
    for shown in ("50.0%", "1 µs", "10 kB", "4 kB"):
        assert shown in row


def test_json_has_every_figure_of_a_view(run):
    answer = json.loads(run("status", "demo", "-o", "json")[1])
    assert (answer["ranks"][0]["free_bytes"], answer["epoch"]) == (10_000, 3)
    answer = json.loads(run("heatmap", "-d", "demo", "-o", "json")[1])
    assert len(answer["ranks"]) == len(answer["experts"]) == answer["num_layers"]


def test_a_rank_outside_of_waves_is_named_with_its_reason(run, operations):
    operations.show(ranks=(make_rank(0), make_rank(1, trouble="the worker has ended")))
    assert "rank 1 does not take part in waves: the worker has ended" in run("status", "demo")[1]
    ranks = json.loads(run("status", "demo", "-o", "json")[1])["ranks"]
    assert [rank["trouble"] for rank in ranks] == ["", "the worker has ended"]


def test_a_rank_without_a_stream_has_no_epoch_and_does_not_count_as_alive(run, operations):
    operations.show(ranks=(make_rank(0), make_rank(1, epoch=None)))
    out = run("status", "demo")[1]
    rows = [line for line in out.splitlines() if "node-0" in line]
    assert [re.split(" {2,}", row.strip())[2] for row in rows] == ["yes", "disconnected"]
    wide = run("status", "demo", "-o", "wide")[1]
    assert re.search(r"disconnected +.* ago +- +idle", wide)
    words = "disconnected: the rank has lost its connection to the controller"
    assert words in out
    operations.show(ranks=(make_rank(0),))
    assert words not in run("status", "demo")[1]


def test_a_dispatcher_that_disagrees_is_shown(run, operations):
    warning = "The policy sets dispatch 'optimal', the ranks report 'even'."
    operations.show(dispatch="optimal", dispatch_warning=warning)
    out = run("status", "demo")[1]
    assert "optimal" in out and warning in out


@LOST
def test_what_is_wrong_with_the_counts_is_shown(run, operations):
    doubt = Finding(
        FindingCode.IDLE_EXPERTS, Severity.DOUBT, "experts never count", "rank 1", "6 of 16", "Look"
    )
    noted = Finding(FindingCode.UNEVEN_LAYERS, Severity.NOTE, "layers disagree")
    operations.show(findings=(doubt, noted))
    out = run("status", "demo")[1]
    assert "Doubt: experts never count: rank 1, 6 of 16. Look." in out
    assert "Note: layers disagree" in out
    for unknown in (None, ()):
        operations.show(findings=unknown)
        assert not {"Doubt", "Note:"} & set(run("status", "demo")[1].split())


def test_resume_says_what_it_ended(run, operations):
    view = operations.views["demo"]
    for until, words in ((4e9, "; they were paused\n"), (1.0, "neither paused nor held")):
        view.shown = replace(view.status(), frozen_until_unix=until)
        assert words in run("resume", "-d", "demo")[1]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("auto", "automatic plans may start again"),
        ("propose", "in mode propose each plan waits for approval"),
        ("observe", "in mode observe the controller starts and proposes none"),
    ],
)
def test_resume_says_what_follows_in_each_mode(run, operations, mode, words):
    operations.show(mode=mode, held=True, held_because=Reason.HELD_AFTER_ROLLBACK)
    assert f"{words}; they were held (held_after_rollback)" in run("resume", "-d", "demo")[1]


def test_ranks_retire_and_a_caller_may_wait_until_they_may_leave(run, operations):
    assert run("resize", "-d", "demo")[:2] == (0, "demo: No rank retires.\n")
    assert run("resize", "-d", "demo", "--wait", "5m")[0] == 0, "nothing to wait for"
    code, out, _ = run("resize", "-d", "demo", "--to-ranks", "1", "--yes")
    words = "Ranks 1 of 2 retire; 3 experts live on them alone."
    assert (code, out) == (0, f"demo: {words}\n")
    assert operations.calls[-1][2].to_ranks == 1
    assert words in run("status", "demo")[1] and "resizing" in run("status")[1]
    code, _, err = run("resize", "-d", "demo", "--wait", "1s")
    assert (code, words in err) == (1, True)
    view = operations.views["demo"]
    view.shown = replace(view.status(), resize=ResizeStatus((1,), 2, 1, 0, True, "evacuate"))
    code, out, _ = run("resize", "-d", "demo", "--wait", "1s")
    assert (code, "Ranks 1 of 2 are ready to retire" in out) == (0, True)
    assert "a retirement of ranks was under way" in run("resume", "-d", "demo")[1]


def test_operating_commands(run, operations):
    assert run("plan", "rollback", "-d", "demo", "--yes", "--to-epoch", "2")[0] == 0
    code, out, _ = run("pause", "-d", "demo", "--for", "1m")
    assert (code, "no new plan starts for 60 s" in out) == (0, True)
    assert "`evenkeel resume -d demo` ends it earlier" in out
    assert "no new plan starts for 7 d" in run("pause", "-d", "demo")[1]
    said = "demo: plans were neither paused nor held; the mode is auto\n"
    assert run("resume", "-d", "demo")[1] == said
    assert operations.calls == [
        ("rollback", "demo", 2, "alice"),
        ("freeze", "demo", 60.0, "alice"),
        ("freeze", "demo", 7 * 86400.0, "alice"),
        ("resume", "demo", "alice"),
    ]
    assert run("policy", "set", "-d", "demo", "mode=observe", "cycle_s=30")[0] == 0
    assert operations.document["cycle_s"] == 30
    run("policy", "set", "policy_options.gem.restarts=8", "-d", "demo")
    assert operations.document["policy_options"] == {"gem": {"restarts": 8}}
    words = "no_change: The best placement found is the present one."
    assert words in run("decisions", "-n", "3", "-d", "demo")[1]


def test_a_change_of_the_policy_prints_only_what_changed(run, operations):
    document = {"mode": "auto", "cycle_s": 30.0, "policy_options": {}, "thresholds": {"a": 1.5}}
    operations.document = document
    words = ("mode=observe", "thresholds.a=2.5", "cycle_s=30", "policy_options.gem.restarts=8")
    code, out, err = run("policy", "set", "-d", "demo", *words)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "mode: auto -> observe",
        'policy_options.gem: null -> {"restarts": 8}',
        "thresholds.a: 1.5 -> 2.5",
    ]
    assert run("policy", "set", "-d", "demo", "mode=observe") == (0, "nothing changed\n", "")
    answer = run("policy", "set", "-d", "demo", "mode=observe", "-o", "json")[1]
    assert json.loads(answer) == operations.document
    assert "thresholds.a" in run("policy", "get", "-d", "demo")[1]


def test_a_revision_that_was_read_is_changed_or_none(run, operations):
    shown = json.loads(run("policy", "get", "-d", "demo", "-o", "json")[1])
    revision = shown.pop("revision")
    assert shown == operations.document
    assert re.search(rf"^revision +\"{revision}\"$", run("policy", "get", "-d", "demo")[1], re.M)
    change = ("policy", "set", "-d", "demo", "--revision", revision)
    assert run(*change, "cycle_s=40")[0] == 0
    code, out, err = run(*change, "cycle_s=50")
    assert (code, out, operations.document["cycle_s"]) == (1, "", 40)
    assert "The document has changed since it was read" in err


def test_before_the_first_cycle_decisions_say_when_it_comes(run, operations):
    async def none(*_):
        return []

    operations.decisions = none
    operations.document["cycle_s"] = 2.0
    begins = "demo: no cycle has run yet; the first "
    assert run("decisions", "-d", "demo")[1] == f"{begins}is due within 2 s\n"
    operations.show(state="waiting_for_ranks", reason="ranks_missing")
    out = run("decisions", "-d", "demo")[1]
    state = "waiting_for_ranks (ranks_missing): Not all ranks are connected, so the present"
    assert out.startswith(f"{begins}comes when its state is ready; now it is {state}")
    assert json.loads(run("decisions", "-d", "demo", "-o", "json")[1]) == []


def test_a_running_plan_is_shown(run, operations):
    operations.show(active_plan=make_plan("busy"))
    assert "busy" in run("status", "-o", "wide")[1]
    assert "busy" in run("status", "demo")[1]


def test_what_waits_for_an_operator_is_shown(run, operations):
    def proposed(name):
        record = make_plan(name, phase=PlanPhase.PROPOSED)
        return replace(record, plan=replace(record.plan, expires_at=time.time() + 3600))

    show = operations.show
    show(proposals=(proposed("first"),), mode="propose", held=True, frozen_until_unix=NOW)
    row = run("status")[1].splitlines()[1]
    assert "propose, paused, held" in row and "1 proposed" in row
    show(proposals=(proposed("first"), proposed("second")))
    assert "2 proposed" in run("status")[1]
    words = run("status", "demo")[1]
    assert re.search(
        r"waiting +first proposed: 1 copy, expires in \S+ \w+ *\n +second proposed", words
    )
    show()
    assert re.search(r"waiting +none", run("status", "demo")[1])


def test_a_waiting_proposal_is_visible_at_80_columns(run, operations, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record = make_plan("automatic-0-0bc37c751748", phase=PlanPhase.PROPOSED)
    operations.views.clear()
    operations.show("reference", proposals=(record,), mode="propose", reason="recovered")
    head, row = run("status")[1].splitlines()[:2]
    assert {"MODE", "EPOCH", "BALANCE", "RANKS", "PLAN"} <= set(head.split())
    assert row.startswith("reference   ready") and row.endswith("1 proposed")
    assert "automatic-0-0bc37c751748" in run("status", "-o", "wide")[1]


def test_a_deployment_that_another_replica_leads_is_listed_without_numbers(run, operations):
    operations.elsewhere = [LedElsewhere(DeploymentId("chat"), "b", "b:1")]
    row = run("status", "-o", "wide")[1].splitlines()[1].split()
    assert row == ["chat", "unknown", "follower", "not_leader", *"-------"]
    operations.show(epoch=None)
    assert re.search(r"epoch +- of generation", run("status", "demo")[1])

"""How a command finds its deployment: -d, EVENKEEL_DEPLOYMENT, or the only one there is."""

import pytest

from evenkeel_moe.cli import options
from evenkeel_moe.cli.exits import Exit
from tests.api.fakes import make_plan
from tests.waiting import deadline

COMMANDS = [
    ("decisions",),
    ("pause",),
    ("resume",),
    ("recommend",),
    ("capacity",),
    ("resize",),
    ("heatmap",),
    ("audit",),
    ("deployment", "quarantine"),
    ("placement", "list"),
    ("placement", "export"),
    ("policy", "get"),
    ("policy", "set", "cycle_s=20"),
    ("plan", "list"),
    ("plan", "create"),
    ("plan", "rollback", "--yes"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_takes_the_deployment_in_the_same_way(run, words):
    assert run(*words, "-d", "demo")[0] == 0
    code, _, err = run(*words, "--deployment", "absent")
    assert code == Exit.REFUSED
    assert "absent" in err


@pytest.mark.parametrize("words", ["show", "story", "approve", "cancel"])
def test_commands_of_a_plan_name_the_plan(run, operations, words):
    yes = ["--yes"] if words == "approve" else []
    operations.records["demo"] = [make_plan("mine")]
    assert run("plan", words, "mine", "-d", "demo", *yes)[0] == 0
    assert run("plan", words, "-d", "demo", *yes)[0] == Exit.USAGE


def test_the_environment_gives_way(run, monkeypatch):
    monkeypatch.setenv("EVENKEEL_DEPLOYMENT", "fresh")
    assert run("placement", "export", "-d", "demo")[0] == 0
    assert run("placement", "export")[0] == Exit.UNAVAILABLE, "the placement of fresh is not known"


@pytest.mark.parametrize("text", ["soon", "8d", "-5", "1e3", "inf", "", "0"])
def test_a_pause_needs_a_time(run, operations, text):
    code, out, err = run("pause", "-d", "demo", f"--for={text}")
    assert (code, out, len(err.splitlines())) == (Exit.USAGE, "", 1)
    assert operations.calls == []
    told = f"evenkeel: {text!r} is not a duration: give seconds, or for example 15m or 2h\n"
    assert err == told or text != "soon"


def test_completion_asks_the_controller(run, operations, monkeypatch, url):
    operations.records["demo"] = [make_plan("first"), make_plan("second")]
    monkeypatch.setattr(options, "_COMPLETED_WITHIN_S", deadline(options._COMPLETED_WITHIN_S))

    def complete(words):
        monkeypatch.setenv("_EVENKEEL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        out = run()[1]
        monkeypatch.delenv("_EVENKEEL_COMPLETE")
        return out.split()

    assert complete("evenkeel decisions -d d") == ["demo"]
    assert complete("evenkeel status ") == ["demo", "fresh"]
    assert complete("evenkeel plan show -d demo ") == ["first", "second"]
    assert complete("evenkeel plan approve -d demo s") == ["second"]
    assert complete(f"evenkeel decisions --url {url}/nothing ") == []

"""How a command finds its deployment: NAME, -d, EVENKEEL_DEPLOYMENT, or the only one there is."""

import json

import pytest
import typer

from evenkeel_moe.cli import app
from evenkeel_moe.cli.client import Exit
from tests.api.fakes import make_plan

COMMANDS = [
    ("decisions",),
    ("resume",),
    ("recommend",),
    ("heatmap",),
    ("audit",),
    ("quarantine",),
    ("epochs",),
    ("export",),
    ("policy",),
    ("plan", "list"),
    ("plan", "create", "--dry-run"),
    ("plan", "rollback", "--yes"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_name_is_an_argument_of_every_command(run, words):
    assert run(*words, "demo")[0] == 0
    code, _, err = run(*words, "absent")
    assert code == Exit.REFUSED
    assert "absent" in err


@pytest.mark.parametrize("words", ["show", "story", "approve", "cancel"])
def test_commands_of_a_plan_take_the_name_before_the_plan(run, operations, words):
    yes = ["--yes"] if words == "approve" else []
    operations.records["demo"] = [make_plan("mine")]
    assert run("plan", words, "demo", "mine", *yes)[0] == 0
    operations.records["demo"] = [make_plan("mine")]
    assert run("plan", words, "mine", "-d", "demo", *yes)[0] == 0
    code, _, err = run("plan", words, "a", "b", "c", *yes)
    assert (code, "expected [NAME] PLAN" in err) == (Exit.USAGE, True)


def test_two_names_are_refused_and_the_environment_gives_way(run, monkeypatch):
    code, _, err = run("decisions", "demo", "-d", "fresh")
    assert (code, "two deployments are named" in err) == (Exit.USAGE, True)
    monkeypatch.setenv("EVENKEEL_DEPLOYMENT", "fresh")
    assert run("export", "demo")[0] == 0
    assert run("export", "-d", "demo")[0] == 0
    assert run("export")[0] == Exit.UNAVAILABLE, "the placement of `fresh` is not known"


@pytest.mark.parametrize("text", ["soon", "8d", "-5", "1e3", "inf", ""])
def test_a_freeze_needs_a_time(run, operations, text):
    code, out, err = run("freeze", "demo", "--", text)
    assert (code, out, len(err.splitlines())) == (Exit.USAGE, "", 1)
    assert operations.calls == []


def test_completion_asks_the_controller(run, operations, monkeypatch, url):
    operations.records["demo"] = [make_plan("first"), make_plan("second")]

    def complete(words):
        monkeypatch.setenv("_EVENKEEL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        out = run()[1]
        monkeypatch.delenv("_EVENKEEL_COMPLETE")
        return out.split()

    assert complete("evenkeel decisions d") == ["demo"]
    assert complete("evenkeel status ") == ["demo", "fresh"]
    assert complete("evenkeel plan show demo ") == ["first", "second"]
    assert complete("evenkeel plan approve -d demo s") == ["second"]
    assert complete(f"evenkeel decisions --url {url}/nothing ") == []


def test_the_reasons_of_decisions_are_explained(run):
    assert "no_change: The best placement found is the present one." in run("decisions", "demo")[1]


@pytest.mark.parametrize("words", ["status", "decisions", "recommend", "heatmap", "policy"])
def test_json_of_every_view_is_exact(run, words):
    answer = json.loads(run(words, "demo", "--json")[1])
    epochs = [answer["epoch"]] if "epoch" in answer else []
    assert all(isinstance(epoch, int) for epoch in epochs)
    if words == "status":
        assert (answer["ranks"][0]["free_bytes"], answer["epoch"]) == (10_000, 3)


def test_no_command_takes_a_deployment_by_an_option_alone():
    def commands(command):
        below = getattr(command, "commands", {}).values()
        return [one for each in below for one in commands(each)] if below else [command]

    found = [
        command
        for command in commands(typer.main.get_command(app))
        if any(parameter.name == "deployment" for parameter in command.params)
    ]
    assert len(found) > 15
    for command in found:
        assert any((each.metavar or "").startswith("[NAME]") for each in command.params), command

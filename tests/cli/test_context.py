"""Contexts: a file that says which controller and deployment commands are about."""

import json
import os
import stat

import pytest

from evenkeel_moe.cli.exits import Exit
from tests.api.conftest import OPERATE


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "settings" / "contexts.json"
    monkeypatch.setenv("EVENKEEL_CONTEXTS", str(path))
    return path


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"alice operate {OPERATE}\n")
    return path


def test_a_context_names_address_token_and_deployment(command, url, file, token):
    said = command("context", "set", "eu", "--address", url, "--token-file", str(token))
    assert said == (0, f"eu: kept in {file}\n", "")
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(file.parent).st_mode) == 0o700
    assert command("status")[0] == 0
    code, _, err = command("decisions")
    assert code == Exit.USAGE
    assert "there are several deployments" in err and "demo, fresh" in err
    assert command("context", "set", "eu", "-d", "demo")[0] == 0
    assert command("decisions")[0] == 0
    kept = json.loads(file.read_text())["contexts"]["eu"]
    assert kept == {"address": url, "token_file": str(token), "deployment": "demo"}
    assert OPERATE not in file.read_text()
    assert command("context", "set", "eu", "-d", "")[0] == 0
    assert command("decisions")[0] == Exit.USAGE
    removed = ("--address", "", "--token-file", "", "--ca-file", "")
    assert command("context", "set", "eu", *removed)[0] == 0
    assert json.loads(file.read_text())["contexts"]["eu"] == {}


def test_options_and_variables_win_over_the_context(command, url, file, token, monkeypatch):
    away = ("--address", "http://127.0.0.1:9", "--token-file", "missing", "-d", "absent")
    assert command("context", "set", "away", *away)[0] == 0
    assert command("decisions")[0] == Exit.USAGE
    here = ("--address", url, "--token-file", str(token), "-d", "demo")
    assert command("decisions", *here)[0] == 0
    for name, value in (("ADDRESS", url), ("TOKEN_FILE", str(token)), ("DEPLOYMENT", "demo")):
        monkeypatch.setenv(f"EVENKEEL_{name}", value)
    assert command("decisions")[0] == 0


def test_a_data_folder_that_is_named_wins_over_the_token_of_the_context(
    command, url, file, token, tmp_path
):
    command("context", "set", "eu", "--address", url, "--token-file", str(tmp_path / "missing"))
    (tmp_path / "tokens").write_text(token.read_text())
    assert command("status", "--data-dir", str(tmp_path))[0] == 0


def test_one_of_several_contexts_is_in_use(command, url, file, token):
    command("context", "set", "eu", "--address", url, "--token-file", str(token))
    command("context", "set", "us", "--address", "http://127.0.0.1:9")
    lines = [line.split() for line in command("context", "list")[1].splitlines()]
    assert lines == [
        ["CURRENT", "NAME", "ADDRESS", "DEPLOYMENT"],
        ["*", "eu", url, "-"],
        ["us", "http://127.0.0.1:9", "-"],
    ]
    assert command("status")[0] == 0
    assert command("status", "--context", "us")[0] == Exit.UNAVAILABLE
    assert command("context", "use", "us")[:2] == (0, "us: in use\n")
    assert command("status")[0] == Exit.UNAVAILABLE
    assert json.loads(command("context", "list", "-o", "json")[1])["current"] == "us"


def test_a_context_that_is_unknown_is_named(command, file):
    assert command("context", "list")[1] == "no context yet: evenkeel context set NAME\n"
    for words in (("context", "use", "nope"), ("status", "--context", "nope")):
        code, out, err = command(*words)
        assert (code, out) == (Exit.USAGE, "")
        assert err == f"evenkeel: there is no context 'nope' in {file}; known: none\n"
    assert command("context", "set", "../x")[0] == Exit.USAGE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the file: Invalid JSON"),
        ('{"contexts": {"eu": {"adress": "x"}}}', "contexts.eu.adress: Extra inputs"),
        ('{"contexts": {"eu": {"address": 1}}}', "contexts.eu.address: Input should be a valid"),
        ('{"current": "eu"}', "there is no context 'eu'"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_name(command, file, text, words):
    file.parent.mkdir()
    file.write_text(text)
    code, out, err = command("status")
    assert (code, out, len(err.splitlines())) == (Exit.USAGE, "", 1)
    assert str(file) in err and words in err


def test_a_file_that_others_can_write_or_that_is_a_link_is_not_used(command, file, tmp_path):
    file.parent.mkdir()
    file.write_text("{}")
    file.chmod(0o666)
    code, _, err = command("status")
    assert (code, "can be written by every user" in err) == (Exit.USAGE, True)
    file.unlink()
    (tmp_path / "other").write_text("{}")
    file.symlink_to(tmp_path / "other")
    code, _, err = command("status")
    assert (code, "is a link" in err) == (Exit.USAGE, True)

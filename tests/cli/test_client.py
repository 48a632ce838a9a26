"""Commands that call no controller, a server of another kind, or a replica that does not lead."""

import http.server
import itertools
import json
import threading
from contextlib import contextmanager

import pytest

from evenkeel_moe.cli import client
from evenkeel_moe.cli.client import ApiClient, read_token
from evenkeel_moe.cli.exits import CliError, Exit
from tests.api.conftest import OPERATE, READ


@pytest.mark.parametrize(
    ("token", "arguments", "code"),
    [
        ("wrong-token-0123456789", ("status",), Exit.UNAUTHORIZED),
        (READ, ("resume", "-d", "demo"), Exit.UNAUTHORIZED),
        (OPERATE, ("status", "nope"), Exit.REFUSED),
        (OPERATE, ("status", "--nope"), Exit.USAGE),
        (OPERATE, ("policy", "set", "mode", "-d", "demo"), Exit.USAGE),
        (OPERATE, ("status", "--address", "nonsense"), Exit.USAGE),
        (OPERATE, ("status", "--address", "http://controller:rest"), Exit.USAGE),
        (OPERATE, ("status", "--address", f"http://{'a' * 64}"), Exit.USAGE),
        ("geheim-\u00e4\u00f6\u00fc-0123456789", ("status",), Exit.USAGE),
        ("two words-0123456789", ("status",), Exit.USAGE),
        (OPERATE, ("status", "\udcff"), Exit.USAGE),
        (OPERATE, ("policy", "set", "cycle_s=NaN", "-d", "demo"), Exit.USAGE),
        (OPERATE, ("placement", "export", "-d", "demo", "--out", "."), Exit.USAGE),
    ],
)
def test_errors_are_one_line_and_an_exit_code(run, token, arguments, code):
    got, out, err = run(*arguments, token=token)
    assert got == code
    assert out == ""
    assert "Traceback" not in err
    if arguments[-1] != "--nope":
        assert len(err.splitlines()) == 1


def test_without_a_controller_the_error_asks_for_one_in_words(run):
    words = "no controller answers at http://127.0.0.1:9 (connection refused); is `evenkeel serve`"
    more = "running? --address names the REST address of a controller"
    told = run("status", "--address", "http://127.0.0.1:9")
    assert told == (Exit.UNAVAILABLE, "", f"evenkeel: {words} {more}\n")


@pytest.mark.parametrize("kind", ["plan", "deployment"])
def test_an_argument_that_is_no_id_is_refused_before_it_is_sent(run, kind):
    """In a path, `..` would name another resource, and nothing would name all of them."""
    commands = {
        "plan": ("plan story", "plan show", "plan approve --yes", "plan cancel"),
        "deployment": ("status", "deployment forget --yes", "decisions -d", "plan list -d"),
    }[kind]
    on = ("-d", "demo") if kind == "plan" else ()
    for words, text in itertools.product(commands, ("", " ", "..", "../policy", "a/b", "a?b")):
        code, out, err = run(*words.split(), *on, text)
        assert (code, out) == (Exit.USAGE, "")
        assert err.startswith(f"evenkeel: {text!r} is no {kind} id: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--token", "wrong-token-0123456789"), "the token is unknown there, or has expired"),
        (("--data-dir", "away"), "away/tokens does not exist; use --token-file or --data-dir"),
        (("--token-file", "empty"), "empty holds no token; use --token-file or --data-dir"),
        (("--token-file", "old"), "the token of old is unknown there, or has expired; --token-"),
    ],
)
def test_an_error_about_the_token_names_the_options(
    command, url, tmp_path, monkeypatch, options, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "old").write_text("ann operate old-token-0123456789\n")
    code, _, err = command("status", "--address", url, *options)
    assert (code, words in err) == (Exit.UNAUTHORIZED, True), err
    assert "Authorization" not in err


def test_https_to_a_port_that_speaks_http_is_told(command, url):
    code, _, err = command("status", "--address", url.replace("http:", "https:"))
    assert code == Exit.USAGE
    assert "the port speaks http, not https" in err and "SSL" not in err


def test_which_token_is_sent(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# all\nbob read bbbbbbbbbbbbbbbb\nalice operate aaaaaaaaaaaaaaaa\n")
    missing = tmp_path / "missing"
    assert read_token("given", path, missing) == "given"
    assert read_token(None, path, missing) == "aaaaaaaaaaaaaaaa"
    assert read_token(None, None, path) == "aaaaaaaaaaaaaaaa"
    assert read_token(None, None, missing) is None
    with pytest.raises(CliError):
        read_token(None, missing, path)
    path.write_bytes(b"\xff\xfe\0abc")
    with pytest.raises(CliError, match="is not UTF-8 text"):
        read_token(None, path, missing)


@contextmanager
def server_of(answer):
    """Run a server and yield its URL; `answer` maps a caller's address to (status, body)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            status, body = answer(self.client_address)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (501, b"<p>no</p>"),
        (404, b"\xff"),
        (200, b"# HELP x\nx 1\n"),
        (200, b""),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b'{"status": "ok"}'),
        (200, b'{"items": null, "next_page_token": null}'),
    ],
)
def test_a_server_that_is_not_a_controller_is_reported(run, status, body):
    """For example, the address is that of the metrics port."""
    with server_of(lambda _: (status, body)) as address:
        code, out, err = run("status", "--address", address)
    assert (code, out) == (Exit.REFUSED, "")
    assert "is it an Evenkeel controller?" in err
    assert len(err.splitlines()) == 1


def refused_first(times, problem):
    """Return the callers so far, and an answer for `server_of`: the problem, then a policy."""
    callers = []

    def answer(caller):
        callers.append(caller)
        done = len(callers) > times
        return (200 if done else 503), json.dumps({"mode": "auto"} if done else problem).encode()

    return callers, answer


@pytest.mark.parametrize("elsewhere", [3, 10**9])
def test_an_address_of_several_replicas_is_asked_until_the_leader_answers(
    run, monkeypatch, elsewhere
):
    monkeypatch.setattr(client, "_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(client, "_RETRY_FOR_S", 1.0)
    led = {
        "title": "Out of reach",
        "detail": "demo is led by b at b:1",
        "reason": "not_leader",
        "leader": "b",
    }
    callers, answer = refused_first(elsewhere, led)
    with server_of(answer) as address:
        code, out, err = run("policy", "get", "-d", "demo", "--address", address)
    assert len(set(callers)) == len(callers), "the same connection leads to the same replica"
    if elsewhere == 3:
        assert (code, len(callers)) == (Exit.DONE, 4)
        assert "auto" in out
    else:
        assert code == Exit.UNAVAILABLE and 3 < len(callers) < 100
        assert "led by b at b:1 (not_leader)" in err


@pytest.mark.parametrize("refused", [2, 10**9])
def test_a_planner_that_starts_is_waited_for_and_the_command_says_so(run, monkeypatch, refused):
    monkeypatch.setattr(client, "_PLANNER_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "_PLANNER_STARTS_WITHIN_S", 0.5)
    starting = {"title": "Try again", "detail": "it starts", "reason": "planner_starting"}
    callers, answer = refused_first(refused, starting)
    with server_of(answer) as address:
        code, out, err = run("policy", "get", "-d", "demo", "--address", address)
    assert err.startswith("evenkeel: the planner is starting; waiting up to 500 ms, Ctrl-C ends\n")
    if refused == 2:
        assert (code, len(callers), len(err.splitlines())) == (Exit.DONE, 3, 1)
        assert "auto" in out
    else:
        assert (code, out) == (Exit.UNAVAILABLE, "") and len(callers) > 3
        assert err.splitlines()[1:] == ["evenkeel: Try again: it starts (planner_starting)"]


def test_a_command_of_several_requests_says_once_that_the_planner_starts(monkeypatch, capsys):
    monkeypatch.setattr(client, "_PLANNER_PAUSE_S", 0.01)
    starting = json.dumps({"title": "t", "detail": "d", "reason": "planner_starting"}).encode()
    refusals = [10**9]

    def answer(_):
        refusals[0] -= 1
        return (503, starting) if refusals[0] >= 0 else (200, b"{}")

    with server_of(answer) as address, ApiClient(address, None) as asked:
        monkeypatch.setattr(client, "_PLANNER_STARTS_WITHIN_S", 0.1)
        with pytest.raises(CliError, match="planner_starting"):
            asked.get("deployments")
        monkeypatch.setattr(client, "_PLANNER_STARTS_WITHIN_S", 60.0)
        refusals[0] = 1
        asked.get("deployments")
        assert capsys.readouterr().err.count("the planner is starting") == 1
        refusals[0] = 1  # Its process died: it starts once more.
        asked.get("deployments")
        assert capsys.readouterr().err.count("the planner is starting") == 1


def test_a_request_that_takes_longer_may_have_a_longer_time_out():
    def answer(_):
        threading.Event().wait(0.5)
        return 200, b"{}"

    with server_of(answer) as address, ApiClient(address, None, timeout_s=0.1) as patient:
        with pytest.raises(CliError, match="no answer"):
            patient.get("deployments")
        assert patient.get("deployments", timeout_s=30) == {}

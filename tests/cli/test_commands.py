import io
import json
import os
import re
import socket
import subprocess
import sys
import threading

import pytest
import uvicorn
from typer.testing import CliRunner

from evenkeel_moe.api import TokenSet, create_app
from evenkeel_moe.cli import app, main
from evenkeel_moe.cli.client import CliError, Exit, read_token
from evenkeel_moe.cli.console import work_bars
from evenkeel_moe.cli.options import parse_value
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports import LedElsewhere
from tests.api.fakes import FakeView, make_operations, make_plan, make_rank, make_status

OPERATE = "operate-token-0123456789"
READ = "read-token-0123456789"


@pytest.fixture
def operations():
    return make_operations()


@pytest.fixture
def url(operations):
    """A real server over the fake operations."""
    tokens = TokenSet.parse(f"alice operate {OPERATE}\nbob read {READ}\n")
    config = uvicorn.Config(
        create_app(operations, tokens), log_level="error", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # A command may be quicker than the server's thread: its connection waits.
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
    listener.close()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command as `main` does; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["evenkeel", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return call


@pytest.fixture
def run(url, command, monkeypatch):
    """The same against the server."""

    def call(*arguments, token=OPERATE):
        monkeypatch.setenv("EVENKEEL_URL", url)
        monkeypatch.setenv("EVENKEEL_TOKEN", token)
        return command(*arguments)

    return call


def test_status_lists_deployments(run):
    code, out, _ = run("status")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["DEPLOYMENT", "STATE", "REASON"]
    assert lines[1].split()[0] == "demo"
    assert "0.800" in lines[1]
    assert lines[2].split()[0] == "fresh"
    assert " - " in lines[2]


def test_status_of_one_shows_its_ranks(run):
    code, out, _ = run("status", "demo")
    assert code == 0
    assert "2 layers x 4 experts" in out
    assert "0.5000" in out


def test_a_rank_that_takes_no_wave_is_named_with_its_reason(run, operations):
    ranks = (make_rank(0), make_rank(1, trouble="the worker has ended"))
    operations.views["demo"] = FakeView(make_status(ranks=ranks), {}, None)
    assert "rank 1 does not take part in waves: the worker has ended" in run("status", "demo")[1]
    troubles = [rank["trouble"] for rank in json.loads(run("status", "demo", "--json")[1])["ranks"]]
    assert troubles == ["", "the worker has ended"]


def test_json_is_the_controllers_answer(run):
    code, out, _ = run("status", "demo", "--json")
    assert code == 0
    assert json.loads(out)["shape"]["top_k"] == 2


def test_a_plan_from_dry_run_to_its_end(run, operations):
    options = ("-d", "demo")
    code, out, _ = run(
        "plan",
        "create",
        *options,
        "--dry-run",
        "--id",
        "mine",
        "--policy",
        "keel",
        "--max-moves",
        "8",
        "--phase",
        "decode",
        "--phase",
        "prefill",
    )
    assert code == 0
    assert "proposed" in out
    _, _, request = operations.calls[0]
    assert (request.dry_run, request.policy, request.limits.max_moves) == (True, "keel", 8)
    assert [str(phase) for phase in request.phases] == ["decode", "prefill"]
    assert "approved" in run("plan", "approve", "mine", *options)[1]
    assert "mine" in run("plan", "list", *options)[1]
    assert "balancedness_before" in run("plan", "show", "mine", *options)[1]
    assert "created" in run("plan", "story", "mine", *options)[1]
    assert "cancelled" in run("plan", "cancel", "mine", *options)[1]
    code, out, err = run("plan", "approve", "mine", *options)
    assert (code, out) == (Exit.REFUSED, "")
    assert (
        err
        == "evenkeel: The request does not fit the current state: plan mine is cancelled (wrong_phase)\n"
    )


def test_words_of_a_rank_are_shown_as_they_came(run, operations):
    """Brackets and colons are not markup: where a rank failed must not vanish, nor end the command."""
    words = "rank 3: [/lib/gloo/pair.cc:553] closed by [oncall] :warning:"
    rows = ({"at": 1.0, "event": "ended", "detail": words},)
    operations.records["demo"] = [make_plan("mine", story=rows, error=words)]
    operations.views["demo"] = FakeView(
        make_status(ranks=(make_rank(0, node="[a]", trouble=words),)), {}, None
    )
    for command in (("plan", "story", "mine"), ("plan", "show", "mine")):
        code, out, _ = run(*command, "-d", "demo")
        assert (code, words in out) == (0, True)
    out = run("status", "demo")[1]
    assert words in out
    assert "[a]" in out
    operations.document = {"schedule": {"note": words}}
    assert words in run("policy", "-d", "demo")[1]


def test_work_bars_name_a_policy_as_it_was_given(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with work_bars() as (on_work, _):
        on_work("[/best]: planning", 0)
    assert "[/best]: planning" in terminal.getvalue()


def test_operating_commands(run, operations):
    assert run("plan", "rollback", "-d", "demo", "--to-epoch", "2")[0] == 0
    assert run("freeze", "60", "-d", "demo")[0] == 0
    assert run("resume", "-d", "demo")[0] == 0
    assert operations.calls == [
        ("rollback", "demo", 2, "alice"),
        ("freeze", "demo", 60.0, "alice"),
        ("resume", "demo", "alice"),
    ]
    assert "observe" in run("policy", "mode=observe", "cooldown_s=30", "-d", "demo")[1]
    assert operations.document["cooldown_s"] == 30
    assert "no_change" in run("decisions", "-n", "3", "-d", "demo")[1]


@pytest.mark.parametrize(
    ("arguments", "kind"), [(("rollback",), "rollback"), (("create", "--policy", "keel"), "manual")]
)
def test_a_plan_that_may_have_been_taken_is_asked_for_again_by_its_id(
    run, operations, arguments, kind
):
    words = "the store did not take it; it is tried again while this replica leads"
    operations.error = Unavailable(words)
    code, out, err = run("plan", *arguments, "-d", "demo")
    assert (code, out, len(err.splitlines())) == (Exit.UNAVAILABLE, "", 1)
    assert words in err
    repeat = re.search(rf"--id ({kind}-[0-9a-f]{{12}})$", err.strip())
    assert repeat
    operations.error = None
    for _ in range(2):
        code, out, _ = run("plan", *arguments, "-d", "demo", "--id", repeat[1])
        assert (code, repeat[1] in out) == (0, True)
    assert [record.plan.plan_id for record in operations.records["demo"]] == [repeat[1]]


def test_a_plan_that_was_refused_is_not_to_be_asked_for_again(run, operations):
    operations.error = Conflict("plan p is migrating")
    code, _, err = run("plan", "rollback", "-d", "demo")
    assert (code, "--id" in err) == (Exit.REFUSED, False)


def test_each_rollback_has_an_id_of_its_own(run, operations):
    for _ in range(2):
        assert run("plan", "rollback", "-d", "demo")[0] == 0
    first, second = (record.plan.plan_id for record in operations.records["demo"])
    assert first != second


def test_several_deployments_must_be_named(run):
    code, _, err = run("plan", "list")
    assert code == Exit.USAGE
    assert "demo, fresh" in err


def test_the_only_deployment_needs_no_name(run, operations):
    del operations.views["fresh"]
    assert run("plan", "list")[0] == 0
    operations.views.clear()
    assert run("plan", "list")[0] == Exit.REFUSED


def test_long_lists_are_fetched_whole(run, operations):
    operations.records["demo"] = [make_plan(f"p{number}") for number in range(230)]
    assert len(json.loads(run("plan", "list", "-d", "demo", "--json")[1])) == 230


def test_a_running_plan_is_shown(run, operations):
    operations.views["demo"] = FakeView(make_status(active_plan=make_plan("busy")), {}, None)
    assert "busy" in run("status")[1]
    assert "busy" in run("status", "demo")[1]


@pytest.mark.parametrize(
    ("token", "arguments", "code"),
    [
        ("wrong-token-0123456789", ("status",), Exit.UNAUTHORIZED),
        (READ, ("resume", "-d", "demo"), Exit.UNAUTHORIZED),
        (OPERATE, ("status", "nope"), Exit.REFUSED),
        (OPERATE, ("status", "--nope"), Exit.USAGE),
        (OPERATE, ("policy", "mode", "-d", "demo"), Exit.USAGE),
        (OPERATE, ("status", "--url", "http://127.0.0.1:9"), Exit.UNAVAILABLE),
        (OPERATE, ("status", "--url", "nonsense"), Exit.USAGE),
        (OPERATE, ("status", "--url", "http://controller:rest"), Exit.USAGE),
        (OPERATE, ("status", "--url", f"http://{'a' * 64}"), Exit.USAGE),
        ("geheim-\u00e4\u00f6\u00fc-0123456789", ("status",), Exit.USAGE),
        ("two words-0123456789", ("status",), Exit.USAGE),
        (OPERATE, ("status", "\udcff"), Exit.USAGE),
        (OPERATE, ("policy", "cycle_s=NaN", "-d", "demo"), Exit.USAGE),
        (OPERATE, ("export", "-d", "demo", "-o", "."), Exit.USAGE),
    ],
)
def test_errors_are_one_line_and_an_exit_code(run, token, arguments, code):
    got, out, err = run(*arguments, token=token)
    assert got == code
    assert out == ""
    assert "Traceback" not in err
    if arguments[-1] != "--nope":
        assert len(err.splitlines()) == 1


def test_a_deployment_that_another_replica_leads_is_listed_without_figures(run, operations):
    operations.elsewhere = [LedElsewhere(DeploymentId("chat"), "b", "b:1")]
    row = run("status")[1].splitlines()[1].split()
    assert row == ["chat", "follower", "not_leader", *"-------"]
    operations.views["demo"] = FakeView(make_status(epoch=None), {}, None)
    assert re.search(r"epoch +- of generation", run("status", "demo")[1])


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


def test_values_are_json_or_text():
    assert parse_value("a=1") == ("a", 1)
    assert parse_value("a=null") == ("a", None)
    assert parse_value("mode=auto") == ("mode", "auto")
    assert parse_value("a=b=c") == ("a", "b=c")
    for text in ("9" * 5000, "[" * 100_000):
        assert parse_value(f"a={text}") == ("a", text)
    with pytest.raises(CliError):
        parse_value("=1")


def every_command(group=app, prefix=()):
    for command in group.registered_commands:
        yield (*prefix, command.name or command.callback.__name__.replace("_", "-"))
    for child in group.registered_groups:
        yield from every_command(child.typer_instance, (*prefix, child.name))


@pytest.mark.parametrize("command", list(every_command()), ids=" ".join)
def test_help_explains_every_option(command):
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 0
    # Square brackets are markup to the help's renderer, which drops them: units must be words.
    assert not re.search(r"\s[.,;](\s|$)", result.output)
    rows = [line for line in result.output.splitlines() if line.strip("│ ").startswith("--")]
    for row in rows:
        words = row.strip("│ ").split()
        assert len(words) >= 3, row


def test_help_names_the_exit_codes():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert "3 no controller at the address" in " ".join(result.output.split())


def test_help_is_quick_and_loads_no_heavy_library():
    code = (
        "import sys; from typer.testing import CliRunner; from evenkeel_moe.cli import app;"
        " assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        " heavy = {'torch', 'numpy', 'numba', 'fastapi', 'grpc', 'redis'} & set(sys.modules);"
        " assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=30, env={**os.environ, "TERM": "dumb"}
    )


def test_settings_are_checked_and_printed_without_secrets(command, monkeypatch, tmp_path):
    monkeypatch.setenv("EVENKEEL_REDIS__URL", "redis://app:p@ss:w/rd@store:6379/0")
    monkeypatch.setenv("EVENKEEL_REDIS__PASSWORD", "hunter2")
    assert command("config", "check")[0] == 0
    code, out, _ = command("config", "print")
    assert code == 0
    assert json.loads(out)["redis"]["url"] == "redis://***@store:6379/0"
    assert "hunter2" not in out
    assert "p@ss" not in out
    sentinel = "redis+sentinel://app:one@s:26379/main?sentinel_password=two&sentinel_ssl=true"
    monkeypatch.setenv("EVENKEEL_REDIS__URL", sentinel)
    monkeypatch.setenv("EVENKEEL_REDIS__SENTINEL_PASSWORD", "three")
    redis = json.loads(command("config", "print")[1])["redis"]
    assert (
        redis["url"] == "redis+sentinel://***@s:26379/main?sentinel_password=***&sentinel_ssl=true"
    )
    assert redis["sentinel_password"] == "***"
    monkeypatch.delenv("EVENKEEL_REDIS__SENTINEL_PASSWORD")
    file = tmp_path / "evenkeel.toml"
    file.write_text("[rest]\nprot = 8080\n")
    code, _, err = command("config", "check", "-c", str(file))
    assert code == 2
    assert "PROT" in err
    assert "Traceback" not in err


def write_config(tmp_path, **changes):
    path = tmp_path / "config.json"
    values = {
        "run_folder": str(tmp_path / "run"),
        "num_ranks": 1,
        "slots_per_rank": 16,
        "pool_slots_per_layer": 16,
        "layers": 2,
        "tokens_per_step": 32,
        "steps": 3,
        "rendezvous": f"file://{tmp_path}/rendezvous",
    }
    path.write_text(RankConfig(**{**values, **changes}).to_json())
    return str(path)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, (), "cannot read"),
        ("{", (), "is not JSON"),
        ('{"nonsense": 1}', (), "not a rank configuration"),
        ("", (), "--rank"),
        ("", ("--rank", "7"), "outside"),
    ],
)
def test_a_rank_that_cannot_start_says_why(command, tmp_path, text, options, says):
    path = str(tmp_path / "missing") if text is None else write_config(tmp_path)
    if text:
        (tmp_path / "config.json").write_text(text)
    code, _, err = command("rank", path, *options)
    assert code == Exit.USAGE
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.integration
def test_a_single_rank_runs_to_its_final_check(tmp_path):
    command = [sys.executable, "-m", "evenkeel_moe", "rank", write_config(tmp_path), "--rank", "0"]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()
    ]
    assert [line["ok"] for line in lines if line["kind"] == "check"] == [True]

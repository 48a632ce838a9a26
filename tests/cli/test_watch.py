import json

import pytest

from evenkeel_moe.errors import Unavailable
from tests.api.fakes import make_plan


@pytest.fixture
def rounds(monkeypatch):
    """Let a command watch for three rounds, and return the functions called between them."""
    between = []

    def sleep(seconds):
        assert seconds == 2.0
        if not between:
            raise KeyboardInterrupt
        between.pop(0)()

    monkeypatch.setattr("evenkeel_moe.cli.watch.time.sleep", sleep)
    return between


def test_a_view_is_shown_again_until_interrupted(run, rounds):
    rounds += [lambda: None, lambda: None]
    code, out, _ = run("status", "--watch")
    assert code == 130
    assert out.count("DEPLOYMENT") == 3
    assert "every 2 s, Ctrl-C ends" in out


def test_json_has_one_answer_a_line(run, rounds):
    rounds += [lambda: None]
    out = run("decisions", "demo", "-w", "--json", "-n", "2")[1]
    assert [len(json.loads(line)) for line in out.splitlines()] == [2, 2]


def test_a_controller_that_is_away_is_waited_for(run, rounds, operations):
    def leave():
        operations.error = Unavailable("the store does not answer")

    def return_():
        operations.error = None

    operations.records["demo"] = [make_plan()]
    rounds += [leave, return_]
    code, out, err = run("plan", "list", "demo", "--watch")
    assert (code, out.count("PLAN ")) == (130, 2)
    assert "the store does not answer" in err


def test_a_refusal_ends_the_watch(run, rounds):
    assert run("status", "absent", "--watch")[0] == 1

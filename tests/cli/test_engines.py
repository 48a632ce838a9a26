"""`evenkeel engines check`."""

import pytest

from evenkeel_moe.engines.guest.guards import EngineReport, Hook
from evenkeel_moe.engines.sglang import hooks as sglang
from evenkeel_moe.engines.vllm import hooks as vllm

KNOWN = ("0.32.0", "0.33.0")
FOUND = (Hook("EplbState.step"), Hook("EplbModelState"))
CHANGED = (Hook("EplbState.step"), Hook("EplbModelState", "EplbModelState has no model"))


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says what is installed: the report of vLLM, and no SGLang."""

    def call(report):
        monkeypatch.setattr(sglang, "report", lambda: None)
        monkeypatch.setattr(vllm, "report", lambda: report)

    return call


@pytest.mark.parametrize(
    ("version", "hooks", "code", "words"),
    [
        ("0.33.0+cu130", FOUND, 0, "all 2 parts found, and the version was tested: it starts"),
        ("0.34.0", FOUND, 1, "make test-engines ENGINES=vllm==0.34.0"),
        ("0.33.0", CHANGED, 1, "1 of 2 parts changed: the plugin refuses to start"),
    ],
)
def test_the_verdict_is_the_last_line_and_the_exit_code(
    installed, command, version, hooks, code, words
):
    installed(EngineReport("vllm", version, KNOWN, hooks))
    ended, out, _ = command("engines", "check")
    assert ended == code
    lines = out.splitlines()
    assert lines[0] == "found    EplbState.step"
    assert ("changed  EplbModelState has no model" in lines) == (hooks is CHANGED)
    assert lines[-1].startswith(f"vllm {version}: ") and words in lines[-1]


def test_an_engine_that_is_not_installed_is_named(installed, command):
    installed(None)
    code, _, err = command("engines", "check")
    assert code == 2 and "vllm and sglang are not installed here" in err
    code, _, err = command("engines", "check", "sglang")
    assert code == 2 and "sglang is not installed here" in err
    code, _, err = command("engines", "check", "other")
    assert code == 2 and "unknown engine 'other'; known: vllm, sglang" in err

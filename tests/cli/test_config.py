import json
from dataclasses import asdict

from evenkeel_moe.planning.decision.gates import GateSettings


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
    assert "rest.prot: there is no such setting" in err
    assert "EVENKEEL_" not in err and "invalid_input" not in err
    assert "Traceback" not in err


def test_every_threshold_is_printed_with_its_value(command, monkeypatch):
    monkeypatch.setenv("EVENKEEL_PLANNER__THRESHOLDS__COOLDOWN_S", "5")
    printed = json.loads(command("config", "print")[1])["planner"]["thresholds"]
    assert printed == asdict(GateSettings(cooldown_s=5.0))


def test_a_variable_with_one_underscore_is_named_on_stderr(command, monkeypatch):
    monkeypatch.setenv("EVENKEEL_PLANNER_COST", "tokens")
    monkeypatch.setenv("EVENKEEL_REDIS_PORT_6379_TCP", "tcp://10.0.0.1:6379")
    for name in ("check", "print"):
        code, out, err = command("config", name)
        assert code == 0
        assert "PLANNER_COST" not in out
        assert err == (
            "warning: EVENKEEL_PLANNER_COST is ignored; the setting is EVENKEEL_PLANNER__COST,"
            " with two underscores\n"
        )

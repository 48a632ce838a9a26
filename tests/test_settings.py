"""The sources of the settings, and their checks at start."""

import dataclasses
import re
import tracemalloc

import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.settings import Settings
from evenkeel_moe.settings_sources import load_settings, misspelt_variables


def refusal(**environment):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidInput) as caught:
        for name, value in environment.items():
            patch.setenv(f"EVENKEEL_{name}", value)
        load_settings()
    return str(caught.value)


def test_defaults_are_valid_and_listen_on_this_machine_only():
    settings = load_settings()
    assert {settings.grpc.host, settings.rest.host, settings.metrics.host} == {"127.0.0.1"}
    assert settings.planner.mode is Mode.OBSERVE
    assert settings.planner.thresholds == {}
    assert settings.redis.url == ""
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.grpc.port = 1  # type: ignore[misc]


def test_an_ipv6_address_may_have_brackets(monkeypatch):
    for section, host in (("GRPC", "[::]"), ("REST", "::"), ("METRICS", "[::1]")):
        monkeypatch.setenv(f"EVENKEEL_{section}__HOST", host)
    settings = load_settings()
    assert (settings.grpc.host, settings.rest.host, settings.metrics.host) == ("::", "::", "::1")


def test_variables_override_the_file_and_the_file_overrides_defaults(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(
        "log_level: debug\n"
        "grpc: {port: 7001, advertise: 'a:1'}\n"
        "planner: {mode: auto, thresholds: {cooldown_s: 60, min_gain: 0.02}}\n"
    )
    (tmp_path / "c.toml").write_text('log_level = "debug"\n[grpc]\nport = 7001\n')
    monkeypatch.setenv("EVENKEEL_GRPC__PORT", "7002")
    monkeypatch.setenv("EVENKEEL_PLANNER__THRESHOLDS__COOLDOWN_S", "5")
    settings = load_settings(tmp_path / "c.yaml")
    assert (settings.grpc.port, settings.grpc.advertise, settings.log_level) == (
        7002,
        "a:1",
        "debug",
    )
    assert settings.planner.mode is Mode.AUTO
    assert settings.planner.thresholds == {"cooldown_s": 5.0, "min_gain": 0.02}
    settings = load_settings(tmp_path / "c.toml")
    assert (settings.grpc.port, settings.log_level) == (7002, "debug")
    (tmp_path / "empty.yml").write_text("")
    assert load_settings(tmp_path / "empty.yml").grpc.port == 7002


@pytest.mark.parametrize(
    ("content", "mode", "locked"),
    [
        ("profile: observe", Mode.OBSERVE, True),
        ("profile: propose", Mode.PROPOSE, False),
        ("profile: auto", Mode.AUTO, False),
        ("{profile: observe, planner: {mode: auto}}", Mode.AUTO, False),
        ("{profile: auto, planner: {mode: observe}}", Mode.OBSERVE, True),
        ("{profile: observe, planner: {observe_lock: false}}", Mode.OBSERVE, False),
        ("{}", Mode.OBSERVE, False),
    ],
)
def test_the_profile_sets_mode_and_lock_where_nothing_else_does(tmp_path, content, mode, locked):
    (tmp_path / "c.yaml").write_text(content)
    planner = load_settings(tmp_path / "c.yaml").planner
    assert (planner.mode, planner.observe_lock) == (mode, locked)


def test_the_given_profile_overrides_those_of_variables_and_file(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("profile: observe")
    monkeypatch.setenv("EVENKEEL_PROFILE", "propose")
    assert load_settings(tmp_path / "c.yaml").planner.mode is Mode.PROPOSE
    assert load_settings(tmp_path / "c.yaml", "auto").planner.mode is Mode.AUTO


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.yaml", "profile: often", r"c\.yaml:1: profile: "),
        ("c.yaml", "profile: auto\nplanner: 1", r"c\.yaml:2: planner: "),
        ("c.json", "{}", "must end in .toml, .yaml or .yml"),
        ("c.yaml", "[1]", "must hold sections, not list"),
        ("c.yaml", "a: [", "c.yaml"),
        ("c.toml", "a = ", "c.toml"),
        ("c.yaml", "# a\ngrpc: {prot: 1}", r"c\.yaml:2: grpc\.prot: "),
        ("c.yaml", "nonsense: 1", r"c\.yaml:1: nonsense: "),
        ("c.yaml", "rest:\n  host: a\n  port: high\n", r"c\.yaml:3: rest\.port: "),
        ("c.toml", "[rest]\nhost = 'a'\n\n[grpc]\nport = 'x'\n", r"\ngrpc\.port: "),
        ("c.toml", "rest.port = 'x'\n", r"\nrest\.port: "),
        ("c.toml", "log_level = 'loud'\n", r"\nlog_level: "),
        (
            "c.yaml",
            "planner:\n  thresholds: {cooldown_s: soon}\n",
            r"c\.yaml:2: planner\.thresholds\.cooldown_s: ",
        ),
        ("c.yaml", "grpc:\n  port: [1\n", r"c\.yaml:3: expected ',' or '\]'"),
        ("c.yaml", "planner: {cycle: 1}", r"yaml:1: planner\.cycle: there is no such setting$"),
        ("c.yaml", "4: 1", r"yaml:1: 4: Keys should be strings"),
        ("c.yaml", "_env_file: 1", r"yaml:1: _env_file: there is no such setting$"),
        ("c.yaml", b'grpc: {host: "\xff"}', "c.yaml: 'utf-8'"),
        ("c.toml", b"\xff", "c.toml: 'utf-8'"),
        ("c.yaml", "log_level: 2026-13-01", r"c\.yaml:1: log_level: "),
        ("c.toml", "log_level = 2026-12-01", r"\nlog_level: "),
        ("c.toml", "[grcp.x]\ny = 1\n", "\ngrcp: there is no such setting$"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=words):
        load_settings(tmp_path / name)


HOSTILE = {
    "hex.yaml": (f"grpc: {{port: 0x{'f' * 100_000}}}", r"yaml:1: grpc\.port: .*; it is 0xff"),
    "hex.toml": (f"grpc.port = 0x{'f' * 100_000}", r"grpc\.port: .*thousands of digits"),
    "base60.yaml": (f"grpc: {{port: 1{':59' * 9000}}}", r"grpc\.port: .*; it is 1:59"),
    "base60float.yaml": (f"grpc: {{port: 1{':59' * 900}.5}}", r"grpc\.port: .*; it is 1:59"),
    "octal.yaml": (f"grpc: {{port: 0{'7' * 100_000}}}", r"grpc\.port: "),
    "tag.yaml": ("grpc: {port: !!bool x}", "yaml:1: a value is not written as bool"),
    "twice.yaml": ("grpc: {port: 1}\ngrpc: {port: 2}", "yaml:2: a key occurs twice"),
    "itself.yaml": ("grpc: &a\n  port: *a", "yaml:1: a value contains itself"),
    "deep.yaml": ("a: " + "[" * 500, r"yaml:1: nested too deeply"),
    "deep.toml": ("a = " + "[" * 10_000, r"toml: nested too deeply"),
    "dots.toml": ("a" + ".a" * 50_000 + " = 1", "toml:1: more than 1,000 dots"),
    "names.yaml": ("".join(f"u{n}: 1\n" for n in range(2000)), "and 1900 more$"),
    "names.toml": ("".join(f"u{n} = 1\n" for n in range(2000)), "and 1900 more$"),
    "values.toml": ("a = [" + "1," * 20_000 + "]", "has 20,001 values, more than 10,000"),
    "long.toml": ("#" * 300_000, "is longer than 262,144 bytes"),
    "aliases.yaml": (
        "a0: &a0 [1]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)),
        "yaml:6: stands for more than 200000 values",
    ),
    "merges.yaml": (
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9)),
        "yaml:7: stands for more than 200000 values",
    ),
}
"""Files of settings that are small to write, and what is said of them."""


@pytest.mark.fault(
    "an operator whose settings file had hexadecimal numbers or merged anchors",
    "a traceback, minutes or gigabytes",
)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_within_bounds(tmp_path, name):
    content, words = HOSTILE[name]
    (tmp_path / name).write_text(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=words):
            load_settings(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_parts_of_a_settings_file_may_be_merged_and_overridden(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("grpc: &a {host: 127.0.0.2, port: 7001}\nrest: {<<: *a, port: 7002}")
    settings = load_settings(path)
    assert (settings.rest.host, settings.rest.port) == ("127.0.0.2", 7002)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot read settings file .*absent\.yaml"):
        load_settings(tmp_path / "absent.yaml")


def test_secrets_are_read_from_files_and_never_shown(tmp_path, monkeypatch):
    (tmp_path / "url").write_text("redis://:hunter2@127.0.0.1:6379\n")
    monkeypatch.setenv("EVENKEEL_REDIS__URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("EVENKEEL_REDIS__PREFIX", "fleet")
    settings = load_settings()
    assert settings.redis.url == "redis://:hunter2@127.0.0.1:6379"
    assert settings.redis.prefix == "fleet"
    assert "hunter2" not in repr(settings)
    monkeypatch.setenv("EVENKEEL_REDIS__PREFIX", "a{b}hunter2")
    with pytest.raises(InvalidInput) as caught:
        load_settings()
    assert "EVENKEEL_REDIS__PREFIX" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    (tmp_path / "url").write_bytes(b"hunter2\xff")
    with pytest.raises(InvalidInput, match=r"EVENKEEL_REDIS__URL_FILE: .*/url is not UTF-8 text$"):
        load_settings()
    monkeypatch.setenv("EVENKEEL_REDIS__URL_FILE", str(tmp_path / "absent"))
    with pytest.raises(InvalidInput, match="EVENKEEL_REDIS__URL_FILE: cannot read"):
        load_settings()


def test_the_sentinels_login_is_a_secret_and_needs_a_sentinel_url(tmp_path, monkeypatch):
    (tmp_path / "password").write_text("hunter2\n")
    monkeypatch.setenv("EVENKEEL_REDIS__SENTINEL_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("EVENKEEL_REDIS__SENTINEL_USERNAME", "keel")
    monkeypatch.setenv("EVENKEEL_REDIS__URL", "rediss+sentinel://h:26379/main")
    settings = load_settings()
    assert (settings.redis.sentinel_username, settings.redis.sentinel_password) == (
        "keel",
        "hunter2",
    )
    assert "hunter2" not in repr(settings)
    assert "needs redis+sentinel:// or" in refusal(REDIS__URL="redis://h:6379")
    monkeypatch.delenv("EVENKEEL_REDIS__SENTINEL_PASSWORD_FILE")
    assert "sentinel_username needs redis.sentinel_password" in refusal()
    monkeypatch.setenv("EVENKEEL_REDIS__URL", "redis+sentinel://h:26379/main?sentinel_password=x")
    assert load_settings().redis.sentinel_username == "keel"


def test_half_of_the_window_may_be_held_out(monkeypatch):
    monkeypatch.setenv("EVENKEEL_PLANNER__THRESHOLDS__MIN_HELD_OUT_STEPS", "128")
    assert load_settings().planner.thresholds["min_held_out_steps"] == 128


def test_unknown_variables_are_refused():
    assert "EVENKEEL_GPRC__PORT names no section" in refusal(GPRC__PORT="1")
    assert "EVENKEEL_GRPC__PROT" in refusal(GRPC__PROT="1")


def test_a_setting_with_one_underscore_is_named_with_two(monkeypatch):
    pairs = {
        "EVENKEEL_PLANNER_COST": "EVENKEEL_PLANNER__COST",
        "EVENKEEL_PLANNER_THRESHOLDS_MIN_GAIN": "EVENKEEL_PLANNER__THRESHOLDS__MIN_GAIN",
        "EVENKEEL_REDIS_PASSWORD_FILE": "EVENKEEL_REDIS__PASSWORD_FILE",
        "EVENKEEL_grpc_host": "EVENKEEL_GRPC__HOST",
    }
    for name in pairs:
        monkeypatch.setenv(name, "x")
    assert misspelt_variables() == pairs


@pytest.mark.parametrize(
    "service",
    ["", "_CONTROLLER", *(f"_{name.upper()}" for name in Settings.model_fields)],
)
def test_variables_that_kubernetes_sets_for_a_service_are_no_settings(service, monkeypatch):
    endings = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_6379_TCP"]
    endings += [f"PORT_6379_TCP_{end}" for end in ("PROTO", "PORT", "ADDR")]
    for ending in endings:
        monkeypatch.setenv(f"EVENKEEL{service}_{ending}", "tcp://10.0.0.1:6379")
    assert misspelt_variables() == {}
    assert load_settings() == Settings()


def test_right_variables_are_not_misspelt(monkeypatch):
    for name in ("URL", "TOKEN_FILE", "DATA_DIR", "LOG_LEVEL", "PLANNER__COST", "PLANNER_COSTS"):
        monkeypatch.setenv(f"EVENKEEL_{name}", "x")
    assert misspelt_variables() == {}


def test_variables_of_the_command_line_are_ignored(monkeypatch):
    for name in ("EVENKEEL_ADDRESS", "EVENKEEL_TOKEN", "EVENKEEL_CONFIG", "EVENKEEL_DEPLOYMENT"):
        monkeypatch.setenv(name, "x")
    assert isinstance(load_settings(), Settings)


def test_a_fault_names_what_set_the_value(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(
        "rest: {port: high}\nmetrics: {port: higher}\n"
        "planner: {cycle_s: 1, deadline_s: -1, thresholds: {min_gain: 0.1}}\n"
    )
    monkeypatch.setenv("EVENKEEL_REST__PORT", "70000")
    monkeypatch.setenv("EVENKEEL_METRICS", '{"host": "::1"}')
    monkeypatch.setenv("EVENKEEL_GRPC", '{"prot": 1}')
    monkeypatch.setenv("EVENKEEL_PLANNER", '{"cycle_s": -1, "thresholds": {"min_gain": -1}}')
    monkeypatch.setenv("EVENKEEL_PLANNER__WORKERS", "0")
    with pytest.raises(InvalidInput) as caught:
        load_settings(path)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(re.split(": (?=Input|there)", line)[0] for line in lines) == [
        f"{path}:2: metrics.port",
        f"{path}:3: planner.deadline_s",
        "EVENKEEL_GRPC: grpc.prot",
        "EVENKEEL_PLANNER: planner.cycle_s",
        "EVENKEEL_PLANNER: planner.thresholds.min_gain",
        "EVENKEEL_PLANNER__WORKERS",
        "EVENKEEL_REST__PORT",
    ]


@pytest.mark.parametrize("value", ["{port: 1}", "[]", "[" * 100_000])
def test_a_variable_of_a_whole_section_is_a_json_object(value):
    assert re.search("JSON|dictionary", refusal(REST=value))
    assert re.search("JSON|dictionary", refusal(PLANNER__THRESHOLDS=value))


def test_times_and_sizes_too_large_for_grpc_are_refused():
    """gRPC would fail with a traceback on values beyond 32 bits."""
    words = refusal(
        GRPC__MAX_MESSAGE_BYTES=str(2**31),
        GRPC__KEEPALIVE_S="1e9",
        GRPC__KEEPALIVE_TIMEOUT_S="1e308",
        GRPC__MAX_CONNECTION_AGE_S="1e300",
        GRPC__MAX_CONNECTION_AGE_GRACE_S="nan",
    )
    assert [line.split(":")[0] for line in words.splitlines()[1:]] == [
        "EVENKEEL_GRPC__MAX_MESSAGE_BYTES",
        "EVENKEEL_GRPC__KEEPALIVE_S",
        "EVENKEEL_GRPC__KEEPALIVE_TIMEOUT_S",
        "EVENKEEL_GRPC__MAX_CONNECTION_AGE_S",
        "EVENKEEL_GRPC__MAX_CONNECTION_AGE_GRACE_S",
    ]


def test_all_wrong_values_are_reported_at_once():
    wrong = {
        "GRPC__PORT": ("70000", "65535"),
        "PLANNER__MODE": ("sometimes", "'observe', 'propose' or 'auto'"),
        "LEADER__LEASE_S": ("nan", "a finite number"),
        "PLANNER__THRESHOLDS__COOLDOWN_S": ("-1", "greater than or equal to 0"),
        "HEALTH__PLAN_STUCK_S": ("0", "greater than 0"),
        "HEALTH__BALANCEDNESS_MIN": ("nan", "a finite number"),
        "MIGRATION__MAX_BYTES_PER_S": ("inf", "a finite number"),
        "PLANNER__COPY_BYTES_PER_S": ("inf", "a finite number"),
        "PLANNER__COPY_COST_TOKENS": ("inf", "a finite number"),
        "PLANNER__CROSS_NODE_FACTOR": ("inf", "a finite number"),
    }
    words = refusal(**{name: value for name, (value, _) in wrong.items()})
    for name, (value, allowed) in wrong.items():
        assert re.search(f"EVENKEEL_{name}: .*{allowed}; it is {value}", words)
    words = refusal(REST__PORT="9090", WINDOW__STEPS="200")
    assert "all must differ" in words and "exceeds window.steps" in words


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LEADER__REPLICA_ID": ""}, "EVENKEEL_LEADER__REPLICA_ID"),
        ({"REST__HOST": ""}, "EVENKEEL_REST__HOST"),
        ({"LEADER__REPLICAS": "2"}, "leader.replicas is 2 and redis.url is empty"),
        ({"LEADER__LEASE_S": "2"}, "1 x 3 = 3 exceeds leader.lease_s 2"),
        ({"INGEST__RANK_LEASE_S": "2"}, "2.5 x 3 = 7.5 exceeds ingest.rank_lease_s 2"),
        (
            {"REDIS__WAIT_REPLICAS": "1"},
            "redis.wait_replicas is 1: the embedded store has no replicas",
        ),
        (
            {"REDIS__WAIT_REPLICAS": "2", "REDIS__URL": "redis+cluster://h:1"},
            "the embedded store has no replicas, and replicas of a cluster are not waited for",
        ),
        ({"WINDOW__STEPS": "200"}, "window.plan_steps 256 exceeds window.steps 200"),
        ({"PLANNER__RECENT_STEPS": "100"}, "100 x 4 = 400 exceeds window.plan_steps 256"),
        ({"MIGRATION__PREPARE_DEADLINE_S": "5"}, "batch_deadline_s 10 exceeds"),
        ({"PLANNER__THRESHOLDS__MIN_WINDOW_STEPS": "300"}, "min_window_steps 300 exceeds"),
        (
            {"PLANNER__THRESHOLDS__MIN_HELD_OUT_STEPS": "129"},
            "129 must be a whole number of at most 128, half of window.plan_steps (256)",
        ),
        ({"PLANNER__THRESHOLDS__MIN_HELD_OUT_STEPS": "100.5"}, "100.5 must be a whole number"),
        ({"PLANNER__THRESHOLDS__MIN_HELD_OUT_STEPS": "1e300"}, "1e+300 must be a whole number"),
        (
            {"PLANNER__THRESHOLDS": '{"cooldown": 3}'},
            "planner.thresholds: unknown gate settings cooldown",
        ),
        ({"PLANNER__THRESHOLDS__COOLDOWN": "3"}, "unknown gate settings cooldown; known: "),
        ({"PLANNER__THRESHOLDS__PLAN_BELOW": "1"}, "plan_below 1.0 <= stop_above 0.93 <= 1"),
        ({"PLANNER__POLICY": "best"}, "unknown policy 'best'"),
        ({"GRPC__TLS_CERT_FILE": "a.pem"}, "needs grpc.tls_key_file"),
        ({"REST__TLS_KEY_FILE": "a.pem"}, "needs rest.tls_cert_file"),
        ({"GRPC__TLS_CLIENT_CA_FILE": "a.pem"}, "needs grpc.tls_cert_file"),
        ({"GRPC__TLS_REQUIRE_IDENTITY": "true"}, "needs grpc.tls_client_ca_file"),
        (
            {"REDIS__PASSWORD": "hunter2"},
            "redis.password needs redis.url: the embedded store has no password",
        ),
        ({"REST__PORT": "9090"}, "all must differ"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_arithmetic(environment, words):
    assert words in refusal(**environment)

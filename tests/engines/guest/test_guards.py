"""Checks of an engine's version and parts."""

from dataclasses import dataclass

import pytest

from evenkeel_moe.engines.guest.guards import (
    EngineReport,
    Hook,
    Unsupported,
    check_version,
    compare_fields,
    compare_signatures,
    refuse_differences,
)


def test_guards_name_the_difference():
    class Engine:
        @classmethod
        def plan(cls, weight, ranks):
            return weight

        @staticmethod
        def free(one):
            return one

        number = 3

    def check(owner, expected):
        refuse_differences(compare_signatures(owner, expected))

    check_version("engine", "1.0", ("1.0", "1.1"))
    with pytest.raises(Unsupported, match=r"engine is 1.2; this plugin supports 1.0, 1.1"):
        check_version("engine", "1.2", ("1.0", "1.1"))
    for build in ("1.0.post1", "1.0+cu130", "1.1.post2+local.3"):
        check_version("engine", build, ("1.0", "1.1"))
    for other in ("1.0rc1", "1.0.dev3", "1.0.1", "1.0.post1x", "2.0+cu130", ""):
        with pytest.raises(Unsupported, match="this plugin supports 1.0, 1.1"):
            check_version("engine", other, ("1.0", "1.1"))
    check(Engine, {"plan": "cls weight ranks", "free": "one"})
    with pytest.raises(
        Unsupported, match=r"plan takes \(cls, weight, ranks\), not \(cls, weight\)"
    ):
        check(Engine, {"plan": "cls weight"})
    for name in ("gone", "number"):
        with pytest.raises(Unsupported, match="is missing"):
            check(Engine, {name: ""})

    @dataclass
    class State:
        here: int

    assert not compare_fields(State, ("here",)).difference
    assert compare_fields(State, ("here", "away")).difference.endswith("State has no away")
    assert compare_fields(Engine, ("number",)).difference


def test_versions_of_an_engine_may_take_different_arguments():
    def plan(cls, weight): ...

    owner = type("Engine", (), {"plan": plan})
    (hook,) = compare_signatures(owner, {"plan": "cls weight ranks | cls weight"})
    assert not hook.difference
    (hook,) = compare_signatures(owner, {"plan": "cls | cls ranks"})
    assert hook.difference.endswith("plan takes (cls, weight), not (cls) or (cls, ranks)")


def test_a_report_tells_a_tested_version_from_another_with_the_same_parts():
    hooks = (Hook("a"), Hook("b", "b is missing"))
    assert EngineReport("vllm", "1.0.post1", ("1.0",), hooks).is_known
    report = EngineReport("vllm", "1.1", ("1.0",), hooks)
    assert not report.is_known
    assert report.differences == (hooks[1],)

"""Checks of an engine's version and parts."""

from dataclasses import dataclass

import pytest

from evenkeel_moe.engines.guest.guards import (
    Unsupported,
    check_fields,
    check_signatures,
    check_version,
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

    check_version("engine", "1.0", ("1.0", "1.1"))
    with pytest.raises(Unsupported, match=r"engine is 1.2; this plugin supports 1.0, 1.1"):
        check_version("engine", "1.2", ("1.0", "1.1"))
    for build in ("1.0.post1", "1.0+cu130", "1.1.post2+local.3"):
        check_version("engine", build, ("1.0", "1.1"))
    for other in ("1.0rc1", "1.0.dev3", "1.0.1", "1.0.post1x", "2.0+cu130", ""):
        with pytest.raises(Unsupported, match="this plugin supports 1.0, 1.1"):
            check_version("engine", other, ("1.0", "1.1"))
    check_signatures(Engine, {"plan": "cls weight ranks", "free": "one"})
    with pytest.raises(
        Unsupported, match=r"plan takes \(cls, weight, ranks\), not \(cls, weight\)"
    ):
        check_signatures(Engine, {"plan": "cls weight"})
    for name in ("gone", "number"):
        with pytest.raises(Unsupported, match="is missing"):
            check_signatures(Engine, {name: ""})

    @dataclass
    class State:
        here: int

    check_fields(State, ("here",))
    with pytest.raises(Unsupported, match="State has no away"):
        check_fields(State, ("here", "away"))
    with pytest.raises(Unsupported):
        check_fields(Engine, ("number",))

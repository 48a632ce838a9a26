"""The options that a controller gives its parts, and their defaults."""

from dataclasses import MISSING, asdict, fields, is_dataclass, replace

import pytest

from evenkeel_moe.controller.policy_document import policy_document
from evenkeel_moe.controller.process.options import (
    deployment_options,
    deployments_bytes,
    server_options,
)
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings

DEPLOYMENT = deployment_options(Settings(), "here:1")
OPTIONS = {
    "server": server_options(Settings()),
    "policy": DEPLOYMENT.policy,
    "timing": DEPLOYMENT.timing,
    "wave timing": DEPLOYMENT.timing.wave,
    "cycle": DEPLOYMENT.cycle,
    "objective": DEPLOYMENT.cycle.objective,
    "flow": DEPLOYMENT.flow,
}
NEUTRAL = frozenset({"cross_node_factor"})
"""Fields whose default in the pure core means "no such effect"; a controller always sets them."""


def defaults(kind):
    """Return the default of each field that has a plain one."""
    return {
        one.name: one.default
        for one in fields(kind)
        if one.default is not MISSING and not is_dataclass(one.default)
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_a_part_has_the_same_defaults_as_the_settings(name):
    options = OPTIONS[name]
    own = {field: value for field, value in defaults(options).items() if field not in NEUTRAL}
    assert {field: getattr(options, field) for field in own} == own


def test_an_operator_without_settings_gets_the_defaults_of_the_gates():
    thresholds = policy_document(DEPLOYMENT.policy)["thresholds"]
    assert thresholds == asdict(GateSettings())
    assert (
        thresholds["cooldown_s"],
        thresholds["consecutive_windows"],
        thresholds["max_data_age_s"],
    ) == (8, 2, 15)
    assert (DEPLOYMENT.policy.cycle_s, DEPLOYMENT.timing.cycle_deadline_s) == (2, 120)


def test_deployments_get_the_memory_that_the_process_and_the_planners_leave():
    settings = Settings()
    planner = replace(settings.planner, workers=2)
    changed = settings.model_copy(update={"planner": planner})
    assert deployments_bytes(changed, 4_000_000_000) == 2_500_000_000
    assert deployments_bytes(settings, 500_000_000) == 0
    ingest = replace(settings.ingest, memory_bytes=7)
    changed = settings.model_copy(update={"ingest": ingest})
    assert deployments_bytes(changed, 4_000_000_000) == 7

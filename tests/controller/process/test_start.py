"""The options that a controller gives its parts, and their defaults."""

import os
import subprocess
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass, replace

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.policy_document import policy_document
from evenkeel_moe.controller.process.certificate_watch import CertificateWatch, certificates_of
from evenkeel_moe.controller.process.options import (
    deployment_options,
    deployments_bytes,
    server_options,
)
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings
from evenkeel_moe.settings_sources import load_settings

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


# --- The kernels that the event loop calls are compiled before the first rank connects ------------


PROGRAM = """
import sys
from dataclasses import replace
import numpy as np
from evenkeel_moe.controller.process.kernel_warmup import warm_kernels
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.load import Phase
from evenkeel_moe.planning.problem import kernels, metrics, moe_time
from evenkeel_moe.telemetry.cost_choice import KnownCosts, RankNumbers, choose_cost
from evenkeel_moe.telemetry.time_fit import NoFit
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.telemetry import step_kernels
from evenkeel_moe.telemetry.load_check import LoadCheck
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import ReplicaCost
from evenkeel_moe.wire import reports, step_checks
from tests.telemetry.reports import PLACEMENT, SHAPE, Fleet, make_assembler, windows_of

def identity_of(report):
    return RankIdentity(report.deployment, report.rank, report.generation, report.incarnation)

def over_the_wire(report):
    return reports.decode_report(reports.encode_report(report), identity_of(report), SHAPE)

def compiled():
    named = (
        kernels.rank_load_kernel, kernels.batch_split_kernel,
        kernels.replica_work_kernel, kernels.step_times_kernel,
    )
    functions = [one for module in (step_kernels, step_checks) for one in vars(module).values()]
    ours = [one for one in functions if hasattr(one, "signatures")]
    return [len(one.signatures) for one in (*ours, *named)]

warm_kernels()
before = compiled()
assert sum(before) >= 8, before
run, assembler = Fleet().run(range(3)), make_assembler()
got = [over_the_wire(run.report(rank)) for rank in range(3)]
window = windows_of([assembler.take(report) for report in got])[Phase.DECODE]
no_steps = {"steps": got[0].steps[:0], "counts": got[0].counts[:0], "dropped_steps": 3}
nothing = over_the_wire(replace(run.report(0), **no_steps))
assembler.take(nothing)
LoadCheck(8).add(window)
LoadCheck(8).add(window.slice(slice(1, None)))
counts = window.slice(slice(1, None)).counts
costs = RankNumbers("H100", "bf16", None, ReplicaCost(0.0, 1e-6, 1e-6, 1e-5, 0.0, 0.0))
no_fit = NoFit("none")
known = KnownCosts(SHAPE, [costs] * SHAPE.num_ranks, no_fit, 100.0, 2.0, 0.0)
assert choose_cost(known).ratios[CostSource.DERIVED] is not None
assert compiled() == before, (before, compiled())
for dispatch in DispatchModel:
    for load in (counts, counts.sum(axis=0, dtype=np.float64)[None]):
        metrics.balancedness(metrics.rank_load(load, PLACEMENT, SplitModel(dispatch)))
    moe_time.predicted_time(counts, PLACEMENT, split=SplitModel(dispatch))
    assert compiled() == before, (dispatch, before, compiled())
"""


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_reports_and_balance_find_their_kernels_compiled():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr


WITHOUT_CACHE = """
import resource, signal
import numpy as np
from evenkeel_moe.controller.process import kernel_warmup
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem import metrics

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
placement = Placement.initial(ModelShape(1, 2, 2, 1, 1, 1))

def use():
    return metrics.rank_load(np.ones((1, 1, 2), np.uint32), placement)

kernel_warmup._uses = lambda: [use]
kernel_warmup.warm_kernels()
assert use().tolist() == [[[1.0, 1.0]]]
"""


def test_a_cache_that_cannot_be_written_costs_only_the_cache(tmp_path):
    # Without optimisation the same kernels compile sooner, and they cannot be written either.
    done = run(WITHOUT_CACHE, NUMBA_CACHE_DIR=str(tmp_path / "cache"), NUMBA_OPT="0")
    assert done.returncode == 0, done.stderr
    assert "kernel_not_cached" in done.stdout


# --- Which certificates are watched, and what is exported of them ---------------------------------


NAME = "evenkeel_certificate_expiry_timestamp_seconds"


async def test_an_end_stays_while_files_are_replaced_and_the_cause_is_logged_once():
    registry = CollectorRegistry()
    answers = iter((100.0, OSError("half written"), OSError("half written"), 200.0))

    def read():
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    watch = CertificateWatch({"rest": read}, ControllerMetrics(registry))
    assert registry.get_sample_value(NAME, {"kind": "rest"}) is None
    seen = []
    with capture_logs() as logs:
        for _ in range(4):
            await watch.check()
            seen.append(registry.get_sample_value(NAME, {"kind": "rest"}))
    assert seen == [100.0, 100.0, 100.0, 200.0]
    assert [row["event"] for row in logs] == ["certificate_unreadable"]


def test_every_certificate_of_the_settings_is_watched(tmp_path, monkeypatch):
    assert certificates_of(load_settings()) == {}
    for name in ("cert", "key", "client_ca"):
        monkeypatch.setenv(f"EVENKEEL_GRPC__TLS_{name.upper()}_FILE", str(tmp_path / name))
    for name in ("cert", "key"):
        monkeypatch.setenv(f"EVENKEEL_REST__TLS_{name.upper()}_FILE", str(tmp_path / name))
    assert set(certificates_of(load_settings())) == {"grpc", "grpc_client_ca", "rest"}

"""The kernels that the event loop calls are compiled before the first rank connects."""

import os
import subprocess
import sys

from evenkeel_moe.model.dispatch_model import DispatchModel

PROGRAM = """
import resource, signal, sys
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
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import ReplicaCost
from evenkeel_moe.wire import reports, step_checks
from tests.telemetry.reports import PLACEMENT, SHAPE, Fleet, make_assembler, windows_of

most_bytes, models = int(sys.argv[1]), list(map(DispatchModel, sys.argv[2:]))
if most_bytes:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

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
counts = window.slice(slice(1, None)).counts
costs = RankNumbers("H100", "bf16", None, ReplicaCost(0.0, 1e-6, 1e-6, 1e-5, 0.0, 0.0))
no_fit = NoFit("none")
known = KnownCosts(SHAPE, [costs] * SHAPE.num_ranks, no_fit, 100.0, 2.0, 0.0)
assert choose_cost(known).ratios[CostSource.DERIVED] is not None
assert compiled() == before, (before, compiled())
for dispatch in models:
    for load in (counts, counts.sum(axis=0, dtype=np.float64)[None]):
        metrics.balancedness(metrics.rank_load(load, PLACEMENT, SplitModel(dispatch)))
    moe_time.predicted_time(counts, PLACEMENT, split=SplitModel(dispatch))
    assert compiled() == before, (dispatch, before, compiled())
"""


def run(*dispatch, most_bytes=0, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(most_bytes), *dispatch],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_reports_and_balance_find_their_kernels_compiled():
    done = run(*DispatchModel)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_costs_only_the_cache(tmp_path):
    # Without optimisation the same kernels compile sooner, and they cannot be written either.
    without = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_OPT": "0"}
    done = run(DispatchModel.EVEN, most_bytes=1000, **without)
    assert done.returncode == 0, done.stderr
    assert "kernel_not_cached" in done.stdout

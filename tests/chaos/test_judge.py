"""The outside judge finds no breach in a recorded run, and every forgery of it.

`recorded.tar.xz` is a real run of 4 ranks, in which one retired, others joined and died, and
leaders and the store failed: `python -m tests.chaos --ranks 4 --seconds 80 --seed 50 --folder DIR`,
with its logs unpacked and without the connections of strangers and what ranks logged of each step.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from tests.chaos.forge import Forger, unpack
from tests.chaos.forgeries import FORGERIES
from tests.chaos.judge import rules_outcomes
from tests.chaos.judge.case import WIRE, read_case
from tests.chaos.judge.store import PlanFacts, StoreDump
from tests.chaos.judge.verdict import judge
from tests.chaos.judge.wire import Moment, StoreWrite
from tests.chaos.judge.wire_log import read_records
from tests.waiting import deadline

RECORDED = Path(__file__).parent / "recorded.tar.xz"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    unpack(RECORDED, folder)
    return folder


@pytest.fixture(scope="module")
def facts(run):
    return read_case(run)


@pytest.fixture(scope="module")
def records(run):
    return list(read_records(run / WIRE))


@pytest.fixture
def forger(run, facts, records, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return Forger(tmp_path / "run", facts, records)


def test_the_judge_alone_finds_nothing_in_the_recorded_run(run):
    # With the package hidden: an import of it anywhere would end the process.
    command = "import sys, runpy; sys.modules['evenkeel_moe'] = None; sys.argv[1:] = [{!r}];"
    command += "runpy.run_module('tests.chaos.judge', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", command.format(str(run))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.rstrip().endswith("verdict: no breach")


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forgery_is_found(forger, forge):
    forge(forger)
    forger.write_wire()
    breaches = judge(forger.folder).breaches
    assert FORGERIES[forge] in {breach.rule for breach in breaches}


def _write(term, unix, waves, phase="migrating", accepted=True, node="a"):
    """Return a write of the plan `p`, which has two waves."""
    plan = {"plan_id": "p", "generation": "g", "base_epoch": 4, "weights_version": 1}
    record = {"plan": plan, "phase": phase, "waves_committed": waves, "num_waves": 2}
    record["wave_agreed"] = False
    body = zstandard.compress(json.dumps(record).encode())
    moment = Moment(0, int(unix * 1e9))
    return StoreWrite("fleet", "plans", "p", body, term, node, 0, 0, moment, accepted)


@pytest.mark.parametrize(
    ("writes", "found"),
    [
        ([_write(1, 1.0, 2), _write(2, 9.0, 1, "aborted", node="b")], True),
        ([_write(1, 6.0, 2), _write(2, 9.0, 1, "aborted", node="b")], True),
        ([_write(1, 1.0, 2), _write(2, 9.0, 1, "aborted")], True),
        ([_write(1, 1.0, 2, accepted=False), _write(2, 9.0, 1, "aborted")], False),
        ([_write(1, 1.0, 2)], False),
        ([_write(1, 1.0, 2), _write(1, 9.0, 1, "aborted")], False),
        ([_write(1, 1.0, 2), _write(2, 4.0, 1, "aborted")], False),
    ],
    ids=[
        "set back",
        "stored by a former primary",
        "the primary of before again",
        "never stored",
        "no later leader",
        "the same leader",
        "the same primary",
    ],
)
def test_only_a_failover_of_the_store_explains_a_plan_with_fewer_waves(writes, found):
    dumps = [StoreDump(unix, node, False) for unix, node in ((0.0, "a"), (5.0, "b"))]
    wire = SimpleNamespace(writes=writes)
    case = SimpleNamespace(config={"deployment": "fleet"}, wire=wire, dumps=dumps)
    plan = PlanFacts("p", "g", 4, 1, "aborted", 2, 1, agreed=False)
    assert rules_outcomes._was_set_back(case, "p", plan, 2) is found  # type: ignore[arg-type]

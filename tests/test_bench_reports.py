"""Benches keep the rows of other sections, report no share of no plan, and count late messages."""

import asyncio
import time

import pytest

from bench import delivered, report
from bench.delivered import share_rows
from bench.ingest import step_ages
from bench.ingest_fleet import Fleet, Scale
from bench.report import Row

PLANS = [{"over_promised": 0.8, "promised": 0.02}, {"over_promised": 2.0, "promised": 0.03}]
WAIT_S = 0.2


def values(rows):
    return {row.name: row.value for row in rows}


def test_a_run_of_one_section_keeps_the_rows_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "OUT", tmp_path)
    sections = {"one": lambda: [[Row("a", 1.0, "s")], [Row("b", 2.0, "s")]]}
    report.run_sections("some", sections, (), [])
    report.run_sections("some", {"two": lambda: [[Row("a", 3.0, "s"), Row("c", 4.0, "s")]]}, (), [])
    assert values(report.read_rows("some").values()) == {"a": 3.0, "b": 2.0, "c": 4.0}
    report.write_report("some", [Row("d", 5.0, "s")])
    assert values(report.read_rows("some").values()) == {"d": 5.0}


def test_a_share_of_no_plan_has_no_row():
    assert values(share_rows("", [])) == {"large_plans": 0.0}
    found = values(share_rows("", PLANS))
    assert found == {"large_plans": 0.0, "within_share": 0.5, "over_promised_median": 1.4}
    found = values(share_rows("", [*PLANS, {"over_promised": 1.0, "promised": 0.05}]))
    assert found["large_plans"] == found["large_within_share"] == 1.0


def test_runs_without_a_measured_plan_write_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "OUT", tmp_path)
    monkeypatch.setattr(delivered, "run_once", lambda run: [])
    monkeypatch.setattr("sys.argv", ["delivered", "2"])
    with pytest.raises(SystemExit, match="at most one plan"):
        delivered.main()
    assert not list(tmp_path.iterdir())


async def test_the_age_of_a_step_includes_the_wait_until_its_message_is_read(monkeypatch):
    fleet = Fleet(Scale(deployments=1, ranks=2, layers=1, slots_per_rank=5, steps=1))

    async def report_late(batch):
        await asyncio.sleep(WAIT_S)

    for rank in fleet.ranks:
        monkeypatch.setattr(rank, "report", report_late)
    await fleet.serve(1)
    assert step_ages(fleet, {("d0", 0): time.monotonic()})[0] >= WAIT_S

"""Reports that benches write."""

from bench import report
from bench.report import Row


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

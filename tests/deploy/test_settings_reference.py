import dataclasses

from deploy.settings_reference import settings_page, undocumented
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings


def test_every_setting_has_a_docstring():
    assert undocumented() == []


def test_the_page_has_a_row_for_every_setting_with_its_default():
    page = settings_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    sections = [getattr(Settings(), one.name) for one in dataclasses.fields(Settings)]
    names = [
        one.name
        for kind in [*filter(dataclasses.is_dataclass, sections), GateSettings()]
        for one in dataclasses.fields(kind)
    ]
    assert len(rows) == len(names) + 2, "data_dir and log_level have no section"
    assert all(row.count(" | ") == 3 and not row.endswith("|  |") for row in rows)
    assert "| `cooldown_s` | `8.0` |" in page
    assert "`observe`, `propose`, `auto`" in page
    assert "| `replica_id` | `the host name` |" in page

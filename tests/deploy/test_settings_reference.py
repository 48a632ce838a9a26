import dataclasses

from deploy.settings_reference import settings_page
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings


def test_the_page_has_a_row_for_every_setting_with_its_default():
    page = settings_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    kinds = [*Settings.sections().values(), GateSettings]
    names = [one.name for kind in kinds for one in dataclasses.fields(kind)]
    assert len(rows) == len(names) + 2, "data_dir and log_level have no section"
    assert all(row.count(" | ") == 3 and not row.endswith("|  |") for row in rows)
    assert "| `cooldown_s` | `8.0` |" in page
    assert "`observe`, `propose`, `auto`" in page
    assert "| `replica_id` | `the host name` |" in page

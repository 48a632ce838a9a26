"""The check of `make sbom`: the lists it accepts and the faults it reports."""

import copy
import re
from typing import Any

import pytest

from deploy.sbom import check
from evenkeel_moe import __version__
from evenkeel_moe.errors import InvalidInput
from tests.deploy.chart import ROOT

pytestmark = pytest.mark.deploy
TOOLS = re.compile(r"torch|nvidia|triton|cuda|pytest|mypy|ruff")


@pytest.fixture
def bom() -> dict[str, Any]:
    """Return the parts of cyclonedx-py's output that are checked.

    It lists every package of constraints.txt except the tools.
    """
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    pins = [line.split("==") for line in lines if "==" in line and not TOOLS.search(line)]
    rows = [
        {"name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
        for name, version in pins
    ]
    return {
        "bomFormat": "CycloneDX",
        "metadata": {"component": {"name": "evenkeel-moe", "version": __version__}},
        "components": rows,
    }


def faults(bom: dict[str, Any]) -> str:
    with pytest.raises(InvalidInput) as caught:
        check(bom)
    return str(caught.value)


def test_what_constraints_and_project_say_is_taken(bom):
    assert check(bom) == len(bom["components"])


def test_another_version_a_missing_package_and_torch_are_named(bom):
    row = next(one for one in bom["components"] if one["name"] == "numpy")
    for change, words in (
        ({"version": "0.1"}, "numpy is 0.1, constraints.txt says"),
        ({"name": "numpi"}, "numpy is needed and not in it"),
        ({"name": "numpi"}, "constraints.txt says None"),
        ({"purl": ""}, "numpy has no package URL"),
        ({"name": "torch"}, "torch does not belong in the image"),
    ):
        broken = copy.deepcopy(bom)
        broken["components"][bom["components"].index(row)] |= change
        assert words in faults(broken)


def test_a_list_of_something_else_is_no_list(bom):
    bom["metadata"]["component"]["version"] = "9.9"
    assert "it is of evenkeel-moe 9.9" in faults(bom)
    assert "bomFormat is None" in faults({})

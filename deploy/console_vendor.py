"""Fetches the console's JavaScript libraries from npm: `make console-vendor`.

`vendor/vendor.json` names the packages, their exact versions and licences, and the files that are
taken. This program downloads those versions, adapts the files, and writes their hashes back.
"""

import hashlib
import json
import re
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parents[1] / "service" / "evenkeel_moe" / "console" / "vendor"
LIST = FOLDER / "vendor.json"

_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$\n?", re.MULTILINE)


def adapt(name: str, text: str) -> str:
    """Return a library's file as the console serves it.

    Browsers resolve `from "preact"` only with an import map, which the content security policy
    would forbid. uPlot offers its small form only as a script. Source maps are not served.
    """
    if not name.endswith(".js"):
        return text
    text = _SOURCE_MAP.sub("", text).replace('from"preact"', 'from"./preact.js"')
    return text.rstrip() + ("\nexport default uPlot;\n" if name == "uplot.js" else "\n")


def refresh(packages: list[dict[str, Any]]) -> None:
    """Write the files of every package into the folder. Mutates: `packages`, their hashes."""
    for package in packages:
        wanted = f"{package['name']}@{package['version']}"
        with TemporaryDirectory() as folder:
            command = ["npm", "pack", wanted, "--json", "--ignore-scripts", "--loglevel=error"]
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            (packed,) = json.loads(done.stdout)
            package["integrity"] = packed["integrity"]
            with tarfile.open(Path(folder) / packed["filename"]) as archive:
                for name, file in package["files"].items():
                    source = archive.extractfile(f"package/{file['from']}")
                    assert source is not None, f"{wanted} has no file {file['from']}"
                    body = adapt(name, source.read().decode()).encode()
                    (FOLDER / name).write_bytes(body)
                    file["sha256"] = hashlib.sha256(body).hexdigest()


def main() -> None:
    """Fetch the files and write the list with their hashes."""
    document = json.loads(LIST.read_text(encoding="utf-8"))
    refresh(document["packages"])
    LIST.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

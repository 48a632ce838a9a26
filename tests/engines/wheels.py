"""Engines' own modules, taken out of their published wheels and kept in .cache; nothing of theirs is committed.

What those modules import and a test needs nothing of is stood in for.
"""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parent.parent.parent / ".cache" / "wheels"


def engine_root(name: str, version: str, wanted: tuple[str, ...]) -> Path:
    """Folder with the wanted modules of a wheel; downloads the wheel once, without its dependencies, and deletes it.

    Ranks are processes of their own and ask at the same moment: the first fetches, the others wait for it.
    """
    root = CACHE / f"{name}-{version}-engine"
    mark = root / f"have-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            _fetch(f"{name}=={version}", wanted, root)
            mark.touch()
    return root


def _fetch(requirement: str, wanted: tuple[str, ...], root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        subprocess.run([*command, requirement, "-d", folder], check=True, timeout=1800)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.namelist():
                    if entry.startswith(wanted) and entry.endswith(".py"):
                        archive.extract(entry, root)


def stand_in(name: str, **content: Any) -> types.ModuleType:
    """A module of that name with that content, found by every import from then on; its parent must be there."""
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module

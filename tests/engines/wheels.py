"""Engines' own modules, taken out of their published wheels and kept in .cache; nothing of theirs is committed."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(__file__).parent.parent.parent / ".cache" / "wheels"


def engine_root(name: str, version: str, wanted: tuple[str, ...]) -> Path:
    """Folder with the wanted modules of a wheel; downloads the wheel once, without its dependencies, and deletes it."""
    root = CACHE / f"{name}-{version}-engine"
    mark = root / f"have-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]}"
    if mark.exists():
        return root
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if not list(CACHE.glob(f"{name}-{version}-*.whl")):
        subprocess.run([*command, f"{name}=={version}", "-d", str(CACHE)], check=True, timeout=1800)
    for wheel in CACHE.glob(f"{name}-{version}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.startswith(wanted) and entry.endswith(".py"):
                    archive.extract(entry, root)
        wheel.unlink()
    mark.touch()
    return root

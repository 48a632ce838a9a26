"""Other projects' planners, fetched when a bench runs and kept in .cache; nothing of theirs is committed."""

import importlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["VLLM_VERSION", "vllm_planner"]

VLLM_VERSION = "0.33.0"
CACHE = Path(__file__).parent.parent / ".cache" / "wheels"
POLICY = "vllm/distributed/eplb/policy/"


def vllm_planner() -> Any:
    """vLLM's `DefaultEplbPolicy`, from the published wheel; the wheel itself is deleted again.

    Only the policy's own files are loaded, as a package of their own: importing vllm would pull the engine in.

    Raises:
        subprocess.CalledProcessError: the wheel could not be downloaded.
    """
    root = CACHE / f"vllm-{VLLM_VERSION}"
    folder = root / POLICY
    if not (folder / "default.py").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"downloading vllm {VLLM_VERSION} once (about 340 MB) for its planner of 400 lines")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                f"vllm=={VLLM_VERSION}",
                "-d",
                str(CACHE),
            ],
            check=True,
        )
        for wheel in CACHE.glob(f"vllm-{VLLM_VERSION}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith(POLICY) and name.endswith(".py"):
                        archive.extract(name, root)
            wheel.unlink()
    package = types.ModuleType("vllm_eplb_policy")
    package.__path__ = [str(folder)]
    sys.modules["vllm_eplb_policy"] = package
    return importlib.import_module("vllm_eplb_policy.default").DefaultEplbPolicy

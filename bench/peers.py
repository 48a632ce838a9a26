"""Planners of other projects, fetched into .cache when a bench runs and never committed."""

import importlib
import sys
import types
from typing import Any

from tests.engines.wheels import engine_root

VLLM_VERSION = "0.33.0"
POLICY = "vllm/distributed/eplb/policy/"


def vllm_planner() -> Any:
    """Return vLLM's `DefaultEplbPolicy`, from the published wheel of about 340 MB, downloaded once.

    Only the policy's files are loaded, as a separate package: importing vllm would load the engine.

    Raises:
        subprocess.CalledProcessError: the wheel could not be downloaded.
    """
    folder = engine_root("vllm", VLLM_VERSION, (POLICY,)) / POLICY
    package = types.ModuleType("vllm_eplb_policy")
    package.__path__ = [str(folder)]
    sys.modules["vllm_eplb_policy"] = package
    return importlib.import_module("vllm_eplb_policy.default").DefaultEplbPolicy

"""The modules that a plugin brings into an engine process."""

import subprocess
import sys

from tests.waiting import deadline

MODULES = (
    "evenkeel_moe.engines.vllm.plugin",
    "evenkeel_moe.engines.sglang.plugin",
    "evenkeel_moe.engines.guest.bootstrap",
    "evenkeel_moe.adapters.grpc.rank_link",
)
IMPORTS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    assert "numba" not in sys.modules, module
"""


def test_an_engine_process_loads_no_compiler():
    """numba costs 60 MB per rank, and its import fails without a writable cache folder."""
    command = [sys.executable, "-c", IMPORTS, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stderr

"""What an engine loads with the agent."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "evenkeel_moe.engines.vllm.plugin",
        "evenkeel_moe.engines.sglang.plugin",
        "evenkeel_moe.engines.guest.bootstrap",
        "evenkeel_moe.adapters.grpc.rank_link",
    ],
)
def test_an_engine_process_loads_no_compiler(module):
    """It costs 60 MB in every rank, and without a folder to write its cache to it ends the import."""
    code = f"import sys, {module}; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

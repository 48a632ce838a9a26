"""The modules that a plugin brings into an engine process."""

import subprocess
import sys

import pytest

from tests.waiting import deadline


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
    """numba costs 60 MB per rank, and its import fails without a writable cache folder."""
    code = f"import sys, {module}; assert 'numba' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(120)
    )
    assert done.returncode == 0, done.stderr

"""What the event loop calls itself is compiled before the first rank is let in."""

import subprocess
import sys

PROGRAM = """
import numpy as np
from evenkeel.controller.kernels import warm_kernels
from evenkeel.planning import kernels, metrics
from evenkeel.protocol import board
from tests.protocol.telemetry import PLACEMENT, Fleet, make_assembler, windows_of
from evenkeel.model.load import Phase

def compiled():
    return [len(one.signatures) for one in (board.add_up, kernels.rank_load_kernel, kernels.balancedness_kernel)]

warm_kernels()
before = compiled()
run, assembler = Fleet().run(range(3)), make_assembler()
window = windows_of([assembler.take(run.report(rank)) for rank in range(3)])[Phase.DECODE]
metrics.balancedness(metrics.rank_load(window.slice(slice(1, None)).counts, PLACEMENT))
print(before, compiled())
"""


def test_reports_and_balance_find_their_kernels_compiled():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[1, 1, 1] [1, 1, 1]"

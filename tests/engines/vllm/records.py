"""vLLM's ranks record their loads to a folder, without a controller."""

import threading
from pathlib import Path

import numpy as np

from tests.engines.vllm.scenarios import TOKENS, Rank
from tests.waiting import wait_until


def records(rank, size, *, folder, steps):
    """Run steps while the plugin records; return the experts that this rank routed to."""
    options = {"controllers": "", "record": folder, "record_steps": 2048}
    one = Rank(rank, size, use_async=True, mode="observe", make_link=None, **options)
    routed = []
    for step in range(steps):
        one.step(dummy=step == 3)
        chosen = one.chosen[:TOKENS].reshape(-1).numpy()
        counts = np.bincount(chosen, minlength=one.model.num_logical_experts)
        routed.append(counts * (step != 3))
        threading.Event().wait(0.001)
    wait_until(lambda: list(Path(folder).glob(f"*-rank{rank}-*.npz")), within_s=30)
    return {"routed": np.array(routed), "trouble": one.agent.trouble}

"""The headline figures of the papers behind the policies, on recorded traffic.

docs/seeds.md sets the rows beside what the papers say: python -m bench.seeds [SECTION ...].
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_tokens import accuracy_rows, recorded_ids, waterfill_rule_rows
from bench.dispatch_traces import EXAMPLES, TRACES, Recorded, read_all
from bench.report import Row, run_sections
from bench.seeds_dispatch import (
    libra_rows,
    lplb_rows,
    metro_rows,
    waterfill_rows,
)
from bench.seeds_gem import gem_search_rows
from bench.seeds_kv import kv_rows, memory_rows
from bench.seeds_placement import craft_rows, gem_rows, gem_window_rows, libra_policy_rows
from bench.seeds_regimes import regime_rows
from evenkeel_moe.planning.policies.registry import warm_kernels


def sections(
    traces: list[Recorded], ids: dict[str, NDArray[np.int64]]
) -> dict[str, Callable[[], Iterable[list[Row]]]]:
    """Return the parts of the bench by name; each yields its rows."""
    return {
        "craft": lambda: craft_rows(traces),
        "gem": lambda: gem_rows(traces),
        "gem-search": lambda: gem_search_rows(traces),
        "gem-window": lambda: gem_window_rows(traces),
        "regimes": regime_rows,
        "libra": lambda: libra_rows(traces),
        "libra-policy": lambda: libra_policy_rows(traces),
        "lplb": lambda: lplb_rows(traces),
        "waterfill": lambda: chain(waterfill_rows(traces), waterfill_rule_rows(ids)),
        "metro": lambda: metro_rows(traces),
        "tokens": lambda: [accuracy_rows(traces, ids)],
        "kv-paper": lambda: [memory_rows()],
        "kv": kv_rows,
    }


def read_traces(folder: Path) -> tuple[list[Recorded], dict[str, NDArray[np.int64]]]:
    """Return the loads and the token ids of a folder, or of the example if it has no traces."""
    traces = read_all(folder)
    if traces:
        return traces, recorded_ids(folder)
    print(
        f"no traces in {folder}: only the example trace of the repository is used, which has"
        " neither source ranks, predictions nor token ids. Name another folder in EVENKEEL_TRACES"
    )
    return read_all(EXAMPLES), {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every section, or those named."""
    torch.set_num_threads(1)
    warm_kernels()
    known = sections(*read_traces(TRACES))
    run_sections("seeds", known, ("numpy", "numba", "torch"), arguments)


if __name__ == "__main__":
    main()

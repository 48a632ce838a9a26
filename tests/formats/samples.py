"""Sample values for the tests of formats, and damage to their files."""

import numpy as np

from evenkeel_moe.formats import PlacementFile, Trace
from evenkeel_moe.model.placement import Placement


def make_trace(steps=5, layers=2, experts=4, ranks=2):
    rng = np.random.default_rng(3)
    # Every token goes to two experts, so sums are tokens x 2.
    source = np.zeros((steps, ranks, layers, experts), np.int64)
    for index in np.ndindex(steps, ranks, layers):
        for _ in range(3):
            source[index][rng.permutation(experts)[:2]] += 1
    return Trace(
        source.sum(axis=1),
        tuple(range(1, 1 + layers)),
        "five",
        2,
        np.full(steps, 3 * ranks, np.int64),
        source,
    )


def two_layers() -> PlacementFile:
    """Return a placement of the layers 3 and 4: 3 experts on 2 ranks x 2 slots."""
    rows = np.array([[0, 1, 2, 0], [2, 1, 0, 2]], np.int32)
    return PlacementFile(Placement(rows, 2, 3), (3, 4), {"policy": "keel"})


def said(trace):
    """Return (code, amount) of each finding of a trace."""
    return [(str(finding.code), finding.amount) for finding in trace.findings]

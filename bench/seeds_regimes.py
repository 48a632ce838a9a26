"""CRAFT and GEM on drawn traffic, where it is as their papers say and no recorded trace is."""

from collections.abc import Iterator

import numpy as np

from bench.dispatch_traces import Recorded
from bench.loads import Regime, drawn_traffic
from bench.report import Row
from bench.seeds_placement import craft_gains, gem_savings

SKEWS = (2.0, 5.0, 10.0)
"""A quarter of the layers has this value; the others have 2."""
TEMPORAL = (0, 3, 8)
"""Temporal experts of a layer of 64."""
CRAFT_RANKS = 16


def regime_rows() -> Iterator[list[Row]]:
    """CRAFT by the skew of some layers, GEM by the temporal experts of all.

    CRAFT: 16 layers of 256 experts, 2 replicas a rank over all layers against EPLB's one a rank and
    layer; planned on the first half of the steps, scored on the second. GEM: 4 layers of 64
    experts, 4 ranks, its set-ups high and low.
    """
    for skew in SKEWS:
        load = np.concatenate(
            [
                drawn_traffic(
                    Regime(
                        steps=64, layers=layers, experts=256, tokens=16_384, skew=one, seed=layers
                    )
                )
                for layers, one in ((4, skew), (12, 2.0))
            ],
            axis=1,
        )
        gains = craft_gains(CRAFT_RANKS, load[:32], load[32:])
        start = f"regime_skew_{skew:g}"
        yield [
            Row(f"{start}_eplb_gain", gains["eplb"], "1"),
            Row(f"{start}_craft_share_of_eplb_gain", gains["same_ratio"] / gains["eplb"], "1"),
        ]
    for count in TEMPORAL:
        regime = Regime(
            steps=216, layers=4, experts=64, tokens=4096, skew=3.0, temporal=count, burst=5.0
        )
        load = drawn_traffic(regime)
        trace = Recorded(f"temporal_{count}", load, load[:, None], None, None, 4, 1)
        for spread in ("high", "low"):
            yield [
                Row(f"regime_temporal_{count}_{spread}_{name}_mean_saved", saved[0], "1")
                for name, saved in gem_savings(trace, spread).items()
            ]

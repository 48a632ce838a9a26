"""Reads and writes traces, dumps of engines and placement files.

A trace says how many tokens each expert got in each step; `read_trace` reads every kind that
docs/formats.md lists. A placement says which expert each slot holds; `read_placement` and
`write_placement` handle the formats of all engines. Engines number layers differently, so both
values have `layer_ids`: the index of each MoE layer among the model's hidden layers, dense layers
included.
"""

from evenkeel_moe.formats.placement_writing import render_placement, write_placement
from evenkeel_moe.formats.placements import (
    PlacementFile,
    PlacementFormat,
    parse_placement,
    read_placement,
)
from evenkeel_moe.formats.trace import Trace
from evenkeel_moe.formats.traces import check_trace, read_trace, write_trace

__all__ = [
    "PlacementFile",
    "PlacementFormat",
    "Trace",
    "check_trace",
    "parse_placement",
    "read_placement",
    "read_trace",
    "render_placement",
    "write_placement",
    "write_trace",
]

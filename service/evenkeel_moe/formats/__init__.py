"""Traces, engine dumps and placement files, read and written.

A trace says how many tokens each expert got, step by step; `read_trace` takes four kinds. A placement says
which expert sits in which slot; `read_placement` and `write_placement` take four formats. Engines number
layers differently: both values carry `layer_ids`, the index of each MoE layer among the model's hidden
layers, dense ones counted.
"""

from evenkeel_moe.formats.placements import (
    PlacementFile,
    PlacementFormat,
    parse_placement,
    read_placement,
    render_placement,
    write_placement,
)
from evenkeel_moe.formats.trace import Trace
from evenkeel_moe.formats.traces import read_trace, write_trace

__all__ = [
    "PlacementFile",
    "PlacementFormat",
    "Trace",
    "parse_placement",
    "read_placement",
    "read_trace",
    "render_placement",
    "write_placement",
    "write_trace",
]

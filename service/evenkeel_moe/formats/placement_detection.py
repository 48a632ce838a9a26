"""Tells the format of a placement file by its keys, and names what is no placement."""

from collections.abc import Iterator, Mapping
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats.placement_file import NEUTRAL_FORMAT, PlacementFormat
from evenkeel_moe.formats.reading import listed, shown

ROWS = "rows"
"""Key under which the list of a vllm file, which has no key, is kept."""
_BY_KEY = {
    "physical_to_logical_map": PlacementFormat.SGLANG,
    "layer_list": PlacementFormat.ASCEND,
    ROWS: PlacementFormat.VLLM,
    "record_type": PlacementFormat.VLLM_MAPPING,
    "expert_to_ep_rank": PlacementFormat.VLLM_RANKS,
    "initial_global_assignments": PlacementFormat.TRTLLM,
    "num_slots": PlacementFormat.TRTLLM,
    "physical_to_logical": PlacementFormat.NEUTRAL,
}
"""The first of these keys that a file has tells its format."""
_BALANCER = "load_balancer"
"""Key of TensorRT-LLM's options, below which a placement is, or the name of its file."""
_DEPTH = 4
_MOST = 1000
"""How deep, and in how many mappings, a placement is looked for."""


def detect_format(content: Mapping[Any, Any]) -> PlacementFormat:
    """Return the format that the keys of a file tell.

    Raises:
        InvalidInput: none; the words say what the file seems to be, and what to do.
    """
    if content.get("format") == NEUTRAL_FORMAT:
        return PlacementFormat.NEUTRAL
    if "logical_count" in content or content.get("record_type") == "eplb_load_stats":
        raise InvalidInput("holds counts of tokens: it is a recording, not a placement")
    for key, found in _BY_KEY.items():
        if key in content:
            return found
    paths = []
    for path, value in _below(content):
        if isinstance(value, str):
            raise InvalidInput(f"{path:.80} names another file, {shown(value)}: give that")
        if value.get("format") == NEUTRAL_FORMAT or not _BY_KEY.keys().isdisjoint(value):
            paths.append(path)
    found_format = ""
    if "format" in content:
        found_format = f"format is {shown(content['format'])}, must be {NEUTRAL_FORMAT!r}"
    if paths:
        places = " and ".join(f"{path:.80}" for path in paths[:3])
        one = "that key" if len(paths) == 1 else "one of these keys"
        raise InvalidInput(
            f"{found_format and found_format + '; '}the placement is under {places}: write what is"
            f" below {one} to a file of its own"
        )
    if found_format:
        raise InvalidInput(found_format)
    known = ", ".join(f"{key} ({name})" for key, name in _BY_KEY.items() if key != ROWS)
    raise InvalidInput(
        f"no known placement format has the keys {listed(content) or '(none)'}; known are {known}"
    )


def _below(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the mappings in a mapping, the upper ones first, and names of other files."""
    level: list[tuple[str, Mapping[Any, Any]]] = [("", content)]
    seen = 0
    for _ in range(_DEPTH):
        below: list[tuple[str, Mapping[Any, Any]]] = []
        for path, mapping in level:
            for key, value in mapping.items():
                where = f"{path}{key}"
                if key == _BALANCER and isinstance(value, str):
                    yield where, value
                elif isinstance(value, dict) and seen < _MOST:
                    seen += 1
                    yield where, value
                    below.append((f"{where}.", value))
        level = below

"""A placement with the layers that it is for, and the reader of the files that hold one.

| format | rows | layer numbers | empty slots | duplicates on a rank | carries ranks |
|---|---|---|---|---|---|
| neutral | MoE layers | `layer_ids` | yes | yes | yes |
| sglang | hidden layers, dense ones filled | row index | no | yes | no |
| trtllm | MoE layers by id | absolute | no | yes | no |
| ascend | MoE layers | index among MoE layers | no | no | yes |
| vllm | MoE layers, or one row for all | index among MoE layers | no | yes | no |
| vllm-mapping | MoE layers | index among MoE layers | no | yes | no |
| vllm-ranks | one row for all layers, no replicas | none | no | no | no |

All of them assign slots to ranks in order. What a format does not carry is an argument of the
reader.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.formats.reading import (
    MAX_CELLS,
    MAX_JSON_CHARS,
    as_int,
    as_list,
    as_mapping,
    check_layer_ids,
    check_size,
    expert_rows,
    listed,
    naming,
    parse_json,
    read_text,
    shown,
)
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.yaml_text import parse_yaml

NEUTRAL_FORMAT = "evenkeel.placement"
NEUTRAL_VERSION = 1


class PlacementFormat(StrEnum):
    """The formats, each named by its reader."""

    NEUTRAL = "neutral"
    """Our own: JSON that carries everything; documented in docs/formats.md."""
    SGLANG = "sglang"
    """SGLang `--init-expert-location`."""
    TRTLLM = "trtllm"
    """TensorRT-LLM `moe_config.load_balancer`."""
    ASCEND = "ascend"
    """vllm-ascend `expert_map_path`."""
    VLLM = "vllm"
    """vLLM `initial_expert_map_path`, of pull request 49572."""
    VLLM_MAPPING = "vllm-mapping"
    """vLLM `initial_mapping_path`, of pull request 41141."""
    VLLM_RANKS = "vllm-ranks"
    """vLLM `--expert-placement-file`, of pull request 34811."""

    @classmethod
    def parse(cls, name: str) -> "PlacementFormat":
        """Return the format with this name.

        Raises:
            InvalidInput: there is no such format.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(cls)
            raise InvalidInput(f"unknown placement format {name!r}; known: {known}") from error

    @property
    def holds_empty_slots(self) -> bool:
        """True if a slot may stay empty in such files."""
        return self is PlacementFormat.NEUTRAL

    @property
    def counts_moe_layers(self) -> bool:
        """True if row i of such files is the i-th MoE layer, whatever its hidden layer."""
        return self in (PlacementFormat.ASCEND, PlacementFormat.VLLM, PlacementFormat.VLLM_MAPPING)


@dataclass(frozen=True, eq=False)
class PlacementFile:
    """A placement with the layers of the model that its rows belong to."""

    placement: Placement
    layer_ids: tuple[int, ...]
    """(L,) index of each row among the model's hidden layers, dense layers included; rising."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Free text about its origin; only the neutral format keeps it."""

    def __post_init__(self) -> None:
        check_layer_ids(self.layer_ids, self.placement.num_layers)
        missing = np.argwhere(self.placement.logcnt == 0)
        if len(missing):
            row, expert = missing[0]
            raise InfeasiblePlan(
                f"{len(missing)} experts without a replica, "
                f"first: layer {self.layer_ids[row]} expert {expert}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )


def refuse_duplicates(placement: Placement) -> None:
    """Raise InfeasiblePlan if a rank holds an expert twice, which ascend files cannot express."""
    duplicate = placement.first_duplicate()
    if duplicate is not None:
        layer, rank, expert = duplicate
        raise InfeasiblePlan(
            "ascend maps hold an expert once per device:"
            f" layer {layer} device {rank} has expert {expert} twice",
            Reason.DUPLICATE_ON_RANK,
        )


class Known(TypedDict, total=False):
    """Facts about a file that the caller of the reader may know."""

    num_ranks: int | None
    """R; needed for files that do not carry it, checked against others."""
    num_logical_experts: int | None
    """E; None takes it from the file, or the largest expert id + 1."""
    layer_ids: Sequence[int] | None
    """The MoE layers among the hidden ones, for sglang, ascend and vllm files of models with dense
    layers, and for files with one row for all layers; checked against other files. None counts up
    from 0."""


def read_placement(path: Path | str, **known: Unpack[Known]) -> PlacementFile:
    """Read a placement file; see `parse_placement`. Errors name the file."""
    path = Path(path)
    with naming(path):
        return parse_placement(read_text(path, MAX_JSON_CHARS), **known)


def parse_placement(text: str, **known: Unpack[Known]) -> PlacementFile:
    """Parse the text of a placement file, of the format that its keys tell.

    Args:
        text: JSON or YAML.
        known: see `Known`.

    Raises:
        InvalidInput, ShapeMismatch: the text is malformed.
        InfeasiblePlan: an expert has no replica, or is twice on a rank where that is forbidden.
    """
    content = (
        parse_json(text) if text.lstrip()[:1] in ("{", "[") else parse_yaml(text, "YAML line ")
    )
    expected = _Expected(**known)
    if isinstance(content, list):
        return _parse_vllm(content, expected)
    if not isinstance(content, dict):
        raise InvalidInput(f"must be a mapping, is {type(content).__name__}")
    return _parser_of(content)(content, expected)


class _Expected:
    """The facts that the caller knows of a file; rows of the file are checked against them."""

    def __init__(self, **known: Unpack[Known]) -> None:
        self.num_ranks, layer_ids = known.get("num_ranks"), known.get("layer_ids")
        self.num_logical_experts = known.get("num_logical_experts")
        self.layer_ids = None if layer_ids is None else tuple(layer_ids)

    def ranks(self, carried: int | None = None) -> int:
        """Return R; `carried` is what the file says."""
        ranks = _agreed(carried, self.num_ranks, "ranks")
        if ranks is None:
            raise InvalidInput("this format does not carry the number of ranks: pass num_ranks")
        return ranks

    def placement(
        self, rows: NDArray[np.int32], ranks: int | None = None, experts: int | None = None
    ) -> Placement:
        """Return the placement of (L, S) rows; the file says how many ranks and experts, or not."""
        num_ranks = self.ranks(ranks)
        named = _agreed(experts, self.num_logical_experts, "experts")
        num_experts = int(rows.max()) + 1 if named is None else named
        if num_experts > rows.shape[1]:
            raise ShapeMismatch(
                f"{rows.shape[1]} slots cannot hold {num_experts} experts",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        return Placement(rows, num_ranks, num_experts)

    def moe_layers(self, placement: Placement) -> PlacementFile:
        """Return a placement whose rows are numbered by their index among the MoE layers."""
        return PlacementFile(placement, self.layers_up_to(placement.num_layers))

    def layers(self, carried: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layer ids that the file carries, if they are those expected."""
        expected = carried if self.layer_ids is None else self.layer_ids
        if expected != carried:
            has, needs = set(carried), set(expected)
            parts = []
            if needs - has:
                parts.append(f"lacks layers {listed(sorted(needs - has))}")
            if has - needs:
                parts.append(f"has layers {listed(sorted(has - needs))} that are not expected")
            raise ShapeMismatch(f"the file {', '.join(parts)}")
        return carried

    def layers_up_to(self, last: int) -> tuple[int, ...]:
        """Return the layer ids, up to `last` (exclusive) if the caller does not know them."""
        if self.layer_ids is not None:
            return self.layer_ids
        return tuple(range(last))

    def for_all_layers(self, row: NDArray[np.int32]) -> PlacementFile:
        """Return a placement each of whose layers has the (1, S) row of the file."""
        if self.layer_ids is None:
            raise InvalidInput("the file has one row for all layers: pass layer_ids")
        layers = len(self.layer_ids)
        check_size((layers, row.shape[1]), MAX_CELLS, "layers x slots")
        return self.moe_layers(self.placement(np.tile(row, (layers, 1))))


def _agreed(carried: int | None, known: int | None, what: str) -> int | None:
    """Return a number that the file carries or the caller knows, if they do not contradict."""
    if carried is not None and known not in (None, carried):
        raise ShapeMismatch(f"the file is for {carried} {what}, {known} are expected")
    return known if carried is None else carried


def _parse_neutral(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    sizes = ("num_ranks", "num_logical_experts")
    keys = ("format", "version", *sizes, "layer_ids", "physical_to_logical")
    content = as_mapping(content, "the placement", keys, ("info",))
    if content["format"] != NEUTRAL_FORMAT:
        raise InvalidInput(f"format is {shown(content['format'])}, must be {NEUTRAL_FORMAT!r}")
    version = as_int(content["version"], "version")
    if version != NEUTRAL_VERSION:
        raise InvalidInput(f"version is {version}, only {NEUTRAL_VERSION} can be read")
    rows = expert_rows(content["physical_to_logical"], "physical_to_logical", EMPTY)
    layer_ids = tuple(
        as_int(value, "layer id") for value in as_list(content["layer_ids"], "layer_ids")
    )
    info = content.get("info", {})
    if not isinstance(info, dict):
        raise InvalidInput(f"info must be a mapping, is {type(info).__name__}")
    ranks, experts = (as_int(content[size], size, 1) for size in sizes)
    placement = expected.placement(rows, ranks, experts)
    return PlacementFile(placement, expected.layers(layer_ids), info)


def _parse_sglang(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    content = as_mapping(content, "the placement", ("physical_to_logical_map",))
    rows = expert_rows(content["physical_to_logical_map"], "physical_to_logical_map", 0)
    ids = expected.layers_up_to(len(rows))
    if max(ids) >= len(rows):
        hint = ": it seems to lack the rows of dense layers" if len(ids) == len(rows) else ""
        raise InvalidInput(
            f"the file has {len(rows)} rows, one for each hidden layer; MoE layers"
            f" {min(ids)}..{max(ids)} need {max(ids) + 1}{hint}"
        )
    return PlacementFile(expected.placement(rows[list(ids)]), ids)


def _parse_trtllm(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    keys = ("num_slots", "initial_global_assignments")
    if not content.get(keys[1], None):
        raise InvalidInput(
            f"holds no placement: without {keys[1]}, TensorRT-LLM starts with its experts in order,"
            " as is assumed where no file is given"
        )
    content = as_mapping(content, "the load balancer", keys, ("layer_updates_per_iter",))
    num_slots = as_int(content["num_slots"], "num_slots", 1)
    as_int(content.get("layer_updates_per_iter", 0), "layer_updates_per_iter")
    by_layer = content["initial_global_assignments"]
    if not isinstance(by_layer, dict):
        raise InvalidInput("initial_global_assignments must map layers to lists of experts")
    quoted = next((key for key in by_layer if isinstance(key, str) and key.isdecimal()), None)
    if quoted is not None:
        raise InvalidInput(
            f"layer {shown(quoted)} is text: write {quoted:.20} without quotes, in YAML, since JSON"
            " has no other keys"
        )
    layer_ids = tuple(sorted(as_int(layer, "layer id") for layer in by_layer))
    rows = expert_rows([by_layer[layer] for layer in layer_ids], "initial_global_assignments", 0)
    _check_slots(rows, num_slots, layer_ids[0])
    return PlacementFile(expected.placement(rows), expected.layers(layer_ids))


def _check_slots(rows: NDArray[np.int32], num_slots: int, first_layer: int) -> None:
    if rows.shape[1] != num_slots:
        raise ShapeMismatch(
            f"layer {first_layer} lists {rows.shape[1]} experts, num_slots is {num_slots}"
        )


def _parse_ascend(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    content = as_mapping(content, "the expert map", ("moe_layer_count", "layer_list"))
    layers = as_list(content["layer_list"], "layer_list")
    count = as_int(content["moe_layer_count"], "moe_layer_count", 1)
    if count != len(layers):
        raise ShapeMismatch(f"moe_layer_count is {count}, layer_list has {len(layers)} layers")
    by_layer = [_ascend_layer(layer, index) for index, layer in enumerate(layers)]
    ids = sorted(layer for layer, _ in by_layer)
    if ids != list(range(count)):
        shift = ids == list(range(ids[0], ids[0] + count))
        todo = f"take {ids[0]} from each" if shift else f"number them 0..{count - 1} in order"
        raise InvalidInput(f"layer_id counts MoE layers from 0, got {listed(ids)}: {todo}")
    tables = [table for _, table in sorted(by_layer, key=lambda item: item[0])]
    if len({table.shape for table in tables}) > 1:
        shapes = sorted({table.shape for table in tables})
        raise ShapeMismatch(f"layers differ in devices x experts: {shapes[:4]}")
    placement = expected.placement(np.stack(tables).reshape(count, -1), tables[0].shape[0])
    refuse_duplicates(placement)
    return expected.moe_layers(placement)


def _ascend_layer(layer: object, index: int) -> tuple[int, NDArray[np.int32]]:
    what = f"layer_list[{index}]"
    fields = as_mapping(layer, what, ("layer_id", "device_count", "device_list"))
    devices = as_list(fields["device_list"], f"{what}.device_list")
    count = as_int(fields["device_count"], f"{what}.device_count", 1)
    by_device: dict[int, object] = {}
    for device in devices:
        entry = as_mapping(device, f"{what} device", ("device_id", "device_expert"))
        by_device[as_int(entry["device_id"], f"{what} device_id")] = entry["device_expert"]
    if len(devices) != count or sorted(by_device) != list(range(count)):
        raise InvalidInput(
            f"{what} must list devices 0..{count - 1}, each once, got {sorted(by_device)[:8]}"
        )
    rows = [by_device[device] for device in range(count)]
    return as_int(fields["layer_id"], f"{what}.layer_id"), expert_rows(
        rows, f"{what}.device_expert", 0
    )


def _parse_vllm(table: list[Any], expected: _Expected) -> PlacementFile:
    if table and not isinstance(table[0], list | dict):
        return expected.for_all_layers(expert_rows([table], "the expert map", 0))
    return expected.moe_layers(expected.placement(expert_rows(table, "the expert map", 0)))


def _parse_vllm_mapping(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    keys = ("record_type", "version", "num_slots", "initial_global_assignments")
    content = as_mapping(content, "the mapping", keys, ("num_redundant_experts",))
    if content["record_type"] != "eplb_initial_mapping" or content["version"] != 1:
        raise InvalidInput(
            f"record_type is {shown(content['record_type'])}, version {shown(content['version'])};"
            " only 'eplb_initial_mapping' of version 1 can be read"
        )
    by_layer = content["initial_global_assignments"]
    if not isinstance(by_layer, dict) or set(by_layer) != {str(i) for i in range(len(by_layer))}:
        raise InvalidInput("initial_global_assignments must map the layers 0, 1, ... to experts")
    table = [by_layer[str(layer)] for layer in range(len(by_layer))]
    rows = expert_rows(table, "initial_global_assignments", 0)
    slots = as_int(content["num_slots"], "num_slots", 1)
    _check_slots(rows, slots, 0)
    file = expected.moe_layers(expected.placement(rows))
    redundant = slots - file.placement.num_logical_experts
    told = as_int(content.get("num_redundant_experts", redundant), "num_redundant_experts")
    if told != redundant:
        raise ShapeMismatch(f"num_redundant_experts is {told}, the rows have {redundant}")
    return file


def _parse_vllm_ranks(content: dict[Any, Any], expected: _Expected) -> PlacementFile:
    content = as_mapping(content, "the placement", ("expert_to_ep_rank",))
    ranks = expected.ranks()
    of_expert = [
        as_int(rank, f"rank of expert {expert}", 0, ranks - 1)
        for expert, rank in enumerate(as_list(content["expert_to_ep_rank"], "expert_to_ep_rank"))
    ]
    if words := undivided(len(of_expert), "experts", ranks, "ranks"):
        raise ShapeMismatch(words)
    held = np.bincount(np.array(of_expert, np.int64), minlength=ranks)
    if held.min() != held.max() or not of_expert:
        raise ShapeMismatch(f"ranks hold {held.min()} to {held.max()} experts, must be equal")
    row = np.argsort(of_expert, kind="stable").astype(np.int32)
    return expected.for_all_layers(row[None])


# --- the format of a file ----------------------------------------------------------------------

_Parser = Callable[[dict[Any, Any], _Expected], PlacementFile]
_BY_KEY: dict[str, tuple[PlacementFormat, _Parser]] = {
    "physical_to_logical_map": (PlacementFormat.SGLANG, _parse_sglang),
    "layer_list": (PlacementFormat.ASCEND, _parse_ascend),
    "record_type": (PlacementFormat.VLLM_MAPPING, _parse_vllm_mapping),
    "expert_to_ep_rank": (PlacementFormat.VLLM_RANKS, _parse_vllm_ranks),
    "initial_global_assignments": (PlacementFormat.TRTLLM, _parse_trtllm),
    "num_slots": (PlacementFormat.TRTLLM, _parse_trtllm),
    "physical_to_logical": (PlacementFormat.NEUTRAL, _parse_neutral),
}
"""The first of these keys that a file has tells its format, and so its parser. The file of vLLM's
pull request 49572 is a list."""
_BALANCER = "load_balancer"
"""Key of TensorRT-LLM's options, below which a placement is, or the name of its file."""
_DEPTH = 4
_MOST = 1000
"""A placement is looked for down to this depth, and in at most so many mappings."""


def _parser_of(content: Mapping[Any, Any]) -> _Parser:
    """Return the parser of the format that the keys of a file tell.

    Raises:
        InvalidInput: none; the words say what the file seems to be, and what to do.
    """
    if content.get("format") == NEUTRAL_FORMAT:
        return _parse_neutral
    if "logical_count" in content or content.get("record_type") == "eplb_load_stats":
        raise InvalidInput("holds counts of tokens: it is a recording, not a placement")
    for key, (_, parser) in _BY_KEY.items():
        if key in content:
            return parser
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
    known = ", ".join(f"{key} ({name})" for key, (name, _) in _BY_KEY.items())
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

"""Placement files of four formats, read and written.

| format | rows | layer numbers | empty slots | duplicates on a rank | carries ranks |
|---|---|---|---|---|---|
| neutral | MoE layers | `layer_ids` | yes | yes | yes |
| sglang | hidden layers, dense ones filled | row index | no | yes | no |
| trtllm | MoE layers by id | absolute | no | yes | no |
| ascend | MoE layers | index among MoE layers | no | no | yes |

All of them give slots to ranks in order. What a format does not carry is an argument of the reader.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.formats.reading import (
    as_int,
    as_list,
    as_mapping,
    check_layer_ids,
    expert_rows,
    naming,
    parse_json,
    read_text,
)
from evenkeel_moe.formats.writing import write_file
from evenkeel_moe.model.placement import EMPTY, Placement

__all__ = [
    "PlacementFile",
    "PlacementFormat",
    "parse_placement",
    "read_placement",
    "render_placement",
    "write_placement",
]

NEUTRAL_FORMAT = "evenkeel.placement"
NEUTRAL_VERSION = 1
MAX_HIDDEN_LAYERS = 10_000
"""Rows of an sglang file; far beyond any model, and short of what memory holds."""


class PlacementFormat(StrEnum):
    """Who reads the file."""

    NEUTRAL = "neutral"
    """Ours: JSON that carries everything; documented in docs/formats.md."""
    SGLANG = "sglang"
    """SGLang `--init-expert-location`."""
    TRTLLM = "trtllm"
    """TensorRT-LLM `moe_config.load_balancer`."""
    ASCEND = "ascend"
    """vllm-ascend `expert_map_path`."""

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


@dataclass(frozen=True, eq=False)
class PlacementFile:
    """A placement and the layers of the model its rows belong to."""

    placement: Placement
    layer_ids: tuple[int, ...]
    """(L,) index of each row among the model's hidden layers, dense layers counted; rising."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Free words on where it came from; only the neutral format keeps them."""

    def __post_init__(self) -> None:
        check_layer_ids(self.layer_ids, self.placement.num_layers)
        missing = np.argwhere(self.placement.logcnt == 0)
        if len(missing):
            row, expert = missing[0]
            raise InfeasiblePlan(
                f"{len(missing)} experts without a replica, first: layer {self.layer_ids[row]} expert {expert}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the reader's caller adds to the file."""

    num_ranks: int | None
    num_logical_experts: int | None
    first_moe_layer: int
    layer_ids: tuple[int, ...] | None

    def ranks(self, carried: int | None = None) -> int:
        if carried is not None and self.num_ranks not in (None, carried):
            raise ShapeMismatch(f"the file is for {carried} ranks, {self.num_ranks} were asked for")
        ranks = carried if carried is not None else self.num_ranks
        if ranks is None:
            raise InvalidInput("this format does not carry the number of ranks: pass num_ranks")
        return ranks

    def experts(self, rows: NDArray[np.int32], carried: int | None = None) -> int:
        if carried is not None and self.num_logical_experts not in (None, carried):
            raise ShapeMismatch(
                f"the file is for {carried} experts, {self.num_logical_experts} were asked for"
            )
        named = carried if carried is not None else self.num_logical_experts
        experts = named if named is not None else int(rows.max()) + 1
        if experts > rows.shape[1]:
            raise ShapeMismatch(
                f"{rows.shape[1]} slots cannot hold {experts} experts",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        return experts

    def layers(self, carried: tuple[int, ...]) -> tuple[int, ...]:
        if self.layer_ids not in (None, carried):
            raise ShapeMismatch(
                f"the file is for layers {list(carried)}, {list(self.layer_ids or ())} were asked for"
            )
        return carried

    def layers_up_to(self, last: int) -> tuple[int, ...]:
        return (
            self.layer_ids
            if self.layer_ids is not None
            else tuple(range(self.first_moe_layer, last))
        )


def read_placement(
    path: Path | str,
    format_: PlacementFormat | None = None,
    *,
    num_ranks: int | None = None,
    num_logical_experts: int | None = None,
    first_moe_layer: int = 0,
    layer_ids: Sequence[int] | None = None,
) -> PlacementFile:
    """Read a placement file; see `parse_placement`, errors carry the file's name."""
    path = Path(path)
    with naming(path):
        return parse_placement(
            read_text(path),
            format_,
            num_ranks=num_ranks,
            num_logical_experts=num_logical_experts,
            first_moe_layer=first_moe_layer,
            layer_ids=layer_ids,
        )


def parse_placement(
    text: str,
    format_: PlacementFormat | None = None,
    *,
    num_ranks: int | None = None,
    num_logical_experts: int | None = None,
    first_moe_layer: int = 0,
    layer_ids: Sequence[int] | None = None,
) -> PlacementFile:
    """Parse the text of a placement file.

    Args:
        text: JSON or YAML.
        format_: None tells it from the contents.
        num_ranks: R; needed by sglang and trtllm, checked against the others.
        num_logical_experts: E; None takes what the file says, or the largest id + 1.
        first_moe_layer: hidden layers before the first MoE layer: skipped in sglang files, added to the
            layer numbers of ascend files, not used otherwise.
        layer_ids: the MoE layers among the hidden ones, for sglang and ascend files of models whose dense layers
            are not all in front; checked against the others. None counts on from `first_moe_layer`.

    Raises:
        InvalidInput, ShapeMismatch: malformed; the message has the numbers.
        InfeasiblePlan: an expert without a replica, or a duplicate where the format forbids it.
    """
    if num_ranks is not None and num_ranks < 1:
        raise InvalidInput(f"num_ranks is {num_ranks}, must be at least 1")
    if first_moe_layer < 0:
        raise InvalidInput(f"first_moe_layer is {first_moe_layer}, must not be negative")
    content = parse_json(text) if text.lstrip()[:1] in ("{", "[") else _parse_yaml(text)
    if not isinstance(content, dict):
        raise InvalidInput(f"must be a mapping, is {type(content).__name__}")
    ids = None if layer_ids is None else tuple(layer_ids)
    asked = _Asked(num_ranks, num_logical_experts, first_moe_layer, ids)
    return _PARSERS[format_ or _detect(content)](content, asked)


class _OnceLoader(yaml.SafeLoader):
    """Safe YAML in which a key may occur once: the second row of a layer must not replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise InvalidInput(
                f"{len(node.value)} keys of which {len(mapping)} differ: a key occurs twice"
            )
        return mapping


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _OnceLoader)
    except yaml.YAMLError as error:
        raise InvalidInput(f"neither JSON nor YAML: {' '.join(str(error).split()):.200}") from error
    # Dates that do not exist and numbers too long are ValueErrors, aliases of aliases run out of stack.
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidInput(f"not YAML that can be read: {error!s:.200}") from error


def _detect(content: Mapping[Any, Any]) -> PlacementFormat:
    for key, found in (
        ("format", PlacementFormat.NEUTRAL),
        ("physical_to_logical_map", PlacementFormat.SGLANG),
        ("layer_list", PlacementFormat.ASCEND),
        ("initial_global_assignments", PlacementFormat.TRTLLM),
    ):
        if key in content:
            return found
    raise InvalidInput(
        f"no placement format known here has the keys {', '.join(map(str, list(content)[:8])) or '(none)'}"
    )


def _parse_neutral(content: dict[Any, Any], asked: _Asked) -> PlacementFile:
    keys = (
        "format",
        "version",
        "num_ranks",
        "num_logical_experts",
        "layer_ids",
        "physical_to_logical",
    )
    content = as_mapping(content, "the placement", keys, ("info",))
    if content["format"] != NEUTRAL_FORMAT:
        raise InvalidInput(
            f"format is {reprlib.repr(content['format']):.60}, must be {NEUTRAL_FORMAT!r}"
        )
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
    ranks = asked.ranks(as_int(content["num_ranks"], "num_ranks", 1))
    experts = asked.experts(rows, as_int(content["num_logical_experts"], "num_logical_experts", 1))
    return PlacementFile(Placement(rows, ranks, experts), asked.layers(layer_ids), info)


def _parse_sglang(content: dict[Any, Any], asked: _Asked) -> PlacementFile:
    content = as_mapping(content, "the placement", ("physical_to_logical_map",))
    rows = expert_rows(content["physical_to_logical_map"], "physical_to_logical_map", 0)
    ids = asked.layers_up_to(len(rows))
    if not ids or min(ids) < 0 or max(ids) >= len(rows):
        asked_for = list(ids) or [asked.first_moe_layer]
        raise InvalidInput(f"MoE layers {asked_for} must be among the {len(rows)} hidden layers")
    rows = rows[list(ids)]
    return PlacementFile(Placement(rows, asked.ranks(), asked.experts(rows)), ids)


def _parse_trtllm(content: dict[Any, Any], asked: _Asked) -> PlacementFile:
    keys = ("num_slots", "initial_global_assignments")
    content = as_mapping(content, "the load balancer", keys, ("layer_updates_per_iter",))
    num_slots = as_int(content["num_slots"], "num_slots", 1)
    as_int(content.get("layer_updates_per_iter", 0), "layer_updates_per_iter")
    by_layer = content["initial_global_assignments"]
    if not isinstance(by_layer, dict) or not by_layer:
        raise InvalidInput("initial_global_assignments must map layers to lists of experts")
    layer_ids = tuple(sorted(as_int(layer, "layer id") for layer in by_layer))
    rows = expert_rows([by_layer[layer] for layer in layer_ids], "initial_global_assignments", 0)
    if rows.shape[1] != num_slots:
        raise ShapeMismatch(
            f"layer {layer_ids[0]} lists {rows.shape[1]} experts, num_slots is {num_slots}"
        )
    return PlacementFile(
        Placement(rows, asked.ranks(), asked.experts(rows)), asked.layers(layer_ids)
    )


def _parse_ascend(content: dict[Any, Any], asked: _Asked) -> PlacementFile:
    content = as_mapping(content, "the expert map", ("moe_layer_count", "layer_list"))
    layers = as_list(content["layer_list"], "layer_list")
    count = as_int(content["moe_layer_count"], "moe_layer_count", 1)
    if count != len(layers):
        raise ShapeMismatch(f"moe_layer_count is {count}, layer_list has {len(layers)} layers")
    by_layer = [_ascend_layer(layer, index) for index, layer in enumerate(layers)]
    ids = sorted(layer for layer, _ in by_layer)
    if ids != list(range(count)):
        raise InvalidInput(f"layer_id must be 0..{count - 1}, each once, got {ids[:8]}...")
    tables = [table for _, table in sorted(by_layer, key=lambda item: item[0])]
    if len({table.shape for table in tables}) > 1:
        shapes = sorted({table.shape for table in tables})
        raise ShapeMismatch(f"layers differ in devices x experts: {shapes[:4]}")
    rows = np.stack(tables).reshape(count, -1)
    placement = Placement(rows, asked.ranks(tables[0].shape[0]), asked.experts(rows))
    _refuse_duplicates(placement)
    return PlacementFile(placement, asked.layers_up_to(asked.first_moe_layer + count))


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


_PARSERS: dict[PlacementFormat, Callable[[dict[Any, Any], _Asked], PlacementFile]] = {
    PlacementFormat.NEUTRAL: _parse_neutral,
    PlacementFormat.SGLANG: _parse_sglang,
    PlacementFormat.TRTLLM: _parse_trtllm,
    PlacementFormat.ASCEND: _parse_ascend,
}


def write_placement(
    path: Path | str,
    file: PlacementFile,
    format_: PlacementFormat,
    *,
    num_hidden_layers: int | None = None,
) -> None:
    """Write a placement file; see `render_placement`."""
    with naming(path):
        text = render_placement(file, format_, num_hidden_layers=num_hidden_layers)
    write_file(path, text)


def render_placement(
    file: PlacementFile, format_: PlacementFormat, *, num_hidden_layers: int | None = None
) -> str:
    """The text of a placement file; equal placements give equal bytes.

    Args:
        file: what to write.
        format_: for whom.
        num_hidden_layers: rows of an sglang file; None means up to the last MoE layer. Rows of dense layers
            hold experts in order: present, never used.

    Raises:
        InfeasiblePlan: empty slots or duplicates the format cannot hold.
        InvalidInput: fewer hidden layers than the placement names.
    """
    if format_ is not PlacementFormat.NEUTRAL:
        _refuse_empty(file, format_)
    if format_ is PlacementFormat.NEUTRAL:
        return _render_neutral(file)
    if format_ is PlacementFormat.SGLANG:
        return _render_sglang(file, num_hidden_layers)
    if format_ is PlacementFormat.TRTLLM:
        return _render_trtllm(file)
    _refuse_duplicates(file.placement)
    return _render_ascend(file.placement)


def _render_neutral(file: PlacementFile) -> str:
    placement = file.placement
    content = {
        "format": NEUTRAL_FORMAT,
        "version": NEUTRAL_VERSION,
        "num_ranks": placement.num_ranks,
        "num_logical_experts": placement.num_logical_experts,
        "layer_ids": list(file.layer_ids),
        "info": dict(file.info),
    }
    head = json.dumps(content, allow_nan=False)
    return f'{head[:-1]}, "physical_to_logical": [\n{_rows(placement.phy2log)}\n]}}\n'


def _render_sglang(file: PlacementFile, num_hidden_layers: int | None) -> str:
    placement = file.placement
    hidden = max(file.layer_ids) + 1 if num_hidden_layers is None else num_hidden_layers
    if hidden <= max(file.layer_ids):
        raise InvalidInput(
            f"{hidden} hidden layers, the placement names layer {max(file.layer_ids)}"
        )
    if hidden > MAX_HIDDEN_LAYERS:
        raise InvalidInput(f"{hidden} hidden layers, at most {MAX_HIDDEN_LAYERS} are written")
    in_order = np.arange(placement.num_slots, dtype=np.int32) % placement.num_logical_experts
    rows = np.tile(in_order, (hidden, 1))
    rows[list(file.layer_ids)] = placement.phy2log
    return f'{{"physical_to_logical_map": [\n{_rows(rows)}\n]}}\n'


def _render_trtllm(file: PlacementFile) -> str:
    lines = [
        f"num_slots: {file.placement.num_slots}",
        "layer_updates_per_iter: 0",
        "initial_global_assignments:",
    ]
    for layer, row in zip(file.layer_ids, file.placement.phy2log, strict=True):
        lines.append(f"  {layer}: {json.dumps(row.tolist())}")
    return "\n".join(lines) + "\n"


def _render_ascend(placement: Placement) -> str:
    by_rank = placement.phy2log.reshape(placement.num_layers, placement.num_ranks, -1)
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.num_ranks,
            "device_list": [
                {"device_id": rank, "device_expert": experts.tolist()}
                for rank, experts in enumerate(table)
            ],
        }
        for layer, table in enumerate(by_rank)
    ]
    return json.dumps({"moe_layer_count": placement.num_layers, "layer_list": layers}) + "\n"


def _rows(phy2log: NDArray[np.int32]) -> str:
    """One line per layer, so that two files can be compared by eye and by diff."""
    return ",\n".join(json.dumps(row) for row in phy2log.tolist())


def _refuse_empty(file: PlacementFile, format_: PlacementFormat) -> None:
    empty = (file.placement.phy2log == EMPTY).sum(axis=1)
    if empty.any():
        row = int(empty.argmax())
        raise InfeasiblePlan(
            f"{format_} files cannot hold empty slots: {int(empty.sum())} in {int((empty > 0).sum())} layers,"
            f" most in layer {file.layer_ids[row]} ({int(empty[row])} of {file.placement.num_slots})",
            Reason.UNSUPPORTED,
        )


def _refuse_duplicates(placement: Placement) -> None:
    duplicate = placement.first_duplicate()
    if duplicate is not None:
        layer, rank, expert = duplicate
        raise InfeasiblePlan(
            f"ascend maps hold an expert once per device: layer {layer} device {rank} has expert {expert} twice",
            Reason.DUPLICATE_ON_RANK,
        )

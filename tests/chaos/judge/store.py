"""The records of the store, from dumps of its keys and from the writes on the wire."""

import base64
import gzip
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from tests.chaos.judge.maps import Map, rows_of
from tests.chaos.judge.schema import placement_map

__all__ = ["PlanFacts", "StoreDump", "placement_of", "plan_of", "read_dumps"]

_MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """One record of a plan."""

    plan_id: str
    generation: str
    base_epoch: int
    weights_version: int
    phase: str
    waves: int
    waves_committed: int
    agreed: bool
    """All ranks agreed on the wave after the committed ones."""


@dataclass(slots=True)
class StoreDump:
    """The keys of the deployment at one time."""

    unix: float
    node: str
    final: bool
    """True for the dump after all faults had ended and all plans were over."""
    documents: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, PlanFacts] = field(default_factory=dict)
    open_plans: list[str] = field(default_factory=list)
    epochs: dict[int, Map] = field(default_factory=dict)


def read_dumps(path: Path) -> list[StoreDump]:
    """Read all dumps of a run."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            dump = StoreDump(line["unix"], line["node"], line["final"])
            for key, value in line["keys"].items():
                _enter(dump, re.sub(r".*\}:", "", key), value)
            found.append(dump)
    return found


def _enter(dump: StoreDump, name: str, value: Any) -> None:
    match name:
        case "documents":
            dump.documents = {key: json.loads(_bytes(body)) for key, body in value.items()}
        case "plans":
            dump.plans = {key: plan_of(_bytes(body)) for key, body in value.items()}
        case "plans_open":
            dump.open_plans = sorted(value)
        case "epochs":
            dump.epochs = {int(key): placement_of(_bytes(body)) for key, body in value.items()}


def plan_of(body: bytes) -> PlanFacts:
    """Read a stored plan record."""
    record = json.loads(_unpacked(body))
    plan = record["plan"]
    return PlanFacts(
        plan["plan_id"],
        plan["generation"],
        plan["base_epoch"],
        plan["weights_version"],
        record["phase"],
        record["num_waves"],
        record["waves_committed"],
        record["wave_agreed"],
    )


def placement_of(body: bytes) -> Map:
    """Read a stored placement."""
    form = placement_map().FromString(_unpacked(body))
    return rows_of(form.physical_to_logical, form.num_slots)


def _unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=_MOST_BYTES)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)

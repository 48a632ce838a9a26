"""Maps of experts to slots, their digests, and the checksums that the checkpoint gives experts."""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import xxhash

__all__ = [
    "EMPTY",
    "Map",
    "Rows",
    "digest_of",
    "expert_checksum",
    "map_of_tables",
    "of_other_ranks",
    "rows_of",
    "with_rows",
]

Rows = tuple[tuple[int, ...], ...]
Map = Rows
"""(L, S) the expert in each slot; -1 if no table leads to the slot, -2 if several experts do."""
EMPTY, _CLASH = -1, -2


@cache
def _shared(found: Map) -> Map:
    """Return one object for equal maps, so that thousands of steps share few."""
    return found


def map_of_tables(tables: Sequence[Sequence[Sequence[int]]], num_slots: int) -> Map:
    """Return the map that routing tables follow; it is wider if they lead to other slots.

    Args:
        tables: (L, E) the slots to which the tokens of each expert are sent.
        num_slots: slots of one layer over all ranks.
    """
    rows = []
    for layer in tables:
        led_to = (slot for slots in layer for slot in slots)
        row = [EMPTY] * max(num_slots, 1 + max(led_to, default=-1))
        for expert, slots in enumerate(layer):
            for slot in slots:
                row[slot] = expert if row[slot] == EMPTY else _CLASH
        rows.append(tuple(row))
    return _shared(tuple(rows))


def rows_of(data: bytes, num_slots: int) -> Rows:
    """Return the rows that a message carries as little-endian signed 32-bit integers."""
    table = np.frombuffer(data, "<i4").reshape(-1, num_slots)
    return tuple(tuple(row) for row in table.tolist())


def with_rows(old: Map, layers: Sequence[int], rows: Rows) -> Map:
    """Return a map with some layers replaced."""
    new = list(old)
    for layer, row in zip(layers, rows, strict=True):
        new[layer] = row
    return _shared(tuple(new))


def of_other_ranks(old: Map, former: Sequence[int | None], slots_per_rank: int) -> Map:
    """Return the map of a group of another size: the slots of those who stay, the others empty.

    Args:
        former: the rank of each process in the group of the old map; None for one that joins.
    """
    empty = (EMPTY,) * slots_per_rank
    rows = []
    for row in old:
        held = [row[at : at + slots_per_rank] for at in range(0, len(row), slots_per_rank)]
        parts = (empty if rank is None else held[rank] for rank in former)
        rows.append(tuple(expert for part in parts for expert in part))
    return _shared(tuple(rows))


@cache
def digest_of(found: Map, num_ranks: int, num_experts: int) -> str:
    """Return the digest by which messages name a map."""
    header = f"{len(found)},{len(found[0])},{num_ranks},{num_experts};".encode()
    body = np.array(found, "<i4").tobytes()
    return hashlib.blake2b(header + body, digest_size=16).hexdigest()


def expert_checksum(config: dict[str, Any], layer: int, expert: int) -> str:
    """Return the checksum of an expert's bytes in the checkpoint of the reference engine.

    The checkpoint is drawn from the seed of the run: two matrices of -1, 0 and 1, and a scale of
    powers of two. So the truth about weights comes from no rank.
    """
    return _drawn_checksum(config["seed"], layer, expert, config["d_model"], config["d_ffn"])


@cache
def _drawn_checksum(seed: int, layer: int, expert: int, d_model: int, d_ffn: int) -> str:
    rng = np.random.default_rng((seed, 1 + layer, 1 + expert))
    w_in = rng.integers(-1, 2, (d_model, d_ffn)).astype("<f4")
    w_out = rng.integers(-1, 2, (d_ffn, d_model)).astype("<f4")
    scale = np.exp2(rng.integers(-1, 2, d_ffn)).astype("<f4")
    return xxhash.xxh3_64(w_in.tobytes() + w_out.tobytes() + scale.tobytes()).hexdigest()

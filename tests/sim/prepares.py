"""Prepares that are wrong in themselves or for one rank alone, and a slow, simple check (R17)."""

import dataclasses

from evenkeel_moe.protocol.messages import Prepare

FLAWS = ("no checksum", "no replica", "twice", "missing", "missing", "wrong source")


def problem_of(prepare: Prepare, before) -> str:
    """Return how transfers, rows and checksums fail to fit each other; empty if they fit."""
    if len(prepare.checksums) != len(prepare.body.transfers):
        return f"{len(prepare.checksums)} checksums for {len(prepare.body.transfers)} transfers"
    for layer, row in zip(prepare.body.layers, prepare.body.rows.tolist(), strict=True):
        held = before.phy2log[layer].tolist()
        if set(held) - {-1} != set(row) - {-1}:
            return f"layer {layer} had the experts {set(held)}, then {set(row)}"
        for slot, expert in enumerate(row):
            into = [t for t in prepare.body.transfers if (t.layer, t.dst_slot) == (layer, slot)]
            sources = [(t.logical_expert, held[t.src_slot]) for t in into]
            wanted = [] if expert == -1 else [(expert, expert)]
            if sources != wanted and (sources or expert != held[slot]):
                return f"layer {layer} slot {slot} should get {wanted}, gets {sources}"
    return ""


def spoiled(rng, prepare: Prepare) -> Prepare:
    """Return a Prepare with one flaw, as an older or faulty leader may send it to all ranks."""
    body = prepare.body
    if not body.transfers:
        return prepare
    batches, checksums = [list(batch) for batch in body.batches], list(prepare.checksums)
    number = rng.randrange(len(body.transfers))
    batch = next(
        index for index in range(len(batches)) if sum(map(len, batches[: index + 1])) > number
    )
    place = number - sum(map(len, batches[:batch]))
    match rng.choice(FLAWS):
        case "missing":
            del batches[batch][place], checksums[number]
        case "wrong source":
            t = batches[batch][place]
            batches[batch][place] = dataclasses.replace(t, src_slot=t.dst_slot)
        case "twice":
            batches.append([batches[batch][place]])
            checksums.append(checksums[number])
        case "no checksum":
            checksums[number] = 0
        case "no replica":
            return dataclasses.replace(prepare, body=without_replica(rng, body))
    kept = tuple(tuple(each) for each in batches if each)
    body = dataclasses.replace(body, batches=kept)
    return dataclasses.replace(prepare, body=body, checksums=tuple(checksums))


def for_one_rank(rng, prepare: Prepare) -> Prepare:
    """Return another right Prepare of the same wave, after which a layer has one replica less.

    A faulty leader may send it to one rank and the other one to the rest (R5).
    """
    body, rows = prepare.body, prepare.body.rows.copy()
    written = {(t.layer, t.dst_slot) for t in body.transfers}
    spare = [
        (index, slot)
        for index, layer in enumerate(body.layers)
        for slot, expert in enumerate(rows[index].tolist())
        if expert >= 0 and (rows[index] == expert).sum() > 1 and (layer, slot) not in written
    ]
    if spare:
        rows[rng.choice(spare)] = -1
    return dataclasses.replace(prepare, body=dataclasses.replace(body, rows=rows))


def without_replica(rng, body):
    """Return a wave after which no slot of one layer holds some expert."""
    rows = body.rows.copy()
    written = {(t.layer, t.dst_slot): t for t in body.transfers}
    lone = [
        (index, slot)
        for index, layer in enumerate(body.layers)
        for slot, expert in enumerate(rows[index].tolist())
        if expert >= 0 and (rows[index] == expert).sum() == 1 and (layer, slot) not in written
    ]
    if lone:
        rows[rng.choice(lone)] = -1
    return dataclasses.replace(body, rows=rows)

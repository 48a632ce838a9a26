"""Random plans: valid ones, and on request plans that break a certain rule."""

import dataclasses

import numpy as np

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, Transfer, Wave
from evenkeel_moe.protocol.messages import Prepare

FLAWS = ("no_replica", "duplicate", "no_transfer", "wrong_source", "pool", "second_peer")


def random_target(rng, base: Placement, shape, changes: int) -> Placement:
    """Return the base with some slots changed: swaps, other replicas, filled and emptied slots."""
    rows = base.phy2log.tolist()
    per_rank, pool = shape.slots_per_rank, shape.pool_slots_per_rank
    for _ in range(changes):
        layer = rng.randrange(shape.num_layers)
        row = rows[layer]
        slot = rng.randrange(shape.num_slots)
        rank = slot // per_rank
        expert = rng.randrange(-1 if rng.random() < 0.2 else 0, shape.num_logical_experts)
        mine = row[rank * per_rank : (rank + 1) * per_rank]
        if row[slot] == expert or (expert >= 0 and expert in mine):
            continue
        old = row[slot]
        if old >= 0 and row.count(old) == 1:
            donor = (
                next((s for s, held in enumerate(row) if held == expert), None)
                if expert >= 0
                else None
            )
            if donor is None:
                continue
            theirs = row[donor // per_rank * per_rank : (donor // per_rank + 1) * per_rank]
            if old in theirs:
                continue
            row[donor] = old
        row[slot] = expert
        if pool is not None:
            used = sum(e >= 0 for r in rows for e in r[rank * per_rank : (rank + 1) * per_rank])
            if used > pool:
                row[slot] = old
    return Placement(np.array(rows, np.int32), base.num_ranks, base.num_logical_experts)


def overfull_target(rng, base: Placement, shape) -> Placement:
    """Return a valid placement that one wave reaches only through buffers it frees itself (R11)."""
    rows, per_rank = base.phy2log.tolist(), shape.slots_per_rank
    rank = rng.randrange(shape.num_ranks)
    slots = [
        (layer, rank * per_rank + local)
        for layer in range(shape.num_layers)
        for local in range(per_rank)
    ]
    rng.shuffle(slots)
    free = shape.pool_slots_per_rank - sum(rows[layer][slot] >= 0 for layer, slot in slots)
    filled = emptied = 0
    for layer, slot in slots:
        row = rows[layer]
        mine = row[rank * per_rank : (rank + 1) * per_rank]
        missing = [expert for expert in range(shape.num_logical_experts) if expert not in mine]
        if row[slot] < 0 and missing and filled <= free:
            row[slot] = rng.choice(missing)
            filled += 1
        elif row[slot] >= 0 and row.count(row[slot]) > 1 and emptied < 1 + free:
            row[slot] = -1
            emptied += 1
    return Placement(np.array(rows, np.int32), base.num_ranks, base.num_logical_experts)


def transfers_of(rng, before, after, layers, shape) -> list[Transfer]:
    """Return one transfer for every slot that needs bytes."""
    found = []
    for layer in layers:
        old, new = before[layer], after[layer]
        for dst in range(shape.num_slots):
            if new[dst] >= 0 and new[dst] != old[dst]:
                sources = [slot for slot in range(shape.num_slots) if old[slot] == new[dst]]
                found.append(
                    Transfer(layer, new[dst], rng.choice(sources), dst, shape.bytes_per_expert)
                )
    return found


def batches_of(found, shape) -> tuple[tuple[Transfer, ...], ...]:
    """Return batches by first fit: one peer per rank and batch, one transfer each way."""
    per_rank = shape.slots_per_rank
    batches: list[list[Transfer]] = []
    peers: list[dict] = []
    for t in found:
        src, dst = t.src_slot // per_rank, t.dst_slot // per_rank
        for batch, met in zip(batches, peers, strict=True):
            if src == dst:
                break
            taken = any(
                (b.src_slot // per_rank, b.dst_slot // per_rank) == (src, dst) for b in batch
            )
            if met.get(src, dst) == dst and met.get(dst, src) == src and not taken:
                break
        else:
            batch, met = [], {}
            batches.append(batch)
            peers.append(met)
        batch.append(t)
        if src != dst:
            met[src], met[dst] = dst, src
    return tuple(tuple(batch) for batch in batches)


def fits_pool(wave, before, shape) -> bool:
    """Return True if empty slots find buffers that were free before the wave."""
    if shape.pool_slots_per_rank is None:
        return True
    old = np.array(before)
    filled = ((old[list(wave.layers)] < 0) & (wave.rows >= 0)).reshape(
        len(wave.layers), shape.num_ranks, -1
    )
    used = (old >= 0).reshape(shape.num_layers, shape.num_ranks, -1).sum(axis=(0, 2))
    return bool((used + filled.sum(axis=(0, 2)) <= shape.pool_slots_per_rank).all())


def build_plan(
    rng, deployment, fleet_view, shape, now, *, kind, plan_id, target=None, flaw=None, staging=4
):
    """Return a plan to a random or given target; None if nothing changes.

    Args:
        fleet_view: (generation, epoch, placement, weights version).
    """
    base = fleet_view[2]
    if target is None:
        if flaw == "pool" and shape.pooled:
            target = overfull_target(rng, base, shape)
        else:
            target = random_target(rng, base, shape, rng.choice((1, 2, 3, 6)))
    before, after = base.phy2log.tolist(), target.phy2log.tolist()
    changed = [layer for layer in range(shape.num_layers) if before[layer] != after[layer]]
    if not changed:
        return None
    rng.shuffle(changed)
    groups = [changed] if flaw == "pool" or rng.random() < 0.3 else [[layer] for layer in changed]
    waves = []
    for layers in groups:
        found = transfers_of(rng, before, after, layers, shape)
        rows = np.array([after[layer] for layer in layers], np.int32)
        wave = Wave(len(waves), tuple(layers), rows, batches_of(found, shape))
        shares = [0] * shape.num_ranks
        for t in found:
            shares[t.dst_slot // shape.slots_per_rank] += 1
        if flaw != "pool" and (max(shares) > staging or not fits_pool(wave, before, shape)):
            return None
        waves.append(wave)
        for layer in layers:
            before[layer] = after[layer]
    if flaw is not None:
        target, waves = spoil(rng, flaw, target, waves, shape)
    return plan_by(waves, fleet_view, target, deployment, now, kind=kind, plan_id=plan_id)


def plan_by(waves, fleet_view, target, deployment, now, *, kind, plan_id) -> Plan:
    """Return the plan of these waves; `fleet_view` as in `build_plan`."""
    generation, epoch, base, weights_version = fleet_view
    return Plan(
        plan_id=PlanId(plan_id),
        deployment=deployment,
        kind=kind,
        policy="rollback" if kind is PlanKind.ROLLBACK else "simulated",
        reason=Reason.MANUAL_REQUEST,
        generation=generation,
        weights_version=weights_version,
        base_epoch=Epoch(epoch),
        base=base,
        target=target,
        waves=tuple(waves),
        created_at=now,
        expires_at=now + 8.0,
    )


def spoil(rng, flaw, target, waves, shape):
    """Return a plan with one invariant broken."""
    last = waves[-1]
    rows, batches = last.rows.copy(), last.batches
    if flaw == "no_replica":
        row = rows[0]
        lone = [
            slot for slot in range(len(row)) if row[slot] >= 0 and (row == row[slot]).sum() == 1
        ]
        if lone:
            slot = rng.choice(lone)
            gone = row[slot]
            row[slot] = -1
            batches = tuple(
                tuple(t for t in b if t.dst_slot != slot or t.logical_expert != gone)
                for b in batches
            )
    elif flaw == "duplicate":
        row, per_rank = rows[0], shape.slots_per_rank
        row[1] = row[0] if per_rank > 1 else row[1]
    elif flaw == "no_transfer":
        batches = batches[1:]
    elif flaw == "wrong_source" and batches and batches[0]:
        t = batches[0][0]
        wrong = Transfer(t.layer, t.logical_expert, t.dst_slot, t.dst_slot, t.nbytes)
        batches = ((wrong, *batches[0][1:]), *batches[1:])
    elif flaw == "second_peer":
        batches = (tuple(t for batch in batches for t in batch),)
    waves = [*waves[:-1], Wave(last.index, last.layers, rows, batches)]
    return target.with_rows(last.layers, rows), waves


WRONG = ("no checksum", "no replica", "twice", "missing", "missing", "wrong source")


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
    match rng.choice(WRONG):
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

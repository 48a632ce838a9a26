"""Naive second implementations of the kernels: plain loops over the definitions."""

import math

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching


def shares_even(row):
    return [1.0 / list(row).count(e) if e >= 0 else 0.0 for e in row]


def shares_nearest(row, num_ranks, node, weight):
    """weight: (R, E) tokens from each source rank."""
    per_rank = len(row) // num_ranks
    shares = np.zeros(len(row))
    for expert in range(weight.shape[1]):
        held = [s for s, e in enumerate(row) if e == expert]
        total = weight[:, expert].sum()
        for source in range(num_ranks):
            part = weight[source, expert] / total if total > 0 else 1 / num_ranks
            own = [s for s in held if s // per_rank == source]
            near = [s for s in held if node[s // per_rank] == node[source]]
            for s in own or near or held:
                shares[s] += part / len(own or near or held)
    return shares


def rank_load(load, row, shares, num_ranks):
    """One step, one layer: (E,) -> (R,)."""
    out = np.zeros(num_ranks)
    for slot, expert in enumerate(row):
        if expert >= 0:
            out[slot // (len(row) // num_ranks)] += load[expert] * shares[slot]
    return out


def least_peak(load, row, num_ranks):
    """Least largest rank load of any split, by linear programming."""
    slots = len(row)
    objective = np.append(np.zeros(slots), 1.0)
    under = np.zeros((num_ranks, slots + 1))
    under[:, -1] = -1.0
    equal = np.zeros((len(load), slots + 1))
    for slot, expert in enumerate(row):
        under[slot // (slots // num_ranks), slot] = 1.0
        if expert >= 0:
            equal[expert, slot] = 1.0
    return linprog(objective, under, np.zeros(num_ranks), equal, load).fun


def fewest_active(load, row, num_ranks):
    """Least largest number of active experts of a rank, each served by one replica.

    The least peak for which all active experts can be matched to `peak` seats on every rank.
    """
    per_rank = len(row) // num_ranks
    held = [{slot // per_rank for slot in np.flatnonzero(row == e)} for e in range(len(load))]
    active = [expert for expert in range(len(load)) if load[expert] > 0 and held[expert]]
    peak = 0
    while len(active) > 0:
        peak += 1
        seats = np.repeat(np.arange(num_ranks), peak)
        may_sit = csr_array([[seat in held[expert] for seat in seats] for expert in active])
        if (maximum_bipartite_matching(may_sit, perm_type="column") >= 0).all():
            break
    return peak


def waterfilled(routed, shared):
    """(R,) work after pouring, by bisection of the level."""
    low, high = 0.0, float(np.max(routed) + shared)
    for _ in range(200):
        middle = (low + high) / 2
        takes = np.maximum(middle - routed, 0.0).sum()
        low, high = (low, middle) if takes >= shared else (middle, high)
    return np.maximum(routed, high)


def seconds(tokens, rank, costs):
    if costs is None:
        return tokens
    if tokens <= 0:
        return 0.0
    stair = max(1, math.ceil(tokens / costs.tile_tokens - 1e-9))
    tiles = costs.tile_seconds.shape[1]
    if stair <= tiles:
        return costs.tile_seconds[rank, stair - 1]
    return costs.tile_seconds[rank, -1] + costs.slope_s_per_token[rank] * (
        tokens - tiles * costs.tile_tokens
    )


def replica_work(tokens, replica):
    if tokens <= 0:
        return 0.0
    whole = max(tokens, 1.0)
    if replica.tile_tokens:
        whole = replica.tile_tokens * math.ceil(whole / replica.tile_tokens - 1e-9)
    if replica.read_tokens == replica.start_tokens == replica.tile_tokens == 0:
        return tokens
    return (replica.start_tokens + max(replica.read_tokens, whole)) * min(tokens, 1.0)


def slowest_rank(tokens, per_slot, num_ranks, cost, split, layer):
    """Time of one layer in one step: (E,) tokens, (S,) tokens of each slot."""
    per_rank = len(per_slot) // num_ranks
    routed = [
        sum(
            replica_work(n, cost.replica) for n in per_slot[rank * per_rank : (rank + 1) * per_rank]
        )
        for rank in range(num_ranks)
    ]
    shared = cost.shared_tokens * sum(tokens)
    level = 0.0
    if split.dispatch == "waterfill" and shared > 0:
        low, high = 0.0, max(routed) + shared
        for _ in range(200):
            level = (low + high) / 2
            poured = sum(max(level - work, 0.0) for work in routed)
            low, high = (low, level) if poured >= shared else (level, high)
        shared = 0.0
    slowest = 0.0
    for rank in range(num_ranks):
        part = 1 / num_ranks
        if split.source_load is not None and split.source_load[:, layer].sum() > 0:
            part = split.source_load[rank, layer].sum() / split.source_load[:, layer].sum()
        work = max(routed[rank], level) + shared * part
        if work > 0:
            slowest = max(slowest, seconds(work, rank, cost.curves) + cost.fixed)
    return slowest


def takes_within(value, rank, costs):
    """Most tokens a rank takes without exceeding `value` seconds, by bisection."""
    low, high = 0.0, 1e9
    if seconds(high, rank, costs) <= value:
        return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle, rank, costs) <= value else (low, middle)
    return low


def fluid_time(total, num_ranks, costs):
    """Least value within which the ranks together take `total`, by bisection."""
    if total == 0:
        return 0.0
    low, high = 0.0, max(seconds(total, rank, costs) for rank in range(num_ranks))
    for _ in range(100):
        middle = (low + high) / 2
        fits = sum(takes_within(middle, rank, costs) for rank in range(num_ranks)) >= total * (
            1 - 1e-9
        )
        low, high = (low, middle) if fits else (middle, high)
    return high


def replicate(weight, num_slots):
    """One row of the reference rule, float32."""
    copies = np.ones(len(weight), np.float32)
    logical = list(range(len(weight)))
    while len(logical) < num_slots:
        hot = int(np.argmax(weight / copies))
        logical.append(hot)
        copies[hot] += 1
    return logical, copies


def pack(weight, num_packs):
    """One row of the reference rule: (pack of each item, place in it)."""
    items = len(weight)
    if items == num_packs:
        return list(range(items)), [0] * items
    total = [np.float32(0)] * num_packs
    inside: list[list[int]] = [[] for _ in range(num_packs)]
    for item in sorted(range(items), key=lambda i: (-weight[i], i)):
        free = [p for p in range(num_packs) if len(inside[p]) < items // num_packs]
        pack_ = min(free, key=lambda p: (total[p], p))
        inside[pack_].append(item)
        total[pack_] = np.float32(total[pack_] + weight[item])
    where = {item: (p, place) for p, held in enumerate(inside) for place, item in enumerate(held)}
    return [where[i][0] for i in range(items)], [where[i][1] for i in range(items)]


def eplb(weight, num_slots, num_groups, num_nodes, num_ranks):
    """One layer of EPLB in plain Python: (E,) -> list of S experts."""
    weight = np.asarray(weight, np.float32)
    size = len(weight) // num_groups
    node_of_group, place = pack(weight.reshape(num_groups, size).sum(axis=1), num_nodes)
    row = []
    for node in range(num_nodes):
        groups = sorted(
            (g for g in range(num_groups) if node_of_group[g] == node), key=lambda g: place[g]
        )
        experts = [g * size + i for g in groups for i in range(size)]
        logical, copies = replicate(weight[experts], num_slots // num_nodes)
        per_copy = np.array([weight[experts[i]] / copies[i] for i in logical], np.float32)
        ranks, places = pack(per_copy, num_ranks // num_nodes)
        by_seat = sorted(range(len(logical)), key=lambda i: (ranks[i], places[i]))
        row += [experts[logical[i]] for i in by_seat]
    return row


def moves(old, new, num_ranks):
    """Copies between ranks one layer needs."""
    old, new = np.reshape(old, (num_ranks, -1)), np.reshape(new, (num_ranks, -1))
    return sum(len({*n[n >= 0].tolist()} - {*o.tolist()}) for o, n in zip(old, new, strict=True))


def fading_errors(load, half_lives, first, ahead):
    """(F, F) sums of products of the errors of fading means, and their (F, L, E) shares at the end,
    in mean experts."""

    def shares(total):
        whole = total.sum(axis=1, keepdims=True)
        return np.where(whole > 0, total * load.shape[2] / np.where(whole > 0, whole, 1), 0.0)

    def fading(known, half_life):
        return shares(sum(0.5 ** ((known - 1 - t) / half_life) * load[t] for t in range(known)))

    errors = np.zeros((len(half_lives), len(half_lives)))
    for known in range(first, len(load) - ahead + 1):
        came = shares(load[known : known + ahead].sum(axis=0))
        off = [(fading(known, half_life) - came).ravel() for half_life in half_lives]
        errors += np.array([[a @ b for b in off] for a in off])
    return errors, np.array([fading(len(load), half_life) for half_life in half_lives])

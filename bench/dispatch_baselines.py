"""Published methods against the imbalance of one batch. They are for comparison only.

HarMoEny decides on exact routing, after the gate: it moves tokens of the hottest expert on the most
loaded rank to the least loaded rank and fetches the expert there. Lina predicts an expert from the
path of a token through earlier layers, with a table built beforehand. A greedy choice of the fewest
active experts, beside the exact one, gives each active expert to the least busy of its ranks and
never revises it.
"""

from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.batch_split import slots_by_expert
from evenkeel_moe.jit import kernel


def harmoeny(
    demand: NDArray[np.integer], hosts: NDArray[np.bool_], max_extra: int, *, threshold: int = 1
) -> tuple[NDArray[np.int64], int]:
    """Return rank loads and copies under HarMoEny's rule.

    Args:
        demand: (R, E) [tokens] exact.
        hosts: (E, R) True where a rank holds the expert. A token starts on its own rank if that
            rank holds the expert, else on the first rank that does.
        max_extra: the experts a rank may fetch for the batch.
        threshold: the fewest tokens that are worth a move.

    Returns:
        ((R,) int64 [tokens], experts fetched).

    Source: HarMoEny as described in Libra section 2.2.
    """
    tokens = np.ascontiguousarray(demand, np.int64)
    return _harmoeny_kernel(tokens, np.array(hosts, np.bool_, order="C"), max_extra, threshold)


@kernel
def _harmoeny_kernel(
    demand: NDArray[np.int64], hosts: NDArray[np.bool_], max_extra: int, threshold: int
) -> tuple[NDArray[np.int64], int]:
    ranks, experts = demand.shape
    assigned = np.zeros((ranks, experts), np.int64)
    for e in range(experts):
        first = 0
        while not hosts[e, first]:
            first += 1
        for rank in range(ranks):
            assigned[rank if hosts[e, rank] else first, e] += demand[rank, e]
    fetched = np.zeros(ranks, np.int64)
    load = assigned.sum(axis=1)
    target = -(-load.sum() // ranks)
    moved = True
    while moved:
        moved = False
        source = int(np.argmax(load))
        for e in np.argsort(-assigned[source], kind="mergesort"):
            if load[source] <= target or assigned[source, e] < threshold:
                break
            for goal in np.argsort(load, kind="mergesort"):
                room = min(target - load[goal], load[source] - target, assigned[source, e])
                if room < threshold:
                    break
                if not hosts[e, goal] and fetched[goal] >= max_extra:
                    continue
                if not hosts[e, goal]:
                    fetched[goal] += 1
                    hosts[e, goal] = True
                assigned[source, e] -= room
                assigned[goal, e] += room
                load[source] -= room
                load[goal] += room
                moved = True
                break
            if moved:
                break
    return load, fetched.sum()


@kernel
def greedy_fewest(
    load: NDArray[np.float64], phy2log: NDArray[np.int32], num_ranks: int
) -> NDArray[np.int64]:
    """Return the active experts of the worst rank if each expert takes its least busy rank in turn.

    Experts are placed in the order of their ids, each on the rank with the fewest active experts so
    far among those that hold it.

    Args:
        load: (L, E) [tokens].
        phy2log: (L, S) logical expert of each slot, negative if empty.
        num_ranks: R.

    Returns:
        (L,) int64.
    """
    layers, experts = load.shape
    worst = np.empty(layers, np.int64)
    active = np.empty(num_ranks, np.int64)
    for layer in range(layers):
        first, following = slots_by_expert(phy2log[layer], experts, num_ranks)
        per_rank = phy2log.shape[1] // num_ranks
        active[:] = 0
        for expert in range(experts):
            if load[layer, expert] <= 0.0:
                continue
            slot = first[expert]
            best = slot // per_rank
            while slot >= 0:
                if active[slot // per_rank] < active[best]:
                    best = slot // per_rank
                slot = following[slot]
            active[best] += 1
        worst[layer] = active.max()
    return worst


class PathTable:
    """Lina's table: the experts that most often followed a path of first choices.

    Source: Lina as described in Libra section 2.2.
    """

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth
        self._seen: dict[tuple[int, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
        self._popular: dict[int, Counter[int]] = defaultdict(Counter)

    def build(self, ids: NDArray[np.integer]) -> "PathTable":
        """Learn from (tokens, L, k) recorded experts."""
        for token in ids.tolist():
            for layer in range(1, len(token)):
                path = tuple(choice[0] for choice in token[max(0, layer - self.depth) : layer])
                self._seen[layer, path].update(token[layer])
                self._popular[layer].update(token[layer])
        return self

    def predict(self, layer: int, before: list[list[int]], k: int) -> list[int]:
        """Predict k experts for a layer from the token's choices in the layers before it."""
        path = tuple(choice[0] for choice in before[max(0, layer - self.depth) : layer])
        found = [expert for expert, _ in self._seen.get((layer, path), Counter()).most_common(k)]
        for expert, _ in self._popular[layer].most_common():
            if len(found) == k:
                break
            if expert not in found:
                found.append(expert)
        return found[:k]

    def accuracy(self, ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return (L - 1,) the share of chosen experts that was predicted, for layers 1.."""
        hits = np.zeros(ids.shape[1] - 1)
        for token in ids.tolist():
            for layer in range(1, len(token)):
                hits[layer - 1] += len(
                    set(self.predict(layer, token, len(token[layer]))) & set(token[layer])
                )
        return np.asarray(hits / (ids.shape[0] * ids.shape[2]), np.float64)

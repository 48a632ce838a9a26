"""Tells the routes that a router chose from those that only fill an array.

A route is the experts of one token in all layers. Where it is compared, it stands for itself by a
hash of 64 bits.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.finding import Finding, FindingCode, Severity

SURE_RUN = 8
"""Equal routes in a row, at the end of a sequence, that are no chance: no text repeats so exactly,
unless it repeats one token."""
SURE_ID_RUN = 16
"""The same for the ids of one layer, if a model chooses one expert for each token."""
FEW = 0.005
"""Share of the tokens below which what is missing or left out decides nothing."""
MOST_PADDED = 0.95
"""Share of the rows above which they cannot all be padding."""
CHANCE = 1e-6
"""Probability that two sequences begin alike by chance, below which they share a prompt."""


@dataclass(eq=False, slots=True)
class TokenRoutes:
    """The rows of an array of routes, and which of them count. (B, T) are sequences, positions."""

    routed: NDArray[np.bool_]
    """(B, T, H) True where the experts of a token count in a layer. Mutated by the functions."""
    route: NDArray[np.uint64]
    """(B, T) hash of the experts in all layers."""
    alike: NDArray[np.bool_]
    """(B, T) True where all of at least three layers name the same experts in the same order; False
    if a token has one expert only."""
    partial: int
    """Rows of a layer that name some experts and lack others."""
    masked: NDArray[np.bool_] | None
    """(B, T) True for the tokens that the mask calls real; None without a mask."""
    padding: NDArray[np.bool_]
    """(B, T) True for rows that look like routes and only fill the array. Mutated likewise."""

    @classmethod
    def of(cls, ids: NDArray[np.integer], masked: NDArray[np.bool_] | None) -> "TokenRoutes":
        """Return the rows of (B, T, H, K) expert ids.

        In a layer a token has no route if its experts are one id repeated, which no router returns
        for more than one expert, or if an id is negative. If there is one expert only, an id that
        a program wrote is known by its long runs.
        """
        sequences, positions, layers, top_k = ids.shape
        routed = (ids != ids[..., :1]).any(axis=3) if top_k > 1 else np.ones(ids.shape[:3], bool)
        negative = ids < 0
        partial = int((negative.any(axis=3) & ~negative.all(axis=3)).sum())
        routed &= ~negative.any(axis=3)
        # Odd numbers, so that no bit of an id is lost; the same for every file.
        factors = np.random.default_rng(0).integers(0, 2**62, layers * top_k, np.uint64) * 2 + 1
        route = np.empty((sequences, positions), np.uint64)
        for position in range(positions):
            flat = ids[:, position].reshape(sequences, -1).astype(np.uint64) + np.uint64(1)
            route[:, position] = ((flat ^ (flat >> np.uint64(7))) * factors).sum(axis=1)
        alike = np.zeros(route.shape, np.bool_)
        if layers > 2 and top_k > 1:  # One expert of few is often the same in some layers.
            alike = (ids == ids[:, :, :1]).all(axis=(2, 3))
        if masked is not None:
            routed &= masked[:, :, None]
        if top_k == 1:
            for layer in range(layers):
                routed[:, :, layer] &= ~_lost_ids(ids[:, :, layer, 0], routed[:, :, layer])
        return cls(routed, route, alike, partial, masked, np.zeros(route.shape, np.bool_))

    @property
    def tokens(self) -> NDArray[np.bool_]:
        """(B, T) True for the tokens that are routed in some layer."""
        return np.asarray(self.routed.any(axis=2), np.bool_)


def leave_out_padding(routes: TokenRoutes) -> tuple[Finding, ...]:
    """Leave out rows that fill sequences up although they look like routes.

    Such are rows that name the same experts in every layer, and long runs of one route. If several
    sequences have the same one, its long runs are padding wherever they stand, and at the ends of
    sequences all its rows are. If one sequence alone has it, a run at an end is padding beyond its
    first row, which may be the last real token; a mask that calls it real is believed.

    Mutates: `routes.routed`, `routes.padding`.

    Raises:
        InvalidInput: nearly all rows would be padding.
    """
    findings = _partial_rows(routes)
    tokens = routes.tokens
    padding = routes.alike & tokens
    if padding.sum() <= FEW * tokens.sum():
        padding[:] = False
    least = max(SURE_RUN, _tokens_beyond_chance(routes))
    runs = [
        (b, run, inner)
        for b in range(len(tokens))
        for run, inner in _runs(routes.route[b], tokens[b] & ~padding[b], least)
    ]
    seen: dict[int, set[int]] = {}
    for b, run, _ in runs:
        if len(run) >= least:
            seen.setdefault(int(routes.route[b, run[0]]), set()).add(b)
    shared = {route for route, where in seen.items() if len(where) > 1}
    certain = bool(padding.any()) or len(set().union(*seen.values())) > 1
    for b, run, inner in runs:
        if int(routes.route[b, run[0]]) in shared:
            padding[b, run] = True
        elif len(run) >= least and not inner and routes.masked is None:
            padding[b, run[1:]] = True
    count, among = int(padding.sum()), int(tokens.sum())
    if count > MOST_PADDED * among > 0:
        raise InvalidInput(
            f"{count} of {among} rows name the same experts in all layers or repeat their"
            " neighbour: these are not the routes of tokens"
        )
    routes.routed[padding], routes.padding = False, padding
    if routes.masked is not None:
        return findings  # The mask calls them real: they are counted as missing.
    empty = ~tokens
    # The last token of a sequence has no route.
    if not count and empty.sum() <= empty.any(axis=1).sum():
        return findings
    grade = Severity.NOTE if certain or count <= FEW * among else Severity.DOUBT
    what = "rows that fill sequences up are left out"
    amount = f"{count + int(empty.sum())} of {tokens.size} rows"
    advice = "An array attention_mask tells them for certain"
    return (*findings, Finding(FindingCode.PADDING, grade, what, "", amount, advice))


def _partial_rows(routes: TokenRoutes) -> tuple[Finding, ...]:
    if not routes.partial:
        return ()
    rows = int(routes.routed.sum()) + routes.partial
    grade = Severity.DOUBT if routes.partial > FEW * rows else Severity.NOTE
    what = "rows that name some experts and -1 for others are left out"
    amount = f"{routes.partial} of {rows} rows of a token in a layer"
    advice = "A route may have been merged with padding"
    return (Finding(FindingCode.ROUTES_MISSING, grade, what, "", amount, advice),)


def _runs(
    route: NDArray[np.uint64], real: NDArray[np.bool_], least: float
) -> list[tuple[NDArray[np.intp], bool]]:
    """Return the first, the last and the long runs of equal routes of one sequence.

    The positions of a run are in the order from the text outwards. True says that the run stands
    between others. A sequence of one run has only a last.
    """
    positions = np.flatnonzero(real)
    if not len(positions):
        return []
    edges = np.flatnonzero(np.diff(route[positions])) + 1
    edges = np.concatenate([[0], edges, [len(positions)]])
    last = len(edges) - 2
    long = set(np.flatnonzero(np.diff(edges) >= least).tolist())
    runs = []
    for run in sorted(long | {0, last}):
        held = positions[edges[run] : edges[run + 1]]
        runs.append((held[::-1] if run == 0 < last else held, 0 < run < last))
    return runs


def _lost_ids(ids: NDArray[np.integer], real: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (B, T) True where a layer's id of a real token was not chosen by a router.

    Most tokens of such an id stand in long runs, which the other tokens of the layer do not explain
    by chance. Dense layers have one id in all tokens.
    """
    codes = np.where(real, ids, -1).astype(np.int64)
    begins = np.ones(codes.shape, np.bool_)
    begins[:, 1:] = codes[:, 1:] != codes[:, :-1]
    runs = np.cumsum(begins.reshape(-1)).reshape(codes.shape)
    length = np.bincount(runs.reshape(-1))[runs]
    long = real & (length >= SURE_ID_RUN)
    lost = np.zeros_like(real)
    for expert in np.unique(codes[long]).tolist():
        own = codes == expert
        if own.sum() == real.sum():
            return np.asarray(own, np.bool_)
        few, among = int((own & ~long).sum()), int((real & ~long).sum())
        by_chance = (few / max(among, 1)) ** SURE_ID_RUN * int(real.sum())
        if 2 * few <= own.sum() and by_chance < FEW:
            lost |= own & (length >= SURE_RUN)
    return lost


def find_missing_routes(routes: TokenRoutes) -> tuple[Finding, ...]:
    """Find tokens without a route: in all layers by the mask, and in single layers.

    The last token of a sequence has no route, because nothing is computed after it. Without a mask,
    only rows between tokens, and sequences without a token, are known to lack a route.
    """
    busy = routes.routed.any(axis=(0, 1))
    rows = routes.routed[:, :, busy]
    tokens = routes.tokens
    findings = []
    what = "tokens that the mask calls real have no route"
    masked = routes.masked
    if masked is None:
        what = "rows between tokens, or of whole sequences, have no route: add attention_mask"
        after = np.logical_or.accumulate(tokens, axis=1)
        before = np.logical_or.accumulate(tokens[:, ::-1], axis=1)[:, ::-1]
        none = ~tokens.any(axis=1, keepdims=True)
        masked = none | (after & before & ~routes.padding)
    real, missing = int(masked.sum()), masked & ~tokens
    usual = int(missing.any(axis=1).sum())
    if missing.sum() > usual + FEW * real:
        findings.append(_missing(what, int(missing.sum()), real))
    partly = (tokens[:, :, None] & ~rows).sum(axis=(0, 1))
    worst = int(partly.argmax()) if len(partly) else 0
    if len(partly) and partly[worst] > FEW * tokens.sum():
        layer = int(np.flatnonzero(busy)[worst])
        what = f"tokens have routes in other layers and none in layer {layer}"
        findings.append(_missing(what, int(partly[worst]), int(tokens.sum())))
    return tuple(findings)


def _missing(what: str, missing: int, among: int) -> Finding:
    amount = f"{missing} of {among} tokens"
    advice = "A rank or a layer may not have been captured. Record again, with all ranks"
    return Finding(FindingCode.ROUTES_MISSING, Severity.DOUBT, what, "", amount, advice)


def count_prompts_once(routes: TokenRoutes) -> tuple[Finding, ...]:
    """Count the tokens with which several sequences begin alike only once.

    The samples of one prompt have its routes each, but a prefix cache computes the prompt once.
    Sequences begin alike if all layers of all their first tokens have the same routes, for so many
    tokens that chance is excluded.

    Mutates: `routes.routed`.
    """
    tokens = routes.tokens
    needed = _tokens_beyond_chance(routes)
    order = [np.flatnonzero(row) for row in tokens]  # padding may be on the left
    repeated = np.zeros(len(tokens), np.int64)
    depth, groups = 0, [[b for b in range(len(tokens)) if len(order[b])]]
    while groups:
        deeper: list[list[int]] = []
        for group in groups:
            by_route: dict[int, list[int]] = {}
            for b in group:
                if depth < len(order[b]):
                    by_route.setdefault(int(routes.route[b, order[b][depth]]), []).append(b)
            deeper.extend(members for members in by_route.values() if len(members) > 1)
        groups, depth = deeper, depth + 1
        for members in groups:
            repeated[members[1:]] = depth
    repeated[repeated < needed] = 0
    for b, length in enumerate(repeated.tolist()):
        routes.routed[b, order[b][:length]] = False
    left_out, among = int(repeated.sum()), int(tokens.sum())
    if not left_out:
        return ()
    what = (
        "sequences that begin with the same routes in all layers have a prompt in common, which"
        " counts once, as with a prefix cache"
    )
    amount = f"{left_out} of {among} tokens are left out, from {needed} equal tokens on"
    return (Finding(FindingCode.REPEATED_PROMPTS, Severity.NOTE, what, "", amount),)


def _tokens_beyond_chance(routes: TokenRoutes) -> float:
    """Return how many tokens in a row are not alike by chance, in any two sequences.

    The probability that two tokens have one route is measured on the file; a run of equal routes
    counts as one token, so that padding does not make everything look like chance.
    """
    sequences = len(routes.route)
    rows = [row[real] for row, real in zip(routes.route, routes.tokens, strict=True)]
    apart = np.concatenate([row[np.append(True, row[1:] != row[:-1])[: len(row)]] for row in rows])
    _, times = np.unique(apart, return_counts=True)
    if len(apart) < 2:
        return math.inf
    alike = float((times * (times - 1.0)).sum() / (len(apart) * (len(apart) - 1.0)))
    if alike >= 1.0:
        return math.inf
    pairs = max(1.0, sequences * (sequences - 1) / 2)
    least = math.log(CHANCE / pairs) / math.log(alike) if alike > 0.0 else 0.0
    return max(4, math.ceil(least))

"""The canary: experts answer one fixed token as they did when their weights were registered.

Checksums cover the tensors that an engine declares. An expert can depend on one that nobody
declared, such as a scale per slot, an alias, or a layout derived at load: its declared bytes then
arrive intact and its output is wrong. The engine's own kernel uses all of them, so its output for
one token shows it.

Answers travel between ranks as a digest of the output's bytes and a sketch: eight sums of the
output with fixed signs, whose distances estimate those of the outputs. Where the kernel gives the
same bits in every slot, bits are compared; else distances, with a tolerance that the replicas of
the experts gave at registration.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import MovedAnswers

SUMS = 8
"""Sums of a sketch. Their distance has a standard error of 1 / sqrt(2 * SUMS), a quarter."""
HELD = np.dtype(
    [("digest", "u8"), ("sketch", "f4", (SUMS,)), ("noise", "f8"), ("slots", "i8")], align=True
)
"""An expert on one rank, as it travels: its answer, the largest distance between its slots and
between two runs in one slot, and the number of its slots."""
_MARGIN = 4.0
"""The tolerance over the largest difference between two slots with the same weights."""
_APART = 8.0
"""Two experts are told apart if their answers differ by this many tolerances."""
_LEAST_NOISE = 1e-9
"""Stands for a difference of bits that the sketch is too coarse to show."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The output of one expert for the fixed token."""

    digest: int
    """64 bits over the bytes of the output."""
    sketch: Callable[[], NDArray[np.float32]]
    """Returns the (SUMS,) sums of the output with fixed signs; few answers need them."""


def held_answer(held: np.void) -> Answer:
    """Return the answer in an element of `HELD`."""
    return Answer(int(held["digest"]), lambda: np.asarray(held["sketch"], np.float32))


def sketch_of(output: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the (SUMS,) sketch of an (n,) output."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(_signs(len(output)) @ output.astype(np.float64), np.float32)


def fixed_token(size: int) -> NDArray[np.float32]:
    """Return the (size,) token of every canary: values in -2..2, the same on every rank."""
    bits = _mixed(np.arange(1, size + 1, dtype=np.uint64))
    return (4.0 * (bits >> np.uint64(40)).astype(np.float64) / 2**24 - 2.0).astype(np.float32)


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the distance of sketches (..., SUMS), as a share of the larger one; inf without one.

    Outputs that are not finite have no distance; two outputs of zeros have 0.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        size = np.maximum(np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1))
        apart = np.linalg.norm(a - b, axis=-1) / np.where(size > 0, size, 1.0)
    return np.where(np.isfinite(apart), apart, np.inf)


def answers_apart(one: Answer, other: Answer) -> float:
    """Return the distance of two answers: 0 for the same bits, and only for them."""
    if one.digest == other.digest:
        return 0.0
    return max(float(distance(one.sketch(), other.sketch())), _LEAST_NOISE)


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """The answers of all experts, as all ranks agreed on them."""

    answers: NDArray[np.void]
    """(L, E) of `HELD`."""
    nearest: NDArray[np.float64]
    """(L, E) distance to the answer of the most similar other expert of the layer."""
    noise: float
    """The largest distance between two slots with the same expert, or two runs in one slot."""
    replicas: int
    """Replicas that were compared with another slot."""
    worst: tuple[int, int]
    """(layer, expert) that has this noise."""

    def tolerance(self, limit: float) -> float:
        """Return the largest distance that counts as no difference; 0 compares bits.

        Args:
            limit: the largest distance that rounding can explain. It is also the tolerance as long
                as no two slots with the same expert have shown that the kernel gives the same bits.
        """
        if not self.replicas:
            return limit
        return min(_MARGIN * self.noise, limit)


def agree(tables: NDArray[np.void]) -> Registered:
    """Return the answers of all experts, each as the first rank that holds it gave it.

    Args:
        tables: (R, L, E) of `HELD`. An expert that no rank holds gets zeros.
    """
    held = tables["slots"] > 0
    first = held.argmax(axis=0)[None]
    answers = np.take_along_axis(tables, first, axis=0)[0]
    apart = np.maximum(distance(tables["sketch"], answers["sketch"][None]), _LEAST_NOISE)
    apart = np.where(tables["digest"] != answers["digest"], apart, 0.0)
    apart = np.where(held, np.maximum(apart, tables["noise"]), 0.0).max(axis=0)
    nearest = np.empty(apart.shape)
    for layer, sketches in enumerate(answers["sketch"]):
        between = distance(sketches[:, None], sketches[None])
        np.fill_diagonal(between, np.inf)
        nearest[layer] = between.min(axis=1)
    replicas = int(np.maximum(tables["slots"].sum(axis=0) - 1, 0).sum())
    layer, expert = divmod(int(apart.argmax()), apart.shape[1])
    return Registered(answers, nearest, float(apart.max()), replicas, (layer, expert))


@dataclass(frozen=True, slots=True)
class Due:
    """A slot to ask."""

    layer: int
    local: int
    """Slot of this rank."""
    expert: int
    """The expert that the map has there."""
    wave: WaveKey | None
    """The wave that brought it; None if the engine moved it by itself."""
    suspect: "tuple[Due, float] | None" = None
    """A moved slot and its small distance, for which this slot, which never moved, is asked."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of asking one slot."""

    different: Due | None = None
    """The moved slot that answers otherwise."""
    by: float = 0.0
    """The distance."""
    ended: MovedAnswers | None = None
    """The result of a wave, if this slot was its last one."""


class Canary:
    """The slots of one rank that are due, and the results of its waves; pure.

    `moved` and `next_due` are called by one thread, `judge` by another.

    Args:
        rank: this rank.
        registered: of all ranks.
        placement: the map at registration.
        limit: see `Registered.tolerance`.
    """

    def __init__(
        self, rank: int, registered: Registered, placement: Placement, limit: float
    ) -> None:
        self._rank = rank
        self._registered = registered
        self._placement = placement
        self._limit = limit
        self.tolerance = registered.tolerance(limit)
        self._due: deque[Due] = deque()
        self._tallies: dict[WaveKey, Counter[str]] = {}
        """By wave its moved slots, those that a plan moved on before they were asked (`gone`), and
        otherwise as in `MovedAnswers`."""

    @property
    def blind(self) -> int:
        """The number of experts whose answer another expert of their layer gives too."""
        return int(self._is_blind().sum())

    def _is_blind(self) -> NDArray[np.bool_]:
        """(L, E) of experts that the tolerance cannot tell from another one."""
        return self._registered.nearest <= _APART * self.tolerance

    def moved(
        self, wave: WaveKey | None, before: Placement, after: Placement
    ) -> MovedAnswers | None:
        """Make every slot of this rank due that has another expert; return a result if none has."""
        old, new = self._mine(before), self._mine(after)
        found = np.argwhere((old != new) & (new != EMPTY)).tolist()
        due = [Due(layer, local, int(new[layer, local]), wave) for layer, local in found]
        if wave is not None:
            blind = self._is_blind()
            if not due:
                return MovedAnswers(wave, 0, 0, 0, 0)
            unseen = sum(bool(blind[one.layer, one.expert]) for one in due)
            self._tallies[wave] = Counter(moved=len(due), blind=unseen)
        self._due.extend(due)
        return None

    def next_due(self) -> Due | None:
        """Take the next slot to ask; None if none is due."""
        return self._due.popleft() if self._due else None

    def judge(self, due: Due, placement: Placement, answer: Answer | None) -> Judged:
        """Compare an answer with the registered one.

        A small difference may come from a kernel that was tuned again since registration. Then a
        slot that never moved shows it too, and its distance becomes the tolerance.

        Args:
            due: the slot.
            placement: the map in use.
            answer: None if the slot has another expert by now.
        """
        if answer is None:
            moved = due.suspect[0] if due.suspect is not None else due
            return Judged(ended=self._count(moved, "gone"))
        registered = held_answer(self._registered.answers[due.layer, due.expert])
        apart = answers_apart(registered, answer)
        if due.suspect is not None:
            moved, far = due.suspect
            if self.tolerance < apart <= self._limit:
                self.tolerance = min(_MARGIN * apart, self._limit)
            return self._judge(moved, far)
        control = self._unmoved(due, placement) if self.tolerance < apart <= self._limit else None
        if control is None:
            return self._judge(due, apart)
        self._due.appendleft(Due(due.layer, *control, due.wave, (due, apart)))
        return Judged()

    def _judge(self, due: Due, apart: float) -> Judged:
        if apart <= self.tolerance:
            return Judged(ended=self._count(due, "same"))
        return Judged(due, apart, self._count(due, "different"))

    def _count(self, due: Due, what: str) -> MovedAnswers | None:
        wave = due.wave
        tally = self._tallies.get(wave) if wave is not None else None
        if wave is None or tally is None:
            return None
        tally[what] += 1
        same, different = tally["same"], tally["different"]
        if same + different + tally["gone"] < tally["moved"]:
            return None
        del self._tallies[wave]
        return MovedAnswers(wave, tally["moved"], same, different, tally["blind"])

    def _unmoved(self, due: Due, placement: Placement) -> tuple[int, int] | None:
        """Return (local slot, expert) of a slot of the layer that never moved; None without one."""
        then, now = self._mine(self._placement)[due.layer], self._mine(placement)[due.layer]
        kept = np.flatnonzero((then == now) & (now != EMPTY))
        kept = kept[kept != due.local]
        return (int(kept[0]), int(now[kept[0]])) if len(kept) else None

    def _mine(self, placement: Placement) -> NDArray[np.int32]:
        """Return the (L, slots_per_rank) part of a map that is on this rank."""
        per_rank = placement.slots_per_rank
        return placement.phy2log[:, self._rank * per_rank : (self._rank + 1) * per_rank]


@lru_cache(maxsize=4)
def _signs(size: int) -> NDArray[np.float64]:
    """Return the (SUMS, size) signs of a sketch; no random generator, so that all ranks agree."""
    bits = _mixed(np.arange(1, SUMS * size + 1, dtype=np.uint64) << np.uint64(1))
    return 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64).reshape(SUMS, size)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 hash of numbers."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

"""The schedule of faults: a pure function of the seed."""

import random
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Fault", "FaultKind", "Schedule", "make_schedule"]


class FaultKind(StrEnum):
    """A kind of fault. Roles (leader, primary) are those at the time of the fault."""

    KILL_LEADER = "kill_leader"
    """SIGKILL; the same identity is started again at the end."""
    STOP_LEADER = "stop_leader"
    """SIGSTOP, then SIGCONT: an old leader wakes up."""
    CUT_LEADER = "cut_leader"
    """Ranks cannot reach the leader; it still reaches the store."""
    SILENCE_LEADER = "silence_leader"
    """As CUT_LEADER, but connections stay open and nothing arrives."""
    KILL_PRIMARY = "kill_primary"
    """SIGKILL of the store's primary: Sentinel promotes the replica."""
    STOP_PRIMARY = "stop_primary"
    """SIGSTOP of it: the old primary wakes up and is made a replica."""
    SENTINEL_FAILOVER = "sentinel_failover"
    """Ordered of Sentinel: READONLY answers, connections killed."""
    KILL_FOLLOWER = "kill_follower"
    STOP_FOLLOWER = "stop_follower"
    CUT_STORE = "cut_store"
    """Both store nodes unreachable, for controllers and Sentinel."""
    FLUSH_STORE = "flush_store"
    """FLUSHALL (R15)."""
    FULL_STORE = "full_store"
    """maxmemory of one byte: every write is answered with OOM."""
    SLOW_STORE = "slow_store"
    SLOW_LINKS = "slow_links"
    """Between ranks and controllers."""
    HOSTILE_CLIENTS = "hostile_clients"
    """Noise, floods and impostors at every door."""
    STOP_RANK = "stop_rank"
    KILL_MOST = "kill_most"
    """SIGKILL of so many ranks that the others have no room: the engine restarts its group."""
    KILL_RANK = "kill_rank"
    """SIGKILL of one rank, without which the others go on."""
    RETIRE = "retire"
    """One or two ranks retire: their experts move away, and the others form the next group."""
    GROW = "grow"
    """So many ranks join that the group has as many as at the start."""

    @property
    def changes_leader(self) -> bool:
        return self in _LEADER

    @property
    def changes_primary(self) -> bool:
        return self in _PRIMARY

    @property
    def stops_serving(self) -> bool:
        """True if the fault ends or stops ranks; no other fault may delay a step."""
        return self in (FaultKind.STOP_RANK, FaultKind.KILL_MOST, FaultKind.KILL_RANK)

    @property
    def is_ordered(self) -> bool:
        """True if it is no failure: it explains nothing but the end of a generation."""
        return self in (FaultKind.RETIRE, FaultKind.GROW)

    @property
    def resizes(self) -> bool:
        """True if the group gets another number of ranks."""
        return self in _RESIZES


_LEADER = frozenset(
    {FaultKind.KILL_LEADER, FaultKind.STOP_LEADER, FaultKind.CUT_LEADER, FaultKind.SILENCE_LEADER}
)
_PRIMARY = frozenset({FaultKind.KILL_PRIMARY, FaultKind.STOP_PRIMARY, FaultKind.SENTINEL_FAILOVER})
_RESIZES = frozenset({FaultKind.KILL_RANK, FaultKind.RETIRE, FaultKind.GROW})

#: (kind, shortest, longest seconds). Control-plane outages last longer than the serving bound, so
#: that a step that waited for one would exceed the bound.
_FAILOVERS = (
    (FaultKind.KILL_LEADER, 7.0, 12.0),
    (FaultKind.STOP_LEADER, 8.0, 12.0),
    (FaultKind.CUT_LEADER, 7.0, 12.0),
    (FaultKind.SILENCE_LEADER, 7.0, 12.0),
    (FaultKind.KILL_PRIMARY, 7.0, 12.0),
    (FaultKind.STOP_PRIMARY, 7.0, 12.0),
    (FaultKind.SENTINEL_FAILOVER, 5.0, 7.0),
)
_OTHERS = (
    (FaultKind.KILL_FOLLOWER, 3.0, 6.0),
    (FaultKind.STOP_FOLLOWER, 7.0, 10.0),
    (FaultKind.CUT_STORE, 6.0, 9.0),
    (FaultKind.FLUSH_STORE, 3.0, 4.0),
    (FaultKind.FULL_STORE, 3.0, 6.0),
    (FaultKind.STOP_RANK, 1.0, 3.0),
)
_NOISE = (
    (FaultKind.SLOW_STORE, 4.0, 8.0),
    (FaultKind.SLOW_LINKS, 4.0, 8.0),
    (FaultKind.HOSTILE_CLIENTS, 5.0, 8.0),
)
_ROUNDS = (
    (FaultKind.RETIRE, FaultKind.KILL_RANK, FaultKind.GROW),
    (FaultKind.KILL_RANK, FaultKind.RETIRE, FaultKind.GROW),
    (FaultKind.RETIRE, FaultKind.GROW, FaultKind.KILL_RANK, FaultKind.GROW),
    (FaultKind.KILL_RANK, FaultKind.GROW, FaultKind.RETIRE, FaultKind.GROW),
)
"""Each leads from the number of ranks at the start back to it."""
_CALM_S = (2.0, 5.0)
_RESIZE_EVERY_S = (20.0, 35.0)
_RESTART_EVERY_S = 240.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule."""

    at: float
    """Seconds from the start; a failover waits a little for a plan under way."""
    kind: FaultKind
    seconds: float
    """A resize takes as long as it takes."""
    seed: int
    """For what the fault itself chooses."""


Schedule = tuple[list[Fault], list[Fault], list[Fault]]
"""(main, noise, resizes), each in order of time. On a slow machine resizes come later than planned,
and those after the other faults are left out."""


def make_schedule(seed: int, seconds: float) -> Schedule:
    """Return the faults of a run.

    Faults of one list do not overlap; faults of different lists may. Every second main fault is a
    failover; all kinds take turns in an order chosen by the seed.
    """
    rng = random.Random(seed)
    main: list[Fault] = []
    at, restarted_at = rng.uniform(*_CALM_S), 60.0 - _RESTART_EVERY_S
    failovers: list[tuple[FaultKind, float, float]] = []
    others: list[tuple[FaultKind, float, float]] = []
    while True:
        if at - restarted_at >= _RESTART_EVERY_S:
            kind, least, most = FaultKind.KILL_MOST, 1.0, 2.0
            restarted_at = at
        elif len(main) % 2 == 0:
            kind, least, most = _draw(failovers, _FAILOVERS, rng)
        else:
            kind, least, most = _draw(others, _OTHERS, rng)
        lasts = rng.uniform(least, most)
        if at + lasts > seconds:
            break
        main.append(Fault(at, kind, lasts, rng.getrandbits(32)))
        at += lasts + rng.uniform(*_CALM_S)
    noise: list[Fault] = []
    at = rng.uniform(5.0, 15.0)
    while at < seconds - _NOISE[0][2]:
        kind, least, most = rng.choice(_NOISE)
        lasts = rng.uniform(least, most)
        noise.append(Fault(at, kind, lasts, rng.getrandbits(32)))
        at += lasts + rng.uniform(10.0, 25.0)
    return main, noise, _resizes(random.Random(f"{seed} resizes"), seconds)


def _resizes(rng: random.Random, seconds: float) -> list[Fault]:
    found: list[Fault] = []
    at, left = rng.uniform(*_CALM_S), list[FaultKind]()
    while at < seconds:
        left = left or list(rng.choice(_ROUNDS))
        found.append(Fault(at, left.pop(0), 0.0, rng.getrandbits(32)))
        at += rng.uniform(*_RESIZE_EVERY_S)
    return found


def _draw(
    left: list[tuple[FaultKind, float, float]],
    every: tuple[tuple[FaultKind, float, float], ...],
    rng: random.Random,
) -> tuple[FaultKind, float, float]:
    """Return the next of a shuffled list, which is shuffled again when it is used up."""
    if not left:
        left.extend(rng.sample(every, len(every)))
    return left.pop()

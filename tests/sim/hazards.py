"""Hazards: seeds in which one plan runs after another, and one thing often goes wrong.

Some are of the agent: late and damaged bytes, slow saves, failing polls, stopped ranks, reloads.
The others are of leaders, whose terms, questions or operators change at a certain moment. A hazard
gives no machine an event itself: the event follows from it as in a real deployment.
"""

from dataclasses import dataclass, replace

TO_RANKS = frozenset({"Prepare", "Commit", "Abort", "QueryState", "NotLeading"})
"""The messages of controllers; all other kinds are messages of ranks."""
SOON_S = 0.004
"""Virtual seconds after a moment within which a cause takes effect; most states last longer."""
SHARE = 0.7
"""Share of the seeds that have a hazard."""
TIMES = 4


@dataclass(frozen=True)
class Hazard:
    """What often goes wrong in a seed."""

    name: str
    share: int
    """How often it is drawn, among the hazards."""
    causes: tuple

    def arrange(self, world) -> None:
        """Prepare a new world for it."""
        world.note(f"hazard: {self.name}")
        world.hurry()
        world.flaws = 0.0
        world.fleet.misconfigured = False
        for cause in self.causes:
            cause(world)


def hazard_of(rng) -> Hazard | None:
    """Return the hazard of a seed; None if it has none."""
    shares = [each.share for each in HAZARDS.values()]
    none = sum(shares) * (1.0 - SHARE) / SHARE
    return rng.choices((*HAZARDS.values(), None), (*shares, none))[0]


# --- what the world is like -----------------------------------------------------------------------


def like(**attributes):
    """Set attributes of the world: `corruption`, `slow_swaps` and others."""

    def arrange(world) -> None:
        for name, value in attributes.items():
            setattr(world, name, value)

    return arrange


def quick(**times):
    """Ask ranks often and miss them soon; `times` are deadlines of waves, in seconds or steps."""

    def arrange(world) -> None:
        wave = replace(world.timing.wave, **times)
        world.timing = replace(
            world.timing, heartbeat_s=0.25, ask_again_s=0.25, rank_lease_s=0.7, wave=wave
        )

    return arrange


# --- at random times ------------------------------------------------------------------------------


def at_times(fault):
    """Let a fault occur several times on a random rank, while plans run."""

    def arrange(world) -> None:
        for _ in range(TIMES):
            world.at(2.0 + 8.0 * world.rng.random(), strike, world, fault)

    return arrange


def strike(world, fault) -> None:
    if not world.calm and world.fleet.ranks:
        fault(world, world.rng.choice(world.fleet.ranks))


def crash(_world, rank) -> None:
    rank.die()


def fail_poll(world, rank) -> None:
    world.fleet.failing_polls.add(rank.rank)


def pause(world, rank) -> None:
    rank.pause(4.0 * world.rng.random())


def leave_boundary_out(_world, rank) -> None:
    rank.leaves_out = 1


def resize(world, _rank) -> None:
    world.fleet.resize(world.rng.choice((2, 3, 3, 4, 4, 4)))


def outlive(world) -> None:
    """Ranks go on without dead ones."""
    world.fleet.outlives = world.fleet.may_resize


def reload(world, _rank) -> None:
    world.fleet.begin_reload(world.rng.random() < 0.7)


# --- at moments -----------------------------------------------------------------------------------


def meet(moment: str, chance: float, strike):
    """Call `strike(world, context)` with a probability whenever a moment passes, until the calm."""

    def arrange(world) -> None:
        def pass_by(context) -> bool:
            if not world.calm and world.rng.random() < chance:
                strike(world, context)
            return not world.calm

        world.when(moment, pass_by)

    return arrange


def wish(what: str, moment: str, chance: float = 0.8):
    """An operator makes a request of the leader at that moment."""

    def strike(world, context) -> None:
        seat = context.get("seat") or world.leading_seat()
        if seat is not None:
            world.after(SOON_S * world.rng.random(), ask, world, seat, what)

    return meet(moment, chance, strike)


def ask(world, seat, what: str) -> None:
    """An operator makes a request of one replica."""
    replica = seat.replica
    if not world.calm and replica.alive and not replica.paused and seat.leader is not None:
        seat.by_hand(what)


def silent(moment: str, seconds: float, chance: float = 0.5):
    """The ranks hear no leader for so long, or no leader hears the ranks."""

    def strike(world, _context) -> None:
        down = world.rng.random() < 0.7
        hold = world.hold(lambda kind, _owner: (kind in TO_RANKS) is down)
        world.after(seconds * (0.8 + 0.4 * world.rng.random()), hold.end)

    return meet(moment, chance, strike)


def lapse(moment: str, chance: float = 0.7, same: float = 0.5):
    """The leader's lease ends early; with probability `same` the same replica takes it again."""

    def strike(world, context) -> None:
        seat = context.get("seat") or world.leading_seat()
        if seat is not None:
            itself = world.rng.random() < same
            world.after(SOON_S * world.rng.random(), let_lapse, world, seat, itself)

    return meet(moment, chance, strike)


def let_lapse(world, seat, itself: bool) -> None:
    """End a lease early; its holder notices at its next renewal, at once if `itself`."""
    shelf, leader = world.store.shelf, seat.leader
    if world.calm or leader is None or shelf.term != leader.term or not seat.replica.alive:
        return
    world.note("the lease runs out")
    shelf.lease_until = 0.0
    seat.renewed_at = 0.0 if itself else seat.replica.now
    for replica in world.replicas:
        if replica.seat is not seat:
            replica.seat.try_at = replica.now + (1.0 if itself else 0.0)


def split(moment: str, after: float = 0.0, chance: float = 0.7):
    """Leadership moves and the ranks follow at once, before the old leader notices."""

    def strike(world, context) -> None:
        seat = context["seat"]
        world.after(after, let_lapse, world, seat, False)
        for rank in world.fleet.ranks:
            world.after(after + 0.12, follow, world, rank, seat)

    return meet(moment, chance, strike)


def follow(world, rank, seat) -> None:
    """A rank leaves a replica; its old stream stays open for a while."""
    if not world.calm and rank.stream is not None and rank.stream.replica is seat.replica:
        rank.abandon()


def flush(moment: str, chance: float = 0.5):
    """The store is emptied as the leader's lease ends, so that terms begin anew."""

    def strike(world, context) -> None:
        world.note("store is flushed")
        world.store.flush()
        context["replica"].crash()
        world.after(0.5, context["replica"].start)

    return meet(moment, chance, strike)


CANCELLED = wish("cancel", "rank is prepared", 0.2)
"""Some waves are given up when they are staged, so that another wave finds what they left."""
_HAZARDS = (
    Hazard("late bytes", 6, (like(late_copies=0.1), CANCELLED)),
    Hazard("damaged bytes", 5, (like(corruption=0.1),)),
    Hazard("slow saves", 1, (like(slow_saves=2.0), at_times(crash))),
    Hazard("failing polls", 1, (at_times(fail_poll),)),
    Hazard("stopped ranks", 1, (at_times(pause),)),
    Hazard("reloads", 2, (at_times(reload),)),
    Hazard(
        "no leader is heard",
        2,
        (
            quick(prepare_deadline_s=4.0),
            silent("wave is preparing", 2.0, 0.3),
            silent("wave is committing", 4.0, 0.3),
        ),
    ),
    Hazard(
        "aborts race with polls",
        2,
        (
            quick(commit_deadline_s=0.3, commit_deadline_steps=8),
            wish("cancel", "rank is armed", 0.3),
        ),
    ),
    Hazard(
        "plans of a stale base",
        1,
        (wish("propose", "controller is migrating"), wish("approve", "controller is ready")),
    ),
    Hazard("wrong plans", 2, (like(flaws=0.5), wish("submit", "controller is ready", 0.3))),
    Hazard("wrong Prepares", 2, (like(wrong_prepares=0.3),)),
    Hazard(
        "two leaders",
        2,
        (quick(), split("controller is migrating", 0.1, 0.5), lapse("wave is preparing", 0.3)),
    ),
    Hazard("an empty store", 1, (flush("controller is migrating", 0.3),)),
    Hazard(
        "other sizes",
        2,
        (
            outlive,
            at_times(resize),
            at_times(crash),
            wish("retire", "controller is ready", 0.2),
            meet("rank is staging", 0.03, lambda _world, context: context["rank"].die()),
            meet("rank polls armed", 0.03, lambda _world, context: context["rank"].die()),
        ),
    ),
)
HAZARDS = {hazard.name: hazard for hazard in _HAZARDS}

LEFT_OUT = Hazard("boundaries left out", 0, (at_times(leave_boundary_out),))
"""A mistake of the engine, which no seed has by itself: every time the group has to restart."""

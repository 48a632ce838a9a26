"""Hazards of the agent: late and damaged bytes, slow saves, failing polls, stopped ranks, reloads.

Each is a focus of the simulation, of the agent's own code instead of pairs of the machines' tables.
"""

from tests.sim.causes import wish
from tests.sim.conditions import like
from tests.sim.focus import Focus

SHARE = 0.6
"""Share of the seeds that have one."""
TIMES = 4
CANCELLED = wish("cancel", "rank is prepared", 0.2)
"""Some waves are given up when they are staged, so that another wave finds what they left."""


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
    world.fleet.fail_poll([rank.rank])


def pause(world, rank) -> None:
    rank.pause(4.0 * world.rng.random())


def leave_boundary_out(_world, rank) -> None:
    rank.leaves_out = 1


def reload(world, _rank) -> None:
    world.fleet.begin_reload(world.deployments[0], world.rng.random() < 0.7)


HAZARDS = (
    Focus("late bytes", 3, (like(late_copies=0.1), CANCELLED)),
    Focus("damaged bytes", 3, (like(corruption=0.1),)),
    Focus("slow saves", 1, (like(slow_saves=2.0), at_times(crash))),
    Focus("failing polls", 1, (at_times(fail_poll),)),
    Focus("stopped ranks", 1, (at_times(pause),)),
    Focus("reloads", 1, (at_times(reload),)),
)

LEFT_OUT = Focus("boundaries left out", 0, (at_times(leave_boundary_out),))
"""A mistake of the engine, which no seed has by itself: every time the group has to restart."""


FAILING_POLLS, RELOADS = HAZARDS[3], HAZARDS[5]


def hazard_of(rng) -> Focus | None:
    """Return the hazard of a seed; None if it has none."""
    shares = [each.share for each in HAZARDS]
    none = sum(shares) * (1.0 - SHARE) / SHARE
    return rng.choices((*HAZARDS, None), (*shares, none))[0]

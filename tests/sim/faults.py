"""The faults of a run, at random times and at the moments where they do most harm."""

import random

from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.protocol import control_messages as ctl
from tests.sim.fleet import Fleet

MOMENTS = (
    "controller sends Prepare",
    "controller sends Commit",
    "controller sends Abort",
    "controller stores agreement",
    "controller ends a wave",
    "controller stores PersistEpoch",
    "controller stores PersistPlan",
    "wave is preparing",
    "wave is committing",
    "wave is aborting",
    "wave is recovering",
    "wave is committed",
    "wave is aborted",
    "controller is recovering",
    "rank is staging",
    "rank is prepared",
    "rank is armed",
    "rank is aborted",
    "rank sends Vote",
    "rank sends Ack",
    "rank sends AbortAnswer",
    "rank sends RankState",
    "rank polls",
    "rank polls armed",
    "rank polls armed",
    "rank swaps",
    "group breaks",
)


SECOND_GROUP_EVERY = 12
"""Of the seeds with random faults, every so many have two groups of one name."""


STOPS_EVERY = 16
"""Of the seeds with random faults, every so many have a leader that stops before it sends."""


def plan_faults(world, until: float) -> None:
    """Schedule this seed's faults, over virtual time and at moments."""
    rng = world.rng
    if rng.random() < 0.6:
        world.network.drop = rng.choice((0.02, 0.1, 0.3))
        world.network.duplicate = rng.choice((0.0, 0.1, 0.4))
        world.network.linger = rng.choice((0.0, 0.05, 0.2))
    world.slow_copies = rng.choice((0.0, 0.05, 0.2))
    world.corruption = rng.choice((0.0, 0.0, 0.02))
    world.slow_swaps = rng.choice((0.03, 0.03, 0.4))
    world.slow_saves = rng.choice((0.02, 0.02, 0.4, 2.0))
    world.wrong_prepares = rng.choice((0.0, 0.0, 0.3))
    for _ in range(rng.choice((0, 1, 2, 4, 6))):
        fault = rng.choice(FAULTS)
        world.at(1.0 + rng.random() * (until - 1.0), inflict, world, fault)
    for _ in range(rng.choice((0, 1, 2, 3, 4))):
        arm(world, rng.choice(MOMENTS), rng.choice(FAULTS), rng.choice((1, 1, 2, 3, 5)))
    if world.seed % STOPS_EVERY == STOPS_EVERY // 2:
        plan_stops(world)
    if world.seed % SECOND_GROUP_EVERY == 0:
        world.at(1.0 + 0.7 * until * rng.random(), second_group, world)
    for _ in range(rng.choice((1, 4, 8))):
        wish = rng.choice(WISHES)
        world.at(1.0 + rng.random() * (until - 1.0), operator_wish, world, wish)
    if rng.random() < 0.5:
        wish = rng.choice(("cancel", "cancel", "submit", "rollback", "approve"))
        arm(world, rng.choice(MOMENTS), lambda w, _context: w.after(0, operator_wish, w, wish), 1)


def plan_stops(world) -> None:
    """In most cases, stop a leader for seconds between a write and the messages that rest on it."""
    # Random numbers of its own, so that the other faults of a seed are the same without it.
    rng = random.Random(f"stop {world.seed}")
    if rng.random() < 0.8:
        seconds, suspended = rng.uniform(0.3, 6.0), rng.random() < 0.5
        arm(
            world,
            f"controller {rng.choice(STOPS)}",
            lambda _, context: context["replica"].pause(seconds, suspended),
            rng.choice((1, 1, 2, 3)),
        )


STOPS = (
    "stores agreement",
    "stores agreement",
    "stores PersistPlan",
    "ends a wave",
    "stores PersistEpoch",
)
"""Writes on which a Commit, a Prepare or the next wave rests."""


WISHES = (
    "submit",
    "submit",
    "propose",
    "propose",
    "rollback",
    "approve",
    "approve",
    "approve",
    "cancel",
    "resume",
    "freeze",
    "mode",
)


def operator_wish(world, wish: str) -> None:
    """An operator makes a request of a replica that believes it leads."""
    if world.calm:
        return
    seats = [
        replica.seat
        for replica in world.replicas
        if replica.alive and not replica.paused and replica.seat.leader is not None
    ]
    if seats:
        world.rng.choice(seats).by_hand(wish)


def arm(world, moment: str, fault, nth: int) -> None:
    """Schedule a fault for the nth time a moment passes."""
    left = [nth]

    def strike(context) -> bool:
        if world.calm:
            return False
        left[0] -= 1
        if left[0] > 0:
            return True
        world.note(f"fault at moment: {moment}")
        fault(world, context)
        return False

    world.when(moment, strike)


# --- faults ---------------------------------------------------------------------------------------


def inflict(world, fault) -> None:
    """Let a fault happen at any replica or rank, unless the calm has begun."""
    if not world.calm:
        fault(world, {})


def _replica(world, context):
    return context.get("replica") or world.rng.choice(world.replicas)


def _rank(world, context):
    return context.get("rank") or world.rng.choice(world.fleet.ranks)


def crash_replica(world, context) -> None:
    replica = _replica(world, context)
    replica.crash()
    world.after(0.2 + 4.0 * world.rng.random(), replica.start)


def crash_both(world, _context) -> None:
    for replica in world.replicas:
        replica.crash()
        world.after(0.2 + 4.0 * world.rng.random(), replica.start)


def pause_replica(world, context) -> None:
    _replica(world, context).pause(0.3 + 6.0 * world.rng.random())


def crash_rank(world, context) -> None:
    if world.fleet.ranks:
        rank = _rank(world, context)
        planned = world.rng.random() < 0.3
        world.note(f"rank {rank.rank} {'stops as planned' if planned else 'crashes'}")
        rank.die(planned)


def cut_streams(world, _context) -> None:
    for stream in list(world.network.streams.values()):
        if world.rng.random() < 0.5:
            world.network.cut(stream)


def partition(world, _context) -> None:
    """Cut some ranks off from some replicas for a while."""
    pairs = {
        (rank, replica.name)
        for rank in range(world.fleet.num_ranks)
        for replica in world.replicas
        if world.rng.random() < 0.4
    }
    world.note(f"partition {sorted(pairs)}")
    world.network.cuts |= pairs
    world.after(0.5 + 5.0 * world.rng.random(), world.network.cuts.difference_update, pairs)


def store_down(world, _context) -> None:
    world.note("store goes down")
    world.store.down = True
    world.after(0.2 + 4.0 * world.rng.random(), store_up, world)


def store_up(world) -> None:
    world.store.down = False


def store_loses_last_write(world, context) -> None:
    world.note("store loses its last write")
    world.store.lose_last_write()
    if world.rng.random() < 0.6:
        crash_replica(world, context)


def store_flushed(world, context) -> None:
    world.note("store is flushed")
    world.store.flush()
    if world.rng.random() < 0.5:
        crash_replica(world, context)


def poll_fails(world, context) -> None:
    if not world.fleet.ranks:
        return
    some = (
        [_rank(world, context).rank]
        if world.rng.random() < 0.7
        else list(range(world.fleet.num_ranks))
    )
    world.note(f"polls fail on ranks {some}")
    world.fleet.failing_polls.update(some)


def fleet_idles(world, _context) -> None:
    world.note("fleet idles")
    world.fleet.idle = True
    world.after(0.5 + 6.0 * world.rng.random(), fleet_goes_on, world)


def fleet_goes_on(world) -> None:
    world.fleet.idle = False


def reload(world, _context) -> None:
    world.after(0, world.fleet.begin_reload, world.rng.random() < 0.7)


def rank_disabled(world, context) -> None:
    """An agent meets an error and refuses waves until the group restarts."""
    if not world.fleet.ranks:
        return
    rank, fleet = _rank(world, context), world.fleet
    world.note(f"rank {rank.rank} refuses waves")
    rank.disable()
    world.after(0.5 + 4.0 * world.rng.random(), fleet.replace, fleet.generation)


def clock_stepped(world, context) -> None:
    """A controller's Unix clock is set."""
    replica = _replica(world, context)
    if not replica.alive or replica.paused:
        return
    replica.seat.feed(ctl.ClockStepped(world.rng.choice((-2.0, -0.3, 0.0, 0.5, 3.0))))


def plan_measured(world, context) -> None:
    """A controller has measured what a plan delivered."""
    replica = _replica(world, context)
    if not replica.alive or replica.paused:
        return
    gain = world.rng.choice((-0.1, 0.0, 0.2))
    known = list(replica.seat.control.records.by_id) or [PlanId("unknown")]
    gained = DeliveredGain(world.now, gain, 0.01, gain - 0.02, gain + 0.02)
    replica.seat.feed(ctl.PlanMeasured(world.rng.choice(known), gained))


def lossy(world, _context) -> None:
    """The network is very bad for a while."""
    network = world.network
    before = (network.drop, network.duplicate, network.linger)
    network.drop, network.duplicate, network.linger = 0.5, 0.3, 0.3
    world.after(0.5 + 2.0 * world.rng.random(), restore, world, before)


def restore(world, before) -> None:
    if not world.calm:
        world.network.drop, world.network.duplicate, world.network.linger = before


def abandoned(world, _context) -> None:
    """Ranks connect to another replica while their old streams are still open."""
    for rank in world.fleet.ranks:
        if world.rng.random() < 0.7:
            world.after(0.3 * world.rng.random(), rank.abandon)


def echoes(world, _context) -> None:
    """Recent messages arrive again, some of ended waves."""
    for _ in range(world.rng.choice((1, 2, 4))):
        world.network.echo(0.05)


def handover(world, _context) -> None:
    """The store ends a lease early: leadership moves although no replica died."""
    world.note("the lease runs out")
    world.store.shelf.lease_until = 0.0
    if world.rng.random() < 0.5:
        abandoned(world, {})
    if world.rng.random() < 0.5:
        world.after(0.5 + 2.0 * world.rng.random(), inflict, world, handover)


def second_group(world) -> None:
    """Another group serves under the same name for a while."""
    first = world.fleet
    if world.calm or world.second is not None:
        return
    gate = {"poll_every": first.poll_every, "resolve_after": first.resolve_after}
    world.second = second = Fleet(world, first.shape, **gate, name="h")
    second.start()
    world.after(0.5 + 6.0 * world.rng.random(), second.stop)


FAULTS = (
    handover,
    handover,
    handover,
    echoes,
    echoes,
    crash_replica,
    crash_replica,
    crash_both,
    pause_replica,
    pause_replica,
    crash_rank,
    cut_streams,
    partition,
    store_down,
    store_loses_last_write,
    store_flushed,
    poll_fails,
    fleet_idles,
    fleet_idles,
    reload,
    reload,
    rank_disabled,
    plan_measured,
    clock_stepped,
    lossy,
)

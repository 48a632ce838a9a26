"""Storms: seeds in which old messages and ill-timed events rain on every machine in its rarest states.

Chance alone passes some (state, event) pairs a few times in a million events. In a storm whatever enters a
state is at once met by what it should not have to expect there: messages of the past, news of copies
that ended, cut streams, a handover, a reload, a cancel.
"""

from evenkeel.errors import Reason
from evenkeel.protocol import messages as msg
from tests.sim import faults

RANK_STATES = ("staging", "prepared", "armed", "aborted")
WAVE_STATES = ("preparing", "committing", "aborting", "recovering", "committed", "aborted")
CONTROL_STATES = ("follower", "waiting_for_ranks", "recovering", "ready", "migrating")
SOON_S = 0.004
"""Within so many virtual seconds a state is met by its storm: less than most states last."""


def brew(world) -> None:
    """Let this seed's machines be met by storms until the calm."""
    strength = world.rng.choice((0.2, 0.4, 0.6))
    world.hurry()
    for state in RANK_STATES:
        meet(world, f"rank is {state}", strength, on_rank)
    meet(world, "rank swaps", strength, on_rank)
    meet(world, "rank polls to drop", 0.9, on_dropping_poll)
    for state in WAVE_STATES:
        meet(world, f"wave is {state}", strength, on_wave)
    for state in CONTROL_STATES:
        meet(world, f"controller is {state}", strength, on_control)
    meet(world, "controller plans", 0.1, on_planning)


def meet(world, moment: str, strength: float, storm) -> None:
    """Whenever a moment passes, let a storm follow with a probability."""

    def strike(context) -> bool:
        if not world.calm and world.rng.random() < strength:
            storm(world, context)
        return not world.calm

    world.when(moment, strike)


def on_rank(world, context) -> None:
    """A rank entered a state."""
    rank, site = context["rank"], context["site"]
    rng = world.rng
    for _ in range(rng.choice((2, 4, 6))):
        echo(world, lambda stream: stream.rank is rank, SOON_S)
    for event in site.old_news()[:2]:
        world.after(SOON_S * rng.random(), site.feed, event)
    if site.participant.state == "aborted" and rng.random() < 0.5:
        wave = site.participant.wave  # the copies ended just as they were given up
        late = rng.choice((msg.StagingFinished(wave), msg.StagingFailed(wave, Reason.TRANSFER_FAILED)))
        world.after(SOON_S * rng.random(), site.feed, late)
    if rng.random() < 0.08:
        announced = rng.random() < 0.5
        world.after(SOON_S * rng.random(), world.fleet.begin_reload, site.deployment, announced)


def on_dropping_poll(world, context) -> None:
    """A rank has just told the poll that it would drop its wave; now its controller is heard again."""
    rank = context["rank"]
    for _ in range(4):
        echo(world, lambda stream: stream.rank is rank, world.fleet.step_s * world.fleet.resolve_after)


def on_wave(world, context) -> None:
    """A coordinator entered a state."""
    rng, replica = world.rng, context["replica"]
    for _ in range(rng.choice((2, 4, 6))):
        echo(world, lambda stream: stream.replica is replica, SOON_S)
    roll = rng.random()
    if roll < (0.6 if replica_recovers(replica) else 0.15):
        cut_one(world, replica)
    elif roll < 0.3:
        world.after(SOON_S * rng.random(), faults.operator_wish, world, "cancel")


def replica_recovers(replica) -> bool:
    """Whether a wave is found again after a change of leader: the rarest of a coordinator's states."""
    seats = replica.seats.values()
    return any(seat.control.coordinator and seat.control.coordinator.state == "recovering" for seat in seats)


def on_control(world, context) -> None:
    """A controller entered a state."""
    rng, replica = world.rng, context["replica"]
    for _ in range(8):
        echo(world, lambda stream: stream.replica is replica, 10 * SOON_S)
    roll = rng.random()
    if roll < 0.08:
        world.after(0.3 * rng.random(), faults.handover, world, {})
    elif roll < 0.12:
        faults.store_down(world, context)
    elif roll < 0.2:
        cut_one(world, replica)


def on_planning(world, context) -> None:
    """A cycle of planning began; its answer is to come when much has changed."""
    faults_now = (faults.handover, faults.crash_rank, faults.cut_streams)
    world.after(0.05 * world.rng.random(), world.rng.choice(faults_now), world, {})


def echo(world, fits, within: float) -> None:
    """One of the messages sent lately that fit arrives once more; seldom kinds as often as frequent ones."""
    kinds: dict = {}
    for item in world.network.sent:
        if fits(item[1]):
            kinds.setdefault(type(item[2]), []).append(item)
    if kinds:
        deliver, stream, message = world.rng.choice(world.rng.choice(list(kinds.values())))
        world.after(within * world.rng.random(), deliver, stream, message)


def cut_one(world, replica) -> None:
    """One rank's stream to a replica breaks; the rank connects again."""
    streams = [stream for stream in world.network.streams.values() if stream.replica is replica]
    if streams:
        world.after(SOON_S * world.rng.random(), world.network.cut, world.rng.choice(streams))

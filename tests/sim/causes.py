"""Causes: what makes one kind of event come about in one state, whenever that state is entered.

Each function takes the moments and kinds it is about and returns what arranges it in a world. None of
them hands a machine a message or a decision of its own making: they let messages be late or arrive
twice, streams break, leases lapse, engines reload and operators cancel, and the shells do the rest.
"""

from dataclasses import replace

from tests.sim.faults import clock_stepped

TO_RANKS = frozenset({"Prepare", "Commit", "Abort", "QueryState", "NotLeading"})
"""What controllers say; every other kind of message is a rank's."""
SOON_S = 0.004
"""Within so many virtual seconds of its beginning a state is met: less than most states last."""


def meet(world, moment: str, chance: float, strike) -> None:
    """Whenever a moment passes, until the calm, let `strike(context)` follow with a probability."""

    def pass_by(context) -> bool:
        if not world.calm and world.rng.random() < chance:
            strike(context)
        return not world.calm

    world.when(moment, pass_by)


def where(context):
    """The site or seat a moment is about."""
    return context.get("site") or context["seat"]


def fits(context, owner) -> bool:
    """Whether a stream, or a seat with news for itself, belongs to where a moment passed."""
    place = where(context)
    if owner.deployment != place.deployment:
        return False
    if "site" in context:
        return getattr(owner, "rank", None) is place.rank
    return owner is place or (hasattr(owner, "rank") and owner.replica is place.replica)


# --- messages -------------------------------------------------------------------------------------


def again(kind: str, moment: str, times: int = 2, chance: float = 0.8):
    """Messages of one kind sent lately arrive once more, from or at whoever enters a state."""

    def arrange(world) -> None:
        def strike(context) -> None:
            for _ in range(times):
                world.network.echo(SOON_S, kind, lambda stream: fits(context, stream))

        meet(world, moment, chance, strike)

    return arrange


def twice(kind: str, times: int = 2, chance: float = 0.8):
    """What ranks send of one kind arrives several times over on its stream."""

    def arrange(world) -> None:
        def strike(context) -> None:
            stream = context["site"].stream
            for _ in range(times if stream is not None else 0):
                delay = 0.05 + 0.1 * world.rng.random()
                world.after(delay, world.network.echo, SOON_S, kind, lambda other: other is stream)

        meet(world, f"rank sends {kind}", chance, strike)

    return arrange


def late(
    kinds: frozenset,
    since: str,
    until: str | None = None,
    longest: float = 1.5,
    chance: float = 0.8,
    one: bool = False,
):
    """From one moment on, what is of these kinds does not arrive before another moment, or `longest`.

    `one`: only what one rank says or is told is late, at whatever replica, and one rank at a time.
    """

    def arrange(world) -> None:
        before: list = []

        def strike(context) -> None:
            rank = world.rng.choice(world.fleet.ranks)
            if one and before and before[-1] in world.holds:
                return

            def holds(kind, owner) -> bool:
                if kind not in kinds or owner.deployment != where(context).deployment:
                    return False
                return owner.rank is rank if one else fits(context, owner)

            hold = world.hold(holds)
            before.append(hold)
            world.after(longest * (0.8 + 0.4 * world.rng.random()), hold.end)
            if until is not None:
                world.when(until, lambda later: release(hold, context, later))

        meet(world, since, chance, strike)

    return arrange


def release(hold, context, later) -> bool:
    """Let go what was held back if the moment is about the same deployment and rank; True to wait on."""
    if hold not in hold.world.holds:
        return False
    place, other = where(context), where(later)
    if place.deployment != other.deployment or (
        "site" in context and "site" in later and place is not other
    ):
        return True
    hold.end(SOON_S)
    return False


def silent(moment: str, part: float, chance: float = 0.7):
    """Ranks are not heard for longer than their lease, then are again, one after the other.

    `part`: probability that a rank of the deployment is among them; one always is.
    """

    def arrange(world) -> None:
        def strike(context) -> None:
            rng, ranks = world.rng, world.fleet.ranks
            first = rng.choice(ranks)
            seconds = world.timing.rank_lease_s + 0.15
            for rank in ranks:
                if rank is first or rng.random() < part:
                    hush(world, context, rank, seconds)
                    seconds += 0.2

        meet(world, moment, chance, strike)

    return arrange


def hush(world, context, rank, seconds: float) -> None:
    """What one rank says arrives that many seconds later."""
    hold = world.hold(
        lambda kind, owner: (
            kind not in TO_RANKS and getattr(owner, "rank", None) is rank and fits(context, owner)
        )
    )
    world.after(seconds, hold.end)


def leaderless(moment: str, kinds: frozenset = frozenset(), chance: float = 0.5):
    """The ranks of a deployment hear no leader for so long that they would drop their wave.

    Once they have told a poll so, `kinds` arrive after all.
    """

    def arrange(world) -> None:
        def strike(context) -> None:
            deployment = where(context).deployment
            hold = world.hold(
                lambda kind, owner: kind in TO_RANKS and owner.deployment == deployment
            )
            world.after(world.fleet.drop_after_s + 0.5, hold.end)

            def speak(_later) -> bool:
                if hold not in world.holds:
                    return False
                if kinds:
                    world.after(0.022 + 0.02 * world.rng.random(), hold.let_go, SOON_S, kinds)
                return True

            world.when("rank polls to drop", speak)

        meet(world, moment, chance, strike)

    return arrange


def cut(moment: str, part: float, chance: float = 0.7):
    """Streams to a replica break, each with a probability and at least one; their ranks connect again."""

    def arrange(world) -> None:
        def strike(context) -> None:
            streams = [stream for stream in world.network.streams.values() if fits(context, stream)]
            first = world.rng.choice(streams) if streams else None
            for stream in streams:
                if stream is first or world.rng.random() < part:
                    world.after(SOON_S * world.rng.random(), world.network.cut, stream)

        meet(world, moment, chance, strike)

    return arrange


# --- ranks ----------------------------------------------------------------------------------------


def news(moment: str, chance: float = 0.8):
    """Threads of copies that ended still have something to say."""

    def arrange(world) -> None:
        def strike(context) -> None:
            site = context["site"]
            for event in site.old_news():
                world.after(SOON_S * world.rng.random(), site.feed, event)

        meet(world, moment, chance, strike)

    return arrange


def reload(moment: str, announced: bool, chance: float = 0.5, within: float = SOON_S):
    """The engine wants other weights just then."""

    def arrange(world) -> None:
        def strike(context) -> None:
            deployment = where(context).deployment
            world.after(
                within * world.rng.random(), world.fleet.begin_reload, deployment, announced
            )

        meet(world, moment, chance, strike)

    return arrange


def disable(moment: str, times: int = 1, chance: float = 0.5, restart_s: float = 0.0):
    """An agent meets errors and refuses waves; `restart_s`: the group is restarted so much later, 0 for never."""

    def arrange(world) -> None:
        def strike(context) -> None:
            for _ in range(times):
                world.after(SOON_S * world.rng.random(), context["site"].disable)
            if restart_s:
                world.after(restart_s, world.fleet.replace, world.fleet.generation)

        meet(world, moment, chance, strike)

    return arrange


def rebalance(moment: str, chance: float = 0.8):
    """The engine moves experts by itself as soon as no rank holds a wave."""

    def arrange(world) -> None:
        def strike(context) -> None:
            world.fleet.rebalancing = where(context).deployment

        meet(world, moment, chance, strike)

    return arrange


# --- controllers ----------------------------------------------------------------------------------


def wish(what: str, moment: str, chance: float = 0.8):
    """An operator asks the leader for something just then."""

    def arrange(world) -> None:
        def strike(context) -> None:
            deployment = where(context).deployment
            seat = context.get("seat") or world.leading_seat(deployment)
            if seat is not None:
                world.after(SOON_S * world.rng.random(), ask, world, seat, what)

        meet(world, moment, chance, strike)

    return arrange


def ask(world, seat, what: str) -> None:
    """An operator turns to one replica."""
    if (
        not world.calm
        and seat.replica.alive
        and not seat.replica.paused
        and seat.leader is not None
    ):
        seat.by_hand(what)


def lapse(moment: str, chance: float = 0.7, same: float = 0.5, within: float = SOON_S):
    """The leader's lease runs out early; with probability `same` it takes it again itself."""

    def arrange(world) -> None:
        def strike(context) -> None:
            seat = context.get("seat") or world.leading_seat(where(context).deployment)
            if seat is not None:
                itself = world.rng.random() < same
                world.after(within * world.rng.random(), let_lapse, world, seat, itself)

        meet(world, moment, chance, strike)

    return arrange


def let_lapse(world, seat, itself: bool) -> None:
    """A lease runs out; its holder notices at its next renewal, due at once if it is to take it again."""
    shelf = world.store.shelf(seat.deployment)
    if (
        world.calm
        or seat.leader is None
        or shelf.term != seat.leader.term
        or not seat.replica.alive
    ):
        return
    world.note(f"the lease of {seat.deployment} runs out")
    shelf.lease_until = 0.0
    seat.renewed_at = 0.0 if itself else world.now
    for replica in world.replicas:
        other = replica.seats.get(seat.deployment)
        if other is not None and other is not seat:
            other.try_at = world.now + (1.0 if itself else 0.0)


def split(moment: str, after: float = 0.0, chance: float = 0.7):
    """Leadership moves, the ranks follow it at once, and the old leader has yet to notice."""

    def arrange(world) -> None:
        def strike(context) -> None:
            seat = context["seat"]
            world.after(after, let_lapse, world, seat, False)
            for rank in world.fleet.ranks:
                world.after(after + 0.12, follow, world, rank.sites[seat.deployment], seat)

        meet(world, moment, chance, strike)

    return arrange


def follow(world, site, seat) -> None:
    """A rank turns away from a replica, to which its old socket stays open for a while."""
    if not world.calm and site.stream is not None and site.stream.replica is seat.replica:
        site.abandon()


def set_clock(moment: str, times: int = 1, chance: float = 0.8):
    """Somebody sets the controller's Unix clock just then."""

    def arrange(world) -> None:
        def strike(context) -> None:
            for _ in range(times):
                world.after(SOON_S * world.rng.random(), clock_stepped, world, context)

        meet(world, moment, chance, strike)

    return arrange


def store_away(moment: str, seconds: float, chance: float = 0.7):
    """The store does not answer for a moment."""

    def arrange(world) -> None:
        def strike(_context) -> None:
            world.note("store goes down")
            world.store.down = True
            world.after(seconds, come_back, world)

        meet(world, moment, chance, strike)

    return arrange


def come_back(world) -> None:
    """The store answers again."""
    world.store.down = False


# --- what a fleet is like -------------------------------------------------------------------------


def like(**attributes):
    """Attributes of the world: `copy_s`, `corruption`, `slow_swaps`, `failing_swaps`, `eagerness`."""

    def arrange(world) -> None:
        for name, value in attributes.items():
            setattr(world, name, value)

    return arrange


def fleet_like(**attributes):
    """Attributes of the fleet: `drop_after_s`."""

    def arrange(world) -> None:
        for name, value in attributes.items():
            setattr(world.fleet, name, value)

    return arrange


def quick(**times):
    """Ranks are asked and missed quickly; `times` of waves in seconds or steps."""

    def arrange(world) -> None:
        wave = replace(world.timing.wave, **times)
        world.timing = replace(
            world.timing, heartbeat_s=0.25, ask_again_s=0.25, rank_lease_s=0.7, wave=wave
        )

    return arrange

"""Causes: each makes one kind of event occur whenever a machine enters a certain state.

Each function returns a function that prepares a world. A cause never gives a machine an event
itself. It delays or repeats messages, breaks streams, ends leases, lets engines reload and
operators cancel; the event follows from that as in a real deployment.
"""

from tests.sim.faults import clock_stepped, plan_measured

TO_RANKS = frozenset({"Prepare", "Commit", "Abort", "QueryState", "NotLeading"})
"""The messages of controllers; all other kinds are messages of ranks."""
SOON_S = 0.004
"""Virtual seconds after a moment within which a cause takes effect; most states last longer."""


def meet(world, moment: str, chance: float, strike) -> None:
    """Call `strike(context)` with a probability whenever a moment passes, until the calm."""

    def pass_by(context) -> bool:
        if not world.calm and world.rng.random() < chance:
            strike(context)
        return not world.calm

    world.when(moment, pass_by)


def where(context):
    """Return the site or seat of a moment."""
    return context.get("site") or context["seat"]


def fits(context, owner) -> bool:
    """Return True if a stream or seat belongs to the place where a moment passed."""
    place = where(context)
    if owner.deployment != place.deployment:
        return False
    if "site" in context:
        return getattr(owner, "rank", None) is place.rank
    return owner is place or (hasattr(owner, "rank") and owner.replica is place.replica)


# --- messages -------------------------------------------------------------------------------------


def again(kind: str, moment: str, times: int = 2, chance: float = 0.8):
    """Recent messages of one kind arrive again, from or at the machine that enters a state."""

    def arrange(world) -> None:
        def strike(context) -> None:
            for _ in range(times):
                world.network.echo(SOON_S, kind, lambda stream: fits(context, stream))

        meet(world, moment, chance, strike)

    return arrange


def twice(kind: str, times: int = 2, chance: float = 0.8):
    """Messages of one kind from ranks arrive several times on their stream."""

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
    """Hold messages of these kinds from one moment until another, or for `longest` seconds.

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
    """Deliver the delayed messages if the moment is of the same place; return True to wait on."""
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
    """Ranks are not heard for longer than their lease, and then return one after the other.

    `part`: probability that a rank of the deployment is among them; one always is.
    """

    def arrange(world) -> None:
        def strike(context) -> None:
            rng, ranks = world.rng, world.fleet.ranks
            first = rng.choice(ranks)
            seconds = world.timing.rank_lease_s + 0.15
            for rank in ranks:
                if rank is first or rng.random() < part:
                    delay_messages(world, context, rank, seconds)
                    seconds += 0.2

        meet(world, moment, chance, strike)

    return arrange


def delay_messages(world, context, rank, seconds: float) -> None:
    """The messages of one rank arrive that many seconds later."""
    hold = world.hold(
        lambda kind, owner: (
            kind not in TO_RANKS and getattr(owner, "rank", None) is rank and fits(context, owner)
        )
    )
    world.after(seconds, hold.end)


def leaderless(moment: str, kinds: frozenset = frozenset(), chance: float = 0.5):
    """The ranks of a deployment hear no leader for so long that they want to drop their wave.

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
    """Streams to a replica break: one always, each other one with a probability."""
    return _at_streams(cut_off, moment, part, chance)


def cut_off(world, stream) -> None:
    """Break a stream."""
    world.network.cut(stream)


def stop(moment: str, part: float = 1.0, chance: float = 0.7):
    """Ranks at a replica stop as planned: one always, each other one with a probability."""
    return _at_streams(stop_rank, moment, part, chance)


def stop_rank(world, stream) -> None:
    """The engine of a stream's rank stops as planned."""
    if not world.calm:
        stream.rank.die(planned=True)


def _at_streams(fault, moment: str, part: float, chance: float):

    def arrange(world) -> None:
        def strike(context) -> None:
            streams = [stream for stream in world.network.streams.values() if fits(context, stream)]
            first = world.rng.choice(streams) if streams else None
            for stream in streams:
                if stream is first or world.rng.random() < part:
                    world.after(SOON_S * world.rng.random(), fault, world, stream)

        meet(world, moment, chance, strike)

    return arrange


# --- ranks ----------------------------------------------------------------------------------------


def news(moment: str, chance: float = 0.8):
    """Threads of ended copies report again."""

    def arrange(world) -> None:
        def strike(context) -> None:
            site = context["site"]
            for event in site.old_news():
                world.after(SOON_S * world.rng.random(), site.feed, event)

        meet(world, moment, chance, strike)

    return arrange


def reload(moment: str, announced: bool, chance: float = 0.5, within: float = SOON_S):
    """The engine wants to load other weights at that moment."""

    def arrange(world) -> None:
        def strike(context) -> None:
            deployment = where(context).deployment
            world.after(
                within * world.rng.random(), world.fleet.begin_reload, deployment, announced
            )

        meet(world, moment, chance, strike)

    return arrange


def disable(moment: str, times: int = 1, chance: float = 0.5, restart_s: float = 0.0):
    """An agent meets errors and refuses waves; `restart_s` later the group restarts, if not 0."""

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
    """An operator makes a request of the leader at that moment."""

    def arrange(world) -> None:
        def strike(context) -> None:
            deployment = where(context).deployment
            seat = context.get("seat") or world.leading_seat(deployment)
            if seat is not None:
                world.after(SOON_S * world.rng.random(), ask, world, seat, what)

        meet(world, moment, chance, strike)

    return arrange


def ask(world, seat, what: str) -> None:
    """An operator makes a request of one replica."""
    if (
        not world.calm
        and seat.replica.alive
        and not seat.replica.paused
        and seat.leader is not None
    ):
        seat.by_hand(what)


def lapse(moment: str, chance: float = 0.7, same: float = 0.5, within: float = SOON_S):
    """The leader's lease ends early; with probability `same` the same replica takes it again."""

    def arrange(world) -> None:
        def strike(context) -> None:
            seat = context.get("seat") or world.leading_seat(where(context).deployment)
            if seat is not None:
                itself = world.rng.random() < same
                world.after(within * world.rng.random(), let_lapse, world, seat, itself)

        meet(world, moment, chance, strike)

    return arrange


def let_lapse(world, seat, itself: bool) -> None:
    """End a lease early; its holder notices at its next renewal, at once if `itself`."""
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
    seat.renewed_at = 0.0 if itself else seat.replica.now
    for replica in world.replicas:
        other = replica.seats.get(seat.deployment)
        if other is not None and other is not seat:
            other.try_at = other.replica.now + (1.0 if itself else 0.0)


def split(moment: str, after: float = 0.0, chance: float = 0.7):
    """Leadership moves and the ranks follow at once, before the old leader notices."""

    def arrange(world) -> None:
        def strike(context) -> None:
            seat = context["seat"]
            world.after(after, let_lapse, world, seat, False)
            for rank in world.fleet.ranks:
                world.after(after + 0.12, follow, world, rank.sites[seat.deployment], seat)

        meet(world, moment, chance, strike)

    return arrange


def follow(world, site, seat) -> None:
    """A rank leaves a replica; its old stream stays open for a while."""
    if not world.calm and site.stream is not None and site.stream.replica is seat.replica:
        site.abandon()


def set_clock(moment: str, times: int = 1, chance: float = 0.8):
    """The controller's Unix clock is set at that moment."""
    return _at_controller(clock_stepped, moment, times, chance)


def measure(moment: str, times: int = 1, chance: float = 0.8):
    """The controller measures a plan at that moment."""
    return _at_controller(plan_measured, moment, times, chance)


def _at_controller(fault, moment: str, times: int, chance: float):

    def arrange(world) -> None:
        def strike(context) -> None:
            for _ in range(times):
                world.after(SOON_S * world.rng.random(), fault, world, context)

        meet(world, moment, chance, strike)

    return arrange


def store_away(moment: str, seconds: float, chance: float = 0.7):
    """The store does not answer for some time."""

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

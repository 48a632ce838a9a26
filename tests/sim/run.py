"""One seed: a time of faults, then a calm in which every plan must end and a new one succeed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from tests.sim import faults
from tests.sim.checks import NO_PROGRESS, RECORDS_DISAGREE, Violation
from tests.sim.fleet import Fleet
from tests.sim.foci import FOCI
from tests.sim.focus import Focus
from tests.sim.kit import Kit
from tests.sim.network import SimNetwork
from tests.sim.planner import FLAWS, build_plan
from tests.sim.replica import TICK_S, Replica
from tests.sim.seat import random_timing
from tests.sim.store import SimStore
from tests.sim.world import World

CALM_TICKS = 500
"""The ticks of calm in which every plan must end and a new one must be committed."""


RETRY_S = 1.5
"""The wait in calm before a failed plan is repeated: longer than a heartbeat at rest."""


class FleetWorld(World):
    """A whole deployment: replicas, store, network and EP group."""

    fleet_type: type[Fleet] = Fleet
    sizes = (2, 2, 3)
    """The numbers of ranks, by their frequency."""
    second_deployment = 0.15
    """Probability that a group has two deployments."""

    def __init__(
        self, seed: int, kit: Kit | None = None, pairs: Counter | None = None, trace: bool = False
    ) -> None:
        super().__init__(seed, kit, trace)
        self.kit = self.kit.wired(pairs)
        self.slow_copies = self.corruption = self.rumours = self.slow_swaps = 0.0
        self.failing_swaps = 0.01
        self.stray_swaps = 0.01
        """Probability that the engines of all ranks end a wave with another map than agreed."""
        self.slow_saves = 0.02
        """The longest time in which a rank saves its placement."""
        self.wrong_prepares = 0.0
        """Probability that a leader sends a wrong Prepare of a wave."""
        self.prepares_differ = 0.3
        """Probability that a wrong Prepare is a right one that only one rank gets."""
        self.copy_s = (0.01, 0.05)
        """The shortest and longest time of a copy without a fault."""
        self.prompt_failures = 0.5
        """Probability that a failed write is reported at once."""
        self.slow_planning = 0.2
        self.plans_made = 0
        self.eagerness = 0.6
        """Probability that a cycle of planning finds a plan."""
        self.attempts = 1
        """The tries of a cycle to find a plan."""
        self.cycle_s = 1.5
        self.store = SimStore(self)
        self.network = SimNetwork(self)
        self.configure(self.rng)

    def configure(self, rng) -> None:
        """Choose this seed's group and controllers."""
        self.mode = rng.choice((Mode.AUTO, Mode.AUTO, Mode.AUTO, Mode.PROPOSE, Mode.OBSERVE))
        self.flaws = rng.choice((0.0, 0.2))
        names = ["target", "draft"] if rng.random() < self.second_deployment else ["target"]
        self.deployments = tuple(DeploymentId(name) for name in names)
        num_ranks = rng.choice(self.sizes)
        shapes = {deployment: random_shape(rng, num_ranks) for deployment in self.deployments}
        poll_every = rng.choice((1, 2, 3, 4))
        resolve_after = rng.randint(1, poll_every)
        self.timing = random_timing(rng, 2 * poll_every + resolve_after)
        self.replicas = [Replica(self, name) for name in ("c0", "c1")]
        self.fleet = self.fleet_type(
            self, shapes, poll_every=poll_every, resolve_after=resolve_after
        )
        self.fleet.drop_after_s = rng.choice((0.7, 1.0, 3.0))
        self.fleet.misconfigured = rng.random() < 0.04
        self.second: Fleet | None = None

    def hurry(self) -> None:
        """Run one plan after another, as fast as waves allow."""
        self.mode, self.eagerness, self.attempts = Mode.AUTO, 1.0, 8
        self.cycle_s, self.slow_planning = 0.2, 0.02

    def controls(self, *args, **kwargs):
        return self.kit.control(*args, **kwargs)

    def make_plan(self, deployment, view, kind: PlanKind, target=None, sound: bool = False):
        self.plans_made += 1
        flaw = None
        if not sound and kind is not PlanKind.ROLLBACK and self.rng.random() < self.flaws:
            pooled = self.fleet.shapes[deployment].pooled
            flaw = "pool" if pooled and self.rng.random() < 0.6 else self.rng.choice(FLAWS)
        return build_plan(
            self.rng,
            deployment,
            view,
            self.fleet.shapes[deployment],
            self.now,
            kind=kind,
            plan_id=f"p{self.plans_made}",
            target=target,
            flaw=flaw,
            staging=self.fleet.staging_experts,
        )

    def copy_delay(self, deadline: float) -> float:
        """Return the seconds of one copy; with faults some exceed a batch's deadline."""
        delay = self.rng.uniform(*((0.01, 0.05) if self.calm else self.copy_s))
        if not self.calm and self.rng.random() < self.slow_copies:
            delay += 3.0 * deadline * self.rng.random()
        return delay

    def corrupts(self) -> bool:
        """Return True if the bytes of one copy arrive damaged."""
        return not self.calm and self.rng.random() < self.corruption

    # --- phases -----------------------------------------------------------------------------------

    def begin(self) -> None:
        for replica in self.replicas:
            replica.start()
        self.fleet.start()

    def heal(self) -> None:
        """End all faults and start what is down."""
        self.note("calm")
        self.calm = True
        network = self.network
        network.drop = network.duplicate = network.linger = 0.0
        network.cuts.clear()
        for hold in list(self.holds):
            hold.end()
        self.store.down = False
        if self.second is not None:
            self.second.stop()
        self.fleet.idle = False
        self.fleet.failing_polls.clear()
        for replica in self.replicas:
            replica.go_on(replica.life)
            replica.start()
        sites = [site for rank in self.fleet.ranks for site in rank.sites.values()]
        if self.fleet.misconfigured or any(site.trouble for site in sites):
            self.fleet.misconfigured = False
            self.fleet.broken()

    def close(self) -> None:
        """Free what the ranks hold, after the end of the run."""
        for fleet in (self.fleet, self.second):
            if fleet is not None:
                fleet.close()

    def leading_seat(self, deployment):
        """Return the seat that holds the lease in the store."""
        shelf = self.store.shelf(deployment)
        for replica in self.replicas:
            seat = replica.seats.get(deployment)
            if seat is not None and seat.leader is not None and seat.leader.term == shelf.term:
                return seat
        return None


def random_shape(rng, num_ranks: int) -> ModelShape:
    layers = rng.choice((1, 2, 3))
    if rng.random() < 0.3:
        per_rank = 4
        pool = layers * -(-4 // num_ranks) + rng.choice((1, 2, 3))
        return ModelShape(layers, 4, num_ranks, per_rank, 1, 10, pool_slots_per_rank=pool)
    return ModelShape(layers, 4, num_ranks, 3 if num_ranks == 2 else 2, 1, 10)


NOT_GENTLE = 0.2
"""Share of the seeds with a focus that have random faults too."""


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    events: int
    violation: str | None = None
    detail: str = ""
    committed: int = 0
    trace: list[str] = field(default_factory=list)


def pick_focus(rng) -> Focus | None:
    """Return the focus of a seed; None if the seed is left to chance."""
    shares = [each.share for each in FOCI]
    return rng.choices((*FOCI, None), (*shares, 1000 - sum(shares)))[0]


def run_seed(
    seed: int,
    kit: Kit | None = None,
    pairs: Counter | None = None,
    trace: bool = False,
    about: Focus | None = None,
    world_type: type[FleetWorld] = FleetWorld,
    watch: Callable[[FleetWorld], None] | None = None,
) -> Outcome:
    """Run one seed to its end or to the first broken invariant.

    `about` sets its focus, `world_type` the kind of its ranks; `watch` is called with the world
    before it begins.
    """
    world = world_type(seed, kit, pairs, trace)
    if watch is not None:
        watch(world)
    world.print_trace = trace
    outcome = Outcome(seed, 0)
    try:
        about = about or pick_focus(world.rng)
        until = (8.0 if about is None else 12.0) + 12.0 * world.rng.random()
        if about is None or world.rng.random() < NOT_GENTLE:
            faults.plan_faults(world, until)
        if about is not None:
            about.arrange(world)
        world.begin()
        world.run_until(until)
        world.heal()
        prove_progress(world)
    except Violation as violation:
        outcome.violation, outcome.detail = violation.invariant, violation.detail
    finally:
        world.close()
    outcome.events = world.events
    outcome.committed = len(world.checks.swapped)
    outcome.trace = world.trace_lines or []
    return outcome


def prove_progress(world: FleetWorld) -> None:
    """Check that every plan ends, and that a new one is committed on every deployment."""
    deadline = world.now + CALM_TICKS * TICK_S
    waiting = set(world.deployments)
    fresh: dict = {}
    while waiting:
        world.run_until(world.now + 5 * TICK_S)
        for deployment in sorted(waiting):
            if advance_proof(world, deployment, fresh):
                waiting.discard(deployment)
        if world.now >= deadline and waiting:
            raise Violation(NO_PROGRESS, describe_standstill(world, sorted(waiting)))


def advance_proof(world: FleetWorld, deployment, fresh: dict) -> bool:
    """Submit a new plan once the old ones have ended; return True once it is committed."""
    seat = world.leading_seat(deployment)
    if seat is None:
        return False
    if deployment in fresh:
        plan_id, submitted_at = fresh[deployment]
        record = seat.control.records.by_id.get(plan_id)
        if record is not None and record.phase is PlanPhase.COMMITTED:
            check_records(world, deployment, seat)
            return True
        # A new plan on the same stale base would be refused until a heartbeat shows the true one.
        early = world.now < submitted_at + RETRY_S
        if record is not None and (early or not record.phase.terminal):
            return False
        del fresh[deployment]
    try:
        seat.ask(ctl.PolicySet(DeploymentPolicy(mode=Mode.PROPOSE, cycle_s=1.5), {}))
        seat.ask(ctl.PlansFrozen(0))
        record = seat.submit(PlanKind.MANUAL, True, sound=True)
    except EvenkeelError:
        return False
    if record is not None:
        fresh[deployment] = record.plan.plan_id, world.now
    return False


def check_records(world: FleetWorld, deployment, seat) -> None:
    """Check that store, controller and ranks agree in calm, after a commit."""
    site = world.fleet.ranks[0].sites[deployment]
    stored = world.store.shelf(deployment).epochs
    if not stored or max(stored) != site.epoch or stored[site.epoch].digest != site.map.digest:
        raise Violation(
            RECORDS_DISAGREE, f"store has epochs {sorted(stored)}, ranks are at {site.epoch}"
        )
    if seat.control.epoch != site.epoch:
        raise Violation(
            RECORDS_DISAGREE, f"controller at {seat.control.epoch}, ranks at {site.epoch}"
        )


def describe_standstill(world: FleetWorld, deployments) -> str:
    parts = []
    for deployment in deployments:
        seat = world.leading_seat(deployment)
        if seat is None:
            parts.append(f"{deployment} has no leader")
            continue
        control = seat.control
        active = control.records.active
        plan = f"plan {active.plan.plan_id} {active.phase} {active.reason}" if active else "no plan"
        wave = f"wave {control.coordinator.state}" if control.coordinator else "no wave"
        reason = control.state_reason(seat.replica.now)
        parts.append(f"{deployment}: {control.state} {reason}, {plan}, {wave}")
        sites = [rank.sites[deployment] for rank in world.fleet.ranks]
        parts += [f"rank {s.rank.rank} {s.participant.state} epoch {s.epoch}" for s in sites]
    return "; ".join(parts)

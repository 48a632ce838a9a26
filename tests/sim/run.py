"""One seed: a time of faults, then a calm in which every plan must end and a new one succeed."""

import random
from dataclasses import dataclass, field, replace

from structlog.testing import capture_logs

from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from tests.sim import faults
from tests.sim.checks import AGENT_ERROR, NO_PROGRESS, RECORDS_DISAGREE, Violation
from tests.sim.fleet import Fleet
from tests.sim.hazards import Hazard, hazard_of
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
LATE_S = 4.0
"""Late bytes land within this time after the deadline of their batch."""
PROBES = 0.3
"""Share of the seeds in which engines have probes."""
NOT_GENTLE = 0.2
"""Share of the seeds with a hazard that have random faults too."""
ERRORS = frozenset(
    {"participant_failed", "transfer_job_failed", "staging_failed", "staging_broke_off"}
)
"""Log lines of errors that the agent survives. The simulation injects none of them."""


class FleetWorld(World):
    """A whole deployment: replicas, store, network and EP group."""

    fleet_type: type[Fleet] = Fleet

    def __init__(self, seed: int, kit: Kit | None = None, trace: bool = False) -> None:
        super().__init__(seed, trace)
        self.kit = (kit or Kit()).wired()
        self.slow_copies = self.corruption = self.slow_swaps = 0.0
        self.late_copies = 0.0
        """Probability that the bytes of a copy land seconds after the deadline of its batch."""
        self.failing_swaps = 0.01
        self.slow_saves = 0.02
        """The longest time in which a rank saves its placement."""
        self.wrong_prepares = 0.0
        """Probability that a leader sends a wrong Prepare of a wave."""
        self.prepares_differ = 0.3
        """Probability that a wrong Prepare is a right one that only one rank gets."""
        self.prompt_failures = 0.5
        """Probability that a failed write is reported at once."""
        self.lost_answers = 0.3
        """Probability that a write that failed has happened."""
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
        shape = random_shape(rng, rng.choice((2, 3, 4)))
        poll_every = rng.choice((1, 2, 3, 4))
        resolve_after = rng.randint(1, poll_every)
        self.timing = random_timing(rng, 2 * poll_every + resolve_after)
        self.replicas = [Replica(self, name) for name in ("c0", "c1")]
        self.fleet = self.fleet_type(
            self, shape, poll_every=poll_every, resolve_after=resolve_after
        )
        self.fleet.drop_after_s = rng.choice((0.7, 1.0, 3.0))
        self.fleet.misconfigured = rng.random() < 0.04
        self.second: Fleet | None = None
        self.probes = rng.random() < PROBES
        """True if engines probe what experts compute, which hides wrong bytes from the checks."""

    def hurry(self) -> None:
        """Run one plan after another, as fast as waves allow."""
        self.mode, self.eagerness, self.attempts = Mode.AUTO, 1.0, 8
        self.cycle_s, self.slow_planning = 0.2, 0.02

    def make_plan(self, view, kind: PlanKind, target=None, sound: bool = False):
        self.plans_made += 1
        shape, flaw = replace(self.fleet.shape, num_ranks=view[2].num_ranks), None
        free = kind not in (PlanKind.ROLLBACK, PlanKind.EVACUATION)
        if not sound and free and self.rng.random() < self.flaws:
            pool = shape.pooled and self.rng.random() < 0.6
            flaw = "pool" if pool else self.rng.choice(FLAWS)
        return build_plan(
            self.rng,
            self.deployment,
            view,
            shape,
            self.now,
            kind=kind,
            plan_id=f"p{self.plans_made}",
            target=target,
            flaw=flaw,
            staging=self.fleet.staging_experts,
        )

    def copy_delay(self, deadline: float) -> float:
        """Return the seconds of one copy; with faults some exceed a batch's deadline."""
        random = self.rng.random
        if not self.calm and random() < self.late_copies:
            return deadline + LATE_S * random()
        slow = not self.calm and random() < self.slow_copies
        return self.rng.uniform(0.01, 0.05) + (3.0 * deadline * random() if slow else 0.0)

    def corrupts(self) -> bool:
        """Return True if the bytes of one copy arrive damaged."""
        return not self.calm and self.rng.random() < self.corruption

    # --- phases -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the group before the controllers, whose moments need ranks."""
        self.fleet.start()
        self.run_until(1.0, lambda: bool(self.fleet.ranks))
        for replica in self.replicas:
            replica.start()

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
        self.fleet.idle = self.fleet.outlives = False
        self.fleet.wanted = ()
        self.fleet.failing_polls.clear()
        for replica in self.replicas:
            replica.go_on(replica.life)
            replica.start()
        if self.fleet.misconfigured or any(rank.agent.trouble for rank in self.fleet.ranks):
            self.fleet.misconfigured = False
            self.fleet.broken()

    def close(self) -> None:
        """Free what the ranks hold, after the end of the run."""
        for fleet in (self.fleet, self.second):
            if fleet is not None:
                fleet.close()

    def leading_seat(self):
        """Return the seat that holds the lease in the store."""
        for replica in self.replicas:
            leader = replica.seat.leader
            if leader is not None and leader.term == self.store.shelf.term:
                return replica.seat
        return None


def random_shape(rng, num_ranks: int) -> ModelShape:
    layers = rng.choice((1, 2, 3))
    if rng.random() < 0.3:
        per_rank = 4
        pool = layers * -(-4 // num_ranks) + rng.choice((1, 2, 3))
        return ModelShape(layers, 4, num_ranks, per_rank, 1, 10, pool_slots_per_rank=pool)
    return ModelShape(layers, 4, num_ranks, 3 if num_ranks == 2 else 2, 1, 10)


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    events: int
    violation: str | None = None
    detail: str = ""
    committed: int = 0
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int,
    kit: Kit | None = None,
    trace: bool = False,
    hazard: Hazard | None = None,
    world_type: type[FleetWorld] = FleetWorld,
) -> Outcome:
    """Run one seed to its end or to the first broken invariant.

    Args:
        hazard: in place of the seed's own.
        world_type: the kind of engine.
    """
    with capture_logs() as logs:
        outcome = _run(world_type(seed, kit, trace), seed, trace, hazard)
    errors = [line for line in logs if line["event"] in ERRORS]
    # An agent with an error takes no waves, so that nothing ends.
    if errors and outcome.violation in (None, NO_PROGRESS):
        outcome.violation, outcome.detail = AGENT_ERROR, f"{errors[0]}"
    return outcome


def _run(world: FleetWorld, seed: int, trace: bool, hazard: Hazard | None) -> Outcome:
    world.print_trace = trace
    outcome = Outcome(seed, 0)
    try:
        hazard = hazard or hazard_of(random.Random(f"hazard {seed}"))
        until = (8.0 if hazard is None else 12.0) + 12.0 * world.rng.random()
        if hazard is None or world.rng.random() < NOT_GENTLE:
            faults.plan_faults(world, until)
        if hazard is not None:
            hazard.arrange(world)
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
    """Check that every plan ends, and that a new one is committed."""
    deadline = world.now + CALM_TICKS * TICK_S
    submitted: tuple | None = None
    while True:
        world.run_until(world.now + 5 * TICK_S)
        seat = world.leading_seat()
        if seat is not None:
            submitted, done = advance_proof(world, seat, submitted)
            if done:
                return
        if world.now >= deadline:
            raise Violation(NO_PROGRESS, describe_standstill(world))


def advance_proof(world: FleetWorld, seat, submitted: tuple | None) -> tuple[tuple | None, bool]:
    """Submit a new plan once the old ones have ended.

    Returns:
        (plan id, time) of the newest one, and True once it is committed.
    """
    if submitted is not None:
        plan_id, submitted_at = submitted
        record = seat.control.records.by_id.get(plan_id)
        # A leader that has just taken over asks its ranks first.
        known = seat.control.epoch is not None
        if record is not None and record.phase is PlanPhase.COMMITTED and known:
            check_records(world, seat)
            return submitted, True
        # A new plan on the same stale base would be refused until a heartbeat shows the true one.
        early = world.now < submitted_at + RETRY_S
        if record is not None and (early or not record.phase.terminal):
            return submitted, False
    try:
        seat.ask(ctl.PolicySet(DeploymentPolicy(mode=Mode.PROPOSE, cycle_s=1.5), {}))
        seat.ask(ctl.PlansFrozen(0))
        retiring = seat.control.hold.retiring
        if retiring is not None and retiring.num_ranks == world.fleet.num_ranks:
            seat.ask(ctl.AutomaticPlansResumed())
        record = seat.submit(PlanKind.MANUAL, True, sound=True)
    except EvenkeelError:
        return None, False
    return (None if record is None else (record.plan.plan_id, world.now)), False


def check_records(world: FleetWorld, seat) -> None:
    """Check that store, controller and ranks agree in calm, after a commit."""
    rank, stored = world.fleet.ranks[0], world.store.shelf.epochs
    if not stored or max(stored) != rank.epoch or stored[rank.epoch].digest != rank.map.digest:
        raise Violation(
            RECORDS_DISAGREE, f"store has epochs {sorted(stored)}, ranks are at {rank.epoch}"
        )
    if seat.control.epoch != rank.epoch:
        raise Violation(
            RECORDS_DISAGREE, f"controller at {seat.control.epoch}, ranks at {rank.epoch}"
        )


def describe_standstill(world: FleetWorld) -> str:
    seat = world.leading_seat()
    if seat is None:
        return "there is no leader"
    control = seat.control
    active = control.records.active
    plan = f"plan {active.plan.plan_id} {active.phase} {active.reason}" if active else "no plan"
    wave = f"wave {control.coordinator.state}" if control.coordinator else "no wave"
    ranks = [f"rank {r.rank} {r.participant.state} epoch {r.epoch}" for r in world.fleet.ranks]
    return "; ".join(
        [f"{control.state} {control.state_reason(seat.replica.now)}, {plan}, {wave}", *ranks]
    )

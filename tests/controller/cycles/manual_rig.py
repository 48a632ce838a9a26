"""A replica that leads two ranks, whose store can fail; for tests of requests by hand."""

from dataclasses import replace

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.deployment.deployment import TICK_S
from evenkeel_moe.controller.operations.operator_service import OperatorService
from evenkeel_moe.errors import (
    Reason,
    Unavailable,
)
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.ports.operations import RollbackRequest
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import Spawned, attach_ranks, make_registry
from tests.protocol.machines import AFTER_ONE, BASE, DEPLOYMENT, SHAPE, hello_of, plan_of, state_of
from tests.telemetry.reports import Fleet as LoadFleet
from tests.waiting import until

BAD = PlanId("bad")
BACK = PlanId("back")


class FlakyStore(MemoryStore):
    """Fails the next writes of plans and documents, before or after it stored them."""

    def __init__(self, clock):
        super().__init__(clock)
        self.failing, self.takes = 0, False

    async def _write(self, write):
        fails, self.failing = self.failing > 0, max(0, self.failing - 1)
        if self.takes or not fails:
            await write
        else:
            write.close()
        if fails:
            raise Unavailable("too few replicas have it")

    async def store_plan(self, *arguments):
        await self._write(super().store_plan(*arguments))

    async def store_document(self, *arguments):
        await self._write(super().store_document(*arguments))


class InlinePlanner:
    """Plans at once, in this process."""

    fault, warm = "", True

    @property
    def background(self):
        return self

    def begin(self):
        return True

    async def wait_until_warm(self):
        if not self.warm:
            raise Unavailable("it starts", Reason.PLANNER_STARTING)

    async def run(self, function, *arguments):
        return function(*arguments)


class Ranks:
    """Two ranks that carry out every message at once, or none while they hang.

    They vote against each wave while they are not ready.
    """

    def __init__(self, spawn):
        self.epoch, self.placement, self.maps = Epoch(0), BASE, [BASE]
        self.sessions = []
        self.hung, self.ready = False, True
        self._spawn = spawn
        self._after = None
        self._generation = Generation("g1")

    def start_cold(self):
        """Begin again as another generation, at epoch 0 with the initial placement."""
        self.epoch, self.placement, self._after = Epoch(0), BASE, None
        self._generation = Generation("g2")

    async def attach(self, registry, first_stream=1):
        hellos = [
            hello_of(
                rank,
                self._generation,
                epoch=self.epoch,
                placement_digest=self.placement.digest,
                capabilities=frozenset({"migrate"}),
            )
            for rank in range(2)
        ]
        self.sessions = await attach_ranks(registry, hellos, first_stream, self._spawn, self._serve)

    async def _serve(self, rank, stream, session):
        while (message := await stream.next()) is not None:
            if not self.hung:
                self._take(rank, session, message)

    def _take(self, rank, session, message):
        say = session.received
        match message:
            case msg.QueryState():
                state = state_of(
                    rank, query=message.query, epoch=self.epoch, placement=self.placement
                )
                say(replace(state, identity=session.hello.identity))
            case msg.Prepare():
                rows = self.placement.with_rows(message.body.layers, message.body.rows)
                self._after = (Epoch(message.base_epoch + 1), rows)
                if self.ready:
                    say(msg.Vote(message.wave, True))
                else:
                    say(msg.Vote(message.wave, False, Reason.TRANSFER_TIMEOUT))
            case msg.Abort():
                refused = msg.WaveOutcome.REFUSED
                say(msg.AbortAnswer(message.wave, self.epoch, refused, drained=True))
            case msg.Commit():
                if self._after is not None:
                    (self.epoch, self.placement), self._after = self._after, None
                    self.maps.append(self.placement)
                say(msg.Ack(message.wave, self.epoch, self.placement.digest, 0.01 * (1 + rank)))


class Rig:
    """A replica that leads DEPLOYMENT, its ranks and its store; `restart` replaces the replica."""

    def __init__(self):
        self.clock = SystemClock()
        self.serving, self.tasks = Spawned(), Spawned()
        self.store, self.ranks = FlakyStore(self.clock), Ranks(self.serving.spawn)
        self.start()

    def start(self):
        self.registry = make_registry(
            self.store, self.tasks.spawn, clock=self.clock, planner=InlinePlanner()
        )
        self.health = self.registry.shared.health
        self.operations = OperatorService(self.registry)

    @property
    def member(self):
        return self.registry.deployments[DEPLOYMENT]

    async def lead(self, first_stream=1):
        await self.ranks.attach(self.registry, first_stream)
        await self.at_rest()

    async def restart(self):
        """Let the replica die and come back under its name."""
        await self.tasks.end()
        self.start()
        await self.lead(first_stream=11)

    async def at_rest(self):
        def settled():
            control = self.member.control
            return (
                control.state is ControlState.READY
                and not control.write_retry
                and not self.health.resting
            )

        await until(settled)

    async def migrate(self):
        """Carry out a plan that an operator regrets."""
        scored, at = CostSource.TOKENS, self.clock.unix()
        plan = plan_of(1, plan_id=BAD, created_at=at, cost_source=scored)
        await self.member.inbox.request_plan(ctl.PlanSubmitted(plan, approve=True))
        await until(lambda: self.ranks.placement == AFTER_ONE)
        await self.at_rest()

    async def load(self):
        """Report a few steps of load, which a manual plan is judged on."""
        await self.operations.set_policy(DEPLOYMENT, {"thresholds": {"min_window_steps": 1}}, "me")
        run = LoadFleet(placement=BASE, shape=SHAPE).run(range(8), epoch=Epoch(0))
        for rank, session in enumerate(self.ranks.sessions):
            identity = session.hello.identity
            report = run.report(rank)
            session.received(
                replace(report, deployment=identity.deployment, generation=identity.generation)
            )
        await until(lambda: self.member.loads.ingest.windows(8))

    async def once_the_store_is_asked_again(self, ask):
        """Return the answer once the store is asked again after its failure."""
        await until(lambda: not self.health.resting)
        return await ask()

    async def look_on(self):
        """Wait for a few ticks: the machine has done by then what it does by itself."""
        first = self.clock.monotonic()
        await until(lambda: self.clock.monotonic() - first > 4 * TICK_S)
        await self.at_rest()


def rollback(rig, to_epoch=None, plan_id=BACK):
    return rig.operations.rollback(
        DEPLOYMENT, RollbackRequest(plan_id, to_epoch, requested_by="me")
    )

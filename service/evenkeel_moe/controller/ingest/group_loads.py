"""Keeps the windows of a deployment in line with the control machine and with the store.

The machine settles which generation of ranks is registered and which placement it runs under.
Reports can be counted only under that placement, and windows belong to one generation.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from evenkeel_moe.controller.ingest.dispatch_choice import DispatchChoice, choose_dispatch
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.finding import Finding
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports.stores import DeploymentStore
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.telemetry.balance import Balance
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.wire.values import is_allowed_size

_log = structlog.get_logger(__name__)
_TIMED_STEPS = 512
"""Steps whose seconds are fitted."""
_EARLIER_PLACEMENTS = 3
"""Placements before the present one under which late reports are still counted."""


@dataclass(eq=False, repr=False)
class GroupLoads:
    """The loads of one deployment's ranks: windows, balance, times, shape and topology.

    Args:
        control: the machine; only read.
        store: keeps the shape, which says whose windows are stored.
        plan_steps: newest steps of a phase that count for the balance.
        dispatch: the model of the engines' dispatcher where neither the policy nor the ranks name
            one.
        admits: returns True if windows of a shape may be restored: the memory has room for them.
    """

    control: DeploymentState
    store: DeploymentStore
    ingest: Ingest
    plan_steps: int
    dispatch: DispatchModel
    health: StoreHealth
    admits: Callable[[ModelShape], bool] = lambda _: True
    balance: Balance = field(init=False)
    times: RankTimes = field(init=False)
    """The seconds that ranks report, and the speeds of the ranks."""
    shape: ModelShape | None = field(default=None, init=False)
    """As the ranks declared it; before they do, as stored. None while it is not known."""
    _settled_at: tuple[Epoch, str] | None = field(default=None, init=False)
    """Epoch and digest of the placement under which reports are counted."""
    _shape_unstored: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.balance = Balance(self.plan_steps, self.split)
        self.times = RankTimes(_TIMED_STEPS)

    def topology(self) -> Topology:
        """Return the node of each rank; a single node until all ranks are known."""
        members = self.control.membership.members
        num_ranks = self.shape.num_ranks if self.shape is not None else 1
        if len(members) != num_ranks:
            return Topology.single_node(num_ranks)
        return topology_of([members[rank].hello.node for rank in sorted(members)])

    def split(self) -> SplitModel:
        """Return how tokens split over replicas now, for the gauges as for the gates."""
        return SplitModel(self.dispatch_choice().model, self.topology())

    def dispatch_choice(self) -> DispatchChoice:
        """Return the model of the dispatcher now, and what disagrees with it."""
        members = self.control.membership.members.values()
        told = (member.hello.dispatch for member in members)
        return choose_dispatch(self.control.policy.dispatch, told, self.dispatch)

    def update_balance(self) -> None:
        """Bring balance and times up to the newest steps, under the committed placement."""
        control = self.control
        placement, epoch = control.placement, control.epoch
        if placement is None:
            return
        windows = self.windows_of(placement)
        self.balance.update(windows, placement)
        if epoch is not None:
            self.times.update(windows, placement, epoch, self.split(), control.history)

    def findings(self) -> tuple[Finding, ...] | None:
        """Return what is wrong with the counts of the newest steps, by the thresholds of the gates.

        None without a step, or while the placement is not known.
        """
        control = self.control
        placement, epoch = control.placement, control.epoch
        if placement is None or epoch is None:
            return None
        self.ingest.check.update(self.windows_of(placement))
        settings = GateSettings.from_thresholds(control.policy.thresholds)
        return self.ingest.check.findings(
            placement,
            epoch,
            most_deviation=settings.max_layer_deviation,
            most_idle=settings.max_idle_experts,
        )

    def windows_of(self, placement: Placement) -> dict[Phase, Sequence[LoadWindow]]:
        """Return the windows in parts, oldest first; none if a placement has other experts."""
        sizes = placement.num_layers, placement.num_logical_experts
        return {
            phase: parts
            for phase, parts in self.ingest.parts().items()
            if parts[-1].counts.shape[1:] == sizes
        }

    # --- following the machine --------------------------------------------------------------------

    def declare_shape(self, shape: ModelShape) -> None:
        """Note the shape a registered rank declared, unless one is known."""
        self.shape = self.shape or shape

    def follow_generation(self) -> bool:
        """Begin the windows of the registered generation; return True if it is a new one.

        Only a group that came from the present one keeps the loads of its experts.
        """
        membership, generation = self.control.membership, self.control.generation
        shape, before = membership.shape, self.ingest.generation
        if generation is None or shape is None or generation == before:
            return False
        carries = before is not None and membership.came_from == before
        self.ingest.begin_generation(generation, shape, carries=carries)
        self.shape = shape
        self.balance.clear()
        self.times.clear()
        self._settled_at = None
        self._shape_unstored = True
        return True

    def follow_placement(self) -> None:
        """Count reports under the committed placement, or let them wait while it is in question.

        A follower goes on counting under the last placement while it seeks the lease.
        """
        control = self.control
        if control.state is ControlState.FOLLOWER:
            return
        if control.state not in (ControlState.READY, ControlState.MIGRATING):
            if self._settled_at is not None:
                self._settled_at = None
                self.ingest.unsettle()
            return
        epoch, placement = control.epoch, control.placement
        assert epoch is not None and placement is not None
        if (epoch, placement.digest) == self._settled_at:
            return
        self._settled_at = (epoch, placement.digest)
        shape = control.membership.shape
        earlier = sorted(known for known in control.history if known < epoch)
        for known in earlier[-_EARLIER_PLACEMENTS:]:
            if shape is not None and control.history[known].sizes == shape.sizes:
                self.ingest.expect(known, control.history[known])
        self.ingest.settle(epoch, placement)

    def expect_wave(self, prepare: Prepare) -> None:
        """Learn the placement of a wave: ranks may report steps under it before their Ack."""
        placement = self.control.placement
        if placement is None or self.control.epoch != prepare.base_epoch:
            return
        try:
            after = placement.with_rows(prepare.body.layers, prepare.body.rows)
            self.ingest.expect(Epoch(prepare.base_epoch + 1), after)
        except EvenkeelError as error:
            _log.error("wave_map_unusable", deployment=self.control.deployment, error=str(error))

    # --- the copy in the store --------------------------------------------------------------------

    def store_shape_again(self) -> None:
        """Store the shape with the next windows: the store knows nothing of the deployment."""
        self._shape_unstored = True

    async def store_windows(self, term: Callable[[], int]) -> None:
        """Bring the stored windows and shape up to date.

        Args:
            term: returns the term to write under.

        Raises:
            Unavailable: the store is out of reach; a later call stores what is missing.
            Conflict: another replica leads.
        """
        await self.ingest.store()
        generation = self.ingest.generation
        if not self._shape_unstored or self.shape is None or generation is None:
            return
        body = shape_document(generation, self.shape)
        self._shape_unstored = False  # Before the write: another group may register during it.
        try:
            await self.store.store_document(self.control.deployment, "shape", body, term())
        except BaseException:
            self._shape_unstored = True
            raise

    async def restore(self, connected: Callable[[], Set[Generation]]) -> None:
        """Load the stored windows, and keep the steps of theirs that are only in memory.

        Args:
            connected: returns the generations of the ranks that have a stream here.

        Raises:
            Unavailable: the store is out of reach.
        """
        deployment = self.control.deployment
        document = await self.store.fetch_document(deployment, "shape")
        known = shape_from_document(document)
        if known is None:
            if document is not None:
                self.health.unreadable("document", f"{deployment} shape", "it is no shape")
            return
        generation, shape = known
        steps = await self._restore_windows(generation, shape, connected())
        _log.info("window_restored", deployment=deployment, steps=steps, generation=generation)

    async def _restore_windows(
        self, generation: Generation, shape: ModelShape, connected: Set[Generation]
    ) -> int:
        ingest = self.ingest
        if generation != ingest.generation:
            if connected == {ingest.generation}:
                return 0  # The group restarted: the store still has the window of the one before.
            ingest.leave_generation()
        elif ingest.shape is not None and shape.sizes != ingest.shape.sizes:
            where = f"{self.control.deployment} shape"
            self.health.unreadable("document", where, "it is not the shape of its generation")
            self._shape_unstored = True
            return 0
        in_memory = dict(ingest.rings) if ingest.generation is not None else {}
        # Reports wait until the machine settles: they may be of a generation that was here before.
        ingest.unsettle()
        self._settled_at = None
        if ingest.generation is None:
            self._shape_unstored = False
        if not self.admits(shape):
            return 0
        steps = await ingest.restore(generation, shape)
        for phase, ring in in_memory.items():
            for part in ring.parts():
                steps += len(ingest.rings[phase].append(part))
        self.declare_shape(shape)
        return steps


def topology_of(nodes: Sequence[str]) -> Topology:
    """Number the nodes in the order in which the ranks name them."""
    numbers: dict[str, int] = {}
    return Topology(tuple(numbers.setdefault(node, len(numbers)) for node in nodes))


def shape_document(generation: Generation, shape: ModelShape) -> dict[str, Any]:
    """Return the document that says whose windows are stored."""
    return {"generation": generation, "shape": asdict(shape)}


def shape_from_document(body: Mapping[str, Any] | None) -> tuple[Generation, ModelShape] | None:
    """Read the document back; None if none is stored or it cannot be read."""
    if body is None:
        return None
    generation, shape = body.get("generation"), ModelShape.of_document(body.get("shape"))
    if not isinstance(generation, str) or shape is None:
        return None
    width = max(shape.num_slots, shape.num_logical_experts)
    return (Generation(generation), shape) if is_allowed_size(shape.num_layers, width) else None

"""The services that the parts of all deployments of a replica use."""

from collections.abc import Callable
from dataclasses import dataclass, field

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.ingest.group_memory import GroupMemory
from evenkeel_moe.controller.ingest.waiting_reports import IncompleteGroups
from evenkeel_moe.controller.store_clock import StoreClock
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.controller.tasks import Spawn
from evenkeel_moe.ports.stores import DeploymentStore, WindowStore
from evenkeel_moe.protocol.messages import Hello


@dataclass(frozen=True, slots=True)
class SharedServices:
    """The services that all deployments of a replica share."""

    store: DeploymentStore
    windows: WindowStore
    clock: StoreClock
    metrics: ControllerMetrics
    health: StoreHealth
    planner: PlannerPool
    spawn: Spawn
    incomplete: IncompleteGroups = field(default_factory=IncompleteGroups)
    may_restore: Callable[[GroupMemory], bool] = lambda _: True
    """Returns True if windows that take so much may be restored."""
    admit: Callable[[Hello, RankStream], bool] = lambda *_: True
    """Returns True if the group of a rank may take memory; else refuses the rank."""

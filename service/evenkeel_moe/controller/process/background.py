"""The background tasks of a controller.

They keep stored windows and gauges up to date, measure plans, evict idle deployments and pace
reports.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.deployment.deployment_registry import DeploymentRegistry
from evenkeel_moe.controller.operations.gauges import GaugeLimits, GaugeReader
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.controller.process.flow_control import Pacer
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, EvenkeelError, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.wire.link import FlowControl

_log = structlog.get_logger(__name__)
Failed = Callable[[DeploymentId, Deployment | None, Exception], None]
"""`DeploymentRegistry.failed`."""
_PACE_S = 0.25
_PROBE_S = 1.0
"""Time between writes that only check whether the store takes writes. A replica that leads nothing
writes nothing else."""
_RETRY_S = 1.0
_MEASURE_S = 1.0
_EVICT_EVERY_S = 60.0


async def take_up_deployments(registry: DeploymentRegistry) -> None:
    """Take up the deployments that this replica led before it restarted; then end."""
    store, health = registry.shared.store, registry.shared.health
    while True:
        try:
            await registry.take_up(await store.deployments())
        except Unavailable as error:
            health.failed(error)
            await asyncio.sleep(_RETRY_S)
        else:
            health.answered()
            return


async def store_windows(registry: DeploymentRegistry, interval_s: float) -> None:
    """Keep the stored windows up to date; notice when the store fails, and when it recovers."""
    shared, deployments = registry.shared, registry.deployments
    health, clock = shared.health, shared.clock
    probed_at = float("-inf")
    while True:
        await asyncio.sleep(interval_s)
        if health.resting:
            continue
        try:
            await store_all_windows(deployments.values(), health, registry.failed)
            if clock.monotonic() - probed_at < _PROBE_S:
                continue
            await shared.store.ping()
            await clock.follow(shared.store)
            probed_at = clock.monotonic()
            _check_leases(deployments.values())
        except Unavailable as error:
            health.failed(error)
        else:
            health.recovered()


def _check_leases(deployments: Iterable[Deployment]) -> None:
    """Check the last answer about each lease: leases may be on another shard than the probe.

    Raises:
        Unavailable: the store did not answer, or refused a lease, when it was last asked.
    """
    for deployment in deployments:
        if deployment.keeper.fault is not None:
            raise deployment.keeper.fault


async def store_all_windows(
    deployments: Iterable[Deployment], health: StoreHealth, failed: Failed
) -> None:
    """Store the windows of all deployments.

    Args:
        deployments: of this replica.
        health: told when the store does not take windows.
        failed: called with a deployment whose windows cannot be stored for another reason.

    Raises:
        Unavailable: the store did not take all of them.
    """
    waiting = list(deployments)
    while waiting:
        fault = await _store_window(waiting.pop(0), failed)
        if fault is not None:
            health.failed(fault)
            # The others may be on a shard that answers. They are stored at the same time, so that a
            # silent shard costs one more timeout, and not one for each deployment.
            await asyncio.gather(*(_store_window(one, failed) for one in waiting))
            raise fault


async def _store_window(deployment: Deployment, failed: Failed) -> Unavailable | None:
    """Store the windows of one deployment; return the error if the store did not take them."""
    try:
        await deployment.store_windows()
    except Conflict as error:
        deployment.keeper.lose(str(error))
    except Unavailable as error:
        return error
    except Exception as error:
        failed(deployment.deployment, deployment, error)
    return None


async def pace_reports(
    registry: DeploymentRegistry, flow: FlowControl, max_reports_per_s: float
) -> None:
    """Let ranks report more rarely if they are many, or if the event loop is late."""
    loop, pacer = asyncio.get_running_loop(), Pacer(flow, max_reports_per_s)
    while True:
        due = loop.time() + _PACE_S
        await asyncio.sleep(_PACE_S)
        ranks = sum(len(one.ranks.by_stream) for one in registry.deployments.values())
        if pacer.sample(loop.time() - due, ranks):
            _log.warning(
                "reports_paced",
                level=pacer.level,
                interval_s=pacer.flow.report_interval_s,
                stride=pacer.flow.stride,
                ranks=ranks,
            )
            registry.pace(pacer.flow)


@contextlib.contextmanager
def _contained(registry: DeploymentRegistry, deployment: Deployment, event: str) -> Iterator[None]:
    """Log an error of one deployment, and end only that one if the error is a bug of ours.

    What the ranks of one group send must not end the controller of all groups.
    """
    try:
        yield
    except EvenkeelError as error:
        _log.error(event, deployment=deployment.deployment, error=str(error))
    except Exception as error:
        registry.failed(deployment.deployment, deployment, error)


async def refresh_metrics(
    registry: DeploymentRegistry,
    metrics: ControllerMetrics,
    interval_s: float,
    limits: GaugeLimits,
) -> None:
    """Refresh the gauges of the deployments that this replica leads."""
    readers: dict[Deployment, GaugeReader] = {}
    loop = asyncio.get_running_loop()
    took_s = 0.0
    while True:
        await asyncio.sleep(interval_s)
        readers = {
            one: readers.get(one) or GaugeReader(one.planner, limits)
            for one in registry.deployments.values()
        }
        for name, deployment in list(registry.deployments.items()):
            # Leave reports, heartbeats and leases as much time as the last deployment took:
            # milliseconds, but a few tenths of a second for the largest shapes.
            await asyncio.sleep(took_s)
            began = loop.time()
            if registry.deployments.get(name) is not deployment:
                continue
            if not deployment.keeper.leading or deployment.loads.shape is None:
                metrics.follow(name)
                continue
            with _contained(registry, deployment, "figures_failed"):
                try:
                    metrics.refresh(LiveView(deployment).status(), readers[deployment].read())
                except EvenkeelError:
                    metrics.follow(name)
                    raise
            took_s = loop.time() - began


async def measure_plans(registry: DeploymentRegistry) -> None:
    """Measure what the plans of all deployments delivered."""
    while True:
        await asyncio.sleep(_MEASURE_S)
        for deployment in list(registry.deployments.values()):
            with _contained(registry, deployment, "measuring_failed"):
                await deployment.measure_plans()


async def evict_idle(registry: DeploymentRegistry, after_s: float) -> None:
    """Evict the deployments that have been without ranks for that long."""
    while True:
        await asyncio.sleep(min(_EVICT_EVERY_S, after_s / 4))
        await registry.evict_idle(after_s)

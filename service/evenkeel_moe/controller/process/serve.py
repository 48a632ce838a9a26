"""The controller process: builds everything, runs it, takes it down in order."""

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.server import GrpcServer, ServerOptions
from evenkeel_moe.adapters.http_servers import MetricsServer, RestServer
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.adapters.redis.client import SentinelLogin, connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.api.app import create_app
from evenkeel_moe.controller.cycles.cycle_inputs import CycleSettings
from evenkeel_moe.controller.deployment.action_executor import StoreHealth
from evenkeel_moe.controller.deployment.deployment import Deployment, DeploymentOptions, Outside
from evenkeel_moe.controller.logs import configure_logs
from evenkeel_moe.controller.operations.gauges import FigureLimits, Figures
from evenkeel_moe.controller.operations.operator_service import Fleet
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.controller.process.eviction_policy import EvictionWatch
from evenkeel_moe.controller.process.flow_control import Pacer
from evenkeel_moe.controller.process.kernel_warmup import warm_kernels
from evenkeel_moe.controller.process.tokens import TokenFile
from evenkeel_moe.controller.tasks import LastResort, Spawner, end_tasks
from evenkeel_moe.errors import Conflict, EvenkeelError, InvalidInput, Unavailable
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from evenkeel_moe.settings import Settings, from_sections
from evenkeel_moe.wire.link import FlowControl

__all__ = ["run", "serve"]

_log = structlog.get_logger(__name__)
_PACE_S = 0.25
_PROBE_S = 1.0
"""Between writes that only tell whether the store takes any: a replica that leads nothing writes nothing else."""
_STOP_S = 20.0
"""A controller that still waits for something this long after it was told to stop is ended."""


def run(settings: Settings) -> None:
    """`serve` for a process of its own.

    Raises:
        InvalidInput: an address is taken, a file cannot be read, the data folder is in use.
        Unavailable: the embedded store does not start.
    """
    uvloop.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly: steps stored, leases given up, no process left.

    Raises:
        InvalidInput: an address is taken, a file cannot be read, the data folder is in use.
        Unavailable: the embedded store does not start.
    """
    configure_logs(settings.log_level)
    stop, last_resort = asyncio.Event(), LastResort(_STOP_S)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _serve(settings, stack, stop, last_resort)
    finally:
        last_resort.disarm()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve(
    settings: Settings,
    stack: contextlib.AsyncExitStack,
    stop: asyncio.Event,
    last_resort: LastResort,
) -> None:
    with _usable(settings.data_dir):
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        tokens = _tokens(settings)
    clock, registry = SystemClock(), CollectorRegistry()
    metrics = ControllerMetrics(registry)
    health = StoreHealth(clock, metrics)
    # Before gRPC has threads: a fork beside them makes it complain on stderr.
    embedded = None if settings.redis.url else EmbeddedValkey(settings.data_dir / "valkey")
    if embedded is not None:
        stack.push_async_callback(embedded.stop)
        with _usable(settings.data_dir):
            await embedded.start()
    grpc_server = GrpcServer(_server_options(settings))
    grpc_server.bind()
    stack.push_async_callback(grpc_server.stop)
    metrics_server = MetricsServer(registry, settings.metrics.host, settings.metrics.port)
    stack.callback(metrics_server.close)
    rest = RestServer(settings.rest.host, settings.rest.port)
    stack.callback(rest.close)
    url = settings.redis.url if embedded is None else embedded.url
    redis = settings.redis
    login = SentinelLogin(redis.sentinel_username, redis.sentinel_password)
    client = connect(
        url, timeout_s=redis.timeout_s, password=redis.password or None, sentinel=login
    )
    stack.push_async_callback(disconnect, client)
    planner = PlannerPool(settings.planner.workers, deadline_s=settings.planner.deadline_s)
    stack.callback(planner.close)
    # Before leases are sought: who has one must have ears.
    await asyncio.to_thread(warm_kernels, settings.planner.dispatch)
    prefix, window = settings.redis.prefix, settings.window
    async with asyncio.TaskGroup() as tasks:
        spawner = Spawner(tasks, failed=last_resort.arm)
        outside = Outside(
            store=RedisDeploymentStore(
                client, prefix=prefix, wait_replicas=redis.wait_replicas, wait_s=redis.timeout_s / 2
            ),
            windows=RedisWindowStore(
                client, prefix=prefix, capacity=window.steps, ttl_s=window.ttl_s
            ),
            clock=clock,
            metrics=metrics,
            health=health,
            planner=planner,
            spawn=spawner.spawn,
        )
        options = _deployment_options(settings, _advertised(settings, grpc_server.port))
        fleet = Fleet(options, outside, max_deployments=settings.ingest.max_deployments)
        if embedded is not None:
            spawner.spawn(embedded.watch(), "embedded-store")
        spawner.spawn(planner.warm_up(), "planner-warm-up")
        spawner.spawn(EvictionWatch(client, metrics).run(), "eviction-watch")
        spawner.spawn(_take_up(fleet, outside), "take-up")
        storing = spawner.spawn(
            _store_windows(fleet, outside, window.store_interval_s), "store-windows"
        )
        limits = FigureLimits(settings.metrics.worst_layers, settings.metrics.layer_rank_series)
        refresh = _refresh_metrics(fleet, metrics, settings.metrics.refresh_s, limits)
        spawner.spawn(refresh, "refresh-metrics")
        spawner.spawn(_forget_idle(fleet, settings.ingest.forget_after_s), "forget-idle")
        spawner.spawn(_pace_reports(fleet, options.flow), "pace-reports")
        spawner.spawn(rest.run(create_app(fleet, tokens)), "rest")
        await grpc_server.start(fleet)
        _spare_collector()
        _log.info(
            "serving",
            grpc=grpc_server.port,
            rest=rest.port,
            metrics=metrics_server.port,
            replica=settings.leader.replica_id,
            store="embedded" if embedded is not None else "external",
        )
        await stop.wait()
        _log.info("stopping")
        last_resort.arm()
        await _stop(fleet, grpc_server, rest, storing)
        await spawner.end()
    _log.info("stopped")


def _spare_collector() -> None:
    """Reports are thousands of short-lived objects a second and no cycles: look for cycles rarely, never in the code."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _stop(
    fleet: Fleet, grpc_server: GrpcServer, rest: RestServer, storing: asyncio.Task[None]
) -> None:
    """Say goodbye in order; whatever the store does not take now is the next leader's to ask the ranks."""
    await rest.stop()
    fleet.say_goodbye()
    await grpc_server.stop()
    # What it had in hand when it ends is given again below.
    await end_tasks((storing,))
    # All at once: a store that does not answer costs its timeouts once, not once for each deployment.
    await asyncio.gather(*(_leave(deployment) for deployment in list(fleet.members.values())))


async def _leave(deployment: Deployment) -> None:
    with contextlib.suppress(Unavailable, Conflict):
        await deployment.store_windows()
    await deployment.leave()


# --- tasks ------------------------------------------------------------------------------------------


async def _take_up(fleet: Fleet, outside: Outside) -> None:
    """Return to the deployments this replica led before it was restarted."""
    while True:
        try:
            await fleet.return_to(await outside.store.deployments())
        except Unavailable as error:
            outside.health.failed(error)
            await asyncio.sleep(1.0)
        else:
            return


async def _store_windows(fleet: Fleet, outside: Outside, interval_s: float) -> None:
    """Keep the stored windows up to date, and notice when the store goes and comes back."""
    health, clock = outside.health, outside.clock
    probed_at = float("-inf")
    while True:
        await asyncio.sleep(interval_s)
        if health.resting:
            continue
        try:
            await _store_all(fleet.members.values(), health)
            if clock.monotonic() - probed_at < _PROBE_S:
                continue
            await outside.store.ping()
            probed_at = clock.monotonic()
            _check_leases(fleet.members.values())
        except Unavailable as error:
            health.failed(error)
        else:
            health.recovered()


def _check_leases(deployments: Iterable[Deployment]) -> None:
    """Leases may be on a shard that the probe is not on.

    Raises:
        Unavailable: the store did not answer, or refused, when a lease was last sought or renewed.
    """
    for deployment in deployments:
        if deployment.keeper.fault is not None:
            raise deployment.keeper.fault


async def _store_all(deployments: Iterable[Deployment], health: StoreHealth) -> None:
    """Bring the store up to date with every window that it takes.

    Raises:
        Unavailable: it did not take all.
    """
    waiting = list(deployments)
    while waiting:
        fault = await _store_window(waiting.pop(0))
        if fault is not None:
            health.failed(fault)
            # The others may be on a shard that answers. All at once: one that does not costs its timeouts once more, not
            # once for each.
            await asyncio.gather(*map(_store_window, waiting))
            raise fault


async def _store_window(deployment: Deployment) -> Unavailable | None:
    """Why the store did not take it; None when it did."""
    try:
        await deployment.store_windows()
    except Conflict as error:
        deployment.keeper.outlive(str(error))
    except Unavailable as error:
        return error
    return None


async def _pace_reports(fleet: Fleet, flow: FlowControl) -> None:
    """Measure how late this loop is; when it falls behind, ranks report more rarely, then more sparsely."""
    loop, pacer = asyncio.get_running_loop(), Pacer(flow)
    while True:
        due = loop.time() + _PACE_S
        await asyncio.sleep(_PACE_S)
        if pacer.sample(loop.time() - due):
            _log.warning(
                "reports_paced",
                level=pacer.level,
                interval_s=pacer.flow.report_interval_s,
                stride=pacer.flow.stride,
            )
            fleet.pace(pacer.flow)


async def _refresh_metrics(
    fleet: Fleet, metrics: ControllerMetrics, interval_s: float, limits: FigureLimits
) -> None:
    figures: dict[Deployment, Figures] = {}
    while True:
        await asyncio.sleep(interval_s)
        figures = {one: figures.get(one) or Figures(one, limits) for one in fleet.members.values()}
        for name, deployment in list(fleet.members.items()):
            await asyncio.sleep(
                0
            )  # Each takes milliseconds: reports and heartbeats are read in between.
            if fleet.members.get(name) is not deployment:
                continue
            if not deployment.keeper.leading or deployment.shape is None:
                metrics.follow(name)
                continue
            view = LiveView(deployment)
            try:
                metrics.refresh(view.status(), view.balance(), figures[deployment].now())
            except (
                EvenkeelError
            ) as error:  # What one group's ranks say must not end the controller of all.
                _log.error("figures_failed", deployment=name, error=str(error))
                metrics.follow(name)


async def _forget_idle(fleet: Fleet, after_s: float) -> None:
    while True:
        await asyncio.sleep(min(60.0, after_s / 4))
        await fleet.forget_idle(after_s)


# --- settings as the parts need them ------------------------------------------------------------------


@contextlib.contextmanager
def _usable(data_dir: Path) -> Iterator[None]:
    """A folder that cannot be made or written is for the operator to mend."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"cannot use the data folder {data_dir}: {error}") from error


def _tokens(settings: Settings) -> TokenFile:
    """Who may use the API; at the first start a token is made and left in the data folder."""
    path = settings.rest.token_file
    if path is None:
        path = settings.data_dir / "tokens"
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(f"admin admin {secrets.token_urlsafe(32)}\n")
            _log.info("token_written", path=str(path))
    return TokenFile(path)


def _server_options(settings: Settings) -> ServerOptions:
    return from_sections(ServerOptions, settings.grpc)


def _advertised(settings: Settings, port: int) -> str:
    if settings.grpc.advertise:
        return settings.grpc.advertise
    host = settings.grpc.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return host_port(host, port)


def _deployment_options(settings: Settings, advertise: str) -> DeploymentOptions:
    planner, ingest, migration = settings.planner, settings.ingest, settings.migration
    return from_sections(
        DeploymentOptions,
        settings.leader,
        advertise=advertise,
        alone=settings.leader.replicas == 1,
        timing=from_sections(
            ControlTiming,
            ingest,
            migration,
            cycle_deadline_s=2 * planner.deadline_s,
            wave=from_sections(WaveTiming, migration),
        ),
        policy=from_sections(DeploymentPolicy, planner),
        cycle=from_sections(
            CycleSettings, settings.window, planner, objective=from_sections(Objective, planner)
        ),
        window_steps=settings.window.steps,
        max_pending=ingest.max_pending_steps,
        flow=from_sections(FlowControl, ingest),
    )

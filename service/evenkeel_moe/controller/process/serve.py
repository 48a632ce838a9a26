"""The controller process: builds all parts, runs them, and stops them in order."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.core_log import core_log
from evenkeel_moe.adapters.grpc.server import GrpcServer
from evenkeel_moe.adapters.http_servers import MetricsServer, RestServer
from evenkeel_moe.adapters.memory_limit import memory_limit_bytes
from evenkeel_moe.adapters.open_files import allow_open_files
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.adapters.redis.client import Client, SentinelLogin, connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.api.app import create_app
from evenkeel_moe.api.auth import OPEN_PATHS
from evenkeel_moe.api.console import console_files
from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.deployment.deployment_registry import DeploymentRegistry
from evenkeel_moe.controller.logs import configure_logs
from evenkeel_moe.controller.operations.gauges import GaugeLimits
from evenkeel_moe.controller.operations.operator_service import OperatorService
from evenkeel_moe.controller.process import background
from evenkeel_moe.controller.process.certificate_watch import CertificateWatch, certificates_of
from evenkeel_moe.controller.process.eviction_policy import EvictionWatch
from evenkeel_moe.controller.process.kernel_warmup import warm_kernels
from evenkeel_moe.controller.process.options import (
    advertised_address,
    deployment_options,
    deployments_bytes,
    rest_tls,
    server_options,
    store_connections,
)
from evenkeel_moe.controller.process.tokens import TokenFile, write_first_token
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.controller.store_clock import StoreClock
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.controller.tasks import ExitTimer, Spawner, end_tasks
from evenkeel_moe.errors import Conflict, InvalidInput, Unavailable
from evenkeel_moe.settings import RestSettings, Settings

_log = structlog.get_logger(__name__)
_OTHER_FILES = 1024
"""Open files besides the streams of ranks and the store: HTTP connections, files, pipes."""
STOP_S = 20.0
"""A controller that still waits for something this long after it was told to stop is ended."""


def run(settings: Settings) -> None:
    """Run `serve` in a process of its own.

    Raises:
        InvalidInput: an address is taken, a file is missing or unreadable, the data folder is used.
        Unavailable: the embedded store does not start.
    """
    uvloop.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then stop: store steps, give leases up, end all processes.

    Raises:
        InvalidInput: an address is taken, a file is missing or unreadable, the data folder is used.
        Unavailable: the embedded store does not start.
    """
    configure_logs(settings.log_level)
    wanted = settings.grpc.max_streams + 2 * store_connections(settings) + _OTHER_FILES
    if (allowed := allow_open_files(wanted)) < wanted:
        _log.warning("few_open_files", allowed=allowed, wanted=wanted)
    stop, exit_timer = asyncio.Event(), ExitTimer(STOP_S)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(core_log())
            servers = await _start_servers(settings, stack)
            async with asyncio.TaskGroup() as tasks:
                spawner = Spawner(tasks, failed=exit_timer.arm)
                await _run(settings, servers, spawner, stop, exit_timer)
            _log.info("stopped")
    finally:
        exit_timer.disarm()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


# --- starting -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Servers:
    """The outside connections of the process; the exit stack closes them."""

    tokens: TokenFile
    clock: SystemClock
    metrics: ControllerMetrics
    health: StoreHealth
    embedded: EmbeddedValkey | None
    grpc: GrpcServer
    metrics_server: MetricsServer
    rest: RestServer
    client: Client
    leases: Client
    """A client of the same store with connections of its own."""
    planner: PlannerPool


async def _start_servers(settings: Settings, stack: contextlib.AsyncExitStack) -> _Servers:
    """Take the addresses, connect to the store, and warm the kernels."""
    console_files()  # Read once, here: a package without them cannot serve.
    with _usable(settings.data_dir):
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    clock = SystemClock()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = ControllerMetrics(registry)
    health = StoreHealth(clock, metrics)
    # The embedded store is forked before gRPC starts threads: gRPC complains about later forks.
    embedded = None if settings.redis.url else EmbeddedValkey(settings.data_dir / "valkey")
    if embedded is not None:
        stack.push_async_callback(embedded.stop)
        with _usable(settings.data_dir):
            await embedded.start()
    grpc = GrpcServer(server_options(settings))
    metrics.watch_streams(lambda: grpc.open_streams)
    grpc.bind()
    stack.push_async_callback(grpc.stop)
    metrics_server = MetricsServer(registry, settings.metrics.host, settings.metrics.port)
    stack.callback(metrics_server.close)
    rest = RestServer(
        settings.rest.host, settings.rest.port, probes=OPEN_PATHS, tls=rest_tls(settings.rest)
    )
    stack.callback(rest.close)
    # After the addresses: a first token tells scripts that this controller starts.
    with _usable(settings.data_dir):
        tokens = _tokens(settings, clock)
    url = settings.redis.url if embedded is None else embedded.url
    client, leases = _connect(settings, url), _connect(settings, url)
    stack.push_async_callback(disconnect, client)
    stack.push_async_callback(disconnect, leases)
    planner = PlannerPool(settings.planner.workers, deadline_s=settings.planner.deadline_s)
    stack.callback(planner.close)
    # Before leases are sought: a leader must be able to take reports at once.
    await asyncio.to_thread(warm_kernels)
    return _Servers(
        tokens,
        clock,
        metrics,
        health,
        embedded,
        grpc,
        metrics_server,
        rest,
        client,
        leases,
        planner,
    )


def _connect(settings: Settings, url: str) -> Client:
    redis = settings.redis
    return connect(
        url,
        timeout_s=redis.timeout_s,
        connections=store_connections(settings),
        password=redis.password or None,
        sentinel=SentinelLogin(redis.sentinel_username, redis.sentinel_password),
    )


@contextlib.contextmanager
def _usable(data_dir: Path) -> Iterator[None]:
    """Tell the operator about a data folder that cannot be made or written."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"cannot use the data folder {data_dir}: {error}") from error


def _tokens(settings: Settings, clock: SystemClock) -> TokenFile:
    """Read the API tokens; at the first start, write one new token into the data folder."""
    named, own = settings.rest.token_file, settings.data_dir / "tokens"
    if named is None and write_first_token(own, clock.unix()):
        _log.info("token_written", path=str(own))
    return TokenFile(named or own, clock.unix, own=named is None)


# --- running --------------------------------------------------------------------------------------


async def _run(
    settings: Settings,
    servers: _Servers,
    spawner: Spawner,
    stop: asyncio.Event,
    exit_timer: ExitTimer,
) -> None:
    """Serve until `stop` is set, then stop in order."""
    options = deployment_options(settings, advertised_address(settings.grpc, servers.grpc.port))
    registry = DeploymentRegistry(
        options,
        _shared_services(settings, servers, spawner),
        max_deployments=settings.ingest.max_deployments,
        max_new_deployments=settings.ingest.max_new_deployments,
        memory_bytes=deployments_bytes(settings, memory_limit_bytes()),
        max_streams=settings.grpc.max_streams,
    )
    storing = _spawn_background(settings, servers, registry, spawner)
    service = OperatorService(registry)
    app = create_app(service, servers.tokens, health_bounds=settings.health)
    spawner.spawn(servers.rest.run(app), "rest")
    await servers.grpc.start(registry)
    tune_garbage_collection()
    _log.info(
        "serving",
        grpc=servers.grpc.port,
        rest=servers.rest.port,
        metrics=servers.metrics_server.port,
        console=_console_url(settings.rest, servers.rest.port),
        replica=settings.leader.replica_id,
        store="embedded" if servers.embedded is not None else "external",
    )
    await stop.wait()
    _log.info("stopping")
    exit_timer.arm()
    await _stop(registry, servers, storing)
    await spawner.end()


def _console_url(rest: RestSettings, port: int) -> str:
    """Return the link of the console, as it can be opened from this machine."""
    every_address = rest.host in ("0.0.0.0", "::")
    scheme = "http" if rest.tls_cert_file is None else "https"
    return f"{scheme}://{host_port('localhost' if every_address else rest.host, port)}/"


def _shared_services(settings: Settings, servers: _Servers, spawner: Spawner) -> SharedServices:
    redis, window, client = settings.redis, settings.window, servers.client
    return SharedServices(
        store=RedisDeploymentStore(
            client,
            leases=servers.leases,
            prefix=redis.prefix,
            wait_replicas=redis.wait_replicas,
            wait_s=redis.timeout_s / 2,
            unreadable=servers.health.unreadable,
            timed=servers.metrics.store_called,
        ),
        windows=RedisWindowStore(
            client,
            prefix=redis.prefix,
            capacity=window.steps,
            ttl_s=window.ttl_s,
            unreadable=servers.health.unreadable,
            timed=servers.metrics.store_called,
        ),
        clock=StoreClock(servers.clock),
        metrics=servers.metrics,
        health=servers.health,
        planner=servers.planner,
        spawn=spawner.spawn,
    )


def _spawn_background(
    settings: Settings, servers: _Servers, registry: DeploymentRegistry, spawner: Spawner
) -> asyncio.Task[None]:
    """Start the background tasks; return the one that stores windows."""
    metrics, ingest = settings.metrics, settings.ingest
    limits = GaugeLimits(metrics.worst_layers, metrics.layer_rank_series)
    if servers.embedded is not None:
        spawner.spawn(servers.embedded.watch(), "embedded-store")
    spawner.spawn(servers.planner.warm_up(), "planner-warm-up")
    spawner.spawn(EvictionWatch(servers.client, servers.metrics).run(), "eviction-watch")
    certificates = CertificateWatch(certificates_of(settings), servers.metrics)
    spawner.spawn(certificates.run(), "certificate-watch")
    spawner.spawn(background.take_up_deployments(registry), "take-up")
    spawner.spawn(
        background.refresh_metrics(registry, servers.metrics, metrics.refresh_s, limits),
        "refresh-metrics",
    )
    spawner.spawn(background.evict_idle(registry, ingest.forget_after_s), "forget-idle")
    spawner.spawn(background.measure_plans(registry), "measure-plans")
    most = settings.advanced.max_reports_per_s
    spawner.spawn(background.pace_reports(registry, registry.options.flow, most), "pace-reports")
    return spawner.spawn(
        background.store_windows(registry, settings.advanced.store_interval_s), "store-windows"
    )


def tune_garbage_collection() -> None:
    """Look for cycles rarely, and never among the objects loaded so far.

    Reports are thousands of short-lived objects a second, without cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# --- stopping -------------------------------------------------------------------------------------


async def _stop(
    registry: DeploymentRegistry, servers: _Servers, storing: asyncio.Task[None]
) -> None:
    """Stop in order. What the store does not take now, the next leader asks the ranks for."""
    servers.rest.stop()
    registry.close_streams()
    await servers.grpc.stop()
    # The windows it was storing when it is cancelled are stored below.
    await end_tasks((storing,))
    # At the same time: a store that does not answer costs one timeout, not one per deployment.
    await asyncio.gather(*(_leave(deployment) for deployment in [*registry.deployments.values()]))


async def _leave(deployment: Deployment) -> None:
    with contextlib.suppress(Unavailable, Conflict):
        await deployment.store_windows()
    await deployment.stop()

"""The controller's settings by section, and which values contradict each other.

Sections are frozen dataclasses of plain values; the rest of the program takes those and reads nothing itself.
`settings_sources` reads them.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.planning.policies.registry import resolve_policy
from evenkeel_moe.planning.problem.objective import DispatchModel

__all__ = [
    "DEFAULT_THRESHOLDS",
    "GrpcSettings",
    "IngestSettings",
    "LeaderSettings",
    "MetricsSettings",
    "MigrationSettings",
    "PlannerSettings",
    "RedisSettings",
    "RestSettings",
    "Settings",
    "WindowSettings",
    "contradictions",
    "from_sections",
    "never_met",
]

T = TypeVar("T")

_STRICT = ConfigDict(extra="forbid")
DEFAULT_THRESHOLDS: Mapping[str, float] = {
    "cooldown_s": 8.0,
    "consecutive_windows": 2.0,
    "max_data_age_s": 15.0,
}
"""Loads are counted by logical expert, so a window needs no time to settle after a plan."""
_GRPC_MOST_S = 2_000_000
"""gRPC counts milliseconds in 32 bits."""

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GrpcSeconds = Annotated[float, Field(gt=0, le=_GRPC_MOST_S)]
Count = Annotated[int, Field(ge=1)]
Host = Annotated[
    str, Field(min_length=1), AfterValidator(lambda host: host.removeprefix("[").removesuffix("]"))
]
"""A name or an address; an IPv6 address with or without brackets."""


@dataclass(frozen=True, config=_STRICT)
class GrpcSettings:
    """Where ranks connect."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0, or :: where there is IPv6."""
    port: Port = 50051
    """0 takes a free port, told in the log."""
    advertise: str = ""
    """host:port by which ranks reach this replica; followers send ranks there. Empty means host:port as
    listened on, with the machine's name where that is every address. Wrong with several replicas: ranks are
    sent in circles."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, lt=1 << 31)] = 64 << 20
    """Largest message taken. Below a full map or a report of many steps, ranks cannot register or report."""
    send_queue: Count = 1024
    """Messages waiting for one rank before its stream is closed as too slow; it connects again."""
    max_streams: Count = 4096
    """Rank streams open at a time; more are told to come again later. Below the ranks of all deployments, some
    never get in."""
    max_messages_per_s: Annotated[float, Field(ge=10)] = 200.0
    """Of one stream, four seconds ahead; a rank needs about ten. A faster client is cut off, and told to wait."""
    keepalive_s: GrpcSeconds = 20.0
    """Silence before a ping; keep it under the idle timeout of proxies in between."""
    keepalive_timeout_s: GrpcSeconds = 10.0
    """Wait for the ping's answer before the connection counts as dead."""
    max_connection_age_s: Annotated[float, Field(ge=0, le=_GRPC_MOST_S)] = 3600.0
    """A connection this old, a tenth more or less by chance, is told to go (GOAWAY); the rank connects anew, and so
    spreads over addresses that came later. 0 lets it live for ever. With a few seconds ranks mostly connect."""
    max_connection_age_grace_s: GrpcSeconds = 60.0
    """After that a stream still open, as a rank's always is, is cut. Serving goes on, reports wait and are sent again."""
    tls_cert_file: Path | None = None
    """PEM chain of this server; with it only TLS is spoken."""
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    """PEM of the CA whose clients may connect; with it every rank needs a certificate. This and the two files above
    are read anew when they change."""
    tls_require_identity: bool = False
    """Whether a rank's certificate must name it, by a URI such as evenkeel://DEPLOYMENT/ranks/0-7. One that names
    ranks is held to them in any case; false also takes certificates that name none."""
    reflection: bool = False
    """Tell any client which services and messages there are, for grpcurl and the like."""


@dataclass(frozen=True, config=_STRICT)
class RestSettings:
    """The operators' API."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0, or :: where there is IPv6."""
    port: Port = 8080
    token_file: Path | None = None
    """Who may call, read anew when it changes. None writes `tokens` with one new token of role admin into the data
    folder at the first start."""


@dataclass(frozen=True, config=_STRICT)
class MetricsSettings:
    """Prometheus."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0, or :: where there is IPv6. Anyone who reaches it may read it."""
    port: Port = 9090
    refresh_s: Seconds = 2.0
    """Between refreshes of the gauges; longer than the scrape interval repeats old values."""
    worst_layers: Annotated[int, Field(ge=0, le=64)] = 5
    """Layers of a deployment, worst balancedness first, that have series of their own."""
    layer_rank_series: Annotated[int, Field(ge=0, le=20_000)] = 0
    """Most series by layer and rank of a deployment, for heat maps: whole layers, the worst first, as many as
    fit. 0 exports none; 61 layers on 72 ranks need 4392."""


@dataclass(frozen=True, config=_STRICT)
class RedisSettings:
    """The store."""

    url: str = field(default="", repr=False)
    """redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or rediss+cluster://. Empty
    starts an embedded server in the data folder: durable over restarts of one replica, not shareable."""
    password: str = field(default="", repr=False)
    """Beats a password in the URL."""
    sentinel_username: str = ""
    """User at the Sentinels, which have users of their own; beats `sentinel_username` in the URL."""
    sentinel_password: str = field(default="", repr=False)
    """Of that user, or of the Sentinels' `requirepass`; beats `sentinel_password` in the URL. The store's credentials are
    never sent to a Sentinel."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "evenkeel"
    """First part of every key. Fleets that share a server must differ here, or they take each other's leases."""
    timeout_s: Seconds = 2.0
    """For a connection and for an answer. Above a third of leader.lease_s a slow store costs the lease."""
    wait_replicas: Annotated[int, Field(ge=0, le=16)] = 0
    """Replicas of the store that must have a plan, an epoch or a policy before it counts as written, so that a failover
    loses none. Where too few have it within half of timeout_s, the write is tried again and no wave begins."""


@dataclass(frozen=True, config=_STRICT)
class WindowSettings:
    """How much of the past is kept."""

    steps: Annotated[int, Field(ge=16)] = 512
    """Complete steps per deployment and phase, in memory and in the store. Each costs layers x experts x 4
    bytes in memory: 60 kB for 58 x 256."""
    plan_steps: Annotated[int, Field(ge=16)] = 256
    """Newest steps a cycle looks at. Planning time grows with it; too few and noise is planned for."""
    ttl_s: Seconds = 86_400.0
    """A stored window nothing was added to for this long is dropped."""
    store_interval_s: Seconds = 0.35
    """Between appends to the store; steps younger than this are lost when the controller dies."""


@dataclass(frozen=True, config=_STRICT)
class PlannerSettings:
    """The control loop. What an operator sets over the API beats mode, policy, cycle_s and thresholds."""

    mode: Mode = Mode.OBSERVE
    """observe: nothing moves. propose: plans wait for approval. auto: plans start by themselves."""
    policy: str = "keel"
    cycle_s: Seconds = 2.0
    """Between looks at the window; each ends in a recorded decision. Long cycles answer a change late."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Gate settings by name, see `planning.gates.GateSettings`; those not named have
    DEFAULT_THRESHOLDS, else the gates' own."""
    recent_steps: Annotated[int, Field(ge=4)] = 32
    """Steps since a change of traffic that are enough to plan on; a quarter of the window at most. With few a plan
    follows chance, with many the old placement serves the new traffic longer."""
    lifetime_steps: Count = 1000
    """Steps a placement is expected to last: what a copy's price is spread over."""
    copy_bytes_per_s: Annotated[float, Field(gt=0)] = 5e9
    """Rate assumed for copies between ranks when their price is worked out in seconds."""
    copy_cost_tokens: Annotated[float, Field(ge=0)] = 200.0
    """Price of one copy where ranks do not measure compute time. Too low and plans shuffle for little."""
    cross_node_factor: Annotated[float, Field(ge=1)] = 2.0
    """Price of a copy that no rank of the node could send, over that of others: keel prefers experts its node has."""
    rank_speeds: bool = False
    """Plan with each rank's measured speed. Only where measurements are steady: noise moves experts about."""
    dispatch: DispatchModel = DispatchModel.EVEN
    """How the engine splits an expert's tokens over its replicas. A wrong one plans for another engine."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Planner processes; each holds compiled kernels, about 300 MB."""
    deadline_s: Seconds = 60.0
    """A cycle that takes longer counts as failed and its process is replaced. A search may take a quarter of it, by the
    rate at which the policy was seen to look at candidates."""
    proposal_ttl_s: Seconds = 3600.0
    """A proposal not approved within this expires."""


@dataclass(frozen=True, config=_STRICT)
class MigrationSettings:
    """Waves."""

    max_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Throttle of copies per rank; 0 is none. Too low and waves miss prepare_deadline_s."""
    batch_deadline_s: Seconds = 10.0
    """One batch of copies; then its communicator is aborted and rebuilt."""
    prepare_deadline_s: Seconds = 120.0
    """From Prepare to the last vote; shorter than the copies take aborts every wave."""
    commit_deadline_s: Seconds = 30.0
    """From Commit to the first ack, and commit_deadline_steps must have passed too."""
    commit_deadline_steps: Count = 256
    """At least twice the gate's poll interval plus its delay."""
    stall_after_s: Seconds = 30.0
    """A wave still missing answers then is reported as stalled."""


@dataclass(frozen=True, config=_STRICT)
class IngestSettings:
    """Reports of ranks."""

    report_interval_s: Seconds = 0.25
    """Between reports of one rank; the window lags by about this."""
    stride: Count = 1
    """Report every n-th step. Above 1 a window spans more time, and short phases may go unseen."""
    max_steps_per_report: Annotated[int, Field(ge=1, le=4096)] = 256
    max_pending_steps: Annotated[int, Field(ge=8)] = 512
    """Incomplete steps held per deployment; each costs layers x slots x 4 bytes once used. Fewer than a slow
    rank lags behind loses those steps."""
    heartbeat_s: Seconds = 2.5
    """Every rank is asked for its state this often, half as often at rest, and says itself that it lives."""
    rank_lease_s: Seconds = 10.0
    """A rank not heard for this long is lost; at least three heartbeats."""
    forget_after_s: Seconds = 3600.0
    """A deployment none of whose ranks was here for this long is let go: lease, memory and series. Its records
    stay in the store."""
    max_deployments: Count = 256
    """Deployments taken on; one more takes the place of one that had no ranks for ten seconds, or is refused, so that a
    misconfigured fleet cannot fill the memory."""


@dataclass(frozen=True, config=_STRICT)
class LeaderSettings:
    """Which replica leads."""

    replica_id: Annotated[str, Field(min_length=1)] = field(default_factory=socket.gethostname)
    """Name of this replica, different for each; one that returns under its old name takes its leases back."""
    replicas: Count = 1
    """How many there are. More than one needs an external store."""
    lease_s: Seconds = 4.0
    """A dead leader's deployments are taken over after this; a leader that cannot renew for this long stops."""
    renew_s: Seconds = 1.0
    """Between renewals; at most a third of lease_s."""


@dataclass(frozen=True, config=_STRICT)
class Settings:
    """Everything, checked."""

    data_dir: Path = Path("evenkeel-data")
    """Folder of the embedded store and the token file; made if missing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    grpc: GrpcSettings = GrpcSettings()
    rest: RestSettings = RestSettings()
    metrics: MetricsSettings = MetricsSettings()
    redis: RedisSettings = RedisSettings()
    window: WindowSettings = WindowSettings()
    planner: PlannerSettings = PlannerSettings()
    migration: MigrationSettings = MigrationSettings()
    ingest: IngestSettings = IngestSettings()
    leader: LeaderSettings = Field(default_factory=LeaderSettings)


def from_sections(kind: type[T], *sections: Any, **others: Any) -> T:
    """Build a dataclass from the settings that have the names of its fields, and from other values."""
    found = {
        one.name: getattr(section, one.name) for section in sections for one in fields(section)
    }
    taken = {one.name for one in fields(kind)} & found.keys()  # type: ignore[arg-type]
    return kind(**{**{name: found[name] for name in taken}, **others})


def never_met(gates: GateSettings, plan_steps: int) -> Iterator[str]:
    """Which thresholds no window of `plan_steps` steps can meet."""
    if gates.min_window_steps > plan_steps:
        yield (
            f"thresholds.min_window_steps {gates.min_window_steps:g} exceeds window.plan_steps {plan_steps}:"
            " no cycle could ever plan"
        )
    held_out = held_out_steps(plan_steps, int(gates.min_held_out_steps))
    if held_out < gates.min_held_out_steps:
        yield (
            f"thresholds.min_held_out_steps {gates.min_held_out_steps:g} can never be met: of window.plan_steps"
            f" {plan_steps} it holds out {held_out}; a whole number up to {plan_steps // 2} can"
        )


def contradictions(settings: Settings) -> Iterator[str]:
    """What each section alone cannot see."""
    leader, ingest, window, planner = (
        settings.leader,
        settings.ingest,
        settings.window,
        settings.planner,
    )
    if leader.replicas > 1 and not settings.redis.url:
        yield (
            f"leader.replicas is {leader.replicas} and redis.url is empty: replicas with stores of their own"
            " would all lead"
        )
    if 3 * leader.renew_s > leader.lease_s:
        yield (
            f"leader.renew_s {leader.renew_s:g} x 3 = {3 * leader.renew_s:g} exceeds leader.lease_s"
            f" {leader.lease_s:g}: one slow answer would cost the lease"
        )
    if 3 * ingest.heartbeat_s > ingest.rank_lease_s:
        yield (
            f"ingest.heartbeat_s {ingest.heartbeat_s:g} x 3 = {3 * ingest.heartbeat_s:g} exceeds"
            f" ingest.rank_lease_s {ingest.rank_lease_s:g}: one late answer would lose the rank"
        )
    if window.plan_steps > window.steps:
        yield f"window.plan_steps {window.plan_steps} exceeds window.steps {window.steps}"
    if 4 * planner.recent_steps > window.plan_steps:
        yield (
            f"planner.recent_steps {planner.recent_steps} x 4 = {4 * planner.recent_steps} exceeds"
            f" window.plan_steps {window.plan_steps}: a change of traffic could never be seen"
        )
    migration = settings.migration
    if migration.batch_deadline_s > migration.prepare_deadline_s:
        yield (
            f"migration.batch_deadline_s {migration.batch_deadline_s:g} exceeds migration.prepare_deadline_s"
            f" {migration.prepare_deadline_s:g}"
        )
    try:
        gates = GateSettings.from_thresholds({**DEFAULT_THRESHOLDS, **planner.thresholds})
        yield from (f"planner.{words}" for words in never_met(gates, window.plan_steps))
        resolve_policy(planner.policy)
    except InvalidInput as error:
        yield f"planner: {error}"
    redis = settings.redis
    if redis.wait_replicas and (not redis.url or "+cluster://" in redis.url):
        yield f"redis.wait_replicas is {redis.wait_replicas}: a store of one's own has no replicas, and a cluster is not asked for them"
    if (redis.sentinel_username or redis.sentinel_password) and "+sentinel://" not in redis.url:
        yield "redis.sentinel_username and redis.sentinel_password need a redis+sentinel:// or rediss+sentinel:// URL"
    if redis.sentinel_username and not (
        redis.sentinel_password or "sentinel_password=" in redis.url
    ):
        yield "redis.sentinel_username needs redis.sentinel_password"
    grpc = settings.grpc
    if (grpc.tls_cert_file is None) != (grpc.tls_key_file is None):
        yield "grpc.tls_cert_file and grpc.tls_key_file need each other"
    if grpc.tls_client_ca_file is not None and grpc.tls_cert_file is None:
        yield "grpc.tls_client_ca_file needs grpc.tls_cert_file: without TLS no client shows a certificate"
    if grpc.tls_require_identity and grpc.tls_client_ca_file is None:
        yield "grpc.tls_require_identity needs grpc.tls_client_ca_file: without it no rank shows a certificate"
    ports = [s.port for s in (settings.grpc, settings.rest, settings.metrics) if s.port]
    if len(set(ports)) < len(ports):
        yield f"grpc, rest and metrics listen on {', '.join(map(str, ports))}: all must differ"

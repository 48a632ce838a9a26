"""The controller's settings by section, and the contradictions between them.

Sections are frozen dataclasses of plain values. `settings_sources` reads them from environment and
file.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import field, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.policy import CostChoice, Mode
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.ports.status import HealthBounds

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
_GRPC_MOST_S = 2_000_000
"""Largest time in gRPC, which counts milliseconds in 32 bits."""

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GrpcSeconds = Annotated[float, Field(gt=0, le=_GRPC_MOST_S)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Host = Annotated[
    str, Field(min_length=1), AfterValidator(lambda host: host.removeprefix("[").removesuffix("]"))
]
"""A host name or an address; an IPv6 address with or without brackets."""


@dataclass(frozen=True, config=_STRICT)
class GrpcSettings:
    """The gRPC server, to which ranks connect."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0 or ::."""
    port: Port = 50051
    """0 uses a free port, which the log names."""
    advertise: str = ""
    """host:port to which followers send ranks. Empty is the address listened on, or the machine's
    name if that is every address. With several replicas a wrong value redirects ranks endlessly."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, lt=1 << 31)] = 64 << 20
    """Largest message. A rank with a larger map or report cannot register or report."""
    max_streams: Count = 8192
    """Most open rank streams; further ranks retry later."""
    keepalive_s: GrpcSeconds = 20.0
    """Silence before a ping; below the idle timeout of proxies."""
    keepalive_timeout_s: GrpcSeconds = 10.0
    """Time for the answer to a ping, else the connection is dead."""
    max_connection_age_s: Annotated[float, Field(ge=0, le=_GRPC_MOST_S)] = 3600.0
    """Age, plus or minus a tenth, at which a connection is closed (GOAWAY) and ranks reconnect,
    also to addresses that were added later. 0 is never."""
    max_connection_age_grace_s: GrpcSeconds = 60.0
    """Time until the streams of such a connection are cut; reports are then sent again."""
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). Enables TLS, and refuses clear text."""
    tls_key_file: Path | None = None
    """Private key of that certificate (PEM)."""
    tls_client_ca_file: Path | None = None
    """CAs of ranks (PEM); every rank then needs a certificate. Changes of these three files need no
    restart: ranks of a CA that is removed are out within 10 s."""
    tls_require_identity: bool = False
    """Require that a rank's certificate names it, as evenkeel://DEPLOYMENT/ranks/0-7."""
    reflection: bool = False
    """Describe services to any client, for tools such as grpcurl."""


@dataclass(frozen=True, config=_STRICT)
class RestSettings:
    """The REST API of operators."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0 or ::."""
    port: Port = 8080
    """0 uses a free port, which the log names."""
    token_file: Path | None = None
    """Accepted tokens; changes need no restart. None: `tokens` in the data folder, which the first
    start creates with one token of role admin."""
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). Enables HTTPS, and refuses clear text. Changes of it and the key
    need no restart."""
    tls_key_file: Path | None = None
    """Private key of that certificate (PEM), without a passphrase."""


@dataclass(frozen=True, config=_STRICT)
class MetricsSettings:
    """Prometheus metrics."""

    host: Host = "127.0.0.1"
    """Address to listen on; a container needs 0.0.0.0 or ::. It needs no token."""
    port: Port = 9090
    """0 uses a free port, which the log names."""
    refresh_s: Seconds = 2.0
    """Time between updates of the gauges; at most the scrape interval."""
    worst_layers: Annotated[int, Field(ge=0, le=64)] = 5
    """Layers of a deployment with their own series: the least balanced."""
    layer_rank_series: Annotated[int, Field(ge=0, le=20_000)] = 1024
    """Most series of a deployment's heat map: whole layers, the worst first. 61 layers on 72 ranks
    need 4392; 0 is none."""


@dataclass(frozen=True, config=_STRICT)
class RedisSettings:
    """The Redis or Valkey store."""

    url: str = field(default="", repr=False)
    """redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or
    rediss+cluster://. Empty starts a server in the data folder, for one controller replica."""
    password: str = field(default="", repr=False)
    """Overrides a password in the URL."""
    sentinel_username: str = ""
    """User of the Sentinels. Overrides `sentinel_username` in the URL."""
    sentinel_password: str = field(default="", repr=False)
    """Password of that user, or the Sentinels' `requirepass`. Overrides `sentinel_password` in the
    URL."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "evenkeel"
    """First part of every key. Fleets with one prefix on one server take each other's leases."""
    timeout_s: Seconds = 2.0
    """Time limit of a connection or answer. Above a third of leader.lease_s a slow store costs the
    lease."""
    wait_replicas: Annotated[int, Field(ge=0, le=16)] = 0
    """Store replicas that must confirm a plan, epoch, pause or policy, so that a failover loses
    none; else the write is tried again and no wave starts."""


@dataclass(frozen=True, config=_STRICT)
class WindowSettings:
    """The windows of past steps."""

    steps: Annotated[int, Field(ge=16)] = 512
    """Complete steps kept for each deployment and phase, in memory and in the store. A step takes
    layers x experts x 4 bytes."""
    plan_steps: Annotated[int, Field(ge=16)] = 256
    """Newest steps that a cycle uses. More take longer; with few, plans follow noise."""
    ttl_s: Seconds = 86_400.0
    """A stored window without new steps for this long is deleted."""


@dataclass(frozen=True, config=_STRICT)
class PlannerSettings:
    """The control loop."""

    mode: Mode = Mode.OBSERVE
    """observe: only operators start plans, unless observe_lock is set. propose: plans wait for
    approval. auto: plans start by themselves."""
    observe_lock: bool = False
    """In mode observe, nothing moves weights; a running plan is cancelled. Only role admin changes
    this, or leaves observe while it is set. The chart sets it."""
    separate_approval: bool = False
    """A plan by hand needs the approval of another token. Only role admin sets it."""
    policy: str = "keel"
    """The planning policy, by its name in docs/policies.md."""
    cycle_s: Seconds = 2.0
    """Time between cycles."""
    thresholds: Mapping[str, NotNegative] = field(default_factory=dict)
    """Thresholds of the gates, by name."""
    recent_steps: Annotated[int, Field(ge=4)] = 32
    """Steps after a change of traffic that suffice for a plan; at most a quarter of
    window.plan_steps. A plan on fewer is refined when twice as many are known."""
    lifetime_steps: Count = 1000
    """Steps that a placement is expected to last, which share the cost of its copies."""
    copy_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e9
    """Assumed rate of copies between ranks, for their cost in seconds."""
    copy_cost_tokens: NotNegative = 200.0
    """Cost of one copy if ranks measure no compute time. If it is too low, plans copy for little
    gain."""
    cross_node_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Cost of a copy from another node relative to one within a node."""
    cost: CostChoice = CostChoice.AUTO
    """auto: plan by the best known cost model: measured, profiled, derived, or else tokens. tokens:
    by tokens alone; plans then ignore slow ranks and the time to read weights."""
    dispatch: DispatchModel = DispatchModel.EVEN
    """The engine's rule to split tokens over replicas, where policy and ranks name none."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Planner processes; each needs about 300 MB for compiled kernels."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """Threads of a planner process for large models; more than cores save no time."""
    deadline_s: Seconds = 60.0
    """Time limit of a cycle, which then fails. The policy's search may use a quarter of it."""
    proposal_ttl_s: Seconds = 3600.0
    """Time after which an unapproved proposal expires."""


@dataclass(frozen=True, config=_STRICT)
class MigrationSettings:
    """The execution of waves."""

    max_bytes_per_s: NotNegative = 0.0
    """Rate limit of copies per rank; 0 is none. If it is too low, waves miss prepare_deadline_s."""
    batch_deadline_s: Seconds = 10.0
    """Time limit of a batch of copies; after it the communicator is aborted and rebuilt."""
    prepare_deadline_s: Seconds = 120.0
    """Time from Prepare to the last vote. If the copies take longer, every wave is aborted."""
    commit_deadline_s: Seconds = 30.0
    """Time from Commit to the first ack; after this and advanced.commit_deadline_steps the wave is
    aborted."""
    stall_after_s: Seconds = 30.0
    """Time after which a wave with missing answers is stalled."""


@dataclass(frozen=True, config=_STRICT)
class IngestSettings:
    """The ranks' reports and liveness."""

    report_interval_s: Seconds = 0.25
    """Time between reports of a rank; the window lags by about this."""
    stride: Count = 1
    """Every n-th step is reported; above 1 short changes may be missed."""
    max_pending_steps: Annotated[int, Field(ge=8)] = 512
    """Incomplete steps kept for each deployment, of layers x slots x 4 bytes each. If a rank lags
    by more, steps are lost."""
    heartbeat_s: Seconds = 2.5
    """Time between heartbeats of a rank, and between the controller's questions, twice that at
    rest."""
    rank_lease_s: Seconds = 10.0
    """Silence after which a rank is lost; at least three heartbeats."""
    forget_after_s: Seconds = 3600.0
    """A deployment without ranks for this long is removed. Its records stay."""
    max_deployments: Count = 256
    """Most deployments. One more replaces one without ranks for ten seconds, or is refused."""
    max_new_deployments: Count = 64
    """The same for deployments whose ranks were never all connected."""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory for deployments, by the most that their shapes can need; one that does not fit is
    refused. 0 is the limit of the container or machine, less what the process and the planners
    need."""


@dataclass(frozen=True, config=_STRICT)
class LeaderSettings:
    """The election of the leading controller replica."""

    replica_id: Annotated[str, Field(min_length=1)] = field(default_factory=socket.gethostname)
    """Unique name of this controller replica; with it a restarted one gets its leases back."""
    replicas: Count = 1
    """Controller replicas; several need an external store."""
    lease_s: Seconds = 4.0
    """Time after which a dead leader is replaced, and one that cannot renew stops."""
    renew_s: Seconds = 1.0
    """Time between renewals; at most a third of lease_s."""


@dataclass(frozen=True, config=_STRICT)
class AdvancedSettings:
    """Settings that operators should not need to change."""

    send_queue: Count = 1024
    """Messages that may wait for one rank; with more it must reconnect."""
    max_messages_per_s: Annotated[float, Field(ge=10)] = 200.0
    """Messages a second from one rank, with a burst of four seconds; a rank sends about ten."""
    max_streams_per_peer: Count = 2048
    """Most open rank streams from one address. Ranks behind one proxy share it."""
    store_interval_s: Seconds = 0.35
    """Time between writes of windows. If the controller dies, newer steps are lost."""
    commit_deadline_steps: Count = 256
    """Steps from Commit to the first ack: at least 2 K + D of the gate."""
    max_reports_per_s: Annotated[float, Field(ge=1)] = 2000.0
    """Reports a second of all ranks. More ranks report more rarely, up to eight times, in longer
    messages."""
    max_steps_per_report: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most steps in one report of a rank."""


class Settings(BaseModel):
    """All settings."""

    model_config = ConfigDict(**_STRICT, frozen=True)

    data_dir: Path = Path("evenkeel-data")
    """Folder of the embedded store and the token file; created if missing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of log lines."""
    profile: Mode | None = None
    """Sets planner.mode and planner.observe_lock where those are not set. observe: nothing moves
    weights. propose: plans wait for approval. auto: plans start by themselves."""
    grpc: GrpcSettings = GrpcSettings()
    rest: RestSettings = RestSettings()
    metrics: MetricsSettings = MetricsSettings()
    redis: RedisSettings = RedisSettings()
    window: WindowSettings = WindowSettings()
    planner: PlannerSettings = PlannerSettings()
    migration: MigrationSettings = MigrationSettings()
    ingest: IngestSettings = IngestSettings()
    leader: LeaderSettings = Field(default_factory=LeaderSettings)
    health: HealthBounds = HealthBounds()
    advanced: AdvancedSettings = AdvancedSettings()

    @model_validator(mode="before")
    @classmethod
    def _apply_profile(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("profile") is None:
            return given
        planner = given.get("planner", {})
        if not isinstance(planner, Mapping):
            return given
        mode = planner.get("mode", given["profile"])
        return {**given, "planner": {"mode": mode, "observe_lock": mode == "observe", **planner}}

    @classmethod
    def sections(cls) -> dict[str, type[Any]]:
        """Return the dataclass of each section by its name."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and is_dataclass(field.annotation)
        }

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions between settings, with the arithmetic."""
        for name, factor, limit, why in _AT_MOST:
            value, most = attrgetter(name, limit)(self)
            if factor * value > most:
                product = f" x {factor} = {factor * value:g}" if factor > 1 else ""
                yield f"{name} {value:g}{product} exceeds {limit} {most:g}: {why}"
        for name, other, why in _NEEDS:
            if attrgetter(name)(self) and not attrgetter(other)(self):
                yield f"{name} needs {other}: {why}"
        redis = self.redis
        if self.leader.replicas > 1 and not redis.url:
            yield (
                f"leader.replicas is {self.leader.replicas} and redis.url is empty: replicas with"
                " embedded stores would all lead"
            )
        if redis.wait_replicas and (not redis.url or "+cluster://" in redis.url):
            yield (
                f"redis.wait_replicas is {redis.wait_replicas}: the embedded store has no replicas,"
                " and replicas of a cluster are not waited for"
            )
        password = redis.sentinel_password or "sentinel_password=" in redis.url
        if redis.sentinel_username and not password:
            yield "redis.sentinel_username needs redis.sentinel_password"
        has_login = redis.sentinel_username or redis.sentinel_password
        if has_login and "+sentinel://" not in redis.url:
            yield "a login of Sentinels needs redis+sentinel:// or rediss+sentinel:// in redis.url"
        ports = [one.port for one in (self.grpc, self.rest, self.metrics) if one.port]
        if len(set(ports)) < len(ports):
            yield (
                f"grpc.port {self.grpc.port}, rest.port {self.rest.port}, metrics.port"
                f" {self.metrics.port}: all must differ"
            )
        try:
            gates = GateSettings.from_thresholds(self.planner.thresholds)
            yield from (f"planner.{words}" for words in never_met(gates, self.window.plan_steps))
        except InvalidInput as error:
            yield f"planner.thresholds: {error}"
        try:
            find_policy(self.planner.policy)
        except InvalidInput as error:
            yield f"planner.policy: {error}"


_AT_MOST = (
    ("leader.renew_s", 3, "leader.lease_s", "one slow answer would cost the lease"),
    ("ingest.heartbeat_s", 3, "ingest.rank_lease_s", "one late answer would lose the rank"),
    ("window.plan_steps", 1, "window.steps", "a window never has as many"),
    ("planner.recent_steps", 4, "window.plan_steps", "a change of traffic could never be seen"),
    ("migration.batch_deadline_s", 1, "migration.prepare_deadline_s", "it would never count"),
)
"""Settings whose value, times a factor, may at most be that of another, and why."""
_NEEDS = (
    ("grpc.tls_cert_file", "grpc.tls_key_file", "TLS takes both"),
    ("grpc.tls_key_file", "grpc.tls_cert_file", "TLS takes both"),
    ("grpc.tls_client_ca_file", "grpc.tls_cert_file", "clients show certificates only over TLS"),
    (
        "grpc.tls_require_identity",
        "grpc.tls_client_ca_file",
        "without it ranks show no certificates",
    ),
    ("rest.tls_cert_file", "rest.tls_key_file", "TLS takes both"),
    ("rest.tls_key_file", "rest.tls_cert_file", "TLS takes both"),
    ("redis.password", "redis.url", "the embedded store has no password"),
)
"""Settings that are valid only with another one, and why."""


def never_met(gates: GateSettings, plan_steps: int) -> Iterator[str]:
    """Yield the thresholds that no window of `plan_steps` steps can meet."""
    if gates.min_window_steps > plan_steps:
        yield (
            f"thresholds.min_window_steps {gates.min_window_steps:g} exceeds window.plan_steps"
            f" {plan_steps}: no cycle could ever plan"
        )
    held_out = held_out_steps(plan_steps, int(gates.min_held_out_steps))
    if held_out < gates.min_held_out_steps:
        yield (
            f"thresholds.min_held_out_steps {gates.min_held_out_steps:g} must be a whole number"
            f" of at most {plan_steps // 2}, half of window.plan_steps ({plan_steps})"
        )

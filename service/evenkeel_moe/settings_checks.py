"""Contradictions between settings, with the arithmetic."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.planning.policies.registry import resolve_policy
from evenkeel_moe.settings import (
    GrpcSettings,
    PlannerSettings,
    RedisSettings,
    RestSettings,
    Settings,
    WindowSettings,
)


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


def contradictions(settings: Settings) -> Iterator[str]:
    """Yield the contradictions between settings, with the arithmetic."""
    yield from _leader_faults(settings)
    yield from _planner_faults(settings.planner, settings.window)
    yield from _redis_faults(settings.redis)
    yield from _grpc_faults(settings.grpc)
    yield from _rest_faults(settings.rest)
    ingest, migration = settings.ingest, settings.migration
    if 3 * ingest.heartbeat_s > ingest.rank_lease_s:
        yield (
            f"ingest.heartbeat_s {ingest.heartbeat_s:g} x 3 = {3 * ingest.heartbeat_s:g} exceeds"
            f" ingest.rank_lease_s {ingest.rank_lease_s:g}: one late answer would lose the rank"
        )
    if migration.batch_deadline_s > migration.prepare_deadline_s:
        yield (
            f"migration.batch_deadline_s {migration.batch_deadline_s:g} exceeds"
            f" migration.prepare_deadline_s {migration.prepare_deadline_s:g}"
        )
    for name, bound in asdict(settings.health).items():
        if not bound > 0:
            yield f"health.{name} is {bound:g}, must be above 0"
    listeners = {
        "grpc": settings.grpc.port,
        "rest": settings.rest.port,
        "metrics": settings.metrics.port,
    }
    ports = {name: port for name, port in listeners.items() if port}
    if len(set(ports.values())) < len(ports):
        told = ", ".join(f"{name}.port {port}" for name, port in ports.items())
        yield f"{told}: all must differ"


def _leader_faults(settings: Settings) -> Iterator[str]:
    leader = settings.leader
    if leader.replicas > 1 and not settings.redis.url:
        yield (
            f"leader.replicas is {leader.replicas} and redis.url is empty: replicas with embedded"
            " stores would all lead"
        )
    if 3 * leader.renew_s > leader.lease_s:
        yield (
            f"leader.renew_s {leader.renew_s:g} x 3 = {3 * leader.renew_s:g} exceeds"
            f" leader.lease_s {leader.lease_s:g}: one slow answer would cost the lease"
        )


def _planner_faults(planner: PlannerSettings, window: WindowSettings) -> Iterator[str]:
    if window.plan_steps > window.steps:
        yield f"window.plan_steps {window.plan_steps} exceeds window.steps {window.steps}"
    if 4 * planner.recent_steps > window.plan_steps:
        yield (
            f"planner.recent_steps {planner.recent_steps} x 4 = {4 * planner.recent_steps} exceeds"
            f" window.plan_steps {window.plan_steps}: a change of traffic could never be seen"
        )
    yield from _threshold_faults(planner.thresholds, window.plan_steps)
    try:
        resolve_policy(planner.policy)
    except InvalidInput as error:
        yield f"planner.policy: {error}"


def _threshold_faults(thresholds: Mapping[str, float], plan_steps: int) -> Iterator[str]:
    wrong = {
        name: value
        for name, value in thresholds.items()
        if not (math.isfinite(value) and value >= 0)
    }
    for name, value in wrong.items():
        yield f"planner.thresholds.{name} is {value}, must be finite and not negative"
    right = {name: value for name, value in thresholds.items() if name not in wrong}
    try:
        gates = GateSettings.from_thresholds(right)
    except InvalidInput as error:
        one_of_them = str(error).partition(" ")[0] in {one.name for one in fields(GateSettings)}
        yield f"planner.thresholds{'.' if one_of_them else ': '}{error}"
    else:
        yield from (f"planner.{words}" for words in never_met(gates, plan_steps))


def _redis_faults(redis: RedisSettings) -> Iterator[str]:
    if redis.wait_replicas and (not redis.url or "+cluster://" in redis.url):
        yield (
            f"redis.wait_replicas is {redis.wait_replicas}: the embedded store has no replicas, and"
            " replicas of a cluster are not waited for"
        )
    if (redis.sentinel_username or redis.sentinel_password) and "+sentinel://" not in redis.url:
        yield (
            "redis.sentinel_username and redis.sentinel_password need a redis+sentinel:// or"
            " rediss+sentinel:// URL"
        )
    if redis.sentinel_username and not (
        redis.sentinel_password or "sentinel_password=" in redis.url
    ):
        yield "redis.sentinel_username needs redis.sentinel_password"


def _grpc_faults(grpc: GrpcSettings) -> Iterator[str]:
    if (grpc.tls_cert_file is None) != (grpc.tls_key_file is None):
        yield "grpc.tls_cert_file and grpc.tls_key_file need each other"
    if grpc.tls_client_ca_file is not None and grpc.tls_cert_file is None:
        yield (
            "grpc.tls_client_ca_file needs grpc.tls_cert_file:"
            " clients show certificates only over TLS"
        )
    if grpc.tls_require_identity and grpc.tls_client_ca_file is None:
        yield (
            "grpc.tls_require_identity needs grpc.tls_client_ca_file:"
            " without it ranks show no certificates"
        )


def _rest_faults(rest: RestSettings) -> Iterator[str]:
    if (rest.tls_cert_file is None) != (rest.tls_key_file is None):
        yield "rest.tls_cert_file and rest.tls_key_file need each other"

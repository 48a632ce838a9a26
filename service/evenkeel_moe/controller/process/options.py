"""Turns the settings of a controller into the options of its parts."""

import socket
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.grpc.rank_port import ServerOptions
from evenkeel_moe.controller.cycles.cycle_inputs import CycleSettings
from evenkeel_moe.controller.deployment.deployment import DeploymentOptions
from evenkeel_moe.model.cost import TOKENS
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.peer_budget import PeerLimits
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from evenkeel_moe.settings import GrpcSettings, RestSettings, Settings
from evenkeel_moe.wire.link import FlowControl

_SILENT_LEASES = 3
"""Leases of a rank after which a stream that says nothing is ended: long after its rank is lost."""
_PROCESS_BYTES = 900_000_000
"""The controller without deployments, 256 MiB of messages that wait unprocessed, and 256 MiB of
reports of groups of which some ranks are missing."""
_PLANNER_BYTES = 300_000_000
"""One planner process."""
_OTHER_CALLS = 16
"""Calls of the store that belong to no deployment, at the same time."""
_MOST_STORE_CONNECTIONS = 1024
"""Servers accept about 10,000 connections by default, and there may be several replicas."""
T = TypeVar("T")


def server_options(settings: Settings) -> ServerOptions:
    """Return the options of the gRPC server."""
    limits = _from_sections(
        PeerLimits,
        settings.grpc,
        settings.advanced,
        silent_s=_SILENT_LEASES * settings.ingest.rank_lease_s,
    )
    return _from_sections(ServerOptions, settings.grpc, settings.advanced, limits=limits)


def advertised_address(grpc: GrpcSettings, port: int) -> str:
    """Return the host:port by which ranks reach this replica; `port` is the one it listens on."""
    if grpc.advertise:
        return grpc.advertise
    every_address = grpc.host in ("0.0.0.0", "::")
    return host_port(socket.gethostname() if every_address else grpc.host, port)


def rest_tls(rest: RestSettings) -> tuple[Path, Path] | None:
    """Return the files of the REST server's certificate and key, or None for clear text."""
    if rest.tls_cert_file is None or rest.tls_key_file is None:
        return None
    return rest.tls_cert_file, rest.tls_key_file


def deployment_options(settings: Settings, advertise: str) -> DeploymentOptions:
    """Return the options of every deployment; `advertise` is this replica's host:port."""
    planner, ingest, migration = settings.planner, settings.ingest, settings.migration
    advanced = settings.advanced
    return DeploymentOptions(
        leader=settings.leader,
        advertise=advertise,
        timing=_from_sections(
            ControlTiming,
            ingest,
            migration,
            cycle_deadline_s=2 * planner.deadline_s,
            wave=_from_sections(WaveTiming, migration, advanced),
        ),
        # The setting of the same name is for deployments whose policy and ranks name no dispatcher.
        policy=_from_sections(DeploymentPolicy, planner, dispatch=None),
        cycle=_from_sections(
            CycleSettings,
            settings.window,
            planner,
            # The objective's cost is a model, which each cycle chooses by planner.cost.
            objective=_from_sections(Objective, planner, cost=TOKENS),
        ),
        window_steps=settings.window.steps,
        max_pending=ingest.max_pending_steps,
        flow=_from_sections(FlowControl, ingest, advanced),
    )


def deployments_bytes(settings: Settings, limit_bytes: int) -> int:
    """Return the memory for all deployments; `limit_bytes` is that of the process and planners."""
    if settings.ingest.memory_bytes:
        return settings.ingest.memory_bytes
    return max(0, limit_bytes - _PROCESS_BYTES - settings.planner.workers * _PLANNER_BYTES)


def store_connections(settings: Settings) -> int:
    """Return how many connections to the store there may be for leases, and how many for the rest.

    One for each deployment, so that none waits for another.
    """
    return min(settings.ingest.max_deployments + _OTHER_CALLS, _MOST_STORE_CONNECTIONS)


def _from_sections(kind: type[T], *sections: Any, **others: Any) -> T:
    """Build a dataclass from the settings with the names of its fields, and from other values."""
    found = {
        one.name: getattr(section, one.name) for section in sections for one in fields(section)
    }
    taken = {one.name for one in fields(kind)} & found.keys()  # type: ignore[arg-type]
    return kind(**{**{name: found[name] for name in taken}, **others})

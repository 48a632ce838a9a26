"""What a plugin reads from the engine's environment, once, when the engine loads it.

`EVENKEEL_RANK__CONTROLLERS` alone switches the plugin on; without it the engine runs as if it were not installed.
"""

import re
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.load import Phase
from evenkeel_moe.wire.values import is_deployment_id

__all__ = ["GuestMode", "GuestSettings", "load_guest_settings"]

_Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""Up to a day: "inf" is a number that no wait takes."""
_ADDRESS = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]\s:/]+):[0-9]{1,5}")


class GuestMode(StrEnum):
    """How far the controller reaches into the engine."""

    OBSERVE = "observe"
    """Loads are reported; the engine's own balancer is left as it is configured."""
    PLACE = "place"
    """The engine's balancer moves experts to the controller's plans, and only to them."""


class GuestSettings(BaseSettings):
    """One rank's plugin, from `EVENKEEL_RANK__*`."""

    # An empty variable is one that was not set: a pod's template can clear a variable, but rarely leave it out.
    model_config = SettingsConfigDict(
        env_prefix="EVENKEEL_RANK__", frozen=True, extra="ignore", env_ignore_empty=True
    )

    controllers: str = ""
    """host:port of every controller replica, separated by commas; empty switches the plugin off."""
    deployment: str = "default"
    """Name of the deployment: one EP group serving one model. Lower case letters, digits, `._-`."""
    mode: GuestMode = GuestMode.OBSERVE
    phase: Phase = Phase.MIXED
    """What this engine serves; with disaggregated prefill and decode each side has its own deployment and phase."""
    node: str = Field(default_factory=socket.gethostname)
    """Name of the rank's fast-link domain."""
    host: str = ""
    """Address by which the other ranks reach rank 0's small store; empty takes the machine's name, which
    must then be known to the others."""
    interface: str = ""
    """Network interface of the gate's Gloo group; empty takes the one the machine's name leads to."""
    poll_every: Annotated[int, Field(ge=2, le=1_000_000)] = 16
    """Steps between two polls of the gate; a plan waits so long for its start."""
    resolve_after: Annotated[int, Field(ge=1)] = 8
    """Steps until a poll's result is used; below the poll's time the step waits for the network."""
    group_timeout_s: _Seconds = 300.0
    """How long the ranks wait for each other at the start: longer than the slowest takes to load more than the fastest,
    and shorter than NCCL's ten minutes, after which ranks without the plugin would end for want of the others."""
    gate_timeout_s: _Seconds = 20.0
    stall_after_s: _Seconds = 30.0
    """Seconds without a layer being switched after which a move is said to have stopped."""
    placement: str = ""
    """File written by `evenkeel export` that vLLM starts from; empty starts as vLLM does. SGLang has an
    option of its own, `--init-expert-location`. A file that does not fit, or not on every rank, is left out."""
    curves: str = ""
    """Folder of curves that `evenkeel profile` wrote on this machine; empty plans without them."""
    weights_version: Annotated[int, Field(ge=1, lt=2**63)] = 1
    tls_ca_file: Path | None = None
    """PEM of the CA that signed the controllers' certificates; with it only TLS is spoken. This and the two below are read
    for each connection, so new files serve from the next one on: at the latest after the controllers' longest age of one."""
    tls_cert_file: Path | None = None
    """PEM chain of this rank, where the controllers ask for one."""
    tls_key_file: Path | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The controllers, one by one."""
        return tuple(part.strip() for part in self.controllers.split(",") if part.strip())


def load_guest_settings() -> GuestSettings:
    """Read the environment.

    Raises:
        InvalidInput: a value that cannot be; the message names the variable.
    """
    try:
        settings = GuestSettings()
    except ValidationError as error:
        faults = (
            f"EVENKEEL_RANK__{'__'.join(str(part).upper() for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False, include_context=False)
        )
        raise InvalidInput("; ".join(faults)) from None
    if not is_deployment_id(settings.deployment):
        raise InvalidInput(
            f"EVENKEEL_RANK__DEPLOYMENT: {settings.deployment!r} is no deployment name"
        )
    for address in settings.addresses:
        if _ADDRESS.fullmatch(address) is None:
            raise InvalidInput(
                f"EVENKEEL_RANK__CONTROLLERS: {address!r} is not host:port; IPv6 addresses stand in brackets"
            )
    if settings.resolve_after > settings.poll_every:
        raise InvalidInput(
            f"EVENKEEL_RANK__RESOLVE_AFTER {settings.resolve_after} exceeds EVENKEEL_RANK__POLL_EVERY"
            f" {settings.poll_every}"
        )
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        raise InvalidInput(
            "EVENKEEL_RANK__TLS_CERT_FILE and EVENKEEL_RANK__TLS_KEY_FILE need each other"
        )
    if settings.tls_cert_file is not None and settings.tls_ca_file is None:
        raise InvalidInput(
            "EVENKEEL_RANK__TLS_CERT_FILE needs EVENKEEL_RANK__TLS_CA_FILE: without it no TLS is spoken"
        )
    return settings

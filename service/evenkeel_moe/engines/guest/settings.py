"""The settings of a plugin, read from the environment once, when the engine loads it.

Only `EVENKEEL_RANK__CONTROLLERS` or `EVENKEEL_RANK__RECORD` switches the plugin on. Without them
the engine runs as if the plugin were not installed.
"""

import re
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import is_deployment_id
from evenkeel_moe.model.load import Phase

_PREFIX = "EVENKEEL_RANK__"
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""At most one day, because "inf" is a valid float that no wait accepts."""
_ADDRESS = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]\s:/]+):[0-9]{1,5}")


def _first_name(names: str) -> str:
    """Return the first of several names separated by commas."""
    return names.split(",")[0].strip()


class GuestMode(StrEnum):
    """The influence of the controller on the engine."""

    OBSERVE = "observe"
    """Report loads only; the engine's own balancer runs as configured."""
    PLACE = "place"
    """The engine's balancer moves experts only as the controller plans."""


class GuestSettings(BaseSettings):
    """Settings of one rank's plugin, from `EVENKEEL_RANK__*`."""

    # An empty variable counts as not set: a pod template can clear a variable but rarely remove it.
    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        populate_by_name=True,
    )

    controllers: str = ""
    """host:port of every controller replica, separated by commas; empty switches the plugin off."""
    deployment: str = "default"
    """Name of the deployment: one EP group that serves one model. Lower case letters, digits,
    `._-`."""
    mode: GuestMode = GuestMode.OBSERVE
    phase: Phase = Phase.MIXED
    """The phase this engine serves. With disaggregated prefill and decode, each side is a
    deployment of its own."""
    node: str = Field(default_factory=socket.gethostname)
    """Name of the rank's fast-link domain."""
    host: str = Field(default="", validation_alias=AliasChoices(f"{_PREFIX}HOST", "VLLM_HOST_IP"))
    """Address at which the other ranks reach the store of rank 0. Without it `VLLM_HOST_IP` counts,
    then the host name, which the other machines must be able to resolve."""
    interface: Annotated[str, AfterValidator(_first_name)] = Field(
        default="", validation_alias=AliasChoices(f"{_PREFIX}INTERFACE", "GLOO_SOCKET_IFNAME")
    )
    """Network interface of the gate's Gloo group. Without it the first one in `GLOO_SOCKET_IFNAME`
    counts, then the one of the host name."""
    poll_every: Annotated[int, Field(ge=2, le=1_000_000)] = 16
    """Steps between two polls of the gate; a plan waits up to this long before it starts."""
    resolve_after: Annotated[int, Field(ge=1)] = 8
    """Steps until the result of a poll is used. If the poll takes longer, the step waits for it."""
    group_timeout_s: _Seconds = 300.0
    """Seconds that the ranks wait for each other at the start. It must exceed the difference in
    load time between the slowest and the fastest rank. It must be shorter than NCCL's ten minutes,
    after which ranks without the plugin would give up waiting for the others. In SGLang it is at
    most 0.8 of `--watchdog-timeout`, after which SGLang ends the server. Ranks beside the first
    wait for it up to 10 s longer."""
    gate_timeout_s: _Seconds = 20.0
    canary_step_s: Annotated[float, Field(ge=0, le=1)] = 5e-5
    """Seconds that a step may wait for the canary, which asks each moved expert one token and
    compares its answer with the registered one; 0 switches it off. Only in mode `place`."""
    stall_after_s: _Seconds = 30.0
    """Seconds without a switched layer after which a move counts as stalled."""
    seconds_every: Annotated[int, Field(ge=0, le=1_000_000)] = 8
    """The seconds of a rank's own routed experts are measured in one step of so many, and in all
    steps that are replayed from CUDA graphs; 0 measures none."""
    placement: str = ""
    """A file of `evenkeel placement export` with which vLLM starts, in mode `place`; empty starts
    as vLLM does. SGLang has its own option, `--init-expert-location`. A file that does not fit, or
    that some rank does not have, is ignored."""
    record: str = ""
    """Folder in which the ranks record their loads, in place of a controller: it switches the
    plugin on without one. All ranks of a group record into folders that `evenkeel record` or
    `evenkeel offline` sees as one."""
    record_steps: Annotated[int, Field(ge=512)] = 20_000
    """Steps that are kept in that folder; older ones are removed."""
    curves: str = ""
    """Folder of curves that `evenkeel profile` wrote on this machine; empty plans without them."""
    profile_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    """Seconds in which the time by tokens and replicas is measured again at the start, in a quarter
    of the free memory; 0 sends what was saved. Only with curves."""
    weights_version: Annotated[int, Field(ge=1, lt=2**63)] = 1
    tls_ca_file: Path | None = None
    """PEM file of the CA that signed the controllers' certificates; setting it switches TLS on. The
    three TLS files are read for every new connection. So renewed files are used at the latest
    when the controllers end a connection because of its age."""
    tls_cert_file: Path | None = None
    """PEM chain of this rank, if the controllers require one."""
    tls_key_file: Path | None = None

    @property
    def is_on(self) -> bool:
        """True if the plugin has anything to do."""
        return bool(self.addresses or self.record)

    @property
    def places(self) -> bool:
        """True if the engine's balancer must follow the controller."""
        return self.mode is GuestMode.PLACE

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses in `controllers`."""
        return tuple(part.strip() for part in self.controllers.split(",") if part.strip())


def settings_of_part(settings: GuestSettings, mark: str, part: str) -> GuestSettings:
    """Return the settings of one of an engine's groups of ranks, each of which is a deployment.

    Args:
        settings: the plugin's settings.
        mark: is added to the deployment's name.
        part: the group, in words.

    Raises:
        Unsupported: the name of the group's deployment is too long.
    """
    name = f"{settings.deployment}-{mark}"
    if not is_deployment_id(name):
        raise Unsupported(
            f"{name!r}, the deployment of {part}, has {len(name)} characters; a name has at most 63"
        )
    return settings.model_copy(update={"deployment": name})


def load_guest_settings() -> GuestSettings:
    """Read the environment.

    Raises:
        InvalidInput: an invalid value; the message names the variable.
    """
    try:
        settings = GuestSettings()
    except ValidationError as error:
        faults = (
            f"{_PREFIX}{'__'.join(str(part).upper() for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False, include_context=False)
        )
        raise InvalidInput("; ".join(faults)) from None
    fault = _find_fault(settings)
    if fault:
        raise InvalidInput(_PREFIX + fault)
    return settings


def _find_fault(settings: GuestSettings) -> str:
    """Return the first fault, starting with a variable's name; empty if there is none."""
    if not is_deployment_id(settings.deployment):
        return f"DEPLOYMENT: {settings.deployment!r} is not a valid deployment name"
    for address in settings.addresses:
        if _ADDRESS.fullmatch(address) is None:
            return f"CONTROLLERS: {address!r} is not host:port; IPv6 addresses need brackets"
    if settings.resolve_after > settings.poll_every:
        return (
            f"RESOLVE_AFTER {settings.resolve_after} exceeds {_PREFIX}POLL_EVERY"
            f" {settings.poll_every}"
        )
    if settings.record and settings.addresses:
        return f"RECORD is for loads without a controller, and {_PREFIX}CONTROLLERS names one"
    if settings.record and settings.places and not settings.placement:
        return f"RECORD needs {_PREFIX}MODE observe: nobody plans without a controller"
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        return f"TLS_CERT_FILE and {_PREFIX}TLS_KEY_FILE must be set together"
    if settings.tls_cert_file is not None and settings.tls_ca_file is None:
        return f"TLS_CERT_FILE needs {_PREFIX}TLS_CA_FILE, which switches TLS on"
    return ""

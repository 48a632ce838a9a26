"""What an agent must know of its rank; plain values, handed in by the engine."""

from dataclasses import dataclass

from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import RankIdentity

__all__ = ["AgentConfig"]


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One rank's agent. K, D and the timeouts must be equal on all ranks of the group."""

    identity: RankIdentity
    shape: ModelShape
    node: str
    """Name of the rank's fast-link domain, usually the host."""
    gpu_uuid: str = ""
    """Empty on CPU."""
    weights_version: int = 1
    """Of the weights loaded at the start; raised by every reload."""
    side: CountingSide = CountingSide.DESTINATION
    """What `record` is given: (L, slots_per_rank) counts, or (L, E) for SOURCE."""
    staging_bytes: int = 256 << 20
    """Allocated at the start, on the device; bounds what one wave may bring to this rank."""
    poll_every: int = 8
    """K: calls of step_boundary between polls. A plan's wave waits for up to K + D steps; a poll costs tens of
    microseconds of the step that begins it."""
    resolve_after: int = 4
    """D: calls until a poll's result is used. At least the poll's time over a step's, or steps wait for it."""
    gate_timeout_s: float = 20.0
    """A poll that takes longer is an error, and an error in the gate restarts the group (R8)."""
    drop_after_s: float = 30.0
    """Silence of every leader after which the group drops a wave it holds (R6)."""
    ring_steps: int = 1024
    """Steps kept while the controller is out of reach; older ones are dropped and counted."""

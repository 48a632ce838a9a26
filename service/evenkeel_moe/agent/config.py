"""The configuration of an agent: plain values, passed in by the engine."""

from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import DEPLOYMENT_ID, is_deployment_id
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Lineage, RankIdentity


class LoraOnExperts(StrEnum):
    """States if LoRA adapters change what the experts compute, and if the agent moves them."""

    NONE = "none"
    """No adapter changes an expert."""
    DECLARED = "declared"
    """The adapters' tensors of an expert are among `ExpertWeights.tensors`, and loading or removing
    an adapter is a reload (`Agent.request_reload`)."""
    NOT_DECLARED = "not_declared"
    """There are such adapters and the agent does not see their tensors: refused."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Configuration of one rank's agent.

    `poll_every`, `resolve_after` and the timeouts must be equal on all ranks of the group.

    Raises:
        InvalidInput: a name that no controller accepts; or experts that the agent cannot move as a
            whole, see `expert_shards` and `lora`.
    """

    identity: RankIdentity
    shape: ModelShape
    node: str
    """Name of the rank's fast-link domain, usually the host."""
    gpu_uuid: str = ""
    """Empty on CPU."""
    device_name: str = ""
    """Name of the device as torch gives it; empty on CPU."""
    weight_format: str = ""
    """Number type in which the experts are computed, such as "bf16"; empty if unknown."""
    dispatch: str = ""
    """The engine's rule to split the tokens of an expert over its replicas: a value of
    `DispatchModel`, or the engine's own name; empty if unknown."""
    slots_stay_filled: bool = False
    """True if the engine cannot leave a slot empty; plans then fill all slots."""
    expert_shards: int = 1
    """Ranks over which tensor parallelism divides each expert. Only 1 is accepted: the shards of an
    expert would have to be copied and switched on all of these ranks together."""
    lora: LoraOnExperts = LoraOnExperts.NONE
    """Adapters on experts; those that are not declared are refused, because they would stay behind
    when their expert moves."""
    observe_only: bool = False
    """True if this rank refuses every wave because its configuration asks so, which is no fault.
    It tells the controller in the first message of each stream."""
    lineage: Lineage | None = None
    """The group of another size that this one came from, if it did. Epochs and the numbers of steps
    go on from there."""
    weights_version: int = 1
    """Version of the weights loaded at the start; every reload raises it."""
    side: CountingSide = CountingSide.DESTINATION
    """Shape of the counts that `record` takes: (L, slots_per_rank), or (L, E) for SOURCE."""
    staging_bytes: int = 256 << 20
    """Memory allocated on the device at the start; limits what one wave may bring to this rank."""
    poll_every: int = 8
    """K: calls of `step_boundary` between polls. A wave waits for up to K + D steps. A poll costs
    the step that begins it tens of microseconds."""
    resolve_after: int = 4
    """D: calls from the start of a poll until its result is used. Choose at least the duration of a
    poll divided by that of a step, or steps wait for the poll."""
    gate_timeout_s: float = 20.0
    """A poll that takes longer is an error, and an error in the gate restarts the group (R8)."""
    drop_after_s: float = 30.0
    """Time without any message from a leader after which the group drops a wave it holds (R6)."""
    canary_step_s: float = 5e-5
    """Seconds that a step may wait for the canary, which asks moved experts the probe's token; 0
    asks none."""
    ring_steps: int = 1024
    """Steps kept while the controller is out of reach; older ones are dropped and counted."""

    def __post_init__(self) -> None:
        name = self.identity.deployment
        if not is_deployment_id(name):
            raise InvalidInput(f"deployment {name[:80]!r} is not {DEPLOYMENT_ID}")
        if self.expert_shards != 1:
            raise InvalidInput(
                f"deployment {self.identity.deployment}: tensor parallelism divides each expert"
                f" over {self.expert_shards} ranks (expert_shards={self.expert_shards}), and the"
                " agent moves whole experts only; keep whole experts on each EP rank, or serve"
                " without an agent"
            )
        if self.lora is LoraOnExperts.NOT_DECLARED:
            raise InvalidInput(
                f"deployment {self.identity.deployment}: adapters change what experts compute, and"
                " their tensors are not declared (lora=not_declared); return them from"
                " ExpertWeights.tensors, or serve without an agent"
            )

    @property
    def counts_per_layer(self) -> int:
        """The number of counts that `record` takes for one layer."""
        if self.side is CountingSide.DESTINATION:
            return self.shape.slots_per_rank
        return self.shape.num_logical_experts

"""What one run of the reference engine is, how its processes end, and the lines they write.

This module imports neither torch nor the agent, so that command lines and views can read it.

Files under `run_folder`
    config.json             the RankConfig every rank reads (rank -1 in the file)
    rank-R.jsonl            lines of rank R over all attempts, see below
    rank-R.log              stdout and stderr of rank R
    supervisor.jsonl        lines of the supervisor: `started`, `rank_died`, `restarted`, `stopped`, `finished`
    state/rank-R.npz        last committed placement of rank R, replaced atomically
    rendezvous-A            file store of attempt A

Lines of a rank, one JSON object each; `kind` tells which, `rank` and `unix` are always there:

=========  ==========================================================================================
kind       further keys
=========  ==========================================================================================
start      attempt, pid, generation, epoch, warm (placement came from a state file), step (the first),
           device, placement_digest
step       step, seconds (one step without pacing and checks), tokens (routed by this rank), epoch, domain
           (`prose`, `code` or `trace`), rank_load (L integers: tokens this rank's slots received),
           served (L integers: tokens it computed, by fetched experts and the shared one too),
           mismatches (rows that differed from the undistributed model since the start)
staging    plan_id, wave_index, bytes_done, bytes_total
swap       step, epoch (the new one), plan_id, wave_index, layers, seconds (how long the step was held up),
           received_bytes
fault      fault, step, detail: what was broken on purpose
problem    step, problems: what this rank found wrong in itself when its first row differed
check      final check: ok, problems (list of sentences, empty when ok), epoch, epochs_agree, maps_agree,
           slots_checked, wrong_slots (list of {layer, local_slot, expert}), rows_checked, mismatches,
           swaps, dropped_records
exit       code, reason (a Reason or `finished`), detail
=========  ==========================================================================================
"""

import dataclasses
import json
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.objective import DispatchModel

__all__ = ["DispatchRule", "ExitCode", "Fault", "RankConfig"]


class ExitCode(IntEnum):
    """How a rank process ended."""

    FINISHED = 0
    """All steps done, or stopped on request; the final check passed."""
    FAILED = 1
    """An error nobody foresaw; the log has the traceback."""
    CHECK_FAILED = 40
    """The final check found wrong weights, maps or outputs."""
    EPOCH_MISMATCH = 41
    """A peer computed under another epoch: the rank left before it could mix them (R8)."""
    GATE_FAILED = 42
    """The gate's answer was unknown: fail-stop (R8)."""
    GROUP_LOST = 43
    """A peer went away in the middle of a collective."""


class DispatchRule(StrEnum):
    """Which replica serves a token, and where shared experts run; see docs/dispatch.md."""

    EVEN = "even"
    """Replicas take turns by a hash of the token."""
    NEAREST = "nearest"
    """Own rank, else own node, else even."""
    LPLB = "lplb"
    """Whole-token quotas that make the fullest rank as empty as the placement allows, every batch anew."""
    WATERFILL = "waterfill"
    """Even, and shared experts run where there is room."""
    LIBRA = "libra"
    """Two stages: own tokens on own experts, then the rest, sharded; next layer's experts fetched ahead."""

    @property
    def model(self) -> DispatchModel:
        """What the planner should plan for. Libra splits as freely as LPLB where tokens travel."""
        if self is DispatchRule.NEAREST:
            return DispatchModel.NEAREST
        return (
            DispatchModel.OPTIMAL
            if self in (DispatchRule.LPLB, DispatchRule.LIBRA)
            else DispatchModel.EVEN
        )


class Fault(StrEnum):
    """What can be broken on purpose on one rank, after its first swap."""

    BYTE = "byte"
    """One byte of one expert's weights in a reachable slot is flipped."""
    MAP = "map"
    """One entry of the installed map is wrong."""
    EPOCH = "epoch"
    """The rank advances its epoch alone."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank of one run. Every rank of a run has the same values, `rank` apart."""

    run_folder: str
    """Where lines, logs and state go; made if absent."""
    rank: int = -1
    """0..num_ranks-1; -1 in a configuration that is not yet given to a rank."""
    num_ranks: int = 4
    nodes: tuple[int, ...] = ()
    """(R,) node index of each rank; empty means one node."""
    deployment: str = "reference"
    controllers: tuple[str, ...] = ()
    """`host:port` of the controller replicas, tried in turn; empty runs without a controller."""
    seed: int = 3
    """Of weights, gates and embeddings. The default skews well: balancedness about 0.65 as placed at the start, 0.95
    once planned, 0.81 right after the shift to code."""

    # The model.
    layers: int = 4
    experts: int = 16
    top_k: int = 2
    slots_per_rank: int = 0
    """Local slots of one layer's map row; how many may be filled is bounded by the pool. 0 takes half as many again
    as the pool has per layer: 8 for 16 experts on 4 ranks."""
    pool_slots_per_layer: int = 0
    """Weight buffers per rank and layer on average: the pool holds layers times this many. 0 takes one more than an
    even share of the experts: 5 for 16 experts on 4 ranks."""
    d_model: int = 64
    d_ffn: int = 128

    dispatch: DispatchRule = DispatchRule.EVEN
    transient_experts: int = 2
    """N of Libra: experts a rank fetches per layer, for that layer of that batch only."""

    # The traffic.
    tokens_per_step: int = 256
    """Tokens one rank routes in one step."""
    steps: int = 400
    """Stop after this many steps; 0 runs until stopped."""
    shift_at: int = 0
    """Step from which the text is code instead of prose; 0 never shifts."""
    trace: str = ""
    """An .npz of recorded routing (`ids` or `T`); its layers, experts and top_k replace the ones here."""
    min_step_s: float = 0.0
    """Pacing: a step takes at least this long, so that a demonstration lasts as long as wanted."""
    first_step: int = 0
    """Where a restarted group goes on; set by the supervisor."""
    verify_every: int = 1
    """Outputs are compared with the undistributed model every so many steps; 0 never."""

    # The agent.
    agent: bool = True
    """False runs the bare engine, for measuring the agent's cost."""
    staging_bytes: int = 4 << 20
    """Room for staged experts on one rank."""
    poll_every: int = 4
    """K: calls of step_boundary between two polls of the gate."""
    poll_latency: int = 2
    """D: calls between the start of a poll and the use of its result."""
    gate_timeout_s: float = 20.0

    # The process.
    attempt: int = 0
    """How often the group was restarted before; set by the supervisor."""
    rendezvous: str = ""
    """torch.distributed init method; set by the supervisor."""
    group_timeout_s: float = 60.0
    """Deadline of one collective of the engine."""
    device: str = "auto"
    """`auto` takes the GPU with the rank's number when there are enough of them, else the CPU."""
    interface: str = "lo"
    """Network interface of the Gloo groups."""
    fault: Fault | None = None
    fault_rank: int = 0
    fault_at: int = 0
    """Step from which the fault strikes; 0 waits for the first swap. Only the first attempt has faults."""

    def __post_init__(self) -> None:
        if not -1 <= self.rank < self.num_ranks:
            raise InvalidInput(f"rank {self.rank} is outside 0..{self.num_ranks - 1}")
        if self.nodes and len(self.nodes) != self.num_ranks:
            raise InvalidInput(f"{len(self.nodes)} node indices for {self.num_ranks} ranks")
        if self.poll_every < 1 or not 1 <= self.poll_latency:
            raise InvalidInput(
                f"poll_every {self.poll_every} and poll_latency {self.poll_latency} must be >= 1"
            )
        if self.tokens_per_step < 1:
            raise InvalidInput(f"tokens_per_step is {self.tokens_per_step}, must be at least 1")
        if not self.pool_slots_per_layer:
            object.__setattr__(self, "pool_slots_per_layer", -(-self.experts // self.num_ranks) + 1)
        if not self.slots_per_rank:
            half_more = self.pool_slots_per_layer + -(-self.pool_slots_per_layer // 2)
            object.__setattr__(self, "slots_per_rank", half_more)
        if not self.trace:
            self.shape  # noqa: B018 - sizes that cannot hold the experts are refused here
        if self.transient_experts < 0:
            raise InvalidInput(
                f"transient_experts is {self.transient_experts}, must not be negative"
            )
        if not 0 <= self.fault_rank < self.num_ranks:
            raise InvalidInput(f"fault_rank {self.fault_rank} is outside 0..{self.num_ranks - 1}")

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of the two matrices and the scale of one expert."""
        return 4 * (2 * self.d_model * self.d_ffn + self.d_ffn)

    @property
    def shape(self) -> ModelShape:
        """The deployment's shape as ranks declare it (a trace's sizes must be in already, see `rank.with_trace_sizes`)."""
        return ModelShape(
            num_layers=self.layers,
            num_logical_experts=self.experts,
            num_ranks=self.num_ranks,
            slots_per_rank=self.slots_per_rank,
            top_k=self.top_k,
            bytes_per_expert=self.bytes_per_expert,
            pool_slots_per_rank=self.layers * self.pool_slots_per_layer,
        )

    @property
    def folder(self) -> Path:
        """`run_folder` as a path."""
        return Path(self.run_folder)

    @property
    def node(self) -> str:
        """Name of this rank's node."""
        return f"node-{self.nodes[self.rank] if self.nodes else 0}"

    def replace(self, **changes: Any) -> "RankConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RankConfig":
        """The inverse of `to_json`.

        Raises:
            InvalidInput: unknown fields, values out of range, or too few slots for the experts.
        """
        values = json.loads(text)
        for name in ("nodes", "controllers"):
            values[name] = tuple(values.get(name, ()))
        if "dispatch" in values:
            values["dispatch"] = DispatchRule(values["dispatch"])
        fault = values.get("fault")
        values["fault"] = Fault(fault) if fault else None
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidInput(f"not a rank configuration: {error}") from error

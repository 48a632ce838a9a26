"""The configuration of a run of the reference engine, its exit codes, and the lines it writes.

This module imports neither torch nor the agent, so that the command line and the demo can load it.

Files under `run_folder`::

    config.json       the RankConfig that every rank reads (rank -1 in the file), of the group that
                      serves; during a resize of the next one. Replaced atomically
    rank-R.jsonl      lines of rank R over all groups, see below
    rank-R.log        stdout and stderr of the processes that started as rank R, with their lines
                      `start`, `lost`, `resized`, `swap`, `fault`, `problem` and `exit`
    supervisor.jsonl  lines of the supervisor: `started`, `rank_died`, `restarted`, `resizing`,
                      `forming` (the old group was told to stop), `resized`, `resize_failed`,
                      `finished`
    state/rank-R.npz  last committed placement of rank R, replaced atomically
    rendezvous-G      file store of group G
    lock              locked while a fleet runs in the folder
    resize-*.json     requests of `evenkeel fleet resize`, and the answers

A group is formed at the start, at each restart and at each resize. A process that stays through a
resize may get another rank. From then on it writes to the file of that rank: a file has what one
rank of each group wrote, so each (group, rank) stands in one file, and each step once.

Lines of a rank are JSON objects. All have `kind`, `rank`, `group` and `unix`:

=======  ===========================================================================================
kind     further keys
=======  ===========================================================================================
ready    pid: a process that joins a group of another size has loaded, and waits for the group
start    attempt, pid, generation, epoch, warm (placement came from a state file), step (the first),
         device, placement_digest, ranks (of the group), former_rank (of this process in the group
         before; null if it was not there), loaded_bytes (of experts, read from the checkpoint since
         the process started)
step     step, seconds (one step without pacing and checks), tokens (routed by this rank), epoch,
         domain (`prose`, `code` or `requests`),
         rank_load (L integers: tokens this rank's slots received),
         served (L integers: tokens it computed, also with fetched and shared experts),
         compute_s (L numbers: seconds in the routed experts of each layer),
         paced_s (L numbers: the least of these seconds that the pace allows; none where a rank
         fetches experts),
         mismatches (rows that differed from the undistributed model since the start); with
         requests also running (requests) and free_blocks (of the KV cache)
request  arrived_s, admitted_s, first_s (its first token), ended_s: seconds after the rank's first
         step; first_step, ended_step; prompt, output (tokens), digest (of its activations after the
         last layer)
drained  next_group: this rank retires then, and has no request left
gave_up  arrived_s, prompt, output, done (tokens computed): a request that a retiring rank left
lost     next_step, epoch, detail: a collective failed because another rank is gone; this rank waits
         for a group without it
resized  pause_s: from the end of the last step of the old group to the first of this one; of it
         agreed_s (who goes), closed_s (the old agent), joined_s (rendezvous and placement),
         started_s (the agent); recovered (experts read from the checkpoint, because they died with
         their ranks)
refused  next_group, detail: the placement changed meanwhile; the group serves on as it is
staging  plan_id, wave_index, bytes_done, bytes_total
swap     step, epoch (the new one), plan_id, wave_index, layers, seconds (delay of the step),
         received_bytes
fault    fault, step, detail: what this rank broke on purpose
problem  step, problems: what this rank found in itself when its first row differed
check    final check: ok, problems (list of sentences, empty when ok), epoch, epochs_agree,
         maps_agree, slots_checked, wrong_slots (list of {layer, local_slot, expert}),
         rows_checked, mismatches, swaps, dropped_records
link     connected (to a controller), detail: why not, empty if connected; written when it changes
exit     code, reason (a Reason or `finished`), detail
=======  ===========================================================================================
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from evenkeel_moe.adapters.addresses import is_host_port
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape

_FLOAT32_BYTES = 4
_KV_FREE_BYTES = 8 << 20
"""A replica of every layer takes 3 % of it, with the default sizes."""


class ExitCode(IntEnum):
    """The exit code of a rank process."""

    FINISHED = 0
    """All steps were done, or a stop was requested; the final check passed."""
    FAILED = 1
    """An unexpected error; the log has the traceback."""
    CHECK_FAILED = 40
    """The final check found wrong weights, maps or outputs."""
    EPOCH_MISMATCH = 41
    """A peer has another epoch; the rank left before it computed (R8)."""
    GATE_FAILED = 42
    """The result of the gate is unknown: fail-stop (R8)."""
    GROUP_LOST = 43
    """A peer ended during a collective."""


class DispatchRule(StrEnum):
    """The choice of a token's replica and of the shared experts' rank; see docs/dispatch.md."""

    EVEN = "even"
    """A hash of the token chooses the replica."""
    NEAREST = "nearest"
    """The own rank, else the own node, else `even`."""
    LPLB = "lplb"
    """Quotas of whole tokens, computed for each batch, that minimize the largest rank load."""
    FEWEST = "fewest"
    """One replica for each expert and batch, so that few experts are active on the fullest rank."""
    WATERFILL = "waterfill"
    """`even`, and the shared expert of a token runs on the rank with the most room of those that
    the token visits, by the load of all ranks."""
    WATERFILL_STATIC = "waterfill-static"
    """`waterfill` by the load of the own rank's tokens alone, without a collective."""
    WATERFILL_ALL_RANKS = "waterfill-all-ranks"
    """`waterfill` that may choose any rank, at the price of new transfers."""
    LIBRA = "libra"
    """First own tokens on own experts, then the rest; fetches the next layer's experts ahead. Both
    by the algorithms of the paper."""
    LIBRA_REFINED = "libra-refined"
    """`libra` that fetches all the experts it may and splits the other tokens exactly."""

    @property
    def fetches(self) -> bool:
        """True if ranks compute experts that they fetched for one batch."""
        return self in (DispatchRule.LIBRA, DispatchRule.LIBRA_REFINED)

    @property
    def moves_shared(self) -> bool:
        """True if shared experts run where there is room, not at home."""
        return self.value.startswith(DispatchRule.WATERFILL.value)

    @property
    def model(self) -> DispatchModel:
        """The model the planner should use, whose name the ranks tell the controller.

        Libra splits tokens between ranks as freely as LPLB.
        """
        if self is DispatchRule.LPLB or self.fetches:
            return DispatchModel.OPTIMAL
        if self.moves_shared:
            return DispatchModel.WATERFILL
        return DispatchModel(self.value)


class Fault(StrEnum):
    """Damage that a rank does to itself on purpose, after its first swap."""

    BYTE = "byte"
    """One byte of one expert's weights in a reachable slot is flipped."""
    MAP = "map"
    """One entry of the installed map is wrong."""
    EPOCH = "epoch"
    """Only this rank raises its epoch."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank of one run. All ranks of a run have the same values except `rank`."""

    run_folder: str
    """Folder of lines, logs and state; made if it is missing."""
    rank: int = -1
    """0..num_ranks-1; -1 in a configuration that no rank has yet."""
    num_ranks: int = 4
    nodes: tuple[int, ...] = ()
    """(R,) node index of each rank; empty means one node."""
    deployment: str = "reference"
    controllers: tuple[str, ...] = ()
    """`host:port` of each controller replica; empty runs without a controller."""
    seed: int = 3
    """Seed of weights, gates and embeddings. The default gives a clear imbalance: balancedness is
    about 0.65 with the initial placement, 0.95 after a plan, and 0.81 right after the shift to
    code."""

    # The model.
    layers: int = 4
    experts: int = 16
    top_k: int = 2
    slots_per_rank: int = 0
    """Local slots per layer; the pool limits how many can be filled. 0 takes 1.5 times
    `pool_slots_per_layer`: 8 for 16 experts on 4 ranks."""
    pool_slots_per_layer: int = 0
    """Mean number of weight buffers per layer: a rank's pool has `layers` times this many. 0
    takes an even share of the experts plus one: 5 for 16 experts on 4 ranks; with requests plus
    five."""
    d_model: int = 64
    d_ffn: int = 128

    dispatch: DispatchRule = DispatchRule.EVEN
    transient_experts: int = 2
    """N of Libra: the experts that a rank fetches for one layer of one batch."""
    overlap: bool = True
    """False ends every stage of Libra before the next one begins, for comparison."""
    timeline: bool = False
    """Write when each stage of Libra began and ended, with every step."""

    # The traffic.
    tokens_per_step: int = 256
    """Tokens that one rank routes in one step; with requests at most."""
    steps: int = 400
    """Stop after this many steps; 0 runs until stopped."""
    shift_at: int = 0
    """First step whose text is code instead of prose; 0 stays with prose."""
    shift_back: bool = False
    """The text changes back and forth, every `shift_at` steps."""
    requests_per_s: float = 0.0
    """Requests that arrive at one rank in a second, on average; they replace the endless text.
    Their KV cache is in the buffers of the pool that experts leave. 0 has neither."""
    prompt_tokens: int = 48
    """Mean length of a prompt."""
    output_tokens: int = 16
    """Mean number of tokens that a request puts out."""
    min_step_s: float = 0.0
    """A step takes at least this long; sets the duration of a demo."""
    first_step: int = 0
    """First step of a group that starts from nothing; set by the supervisor."""
    verify_every: int = 1
    """Steps between comparisons of the outputs with the undistributed model; 0 never compares."""

    # The compute time; see `pace`.
    pace_s_per_token: float = 0.0
    """Least seconds of a rank's experts in a layer per token; 0 takes as long as the CPU does."""
    pace_s_per_replica: float = 0.0
    """The same per active replica, added to the tokens' time."""
    slow_rank: int = 0
    slow_factor: float = 1.0
    """The experts of `slow_rank` take this many times as long; 1 slows nothing."""
    slow_from: int = 0
    """First slow step."""
    slow_until: int = 0
    """First step at the usual speed again; 0 stays slow."""

    # The agent.
    report_seconds: bool = True
    """False reports no compute seconds, like an engine that cannot measure them."""
    tell_cost: bool = False
    """Tell the controller the rank's own compute time at the start, as after a profile."""
    shrinks: bool = False
    """After a death the other ranks go on as a smaller group; else all ranks start again."""
    agent: bool = True
    """False runs the engine without an agent, to measure the agent's cost."""
    kv_bytes_per_token: int | None = None
    """Told to the controller as the rank's own; the engine has no KV cache. None tells nothing."""
    kv_free_bytes: int | None = None
    """The same for the bytes of its KV cache. Both are given or neither."""
    staging_bytes: int = 4 << 20
    """Memory for staged experts on one rank."""
    gate_timeout_s: float = 20.0

    # The group; set by the supervisor.
    group: int = 0
    """Number of the group, which grows from group to group of a run."""
    attempt: int = 0
    """Restarts of the group so far."""
    former: tuple[int | None, ...] = ()
    """(R,) the rank of each process in the group before, None for one that joins; empty for a group
    that starts from nothing."""
    forming: bool = True
    """False while the processes that join and leave a group of another size get ready."""
    dead: tuple[int, ...] = ()
    """Ranks of the group before that died, if the others go on without them."""
    rendezvous: str = ""
    """torch.distributed init method."""

    # The process.
    group_timeout_s: float = 60.0
    """Deadline of each collective of the engine."""
    device: str = "auto"
    """`auto` takes the GPU with the rank's number if there are enough GPUs, else the CPU."""
    fault: Fault | None = None
    """Only the first attempt has one."""
    fault_rank: int = 0

    def __post_init__(self) -> None:
        if not self.pool_slots_per_layer:
            spare = 5 if self.requests_per_s else 1
            pool = -(-self.experts // self.num_ranks) + spare
            object.__setattr__(self, "pool_slots_per_layer", pool)
        if not self.slots_per_rank:
            half_more = self.pool_slots_per_layer + -(-self.pool_slots_per_layer // 2)
            object.__setattr__(self, "slots_per_rank", half_more)
        fault = next(self._faults(), "")
        if fault:
            raise InvalidInput(fault)
        self.shape  # noqa: B018 - refuses sizes that cannot hold the experts

    def _faults(self) -> Iterator[str]:
        """Yield what is wrong with the values, in words."""
        for name, least in (("rank", -1), ("fault_rank", 0), ("slow_rank", 0)):
            if not least <= getattr(self, name) < self.num_ranks:
                yield f"{name} {getattr(self, name)} is outside 0..{self.num_ranks - 1}"
        for name, lowest in (
            ("tokens_per_step", 1),
            ("transient_experts", 0),
            ("requests_per_s", 0),
            ("prompt_tokens", 1),
            ("output_tokens", 1),
            ("pace_s_per_token", 0),
            ("pace_s_per_replica", 0),
            ("slow_factor", 1),
        ):
            value = getattr(self, name)
            if not lowest <= value < math.inf:
                yield f"{name} is {value}, must be finite and at least {lowest}"
        if self.nodes and len(self.nodes) != self.num_ranks:
            yield f"{len(self.nodes)} node indices for {self.num_ranks} ranks"
        if self.former and len(self.former) != self.num_ranks:
            yield f"{len(self.former)} former ranks for {self.num_ranks} ranks"
        if self.slow_from < 0 or (self.slow_until and self.slow_until <= self.slow_from):
            yield f"slow_from {self.slow_from} and slow_until {self.slow_until} leave no slow step"
        paced = self.pace_s_per_token or self.pace_s_per_replica or self.slow_factor > 1.0
        if paced and self.dispatch.fetches:
            yield f"dispatch {self.dispatch} has no pace and no slow rank"
        if self.requests_per_s and self.dispatch.fetches:
            yield (
                f"dispatch {self.dispatch} gathers equally large batches of all ranks, and"
                " requests_per_s gives each rank its own"
            )
        if (self.kv_bytes_per_token is None) != (self.kv_free_bytes is None):
            yield (
                f"kv_bytes_per_token is {self.kv_bytes_per_token} and kv_free_bytes is"
                f" {self.kv_free_bytes}: give both or neither"
            )
        if self.requests_per_s and self.d_ffn < self.layers:
            yield (
                f"d_ffn {self.d_ffn} below layers {self.layers}: no KV token fits the memory of an"
                " expert"
            )
        if self.tell_cost and not self.pace_s_per_token:
            yield "tell_cost needs pace_s_per_token, the time that is told"
        for address in self.controllers:
            if not is_host_port(address):
                yield (
                    f"controller {address!r} is not host:port of its gRPC server, such as"
                    " 127.0.0.1:50051"
                )

    def slowdown(self, step: int) -> float:
        """Return how many times as long this rank's experts take at a step."""
        over = self.slow_until and step >= self.slow_until
        slow = self.rank == self.slow_rank and step >= self.slow_from and not over
        return self.slow_factor if slow else 1.0

    @property
    def bytes_per_expert(self) -> int:
        """The bytes of one expert: two matrices and the scale."""
        return _FLOAT32_BYTES * (2 * self.d_model * self.d_ffn + self.d_ffn)

    @property
    def model_sizes(self) -> dict[str, int]:
        """The arguments of `Model.build` but the device."""
        return {
            "seed": self.seed,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "d_model": self.d_model,
            "d_ffn": self.d_ffn,
        }

    @property
    def shape(self) -> ModelShape:
        """The deployment's shape."""
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
    def file(self) -> Path:
        """The file from which the ranks of a run read their configuration."""
        return self.folder / "config.json"

    @property
    def former_rank(self) -> int | None:
        """The rank of this process in the group before; None if it was not there."""
        return self.former[self.rank] if self.former else None

    @property
    def state_file(self) -> Path:
        """The file with the last placement that this rank committed."""
        return self.folder / "state" / f"rank-{self.rank}.npz"

    @property
    def node(self) -> str:
        """The name of this rank's node."""
        return f"node-{self.nodes[self.rank] if self.nodes else 0}"

    def replace(self, **changes: Any) -> "RankConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_simulated_kv_cache(
        self, bytes_per_token: int | None = None, free_bytes: int | None = None
    ) -> "RankConfig":
        """Return a copy whose ranks tell of a KV cache, which this engine does not have.

        None takes what an engine of this shape could have: float32 keys and values of every layer,
        and `_KV_FREE_BYTES`.
        """
        own = 2 * self.layers * self.d_model * _FLOAT32_BYTES
        return self.replace(
            kv_bytes_per_token=own if bytes_per_token is None else bytes_per_token,
            kv_free_bytes=_KV_FREE_BYTES if free_bytes is None else free_bytes,
        )

    def to_json(self) -> str:
        """Return the configuration as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RankConfig":
        """Read what `to_json` returned.

        Raises:
            InvalidInput: unknown fields, values out of range, or too few slots for the experts.
        """
        values = json.loads(text)
        for name in ("nodes", "controllers", "former", "dead"):
            values[name] = tuple(values.get(name, ()))
        if "dispatch" in values:
            values["dispatch"] = DispatchRule(values["dispatch"])
        fault = values.get("fault")
        values["fault"] = Fault(fault) if fault else None
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidInput(f"not a rank configuration: {error}") from error

"""The invariants that must hold at every step, whatever fails."""

from evenkeel_moe.model.plan import PlanPhase

TORN_MAP = "torn map"
WRONG_BYTES = "wrong bytes"
RECORDS_DISAGREE = "records disagree"
NO_PROGRESS = "no progress"
UNMATCHED_OPERATION = "unmatched operation"
WAVE_REFUSED = "wave refused"
NO_LOCK = "no lock"
AGENT_ERROR = "error of the agent"


class Violation(Exception):
    """An invariant is broken."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class Checks:
    """The true state of the group, and the checks of machines and records against it."""

    def __init__(self, world) -> None:
        self.world = world
        self.found: Violation | None = None
        """The first broken invariant."""
        self.truth: dict = {}
        """(generation, epoch) -> placement, as the first rank installed it."""
        self.saved: set = set()
        """(generation, epoch) of every placement that some rank saved."""
        self.swapped: set = set()
        """wave of every wave that some rank swapped."""
        self.outcomes: dict = {}
        """wave -> committed, as leaders took it to have ended."""
        self.kept: set = set()
        """wave counted as committed by a stored plan since the store last lost data."""
        self.granted = None
        """The leader that got the lease last, even if the store lost it."""
        self.disputed: set = set()
        """plan last recorded by a leader that should have been fenced off."""

    def fail(self, invariant: str, detail: str) -> None:
        self.found = self.found or Violation(invariant, detail)
        raise self.found

    # --- what the engine sees ---------------------------------------------------------------------

    def installed(self, generation, epoch, placement, wave=None) -> None:
        """Check a placement that a rank has installed."""
        known = self.truth.setdefault((generation, epoch), placement)
        if known is not placement and known.digest != placement.digest:
            self.fail(TORN_MAP, f"epoch {epoch} is two maps")
        if wave is not None:
            self.swapped.add(wave)
            if self.outcomes.get(wave) is False:
                self.fail(RECORDS_DISAGREE, f"{wave} is recorded as aborted and was swapped")

    def step(self, ranks) -> None:
        """Check all ranks at the exchange of tokens, when different placements would do harm."""
        first = ranks[0]
        for rank in ranks[1:]:
            if rank.epoch != first.epoch or rank.map.digest != first.map.digest:
                other = f"rank {rank.rank} at {rank.epoch}"
                self.fail(TORN_MAP, f"rank 0 at epoch {first.epoch}, {other}")
            if rank.version != first.version:
                self.fail(WRONG_BYTES, f"weights {first.version} and {rank.version}")
        serials = {rank.comm_serial for rank in ranks}
        if len(serials) > 1:
            self.fail(UNMATCHED_OPERATION, f"transfer communicators {sorted(serials)} in one step")

    def reachable(self, rank) -> None:
        """Check that every slot in the placement holds the right bytes of the loaded weights."""
        for layer in range(rank.shape.num_layers):
            for local in range(rank.shape.slots_per_rank):
                expert = rank.expert_at(layer, local)
                found = rank.memory.read(layer, local)
                if expert >= 0 and found != (rank.version, layer, expert):
                    slot = f"rank {rank.rank} layer {layer} slot {local}"
                    wanted = f"expert {expert} of weights {rank.version}"
                    self.fail(WRONG_BYTES, f"{slot} should hold {wanted}, holds {found}")
        for layer, row in enumerate(rank.rows):
            missing = set(range(rank.shape.num_logical_experts)) - set(row)
            if missing:
                self.fail(WRONG_BYTES, f"layer {layer} has no slot for experts {missing}")

    # --- what is recorded -------------------------------------------------------------------------

    def forgot(self) -> None:
        """Note that the store lost data."""
        self.kept.clear()

    def outcome(self, wave, committed: bool) -> None:
        """Check how a controller takes a wave to have ended."""
        known = self.outcomes.setdefault(wave, committed)
        if known is not committed:
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as committed and as aborted")
        if committed is not (wave in self.swapped):
            what = "committed, no rank swapped it" if committed else "aborted, a rank swapped it"
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as {what}")

    def is_rightful(self, leader) -> bool:
        """Return False if another leader was granted the lease after the writing one.

        A healthy store refuses the earlier leader's writes. A store that forgot the newer leader,
        because it was flushed or lost a write, cannot. Then the record proves nothing.
        """
        return self.granted in (None, leader)

    def epoch(self, generation, epoch, placement, recorded, rightful: bool) -> None:
        """Check a controller's record of an epoch; `recorded`: the stored placements by epoch."""
        newest = max(recorded, default=epoch)
        falls_back = newest > epoch and self.truth.get((generation, newest)) is recorded[newest]
        if falls_back and rightful:
            self.fail(RECORDS_DISAGREE, f"recorded at epoch {newest}, now at {epoch}")
        truth = self.truth.get((generation, epoch))
        if truth is None:
            self.fail(RECORDS_DISAGREE, f"recorded at epoch {epoch}, no rank was ever there")
        elif truth.digest != placement.digest:
            self.fail(RECORDS_DISAGREE, f"epoch {epoch} is recorded with another map")
        elif (generation, epoch) not in self.saved:
            detail = f"recorded at epoch {epoch}, no rank has saved its placement"
            self.fail(RECORDS_DISAGREE, detail)

    def plan(self, record, before, rightful: bool) -> None:
        """Check a controller's record of a plan; `before` is the record it replaces."""
        key = record.plan.plan_id
        changed = before is not None and before.phase.terminal and record.phase is not before.phase
        if changed and rightful and key not in self.disputed:
            detail = f"{record.plan.plan_id} is recorded as {before.phase}, then as {record.phase}"
            self.fail(RECORDS_DISAGREE, detail)
        if rightful:
            self.disputed.discard(key)
        else:
            self.disputed.add(key)
        done = (
            len(record.plan.waves)
            if record.phase is PlanPhase.COMMITTED
            else record.waves_committed
        )
        for index in range(done):
            if record.plan.key(index) not in self.swapped:
                self.fail(
                    RECORDS_DISAGREE,
                    f"{record.plan.plan_id} has wave {index} as committed, no rank has",
                )
            if rightful:
                self.kept.add(record.plan.key(index))
        if record.phase.terminal and rightful and key not in self.disputed:
            for index in range(done, len(record.plan.waves)):
                if record.plan.key(index) in self.kept:
                    ended = f"{record.plan.plan_id} ended {record.phase}"
                    detail = f"{ended} without wave {index}, which is committed"
                    self.fail(RECORDS_DISAGREE, detail)

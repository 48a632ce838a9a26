"""The invariants that must hold at every step, whatever fails."""

from evenkeel_moe.model.plan import PlanPhase

TORN_MAP = "torn map"
WRONG_BYTES = "wrong bytes"
RECORDS_DISAGREE = "records disagree"
NO_PROGRESS = "no progress"
UNMATCHED_OPERATION = "unmatched operation"
WAVE_REFUSED = "wave refused"
NO_LOCK = "no lock"


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
        """(deployment, generation, epoch) -> placement, as the first rank installed it."""
        self.saved: set = set()
        """(deployment, generation, epoch) of every placement that some rank saved."""
        self.swapped: set = set()
        """(deployment, wave) of every wave that some rank swapped."""
        self.outcomes: dict = {}
        """(deployment, wave) -> committed, as recorded."""
        self.kept: set = set()
        """(deployment, wave) recorded as committed since the store last lost data."""
        self.granted: dict = {}
        """Deployment -> the leader that got the lease last, even if the store lost it."""
        self.disputed: set = set()
        """(deployment, plan) last recorded by a leader that should have been fenced off."""

    def fail(self, invariant: str, detail: str) -> None:
        self.found = self.found or Violation(invariant, detail)
        raise self.found

    # --- what the engine sees ---------------------------------------------------------------------

    def installed(self, deployment, generation, epoch, placement, wave=None) -> None:
        """Check a placement that a rank has installed."""
        known = self.truth.setdefault((deployment, generation, epoch), placement)
        if known is not placement and known.digest != placement.digest:
            self.fail(TORN_MAP, f"{deployment} epoch {epoch} is two maps")
        if wave is not None:
            self.swapped.add((deployment, wave))
            if self.outcomes.get((deployment, wave)) is False:
                self.fail(RECORDS_DISAGREE, f"{wave} is recorded as aborted and was swapped")

    def step(self, ranks) -> None:
        """Check all ranks at the exchange of tokens, when different placements would do harm."""
        for deployment in self.world.deployments:
            first = ranks[0].sites[deployment]
            for rank in ranks[1:]:
                site = rank.sites[deployment]
                if site.epoch != first.epoch or site.map.digest != first.map.digest:
                    other = f"rank {rank.rank} at {site.epoch}"
                    self.fail(TORN_MAP, f"{deployment}: rank 0 at epoch {first.epoch}, {other}")
                if site.version != first.version:
                    detail = f"{deployment}: weights {first.version} and {site.version}"
                    self.fail(WRONG_BYTES, detail)
        serials = {rank.comm_serial for rank in ranks}
        if len(serials) > 1:
            self.fail(UNMATCHED_OPERATION, f"transfer communicators {sorted(serials)} in one step")

    def reachable(self, site) -> None:
        """Check that every slot in the placement holds the right bytes of the loaded weights."""
        base = site.rank.rank * site.shape.slots_per_rank
        for layer in range(site.shape.num_layers):
            row = site.rows[layer]
            for local in range(site.shape.slots_per_rank):
                expert = row[base + local]
                if expert >= 0 and site.read(layer, local) != (site.version, layer, expert):
                    slot = f"rank {site.rank.rank} layer {layer} slot {base + local}"
                    found = site.read(layer, local)
                    wanted = f"expert {expert} of weights {site.version}"
                    detail = f"{site.deployment} {slot} should hold {wanted}, holds {found}"
                    self.fail(WRONG_BYTES, detail)
        for layer, row in enumerate(site.rows):
            missing = set(range(site.shape.num_logical_experts)) - set(row)
            if missing:
                self.fail(
                    WRONG_BYTES,
                    f"{site.deployment} layer {layer} has no slot for experts {missing}",
                )

    # --- what is recorded -------------------------------------------------------------------------

    def forgot(self, deployment=None) -> None:
        """Note that the store lost its data of one deployment, or of all."""
        self.kept = {key for key in self.kept if deployment is not None and key[0] != deployment}

    def outcome(self, deployment, wave, committed: bool) -> None:
        """Check a controller's record of the end of a wave."""
        known = self.outcomes.setdefault((deployment, wave), committed)
        if known is not committed:
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as committed and as aborted")
        if committed is not ((deployment, wave) in self.swapped):
            what = "committed, no rank swapped it" if committed else "aborted, a rank swapped it"
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as {what}")
        if committed:
            self.kept.add((deployment, wave))

    def is_rightful(self, deployment, leader) -> bool:
        """Return False if another leader was granted the lease after the writing one.

        A healthy store refuses the earlier leader's writes. A store that forgot the newer leader,
        because it was flushed or lost a write, cannot. Then the record proves nothing.
        """
        return leader == self.granted.get(deployment, leader)

    def epoch(self, deployment, generation, epoch, placement, recorded, rightful: bool) -> None:
        """Check a controller's record of an epoch; `recorded`: the stored placements by epoch."""
        newest = max(recorded, default=epoch)
        falls_back = (
            newest > epoch and self.truth.get((deployment, generation, newest)) is recorded[newest]
        )
        if falls_back and rightful:
            self.fail(
                RECORDS_DISAGREE, f"{deployment} was recorded at epoch {newest}, now at {epoch}"
            )
        truth = self.truth.get((deployment, generation, epoch))
        if truth is None:
            self.fail(
                RECORDS_DISAGREE, f"{deployment} recorded at epoch {epoch}, no rank was ever there"
            )
        elif truth.digest != placement.digest:
            self.fail(RECORDS_DISAGREE, f"{deployment} epoch {epoch} is recorded with another map")
        elif (deployment, generation, epoch) not in self.saved:
            detail = f"{deployment} recorded at epoch {epoch}, no rank has saved its placement"
            self.fail(RECORDS_DISAGREE, detail)

    def plan(self, deployment, record, before, rightful: bool) -> None:
        """Check a controller's record of a plan; `before` is the record it replaces."""
        key = (deployment, record.plan.plan_id)
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
            if (deployment, record.plan.key(index)) not in self.swapped:
                self.fail(
                    RECORDS_DISAGREE,
                    f"{record.plan.plan_id} has wave {index} as committed, no rank has",
                )
        if record.phase.terminal and rightful and key not in self.disputed:
            for index in range(done, len(record.plan.waves)):
                if (deployment, record.plan.key(index)) in self.kept:
                    ended = f"{record.plan.plan_id} ended {record.phase}"
                    detail = f"{ended} without wave {index}, which is committed"
                    self.fail(RECORDS_DISAGREE, detail)

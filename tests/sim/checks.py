"""The invariants: what must hold at every step, whatever fails."""

from evenkeel_moe.model.plan import PlanPhase

TORN_MAP = "torn map"
WRONG_BYTES = "wrong bytes"
RECORDS_DISAGREE = "records disagree"
NO_PROGRESS = "no progress"
UNMATCHED_OPERATION = "unmatched operation"
WAVE_REFUSED = "wave refused"


class Violation(Exception):
    """An invariant is broken."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class Checks:
    """Ground truth as it comes about, and the invariants held against it."""

    def __init__(self, world) -> None:
        self.world = world
        self.truth: dict = {}
        """(deployment, generation, epoch) -> placement, as the first rank installed it."""
        self.swapped: set = set()
        """(deployment, wave) some rank swapped in."""
        self.outcomes: dict = {}
        """(deployment, wave) -> committed, as recorded."""
        self.kept: set = set()
        """(deployment, wave) recorded as committed in a store that has forgotten nothing since."""
        self.granted: dict = {}
        """Deployment -> the leader the lease was granted to last, whatever the store remembers of it."""
        self.disputed: set = set()
        """(deployment, plan) last recorded by a leader that should have been fenced off."""

    def fail(self, invariant: str, detail: str) -> None:
        raise Violation(invariant, detail)

    # --- what the engine sees -----------------------------------------------------------------------

    def installed(self, deployment, generation, epoch, placement, wave=None) -> None:
        """A rank installed a map."""
        known = self.truth.setdefault((deployment, generation, epoch), placement)
        if known is not placement and known.digest != placement.digest:
            self.fail(TORN_MAP, f"{deployment} epoch {epoch} is two maps")
        if wave is not None:
            self.swapped.add((deployment, wave))
            if self.outcomes.get((deployment, wave)) is False:
                self.fail(RECORDS_DISAGREE, f"{wave} is recorded as aborted and was swapped")

    def step(self, ranks) -> None:
        """All ranks exchange tokens: the moment a split would compute."""
        for deployment in self.world.deployments:
            first = ranks[0].sites[deployment]
            for rank in ranks[1:]:
                site = rank.sites[deployment]
                if site.epoch != first.epoch or site.map.digest != first.map.digest:
                    detail = f"{deployment}: rank 0 at epoch {first.epoch}, rank {rank.rank} at {site.epoch}"
                    self.fail(TORN_MAP, detail)
                if site.version != first.version:
                    detail = f"{deployment}: weights {first.version} and {site.version}"
                    self.fail(WRONG_BYTES, detail)
        serials = {rank.comm_serial for rank in ranks}
        if len(serials) > 1:
            self.fail(UNMATCHED_OPERATION, f"transfer communicators {sorted(serials)} in one step")

    def reachable(self, site) -> None:
        """Every slot the router can reach holds the bytes its map names, of the weights loaded."""
        base = site.rank.rank * site.shape.slots_per_rank
        for layer in range(site.shape.num_layers):
            row = site.rows[layer]
            for local in range(site.shape.slots_per_rank):
                expert = row[base + local]
                if expert >= 0 and site.read(layer, local) != (site.version, layer, expert):
                    detail = (
                        f"{site.deployment} rank {site.rank.rank} layer {layer} slot {base + local} should hold"
                        f" expert {expert} of weights {site.version}, holds {site.read(layer, local)}"
                    )
                    self.fail(WRONG_BYTES, detail)
        for layer, row in enumerate(site.rows):
            missing = set(range(site.shape.num_logical_experts)) - set(row)
            if missing:
                self.fail(
                    WRONG_BYTES,
                    f"{site.deployment} layer {layer} has no slot for experts {missing}",
                )

    # --- what is recorded -----------------------------------------------------------------------------

    def forgot(self, deployment=None) -> None:
        """The store lost what it had of a deployment, or of all."""
        self.kept = {key for key in self.kept if deployment is not None and key[0] != deployment}

    def outcome(self, deployment, wave, committed: bool) -> None:
        """A controller recorded how a wave ended."""
        known = self.outcomes.setdefault((deployment, wave), committed)
        if known is not committed:
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as committed and as aborted")
        if committed is not ((deployment, wave) in self.swapped):
            what = "committed, no rank swapped it" if committed else "aborted, a rank swapped it"
            self.fail(RECORDS_DISAGREE, f"{wave} is recorded as {what}")
        if committed:
            self.kept.add((deployment, wave))

    def is_rightful(self, deployment, leader) -> bool:
        """A record is being written; False by a leader after whom another was granted the lease.

        A sound store fences such a writer off. One that forgot the newer leader, because it was flushed or
        lost a write, cannot: what is written then says nothing about the machines.
        """
        return leader == self.granted.get(deployment, leader)

    def epoch(self, deployment, generation, epoch, placement, recorded, rightful: bool) -> None:
        """A controller recorded an epoch; `recorded` is what the store has by epoch."""
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

    def plan(self, deployment, record, before, rightful: bool) -> None:
        """A controller recorded a plan; `before` is what it replaces."""
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
                    detail = f"{record.plan.plan_id} ended {record.phase} without wave {index}, which is committed"
                    self.fail(RECORDS_DISAGREE, detail)

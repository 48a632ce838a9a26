"""The ranks of a deployment: which processes speak for them, who is heard, and what all agree on.

A generation is registered only when all its R ranks are present (R1). Every answer carries a
Reason, also a positive one.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.control_messages import CloseStream
from evenkeel_moe.protocol.messages import Hello, RankState

_RECONNECT_SHARE = 0.2
"""Share of the lease within which a rank whose stream ended is still taken to come back: streams
end and begin again in the life of a process."""


class Admission(NamedTuple):
    """The answer to a Hello."""

    accepted: bool
    reason: Reason
    detail: str
    new_generation: bool = False
    """True if this Hello completed a generation that was not registered before."""
    closes: tuple[CloseStream, ...] = ()
    """The streams to close: this one if it is refused, else those of displaced processes."""


class Quorum(NamedTuple):
    """The answer to whether the deployment may migrate now."""

    ok: bool
    reason: Reason
    """RECOVERED if `ok`."""
    detail: str
    missing: tuple[EpRank, ...] = ()
    """The ranks that are not connected or not fresh."""


@dataclass(slots=True)
class Member:
    """The newest process of one rank."""

    hello: Hello
    stream: int
    last_seen: float
    """Monotonic seconds of the last message on its stream."""
    weights_version: int
    checksums_digest: str | None
    """As its Hello told it; None once it has loaded weights again, whose digest it has not told."""
    trouble: str = ""
    """The reason why the rank refuses every wave, from its newest heartbeat; empty if none."""
    closed_at: float | None = None
    """Monotonic seconds at which its stream ended; None while it is open."""
    stopped: bool = False
    """True if its engine said that it stops as planned; a new Hello ends this."""
    state: RankState | None = None
    """The newest answer of this process to a query."""


class Membership:
    """The ranks of one deployment, as their streams present them.

    Args:
        lease_s: seconds without a message after which a rank is not fresh.
    """

    def __init__(self, deployment: DeploymentId, *, lease_s: float) -> None:
        self.deployment = deployment
        self.lease_s = lease_s
        self.generation: Generation | None = None
        """The registered generation; None until all R ranks of one were present."""
        self.shape: ModelShape | None = None
        """The shape of the registered generation; the next generation may have another one."""
        self.members: dict[EpRank, Member] = {}
        """The newest process of each rank of the registered group, of whichever generation."""
        self._beyond: dict[EpRank, Member] = {}
        """Ranks of a larger group that seems to gather; no members of the registered one."""
        self._furthest = 0
        """The most steps that a member told in the registered generation."""

    # --- changes ----------------------------------------------------------------------------------

    def register(
        self, hello: Hello, stream: int, now: float, *, certified: bool = False
    ) -> Admission:
        """Take a rank's Hello.

        The newest incarnation of a rank wins, and the newest stream of an incarnation. Incarnations
        are clock readings. An older one is accepted if the known process is no longer heard, else
        a rank that restarts on a host with a slow clock would be locked out. A refusal changes
        nothing and names the values that disagree. A group whose ranks are all present keeps its
        place: another generation is refused, unless the certificate of the stream names the rank.
        A process that loses its place is told, so that it comes back once the place is free.
        """
        refusal = self.refusal(hello, stream, now, certified=certified)
        if refusal is not None:
            reason, detail = refusal.reason, refusal.detail
            close = CloseStream(hello.identity.rank, stream, reason, detail)
            return refusal._replace(closes=(close,))
        before = self.everyone
        admission = self._admit(hello, stream, now)
        after = self.everyone
        displaced = (
            CloseStream(rank, member.stream, Reason.DISPLACED, _displaced(member.hello, hello))
            for rank, member in before.items()
            if member.closed_at is None
            and (now_there := after.get(rank)) is not member
            and (now_there is None or now_there.hello.identity != member.hello.identity)
        )
        return admission._replace(closes=tuple(displaced))

    def _admit(self, hello: Hello, stream: int, now: float) -> Admission:
        rank = hello.identity.rank
        registered = self.shape is None or rank < self.shape.num_ranks
        known = self.newest(rank)
        # The same process on another stream: its first heartbeat there says if the trouble is over.
        trouble = ""
        if known is not None and known.hello.identity == hello.identity:
            trouble = known.trouble
        generation = hello.identity.generation
        hellos = (member.hello for member in self.everyone.values())
        equal = (one.shape for one in hellos if one.identity.generation == generation)
        hello = replace(hello, shape=next(equal, hello.shape))
        (self.members if registered else self._beyond)[rank] = Member(
            hello, stream, now, hello.weights_version, hello.checksums_digest, trouble
        )
        everyone = len(self.members) + len(self._beyond)
        # The cheap comparison first: this runs for every Hello of every rank.
        if (
            generation != self.generation
            and everyone >= hello.shape.num_ranks
            and self.is_complete(generation)
        ):
            self.generation = generation
            self.shape = hello.shape
            self.members = {r: m for r, m in self.everyone.items() if r < hello.shape.num_ranks}
            self._beyond = {}
            states = (member.state for member in self.members.values())
            self._furthest = max((state.step for state in states if state is not None), default=0)
            return Admission(True, Reason.GENERATION_CHANGED, f"all ranks of {generation}", True)
        return Admission(True, Reason.RECOVERED, f"rank {rank} on stream {stream}")

    def heard(self, rank: EpRank, incarnation: int, stream: int, now: float) -> bool:
        """Note a message; return False if it is not from the newest process and stream (R1)."""
        member = self.newest(rank)
        if member is None or not self.is_current(member, incarnation, stream):
            return False
        member.last_seen = now
        return True

    def troubled(self, rank: EpRank, stream: int, trouble: str) -> None:
        """Note why a rank refuses every wave, even if its Hello offered to migrate."""
        member = self.newest(rank)
        if member is not None and member.stream == stream:
            member.trouble = trouble

    def stopped(self, rank: EpRank, stream: int) -> None:
        """Note that a rank's engine stops as planned; it is not fresh from now on."""
        member = self.newest(rank)
        if member is not None and member.stream == stream:
            member.stopped = True

    def report(self, state: RankState) -> None:
        """Note a rank's answer; its weights version may have risen since its Hello (R4)."""
        member = self.newest(state.identity.rank)
        if member is not None and member.hello.identity == state.identity:
            # Without the placement and the checksums, which are megabytes.
            member.state = replace(state, placement=None, checksums=None)
            # A reload is told unasked. One that left no checksums is repeated as the same version.
            if state.query == 0 or state.weights_version != member.weights_version:
                member.checksums_digest = None
            member.weights_version = state.weights_version
            if state.identity.generation == self.generation:
                self._furthest = max(self._furthest, state.step)

    def closed(self, rank: EpRank, stream: int, now: float) -> None:
        """Note the end of a stream; the rank stays a member, and fresh until its lease runs out."""
        member = self.newest(rank)
        if member is not None and member.stream == stream:
            member.closed_at = now
            self._beyond.pop(rank, None)

    # --- questions --------------------------------------------------------------------------------

    @property
    def everyone(self) -> dict[EpRank, Member]:
        """The newest process of each rank that said hello, member or not."""
        return self.members | self._beyond

    def newest(self, rank: EpRank) -> Member | None:
        """Return the newest process of a rank; None if it never said hello."""
        return self.members.get(rank) or self._beyond.get(rank)

    def is_current(self, member: Member, incarnation: int, stream: int) -> bool:
        """R1: only the newest stream of the newest process speaks for a rank."""
        return member.hello.identity.incarnation == incarnation and member.stream == stream

    def is_complete(self, generation: Generation) -> bool:
        """R1: all R ranks are present, and their newest processes are of this generation."""
        hellos = [
            m.hello for m in self.everyone.values() if m.hello.identity.generation == generation
        ]
        return len(hellos) > 0 and len(hellos) == hellos[0].shape.num_ranks

    def fresh(self, rank: EpRank, now: float) -> bool:
        """Return True if the rank was heard within its lease."""
        member = self.newest(rank)
        return member is not None and self.is_fresh(member, now)

    def is_fresh(self, member: Member, now: float) -> bool:
        """Return True if the process was heard within its lease and has not stopped as planned."""
        return not member.stopped and now - member.last_seen < self.lease_s

    def any_fresh(self, now: float) -> bool:
        """Return True if some rank of the registered group was heard within its lease."""
        return any(self.is_fresh(member, now) for member in self.members.values())

    @property
    def all_stopped(self) -> bool:
        """True if every rank of the registered group stopped as planned."""
        return bool(self.members) and all(member.stopped for member in self.members.values())

    def is_in_place(self, now: float) -> bool:
        """Return True while every rank of the registered group is heard and has its stream."""
        return self.generation is not None and all(
            member.hello.identity.generation == self.generation
            and self.is_fresh(member, now)
            and (
                member.closed_at is None or now < member.closed_at + self.lease_s * _RECONNECT_SHARE
            )
            for member in self.members.values()
        )

    def step(self) -> int:
        """Return the steps the group has taken in this generation, dummy steps included."""
        return self._furthest

    def weights_version(self) -> int | None:
        """Return the version all members have; None while they differ or there are none."""
        versions = {member.weights_version for member in self.members.values()}
        return versions.pop() if len(versions) == 1 else None

    def staging_bytes(self) -> tuple[int, ...]:
        """Return the (R,) bytes each rank offers for staging."""
        return tuple(self.members[rank].hello.staging_bytes for rank in sorted(self.members))

    def slots_stay_filled(self) -> bool:
        """Return True if some rank cannot leave a slot empty: no plan may then leave one."""
        return any(member.hello.slots_stay_filled for member in self.members.values())

    @property
    def came_from(self) -> Generation | None:
        """The generation of another size that the registered one came from; None if it came from
        none."""
        told = (member.hello.lineage for member in self.members.values())
        return next((lineage.generation for lineage in told if lineage is not None), None)

    @property
    def observers(self) -> list[EpRank]:
        """The ranks that refuse every wave as they were started, ascending."""
        return sorted(rank for rank, m in self.members.items() if not m.hello.migrates)

    def quorum(self, now: float) -> Quorum:
        """Decide if every rank of one generation is fresh and all agree on what a wave needs."""
        if self.generation is None:
            detail = f"{len(self.members)} ranks said hello so far"
            return Quorum(False, Reason.RANKS_MISSING, detail)
        if not self.is_complete(self.generation):
            return Quorum(False, Reason.RANKS_MISSING, "the group is restarting")
        missing = tuple(rank for rank in sorted(self.members) if not self.fresh(rank, now))
        if missing:
            return Quorum(False, Reason.RANKS_MISSING, self._absence(missing), missing)
        return self._agreement()

    def _absence(self, missing: tuple[EpRank, ...]) -> str:
        stopped = [rank for rank in missing if self.members[rank].stopped]
        lost = [rank for rank in missing if not self.members[rank].stopped]
        parts = [f"ranks {stopped} stopped as planned"] if stopped else []
        parts += [f"ranks {lost} not heard for {self.lease_s:g} s"] if lost else []
        return ", ".join(parts)

    def _agreement(self) -> Quorum:
        members = dict(sorted(self.members.items()))
        weights = {rank: m.weights_version for rank, m in members.items()}
        gates = {rank: m.hello.gate_digest for rank, m in members.items()}
        if len(set(weights.values())) > 1:
            detail = f"weights version by rank: {weights}"
            return Quorum(False, Reason.WEIGHTS_VERSION_CHANGED, detail)
        if len(set(gates.values())) > 1:
            return Quorum(False, Reason.GATE_LAYOUT_DISAGREES, f"gate digest by rank: {gates}")
        troubles = {rank: m.trouble for rank, m in members.items() if m.trouble}
        if troubles:
            rank, trouble = next(iter(troubles.items()))
            detail = f"ranks {list(troubles)} take no wave any more; rank {rank}: {trouble[:200]}"
            return Quorum(False, Reason.OBSERVE_ONLY, detail)
        if self.observers:
            return Quorum(False, Reason.OBSERVE_ONLY, f"ranks {self.observers} only observe")
        return Quorum(True, Reason.RECOVERED, f"all {len(members)} ranks")

    # --- refusals ---------------------------------------------------------------------------------

    def refusal(
        self, hello: Hello, stream: int, now: float, *, certified: bool = False
    ) -> Admission | None:
        """Return the refusal of a Hello; None if it would be accepted. Nothing changes."""
        identity, shape = hello.identity, hello.shape
        rank = identity.rank
        if identity.deployment != self.deployment:
            detail = f"this is {self.deployment}, the rank says {identity.deployment}"
            return Admission(False, Reason.UNKNOWN_DEPLOYMENT, detail)
        if not 0 <= rank < shape.num_ranks:
            return Admission(False, Reason.WRONG_SHAPE, f"rank {rank} of {shape.num_ranks}")
        known = self.newest(rank)
        if known is not None and self.is_outdated(known, hello, stream, now):
            # Refusals name nothing with which a stranger could take the place of a rank.
            detail = (
                f"rank {rank} incarnation {identity.incarnation} on stream {stream}: a newer"
                " process or stream of it is known"
            )
            return Admission(False, Reason.STALE_INCARNATION, detail)
        if identity.generation != self.generation and not certified and self.is_in_place(now):
            detail = (
                f"all {len(self.members)} ranks of another group are present;"
                f" {identity.generation} has to wait until one of them has left"
            )
            return Admission(False, Reason.DEPLOYMENT_IN_USE, detail)
        if identity.generation == self.generation and shape != self.shape:
            # Also if this rank was the only one: windows and records have the registered shape.
            detail = f"rank {rank} has {shape}, {identity.generation} is registered as {self.shape}"
            return Admission(False, Reason.SHAPE_DISAGREES, detail)
        equal_shape = shape
        for member in self.everyone.values():
            other = member.hello
            if other.identity.generation != identity.generation or member is known:
                continue
            # Equal shapes of members are one object: this runs for every Hello and every rank.
            if other.shape is not equal_shape and other.shape != shape:
                detail = f"rank {rank} has {shape}, rank {other.identity.rank} {other.shape}"
                return Admission(False, Reason.SHAPE_DISAGREES, detail)
            equal_shape = other.shape
            if conflict := _lineage_conflict(hello, other):
                return Admission(False, Reason.SHAPE_DISAGREES, conflict)
            same_version = member.weights_version == hello.weights_version
            told = member.checksums_digest
            if same_version and told not in (None, hello.checksums_digest):
                detail = (
                    f"weights {hello.weights_version}: rank {rank} has {hello.checksums_digest},"
                    f" rank {other.identity.rank} {told}"
                )
                return Admission(False, Reason.CHECKSUM_MISMATCH, detail)
        return None

    def is_outdated(self, known: Member, hello: Hello, stream: int, now: float) -> bool:
        """R1: it is of an older process while the newer one is heard, or of an older stream."""
        incarnation, newest = hello.identity.incarnation, known.hello.identity.incarnation
        if incarnation < newest:
            return self.fresh(hello.identity.rank, now)
        return incarnation == newest and stream <= known.stream


def _lineage_conflict(one: Hello, other: Hello) -> str:
    """Return why two ranks of a group cannot both come from where they say; empty if they can."""
    mine, theirs = one.lineage, other.lineage
    if mine is None and theirs is None:
        return ""
    if mine is not None and theirs is not None and mine.generation == theirs.generation:
        if mine.rank is None or mine.rank != theirs.rank:
            return ""
    return f"rank {one.identity.rank} comes from {mine}, rank {other.identity.rank} from {theirs}"


def _displaced(old: Hello, new: Hello) -> str:
    return (
        f"rank {old.identity.rank} of {old.identity.generation} on {old.node} gives way to"
        f" {new.identity.generation} on {new.node}, rank {new.identity.rank}"
    )

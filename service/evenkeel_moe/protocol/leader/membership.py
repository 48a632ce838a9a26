"""Who is in the EP group: generations, incarnations, freshness, and what all ranks must agree on.

A generation is registered only when all R ranks of it are present (R1). Questions are answered
with a Reason, also when the answer is yes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.protocol.messages import Hello, RankState

if TYPE_CHECKING:
    from evenkeel_moe.model.topology import ModelShape

__all__ = ["Member", "Membership", "Quorum", "Registration"]


class Registration(NamedTuple):
    """Answer to a Hello."""

    accepted: bool
    reason: Reason
    detail: str
    new_generation: bool = False
    """This Hello completed a generation that was not registered before."""


class Quorum(NamedTuple):
    """Whether the deployment may migrate now, and always why."""

    ok: bool
    reason: Reason
    """RECOVERED when `ok`."""
    detail: str
    missing: tuple[EpRank, ...] = ()
    """Ranks not connected or not fresh."""


@dataclass(slots=True)
class Member:
    """The newest life of one rank."""

    hello: Hello
    stream: int
    last_seen: float
    """Monotonic seconds of the last message on its stream."""
    weights_version: int
    trouble: str = ""
    """Why the rank takes no wave any more, as its newest heartbeat says; empty while all is well."""
    connected: bool = True
    state: RankState | None = None
    """Its newest answer to a query in this life."""


class Membership:
    """Ranks of one deployment as their streams present them.

    Args:
        lease_s: seconds without a message after which a rank is not fresh.
    """

    def __init__(self, deployment: DeploymentId, *, lease_s: float) -> None:
        self.deployment = deployment
        self.lease_s = lease_s
        self.generation: Generation | None = None
        """The registered generation; None until all R ranks of one were present."""
        self.shape: ModelShape | None = None
        """Shape of the registered generation; another one may have another."""
        self.members: dict[EpRank, Member] = {}
        """The newest life in each seat of the registered group, whichever generation it belongs to."""
        self._beyond: dict[EpRank, Member] = {}
        """Ranks of a larger group that gathers, or seems to: they have no seat in the registered one and no say in it."""

    # --- changes ----------------------------------------------------------------------------------

    def register(self, hello: Hello, stream: int, now: float) -> Registration:
        """Take a rank's Hello.

        The newest incarnation of a rank wins, and of one incarnation the newest stream. Incarnations are
        clock readings: one that seems older is taken all the same when the known life is no longer heard,
        or a restart on a host whose clock lags would be locked out. A refusal changes nothing and says
        which numbers disagree.
        """
        refusal = self._refusal(hello, stream, now)
        if refusal is not None:
            return refusal
        rank = hello.identity.rank
        seated = self.shape is None or rank < self.shape.num_ranks
        (self.members if seated else self._beyond)[rank] = Member(
            hello, stream, now, hello.weights_version
        )
        generation = hello.identity.generation
        if generation != self.generation and self.is_complete(generation):
            self.generation = generation
            self.shape = hello.shape
            self.members = {r: m for r, m in self.everyone.items() if r < hello.shape.num_ranks}
            self._beyond = {}
            return Registration(True, Reason.GENERATION_CHANGED, f"all ranks of {generation}", True)
        return Registration(True, Reason.RECOVERED, f"rank {rank} on stream {stream}")

    def heard(self, rank: EpRank, incarnation: int, stream: int, now: float) -> bool:
        """Note a message; False when it is not from the rank's newest life and stream (R1)."""
        member = self.life(rank)
        if member is None or not self.is_current(member, incarnation, stream):
            return False
        member.last_seen = now
        return True

    def troubled(self, rank: EpRank, stream: int, trouble: str) -> None:
        """Note what keeps a rank from waves, whatever its Hello offered; empty gives back what that did."""
        member = self.life(rank)
        if member is not None and member.stream == stream:
            member.trouble = trouble

    def report(self, state: RankState) -> None:
        """Note a rank's answer; its weights version may have risen since its Hello (R4)."""
        member = self.life(state.identity.rank)
        if member is not None and member.hello.identity == state.identity:
            member.state = state
            member.weights_version = state.weights_version

    def closed(self, rank: EpRank, stream: int) -> None:
        """The stream ended; the rank keeps its seat and stops being fresh when its lease runs out."""
        member = self.life(rank)
        if member is not None and member.stream == stream:
            member.connected = False
            self._beyond.pop(rank, None)

    # --- questions --------------------------------------------------------------------------------

    @property
    def everyone(self) -> dict[EpRank, Member]:
        """The newest life of each rank that said hello, with or without a seat."""
        return self.members | self._beyond

    def life(self, rank: EpRank) -> Member | None:
        """The newest life of a rank; None when it never said hello."""
        return self.members.get(rank) or self._beyond.get(rank)

    def is_current(self, member: Member, incarnation: int, stream: int) -> bool:
        """R1: only the newest life's newest stream speaks for a rank."""
        return member.hello.identity.incarnation == incarnation and member.stream == stream

    def is_complete(self, generation: Generation) -> bool:
        """R1: all R ranks are present and their newest lives are of this generation."""
        lives = [
            m.hello for m in self.everyone.values() if m.hello.identity.generation == generation
        ]
        return len(lives) > 0 and len(lives) == lives[0].shape.num_ranks

    def fresh(self, rank: EpRank, now: float) -> bool:
        """Whether the rank's heartbeat lease holds."""
        member = self.life(rank)
        return member is not None and self.is_fresh(member, now)

    def is_fresh(self, member: Member, now: float) -> bool:
        """Whether the heartbeat lease of a life holds."""
        return now - member.last_seen < self.lease_s

    def step(self) -> int:
        """Steps the group has taken in this generation, as far as told; dummy steps included."""
        furthest = 0
        for member in self.members.values():
            state = member.state
            # The cheap question first: every answer of every rank asks them all.
            if (
                state is not None
                and state.step > furthest
                and state.identity.generation == self.generation
            ):
                furthest = state.step
        return furthest

    def weights_version(self) -> int | None:
        """The version all members have; None while they differ or there are none."""
        versions = {member.weights_version for member in self.members.values()}
        return versions.pop() if len(versions) == 1 else None

    def staging_bytes(self) -> tuple[int, ...]:
        """(R,) bytes each rank offers for staging."""
        return tuple(self.members[rank].hello.staging_bytes for rank in sorted(self.members))

    def quorum(self, now: float) -> Quorum:
        """Whether every rank of one generation is fresh and all agree on what a wave rests on."""
        if self.generation is None or self.shape is None:
            return Quorum(
                False, Reason.RANKS_MISSING, f"{len(self.members)} ranks said hello so far"
            )
        if not self.is_complete(self.generation):
            return Quorum(False, Reason.RANKS_MISSING, "the group is restarting")
        missing = tuple(rank for rank in sorted(self.members) if not self.fresh(rank, now))
        if missing:
            detail = f"ranks {list(missing)} not heard for {self.lease_s:g} s"
            return Quorum(False, Reason.RANKS_MISSING, detail, missing)
        return self._agreement()

    def _agreement(self) -> Quorum:
        for reason, what, values in (
            (
                Reason.WEIGHTS_VERSION_CHANGED,
                "weights version",
                {rank: m.weights_version for rank, m in self.members.items()},
            ),
            (
                Reason.GATE_LAYOUT_DISAGREES,
                "gate digest",
                {rank: m.hello.gate_digest for rank, m in self.members.items()},
            ),
        ):
            if len(set(values.values())) > 1:
                return Quorum(False, reason, f"{what} by rank: {dict(sorted(values.items()))}")
        troubles = {rank: m.trouble for rank, m in sorted(self.members.items()) if m.trouble}
        if troubles:
            first = next(iter(troubles))
            detail = f"ranks {list(troubles)} take no wave any more; rank {first}: {troubles[first][:200]}"
            return Quorum(False, Reason.OBSERVE_ONLY, detail)
        watchers = [
            rank
            for rank in sorted(self.members)
            if "migrate" not in self.members[rank].hello.capabilities
        ]
        if watchers:
            return Quorum(False, Reason.OBSERVE_ONLY, f"ranks {watchers} do not offer to migrate")
        return Quorum(True, Reason.RECOVERED, f"all {len(self.members)} ranks")

    # --- refusals ---------------------------------------------------------------------------------

    def _refusal(self, hello: Hello, stream: int, now: float) -> Registration | None:
        identity, shape = hello.identity, hello.shape
        if identity.deployment != self.deployment:
            detail = f"this is {self.deployment}, the rank says {identity.deployment}"
            return Registration(False, Reason.UNKNOWN_DEPLOYMENT, detail)
        if not 0 <= identity.rank < shape.num_ranks:
            detail = f"rank {identity.rank} of {shape.num_ranks}"
            return Registration(False, Reason.WRONG_SHAPE, detail)
        known = self.life(identity.rank)
        if known is not None and self.is_outdated(known, hello, stream, now):
            detail = (
                f"rank {identity.rank} incarnation {identity.incarnation} on stream {stream}; known is"
                f" {known.hello.identity.incarnation} on {known.stream}"
            )
            return Registration(False, Reason.STALE_INCARNATION, detail)
        for other in self.everyone.values():
            if other.hello.identity.generation != identity.generation or other is known:
                continue
            if other.hello.shape != shape:
                detail = f"rank {identity.rank} has {shape}, rank {other.hello.identity.rank} {other.hello.shape}"
                return Registration(False, Reason.SHAPE_DISAGREES, detail)
            if (
                other.hello.weights_version == hello.weights_version
                and other.hello.checksums_digest != hello.checksums_digest
            ):
                detail = (
                    f"weights {hello.weights_version}: rank {identity.rank} has {hello.checksums_digest},"
                    f" rank {other.hello.identity.rank} {other.hello.checksums_digest}"
                )
                return Registration(False, Reason.CHECKSUM_MISMATCH, detail)
        return None

    def is_outdated(self, known: Member, hello: Hello, stream: int, now: float) -> bool:
        """R1: an older life of the rank while the newer one is heard, or an older stream of the same life."""
        mine, other = hello.identity.incarnation, known.hello.identity.incarnation
        if mine < other:
            return self.fresh(hello.identity.rank, now)
        return mine == other and stream <= known.stream

"""The changes that events make to a draft of the next state."""

from tests.explore.invariants import UNMATCHED_OPERATION, Violation
from tests.explore.small import plan_of
from tests.explore.state import Draft, Stream
from tests.explore.view import View


def take_off(draft: Draft, *, rank: int, stream: Stream, way: str) -> None:
    """Take the first message off a stream."""
    link = draft.links[rank]
    place = link.index(stream)
    link[place] = stream._replace(**{way: getattr(stream, way)[1:]})


def to_rank(draft: Draft, *, rank: int, stream: Stream, keep: bool = False) -> None:
    """Deliver the first message of a stream to its rank; `keep` leaves a copy on the way."""
    if not keep:
        take_off(draft, rank=rank, stream=stream, way="down")
    draft.rank_event(rank, ("message", stream.number, stream.down[0]))


def to_leader(
    draft: Draft, *, rank: int, stream: Stream, who: str, keep: bool = False,
    failing_from: int | None = None, happened: int = 0,
) -> None:  # fmt: skip
    """Deliver the first message of a stream to its leader."""
    if not keep:
        take_off(draft, rank=rank, stream=stream, way="up")
    draft.leader_event(who, leader_message(rank, stream), failing_from, happened)


def leader_message(rank: int, stream: Stream) -> tuple:
    return ("message", rank, stream.number, stream.life, stream.up[0])


def see_end(draft: Draft, *, rank: int, stream: Stream, who: str) -> None:
    """Tell a leader that a stream ended; what it has not read of it is lost."""
    link = draft.links[rank]
    link[link.index(stream)] = stream.end(known=True)
    draft.leader_event(who, ("closed", rank, stream.number))


def boundary(draft: Draft, *, view: View, rank: int) -> None:
    """Let a rank pass its step boundary."""
    facts, minima = view.ranks[rank], None
    assert facts is not None
    if facts.resolves:
        vectors = [f.earlier if f.passed else f.vector for f in view.ranks if f is not None]
        known = [vector for vector in vectors if vector is not None]
        if len(known) < len(vectors):
            detail = f"rank {rank} uses a poll that other ranks did not begin"
            raise Violation(UNMATCHED_OPERATION, detail)
        minima = tuple(map(min, *known))
    else:
        minima = ()
    draft.rank_event(rank, ("boundary", minima))


def boundary_fails(draft: Draft, *, rank: int) -> None:
    """Let the poll of a rank fail at its step boundary: it does not know the result."""
    draft.rank_event(rank, ("boundary", None))


def connect(draft: Draft, *, view: View, rank: int) -> None:
    """Open a stream to the present leader; an earlier one may still be open."""
    facts, leaders = view.ranks[rank], draft.tables.leaders
    assert facts is not None
    link = draft.links[rank]
    # A stream that was refused is forgotten on both sides, so its number is free again.
    link[:] = [s for s in link if not (s.broken and s.known and not s.down)]
    known = [leaders.facts[one].newest_streams[rank] for one in (draft.leader, draft.old)]
    number = 1 + max([facts.newest_stream, *known, *(s.number for s in link)])
    draft.links[rank].append(Stream(number, view.facts.term, facts.life))
    draft.rank_event(rank, ("connect", number))


def submit(draft: Draft, *, view: View) -> None:
    """Enter and start a plan for the layers that no wave was begun for."""
    group, number = view.facts.group, view.around.plans + 1
    assert group is not None and view.facts.generation is not None
    plan = plan_of(
        number, view.around.layers, group.placement, view.facts.generation, group.epoch,
        group.weights_version,
    )  # fmt: skip
    draft.change(plans=number)
    draft.leader_event("leader", ("submit", plan))


def load(draft: Draft) -> None:
    """Every rank has permitted it: put other bytes into all slots between two steps."""
    version = draft.around.version + 1
    draft.change(version=version, reload=2)
    for rank in range(len(draft.ranks)):
        draft.rank_event(rank, ("load", version))

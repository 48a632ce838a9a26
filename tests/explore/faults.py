"""The faults of the small world. Each event here uses up one of the faults of a run."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.protocol.transitions import ControlState
from tests.explore.changes import boundary_fails, leader_message, take_off, to_leader, to_rank
from tests.explore.small import LATER_S
from tests.explore.state import Draft, Stream
from tests.explore.view import IDLE, Event, View

Fault = tuple[Event, Callable[[Draft], object]]


def fault_events(view: View, kinds: frozenset[str]) -> Iterator[Fault]:
    """Yield every fault that can happen now."""
    for kind, faults in KINDS.items():
        if kind in kinds:
            for event, change in faults(view):
                yield event._replace(name=f"FAULT {kind} {event.name}".rstrip()), change


# --- the network ----------------------------------------------------------------------------------


def _heads(view: View) -> Iterator[tuple[int, Stream, str, int]]:
    """Yield (rank, stream, way, message) of each message that comes next, except a Hello."""
    for rank, link in enumerate(view.links):
        for stream in link:
            for way, queue in (("down", stream.down), ("up", stream.up)):
                if queue and not stream.broken:
                    if not isinstance(view.tables.messages.met[queue[0]], Hello):
                        yield rank, stream, way, queue[0]


def _lose(view: View) -> Iterator[Fault]:
    """A message on a stream that works is lost."""
    for rank, stream, way, message in _heads(view):
        event = Event(f"{way} stream, rank", rank, message)
        yield event, partial(take_off, rank=rank, stream=stream, way=way)


def _duplicate(view: View) -> Iterator[Fault]:
    """A message arrives twice."""
    for rank, stream, way, message in _heads(view):
        event = Event(f"{way} stream, rank", rank, message)
        if way == "down":
            yield event, partial(to_rank, rank=rank, stream=stream, keep=True)
        elif (who := view.leader_of(stream)) is not None:
            yield event, partial(to_leader, rank=rank, stream=stream, who=who, keep=True)


def _break(view: View) -> Iterator[Fault]:
    """A stream breaks; what is on it arrives late or never."""
    for rank, link in enumerate(view.links):
        for stream in link:
            if not stream.broken:
                yield Event("stream of rank", rank), partial(break_stream, rank=rank, stream=stream)


def break_stream(draft: Draft, *, rank: int, stream: Stream) -> None:
    link = draft.links[rank]
    link[link.index(stream)] = stream.end()


# --- leaders --------------------------------------------------------------------------------------


def _crash_leader(view: View) -> Iterator[Fault]:
    """The leader crashes, also between two writes; a successor leads."""
    if not view.leads:
        return
    yield Event(""), Draft.crash
    if view.old and view.tables.leaders.facts[view.old].state is ControlState.FOLLOWER:
        yield Event("and the one before it leads"), crash_to_earlier
    for rank, stream, event in _deliveries(view):
        asked = view.tables.leaders.step(view.leader, event).asked
        for writes in range(1, asked):
            words = Event(f"after {writes} writes on message of rank", rank, stream.up[0])
            yield words, partial(Draft.crash_within, event=event, writes=writes)


def crash_to_earlier(draft: Draft) -> None:
    """Let the leader crash; the machine that led before it leads again."""
    draft.streams_end(draft.tables.leaders.facts[draft.leader].term)
    draft.leader, draft.old = draft.old, draft.tables.leaders.fresh
    draft.lead()


def _deliveries(view: View) -> Iterator[tuple[int, Stream, tuple]]:
    """Yield each message that the leader may get next, as an event of its machine."""
    for rank, link in enumerate(view.links):
        for stream in link:
            if stream.up and view.leader_of(stream) == "leader":
                yield rank, stream, leader_message(rank, stream)


def _lose_lease(view: View) -> Iterator[Fault]:
    """The leader loses its lease and knows it."""
    if view.leads:
        yield Event(""), lose_lease


def lose_lease(draft: Draft) -> None:
    """Let the leader lose its lease, and take it again at the next term."""
    draft.loses_lease("leader")
    draft.lead()


def _take_lease(view: View) -> Iterator[Fault]:
    """Another replica takes the lease, and the leader does not know it yet."""
    if view.leads and not view.old:
        yield Event(""), take_lease


def take_lease(draft: Draft) -> None:
    draft.old, draft.leader = draft.leader, draft.tables.leaders.fresh
    draft.lead()


def _write(view: View) -> Iterator[Fault]:
    """The writes of an event fail, from any of them on; the first of these may have happened."""
    for rank, stream, event in _deliveries(view):
        asked = view.tables.leaders.step(view.leader, event).asked
        deliver = partial(to_leader, rank=rank, stream=stream, who="leader")
        for first, happened in product(range(asked), (0, 1)):
            name = f"{first}{' (happened)' if happened else ''} and later on message of rank"
            yield (
                Event(name, rank, stream.up[0]),
                partial(deliver, failing_from=first, happened=happened),
            )


def _tick(view: View) -> Iterator[Fault]:
    """The leader asks again early."""
    if view.leads and not view.still:
        yield Event(""), partial(Draft.leader_event, who="leader", event=("tick", LATER_S))


def _deadline(view: View) -> Iterator[Fault]:
    """A deadline of the wave ends early."""
    for who, state in (("leader", view.leader), ("old", view.old)):
        if view.tables.leaders.facts[state].has_deadline:
            yield Event(f"at {who}"), partial(Draft.leader_event, who=who, event=("deadline",))


def _silence(view: View) -> Iterator[Fault]:
    """A rank is not heard for its lease, or hears no leader for long."""
    facts = view.facts
    for rank, rank_facts in enumerate(view.ranks):
        if facts.running and facts.fresh[rank] and view.connected(rank):
            event: tuple = ("unheard", rank)
            yield (
                Event("at leader, of rank", rank),
                partial(Draft.leader_event, who="leader", event=event),
            )
        if rank_facts is None or rank_facts.state is IDLE or rank_facts.leaderless:
            continue
        if not view.hears_no_leader(rank):
            event = ("leaderless",)
            yield (
                Event("of all leaders at rank", rank),
                partial(Draft.rank_event, rank=rank, event=event),
            )


# --- ranks and engine -----------------------------------------------------------------------------


def _crash_rank(view: View) -> Iterator[Fault]:
    """A rank dies, and its group restarts from a saved map."""
    for rank, facts in enumerate(view.ranks):
        if facts is not None:
            yield Event("", rank), partial(Draft.rank_dies, rank=rank)


def _resize(view: View) -> Iterator[Fault]:
    """The group goes over into another generation at the next epoch, with its map."""
    # The number of ranks stays, since all states have it. What the controller has to follow is a
    # generation at an epoch that no plan led to.
    if view.group_lives and not (view.passing or view.around.reload):
        yield Event(""), go_over


def go_over(draft: Draft) -> None:
    """Let all ranks end, and start as a group that keeps their map."""
    epoch, digest, _, _ = draft.facts(0).shown
    draft.group_starts(epoch + 1, digest)


def _reload(view: View) -> Iterator[Fault]:
    """The engine loads other weights."""
    if view.group_lives and not view.around.reload:
        yield Event(""), lambda draft: draft.change(reload=1)


def _move(view: View) -> Iterator[Fault]:
    """The engine moves experts by itself."""
    if view.group_lives and not (view.busy or view.passing or view.around.reload):
        yield Event(""), move_experts


def move_experts(draft: Draft) -> None:
    for rank in range(len(draft.ranks)):
        draft.rank_event(rank, ("move_experts",))


def _gate(view: View) -> Iterator[Fault]:
    """A poll fails on one rank."""
    for rank, facts in enumerate(view.ranks):
        if view.polling and facts is not None and not facts.passed and facts.resolves:
            yield Event("poll of rank", rank), partial(boundary_fails, rank=rank)


def _checksum(view: View) -> Iterator[Fault]:
    """A rank receives wrong bytes."""
    yield from _of_copies(view, ("corrupt",))


def _transfer(view: View) -> Iterator[Fault]:
    """A batch of copies runs into its deadline on one rank."""
    yield from _of_copies(view, ("abort_communicator",))


def _of_copies(view: View, event: tuple) -> Iterator[Fault]:
    for rank, facts in enumerate(view.ranks):
        if facts is not None and facts.moving:
            yield Event("at rank", rank), partial(Draft.rank_event, rank=rank, event=event)


KINDS: dict[str, Callable[[View], Iterator[Fault]]] = {
    "lose": _lose,
    "duplicate": _duplicate,
    "break": _break,
    "crash leader": _crash_leader,
    "crash rank": _crash_rank,
    "resize": _resize,
    "lose lease": _lose_lease,
    "take lease": _take_lease,
    "write": _write,
    "reload": _reload,
    "move": _move,
    "gate": _gate,
    "checksum": _checksum,
    "transfer": _transfer,
    "deadline": _deadline,
    "tick": _tick,
    "silence": _silence,
}
"""The name of each kind of fault, and what yields those that can happen now."""

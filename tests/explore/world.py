"""The small world: its first state, and every event that can follow a state.

See `docs/testing.md` for what is abstracted, and why it loses nothing that matters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol.transitions import ControlState
from tests.explore.changes import (
    boundary,
    connect,
    load,
    see_end,
    submit,
    take_off,
    to_leader,
    to_rank,
)
from tests.explore.faults import KINDS, fault_events
from tests.explore.invariants import History, Violation
from tests.explore.rank_table import copied
from tests.explore.small import LATER_S, SOON_S
from tests.explore.state import Draft, State, Surroundings, Tables
from tests.explore.view import ARMED, IDLE, Event, View
from tests.sim.kit import Kit

Change = Callable[[Draft], object]
_WORDS = {
    "drained": "nothing is in flight any more to rank",
    "lost": "failed copies are reported at rank",
    "save": "map is saved at rank",
    "report_reload": "reload is reported at rank",
}
"""The events of a rank's own threads, in words."""


@dataclass(frozen=True)
class Size:
    """The size of a world."""

    ranks: int
    waves: int
    faults: int
    """The faults that may happen in one run of the world."""
    kinds: frozenset[str] = frozenset(KINDS)
    """The names of the faults."""


class World:
    """One small world.

    Args:
        kit: the classes of the machines.
    """

    def __init__(self, kit: Kit, size: Size) -> None:
        self.tables = Tables(kit, size.ranks, size.waves + 1)
        self.size = size
        self.turned = 0
        """The rotation of the ranks from the last state to the one after it."""

    # --- the first state --------------------------------------------------------------------------

    def first(self) -> State:
        """Return the state in which the group has started and the leader knows all of it."""
        tables = self.tables
        none = Surroundings(0, 0, 0, 0, 1, 0, 0, History())
        size = tables.size
        empty = (0, 0, tables.stores.empty, tables.surroundings(none))
        draft = Draft(tables, (*empty, *[0] * size, *[tables.links(())] * size))
        draft.group_starts(Epoch(0), next(iter(tables.placements)))
        state = draft.done()
        for _ in range(100):
            if (view := View(tables, state)).at_rest:
                break
            _event, change = next(iter(self._events(view)))
            state = self._after(state, change, 0)
        else:
            raise AssertionError("the group does not come to rest")
        draft = Draft(tables, state)
        draft.change(faults=self.size.faults)
        return draft.done()

    def _after(self, state: State, change: Change, cost: int) -> State:
        draft = Draft(self.tables, state)
        if cost:
            draft.change(faults=draft.around.faults - cost)
        change(draft)
        after = draft.done()
        self.turned = draft.turned
        return after

    # --- events -----------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[Event, bool, State | Violation]]:
        """Yield each event that can follow, True if it is a fault, and the state after it."""
        view = View(self.tables, state)
        events = [(0, *one) for one in self._events(view)]
        if view.around.faults:
            events += [(1, *one) for one in fault_events(view, self.size.kinds)]
        for cost, event, change in events:
            after: State | Violation
            try:
                after = self._after(state, change, cost)
            except Violation as violation:
                after = violation
            yield event, bool(cost), after

    def _events(self, view: View) -> Iterator[tuple[Event, Change]]:
        for rank in range(len(view.ranks)):
            yield from self._messages(view, rank)
            yield from self._rank_events(view, rank)
        yield from self._leader_events(view)
        yield from self._group_events(view)

    def _messages(self, view: View, rank: int) -> Iterator[tuple[Event, Change]]:
        for stream in view.links[rank]:
            if stream.down and view.ranks[rank] is not None:
                event = Event("message to rank", rank, stream.down[0])
                yield event, partial(to_rank, rank=rank, stream=stream)
            if stream.down and stream.broken:
                event = Event("late message is lost for rank", rank, stream.down[0])
                yield event, partial(take_off, rank=rank, stream=stream, way="down")
            who = view.leader_of(stream)
            if who is None:
                continue
            if stream.up:
                event = Event(f"message to {who} from rank", rank, stream.up[0])
                yield event, partial(to_leader, rank=rank, stream=stream, who=who)
            if stream.broken and not stream.known:
                yield (
                    Event(f"{who} sees the end of the stream of rank", rank),
                    partial(see_end, rank=rank, stream=stream, who=who),
                )

    def _rank_events(self, view: View, rank: int) -> Iterator[tuple[Event, Change]]:
        facts = view.ranks[rank]
        if facts is None:
            return
        for name in facts.events:
            event: tuple = (name,)
            yield Event(_WORDS[name], rank), partial(Draft.rank_event, rank=rank, event=event)
        source = view.ranks[(rank + 1) % len(view.ranks)]
        for index, layer in enumerate(facts.moving):
            if source is None:
                continue
            event = ("arrived", index, copied(source.bytes, layer))
            arrived = partial(Draft.rank_event, rank=rank, event=event)
            yield Event("copies arrive at rank", rank), arrived
        if view.polling and not facts.passed:
            yield Event("step boundary of rank", rank), partial(boundary, view=view, rank=rank)
        if view.around.reload == 1 and not facts.reload:
            asked = partial(Draft.rank_event, rank=rank, event=("ask reload",))
            yield Event("engine asks for a reload at rank", rank), asked
        mine = next((s for s in view.links[rank] if s.number == facts.stream), None)
        if view.leads and (mine is None or mine.broken or mine.term != view.facts.term):
            yield Event("new stream of rank", rank), partial(connect, view=view, rank=rank)
        if view.hears_no_leader(rank) and facts.state is not IDLE and not facts.leaderless:
            silence = partial(Draft.rank_event, rank=rank, event=("leaderless",))
            yield Event("no leader is heard for long at rank", rank), silence

    def _leader_events(self, view: View) -> Iterator[tuple[Event, Change]]:
        facts, around = view.facts, view.around
        if view.earlier_leads:
            yield (
                Event("old leader learns that it lost its lease"),
                lambda draft: draft.loses_lease("old"),
            )
        if not view.leads:
            yield Event("leader leads at a higher term"), Draft.lead
            return
        for rank in range(len(view.ranks)):
            if facts.running and facts.fresh[rank] and not view.connected(rank):
                lost = partial(Draft.leader_event, who="leader", event=("unheard", rank))
                yield Event("leader does not hear rank", rank), lost
        ready = facts.state is ControlState.READY and facts.group is not None
        if ready and not facts.open_plans and around.layers < self.tables.layers - 1:
            yield Event("an operator starts a plan"), partial(submit, view=view)
        if view.still and not view.at_rest:
            asking = facts.running or facts.state is ControlState.RECOVERING
            event = ("tick", SOON_S if asking else LATER_S)
            yield Event("leader asks again"), partial(Draft.leader_event, who="leader", event=event)
            states = {f.state for f in view.ranks if f is not None}
            if facts.running and states != {ARMED}:
                end = partial(Draft.leader_event, who="leader", event=("deadline",))
                yield Event("deadline of the wave"), end

    def _group_events(self, view: View) -> Iterator[tuple[Event, Change]]:
        around = view.around
        if not view.group_lives:
            generation = str(around.generation)
            for name, epoch, digest in sorted(around.history.saved):
                if name == generation:
                    yield (
                        Event(f"group restarts at epoch {epoch}"),
                        partial(Draft.group_starts, epoch=Epoch(epoch), digest=digest),
                    )
            return
        reloads = {facts.reload for facts in view.ranks if facts is not None}
        if around.reload == 1 and reloads == {"permitted"} and not view.passing:
            yield Event("engine loads other weights"), load
        if around.reload == 2 and reloads == {""}:
            yield Event("reload is over"), lambda draft: draft.change(reload=0)

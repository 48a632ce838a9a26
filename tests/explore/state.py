"""A state of the whole world: numbers of the states of its parts, and the draft of the next one."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from evenkeel_moe.model.ids import Generation
from evenkeel_moe.protocol.messages import Leader, Prepare
from evenkeel_moe.protocol.transitions import ControlState
from tests.explore.invariants import TORN_MAP, UNMATCHED_OPERATION, WRONG_BYTES, History, Violation
from tests.explore.leader import LeaderTable
from tests.explore.rank_table import Messages, RankFacts, RankTable
from tests.explore.records import Stores
from tests.explore.small import placement_of
from tests.sim.kit import Kit

State = tuple[int, ...]
"""(leader, earlier leader or 0, store, surroundings, ranks..., links...)."""
HEAD = 4
Value = TypeVar("Value", bound=Hashable)


class Numbers(Generic[Value]):
    """Numbers for values that can be hashed."""

    def __init__(self) -> None:
        self.met: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def __call__(self, value: Value) -> int:
        number = self._numbers.setdefault(value, len(self.met))
        if number == len(self.met):
            self.met.append(value)
        return number


class Stream(NamedTuple):
    """One stream between a rank and a leader; each direction keeps its order."""

    number: int
    """Streams of one rank are numbered in the order in which they began."""
    term: int
    """The term of the leader at its end."""
    life: int
    """The process of the rank."""
    broken: bool = False
    """Nothing more can be sent. What is on the way may arrive, also late, or be lost."""
    known: bool = False
    """The leader knows that it ended."""
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()

    def end(self, *, known: bool = False, rank_died: bool = False) -> "Stream":
        """Return the stream broken: by the leader's end if `known`, or because the rank died."""
        known = known or self.known
        down, up = () if rank_died else self.down, () if known else self.up
        return self._replace(broken=True, known=known, down=down, up=up)


class Surroundings(NamedTuple):
    """The parts of the world that are no machine."""

    faults: int
    """The faults that may still happen."""
    layers: int
    """The layers that a wave was begun for; the next wave takes the layer after them."""
    plans: int
    generation: int
    version: int
    reload: int
    """1 while the ranks are asked to permit a reload, 2 while they report it."""
    least_term: int
    """The term that a leader named when it stepped down."""
    history: History


class Tables:
    """Everything that states are made of, shared by all states of a search."""

    def __init__(self, kit: Kit, ranks: int, layers: int) -> None:
        kit = kit.wired()
        self.size, self.layers = ranks, layers
        self.turns = range(ranks)
        """The rotations of a state that are one state; only 0 to merge none."""
        self.messages = Messages()
        self.stores = Stores()
        self.ranks = RankTable(kit, self.messages)
        self.leaders = LeaderTable(kit, self.messages, self.stores, ranks)
        self.links: Numbers[tuple[Stream, ...]] = Numbers()
        self.surroundings: Numbers[Surroundings] = Numbers()
        flips = [tuple(bool(bits >> n & 1) for n in range(layers)) for bits in range(1 << layers)]
        self.placements = {
            placement.digest: placement for placement in (placement_of(ranks, f) for f in flips)
        }
        self._silent: dict[int, bool] = {}

    def is_silent(self, link: int) -> bool:
        """Return True if no message is on the way between a rank and any leader."""
        known = self._silent.get(link)
        if known is None:
            streams = self.links.met[link]
            known = self._silent[link] = not any(s.down or s.up for s in streams)
        return known


class Draft:
    """A state under change. Every change raises Violation if it breaks an invariant."""

    __slots__ = ("around", "leader", "links", "old", "ranks", "store", "tables", "turned")

    def __init__(self, tables: Tables, state: State) -> None:
        self.tables = tables
        self.leader, self.old, self.store = state[:3]
        self.around = tables.surroundings.met[state[3]]
        size = tables.size
        self.ranks = list(state[HEAD : HEAD + size])
        self.links = [list(tables.links.met[link]) for link in state[HEAD + size :]]

    # --- the state --------------------------------------------------------------------------------

    def facts(self, rank: int) -> RankFacts:
        facts = self.tables.ranks.facts[self.ranks[rank]]
        assert facts is not None
        return facts

    def change(self, **values) -> None:
        self.around = self.around._replace(**values)

    def done(self) -> State:
        """Return the state; of all its rotations the smallest. `turned` is the rotation."""
        tables, leaders = self.tables, self.tables.leaders
        links = [tables.links(tuple(self._of_use(rank))) for rank in range(tables.size)]
        leader, old, ranks = self.leader, self.old, self.ranks
        if all(map(tables.is_silent, links)) and not any(
            "save" in self.facts(rank).events for rank, number in enumerate(ranks) if number
        ):
            leader, old = leaders.compact(leader), old and leaders.compact(old)
        around = tables.surroundings(self.around)
        best: State | None = None
        for by in tables.turns:
            cut = tables.size - by
            turned = (*ranks[cut:], *ranks[:cut], *links[cut:], *links[:cut])
            if best is not None and turned > best[HEAD:]:
                continue
            state = (
                leaders.rotated(leader, by), old and leaders.rotated(old, by), self.store, around,
                *turned,
            )  # fmt: skip
            if best is None or turned < best[HEAD:] or state < best:
                best, self.turned = state, by
        assert best is not None
        return best

    def _of_use(self, rank: int) -> list[Stream]:
        """Return the streams of a rank without what can have no effect any more.

        A leader ignores a broken stream once it has the rank's Hello on a newer one. A rank that
        has heard a newer leader only refuses a late message, and the refusal is lost.
        """
        facts = self.tables.leaders.facts
        newest = {facts[one].term: facts[one].streams[rank] for one in (self.leader, self.old)}
        used, term = 0, 0
        if self.ranks[rank]:
            used, term = self.facts(rank).stream, self.facts(rank).term
        kept = []
        for stream in self.links[rank]:
            if stream.broken:
                if not stream.known and newest.get(stream.term, 0) > stream.number:
                    stream = stream.end(known=True)
                if stream.term < term:
                    stream = stream._replace(down=())
                if stream.known and not stream.down and stream.number != used:
                    continue
            kept.append(stream)
        return kept

    # --- ranks ------------------------------------------------------------------------------------

    def rank_event(self, rank: int, event: tuple) -> None:
        """Give a rank an event, and carry its effects out."""
        step = self.tables.ranks.step(self.ranks[rank], event)
        if step.broken is not None:
            raise step.broken
        self.ranks[rank], out = step.after, step.out
        for stream, message in step.sends:
            self._send(rank, stream, "up", message)
        history, generation = self.around.history, str(self.around.generation)
        if out.installed is not None:
            history = history.install(generation, *out.installed)
        if out.swapped is not None:
            history = history.swap(out.swapped)
        if out.saved is not None:
            history = history.save(generation, *out.saved)
        if history is not self.around.history:
            self.change(history=history)
        if out.left:
            self.rank_dies(rank)
        elif all(self.ranks) and all(self.facts(r).passed for r in range(len(self.ranks))):
            self.exchange()

    def _send(self, rank: int, number: int, way: str, message: int, term: int = 0) -> None:
        """Put a message on a stream that works; otherwise it is lost."""
        link = self.links[rank]
        for place, stream in enumerate(link):
            if stream.number == number and not stream.broken and term in (0, stream.term):
                if way == "up":
                    link[place] = stream._replace(up=(*stream.up, message))
                else:
                    link[place] = stream._replace(down=(*stream.down, message))

    def exchange(self) -> None:
        """All ranks have passed the boundary and exchange tokens: their maps must be equal."""
        shown = [self.facts(rank).shown for rank in range(len(self.ranks))]
        for epoch, digest, version, serial in shown[1:]:
            if (epoch, digest) != shown[0][:2]:
                detail = f"ranks at epochs {[one[0] for one in shown]} compute one step"
                raise Violation(TORN_MAP, detail)
            if version != shown[0][2]:
                raise Violation(WRONG_BYTES, f"weights {[one[2] for one in shown]} in one step")
            if serial != shown[0][3]:
                detail = f"transfer communicators {[one[3] for one in shown]} in one step"
                raise Violation(UNMATCHED_OPERATION, detail)
        for rank in range(len(self.ranks)):
            self.ranks[rank] = self.tables.ranks.step(self.ranks[rank], ("next step",)).after

    def rank_dies(self, rank: int) -> None:
        self.ranks[rank] = 0
        self.links[rank] = [stream.end(rank_died=True) for stream in self.links[rank]]

    def group_starts(self, epoch: int, digest: str) -> None:
        """The group restarts from a saved map, as a new generation."""
        tables, generation = self.tables, self.around.generation + 1
        placement, version = tables.placements[digest], self.around.version
        name = Generation(str(generation))
        started = tables.ranks.start(name, generation, epoch, placement, version)
        for rank in range(len(self.ranks)):
            self.rank_dies(rank)
            self.ranks[rank] = started
        history = self.around.history.install(name, epoch, digest).save(name, epoch, digest)
        self.change(generation=generation, reload=0, history=history)

    # --- leaders ----------------------------------------------------------------------------------

    def leader_event(
        self, who: str, event: tuple, failing_from: int | None = None, happened: int = 0
    ) -> int:
        """Give a leader an event, and carry its effects out; return the writes it asked for.

        Args:
            failing_from: the number of the first write that fails; None for none.
            happened: how many of the writes that fail reach the store all the same.
        """
        tables = self.tables
        state = getattr(self, who)
        term = tables.leaders.facts[state].term
        step = tables.leaders.step(state, event, failing_from)
        if step.broken is not None:
            raise step.broken
        setattr(self, who, step.after)
        if step.asked and event[0] != "lead" and term < tables.stores.term(self.store):
            self.loses_lease(who)
            return 0
        asked = tables.leaders.step(state, event).writes
        self._write(asked[: len(step.writes) + happened])
        for wave in step.ended:
            self.change(history=self.around.history.end(wave.wave, wave.committed))
        for rank, stream, number in step.sends:
            self._send(rank, stream, "down", number, term)
            message = tables.messages.met[number]
            if isinstance(message, Prepare):
                layers = max(self.around.layers, message.body.layers[0] + 1)
                self.change(layers=layers)
        for rank, stream in step.closes:
            self.links[rank] = [
                one.end(known=True) if (one.number, one.term) == (stream, term) else one
                for one in self.links[rank]
            ]
        if step.at_least is not None:
            self.change(least_term=max(self.around.least_term, step.at_least))
        if tables.leaders.facts[step.after].state is ControlState.FOLLOWER:
            self.streams_end(term)
        return step.asked

    def _write(self, writes) -> None:
        for action in writes:
            self.store, history = self.tables.stores.write(self.store, self.around.history, action)
            if history is not self.around.history:
                self.change(history=history)

    def crash_within(self, event: tuple, writes: int) -> None:
        """Let the leader crash after some of the writes of an event, before it sends anything."""
        term = self.tables.leaders.facts[self.leader].term
        self._write(self.tables.leaders.step(self.leader, event).writes[:writes])
        self.leader = self.tables.leaders.fresh
        self.streams_end(term)
        self.lead()

    def crash(self) -> None:
        """Let the leader crash; another machine leads."""
        term = self.tables.leaders.facts[self.leader].term
        self.leader = self.tables.leaders.fresh
        self.streams_end(term)
        self.lead()

    def lead(self) -> None:
        """Let the leader's machine take the lease, with a term above all that it knows."""
        stores = self.tables.stores
        term = 1 + max(stores.term(self.store), self.around.least_term)
        self.store = stores.grant(self.store, term)
        self.leader_event("leader", ("lead", Leader(f"c{term}", term), self.store))

    def loses_lease(self, who: str) -> None:
        """A leader learns that it leads no more."""
        leaders, state = self.tables.leaders, getattr(self, who)
        term = leaders.facts[state].term
        setattr(self, who, leaders.step(state, ("lose lease",)).after)
        self.streams_end(term)

    def streams_end(self, term: int) -> None:
        """A leader has closed all its streams, or has died."""
        for rank, link in enumerate(self.links):
            self.links[rank] = [s.end(known=True) if s.term == term else s for s in link]

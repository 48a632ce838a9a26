"""A state with the facts of its parts."""

from typing import NamedTuple

from evenkeel_moe.protocol.messages import ParticipantState
from evenkeel_moe.protocol.transitions import ControlState
from tests.explore.rank_table import RankFacts
from tests.explore.state import HEAD, State, Stream, Tables

IDLE, ARMED = ParticipantState.IDLE, ParticipantState.ARMED


class Event(NamedTuple):
    """One event of the world, in words."""

    name: str
    rank: int | None = None
    message: int | None = None
    """The number of the message that is delivered or lost."""


class View:
    """A state with the facts of its parts."""

    def __init__(self, tables: Tables, state: State) -> None:
        self.tables, self.state = tables, state
        size = tables.size
        self.leader, self.old, self.store = state[:3]
        self.around = tables.surroundings.met[state[3]]
        self.ranks: list[RankFacts | None] = [
            tables.ranks.facts[number] for number in state[HEAD : HEAD + size]
        ]
        self.links = [tables.links.met[link] for link in state[HEAD + size :]]
        self.facts = tables.leaders.facts[self.leader]
        self.leads = self.facts.state is not ControlState.FOLLOWER
        self.group_lives = None not in self.ranks
        alive = [facts for facts in self.ranks if facts is not None]
        self.busy = any(f.state is not IDLE for f in alive)
        self.passing = any(facts.passed for facts in alive)
        self.polling = self.group_lives and self.around.reload < 2 and (
            self.passing or any(facts.polls for facts in alive)
        )  # fmt: skip
        """True if a step boundary can change anything."""
        old = tables.leaders.facts[self.old]
        self.earlier_leads = old.state is not ControlState.FOLLOWER
        self.silent = all(map(tables.is_silent, state[HEAD + size :]))

    def connected(self, rank: int) -> bool:
        """Return True if a rank uses a stream that works to the present leader."""
        facts = self.ranks[rank]
        return facts is not None and self.leads and any(
            s.number == facts.stream and not s.broken and s.term == self.facts.term
            for s in self.links[rank]
        )  # fmt: skip

    def leader_of(self, stream: Stream) -> str | None:
        """Return which leader is at the end of a stream; None if it is gone."""
        if self.leads and stream.term == self.facts.term:
            return "leader"
        old = self.old and stream.term == self.tables.leaders.facts[self.old].term
        return "old" if old else None

    def hears_no_leader(self, rank: int) -> bool:
        """Return True if no stream of a rank works: silence is then no fault."""
        return all(stream.broken for stream in self.links[rank])

    @property
    def still(self) -> bool:
        """True if only the steps of the engine and the passing of time can change anything."""
        return (
            self.silent
            and self.group_lives
            and not self.around.reload
            and not any(facts is not None and facts.pending for facts in self.ranks)
            and not any(s.broken and not s.known for link in self.links for s in link)
            and all(self.connected(rank) for rank in range(len(self.ranks)))
            and not self.earlier_leads
        )

    @property
    def at_rest(self) -> bool:
        """True if nothing is under way, and the leader knows the state of the group."""
        group = self.facts.group
        return (
            self.still
            and self.facts.state is ControlState.READY
            and not self.facts.open_plans
            and not self.busy
            and group is not None
            and all(
                facts is not None
                and facts.shown[:3] == (group.epoch, group.placement.digest, group.weights_version)
                for facts in self.ranks
            )
        )

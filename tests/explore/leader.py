"""The states of a controller's machine as numbers, and the steps between them.

Rotated states share one machine: a step of a state is the rotated step of the machine that stands
for all its rotations.
"""

from typing import Any, NamedTuple

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Generation
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.messages import Tick
from evenkeel_moe.protocol.transitions import ControlState, CoordinatorState
from tests.explore.freeze import AGES_AGO, Freezer, clone, normalise
from tests.explore.invariants import UNEXPECTED, Violation
from tests.explore.rank_table import ERRORS, Broken, Messages, as_violation, with_rank
from tests.explore.records import Stores
from tests.explore.small import DEADLINE_S, DEPLOYMENT, POLICY, SOON_S, TIMING, numbered
from tests.sim.kit import Kit

Rotation = tuple[int, ...]


class LeaderStep(NamedTuple):
    """The result of one event of a controller's machine."""

    after: int
    writes: tuple[ctl.PersistAction, ...]
    """The writes that reach the store, in order."""
    asked: int
    """The number of writes that the machine asked for."""
    sends: tuple[tuple[int, int, int], ...]
    """(rank, stream, number of the message)."""
    closes: tuple[tuple[int, int], ...]
    """(rank, stream)."""
    at_least: int | None
    """The term of RaiseTerm."""
    ended: tuple[ctl.WaveEnded, ...]
    broken: Broken


class LeaderFacts(NamedTuple):
    """The parts of a machine's state that decide which events are possible."""

    state: ControlState
    term: int
    generation: Generation | None
    group: GroupState | None
    """The state of the group as the machine knows it."""
    running: bool
    """True while a wave is under way."""
    has_deadline: bool
    """True if the end of a deadline could end the wave or change its record."""
    open_plans: bool
    newest_streams: tuple[int, ...]
    """By rank, the highest number of a stream that it knows."""
    streams: tuple[int, ...]
    """By rank, the stream on which it takes messages; 0 for none."""
    fresh: tuple[bool, ...]
    """By rank."""
    lives: tuple[int, ...]
    """By rank, the process that speaks for it; 0 for none."""


class LeaderTable:
    """The states of a controller's machine."""

    def __init__(self, kit: Kit, messages: Messages, stores: Stores, ranks: int) -> None:
        self.kit = kit
        self.messages = messages
        self.stores = stores
        self.ranks = ranks
        self.rotations: tuple[Rotation, ...] = tuple(
            tuple((rank + by) % ranks for rank in range(ranks)) for by in range(ranks)
        )
        self._freezers = [Freezer(rotation) for rotation in self.rotations]
        self.machines: list[DeploymentControl] = []
        self._parts: list[tuple[int, int]] = []
        """By state: (machine, number of the rotation from it)."""
        self._states: list[list[int]] = []
        """By machine: its state under each rotation."""
        self.facts: list[LeaderFacts] = []
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple, LeaderStep] = {}
        self._compact: dict[int, int] = {}
        self.fresh = self._intern(kit.control(DEPLOYMENT, timing=TIMING, policy=POLICY))
        """The state of a machine that does not lead and never did."""

    # --- states -----------------------------------------------------------------------------------

    def _intern(self, control: DeploymentControl) -> int:
        normalise(control)
        number = self._numbers.get(self._freezers[0].freeze(control))
        if number is not None:
            return number
        machine, states = len(self.machines), []
        self.machines.append(control)
        facts = self._facts_of(control)
        for index, freezer in enumerate(self._freezers):
            key = freezer.freeze(control)
            number = self._numbers.setdefault(key, len(self._parts))
            if number == len(self._parts):
                self._parts.append((machine, index))
                self.facts.append(_rotated(facts, self.rotations[index]))
            states.append(number)
        self._states.append(states)
        return states[0]

    def rotated(self, state: int, by: int) -> int:
        """Return a state with its ranks rotated."""
        machine, index = self._parts[state]
        return self._states[machine][(index + by) % self.ranks]

    def compact(self, state: int) -> int:
        """Return a state with the smallest numbers for its queries; for a silent network."""
        known = self._compact.get(state)
        if known is None:
            machine, index = self._parts[state]
            control = clone(self.machines[machine])
            _compact_queries(control)
            known = self._compact[state] = self.rotated(self._intern(control), index)
        return known

    # --- steps ------------------------------------------------------------------------------------

    def step(self, state: int, event: tuple, failing_from: int | None = None) -> LeaderStep:
        """Return the result of an event.

        Args:
            event: its name and arguments; a rank is the second part, a message is its number.
            failing_from: the number of the first write that the store does not take; None for none.
        """
        key = (state, event, failing_from)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._step(state, event, failing_from)
        return known

    def _step(self, state: int, event: tuple, failing_from: int | None) -> LeaderStep:
        machine, index = self._parts[state]
        if index == 0:
            return self._run(machine, event, failing_from)
        if event[0] in ("message", "closed", "unheard"):
            event = (event[0], (event[1] - index) % self.ranks, *event[2:])
        found = self.step(self._states[machine][0], event, failing_from)
        ranks = self.rotations[index]
        return found._replace(
            after=self.rotated(found.after, index),
            sends=tuple((ranks[rank], stream, sent) for rank, stream, sent in found.sends),
            closes=tuple((ranks[rank], stream) for rank, stream in found.closes),
        )

    def _run(self, machine: int, event: tuple, failing_from: int | None) -> LeaderStep:
        control = clone(self.machines[machine])
        try:
            actions = self._act(control, event)
            persists = [one for one in actions if isinstance(one, ctl.PersistAction)]
            sends = [one for one in actions if isinstance(one, ctl.SendToRank)]
            if failing_from is not None:
                failed = ctl.PersistFailed(tuple(persists[failing_from:]))
                sends = [one for one in sends if not one.needs_store]
                assert not control.handle(failed, 0.0)
            for action in actions:
                if isinstance(action, ctl.Alert) and action.reason is Reason.MALFORMED:
                    raise Violation(UNEXPECTED, action.detail)
        except ERRORS as error:
            return LeaderStep(0, (), 0, (), (), None, (), as_violation(error))
        raised = [one.at_least for one in actions if isinstance(one, ctl.RaiseTerm)]
        return LeaderStep(
            self._intern(control),
            tuple(persists[:failing_from]),
            len(persists),
            tuple((int(s.rank), s.stream, self.messages.number(s.message)) for s in sends),
            tuple((int(c.rank), c.stream) for c in actions if isinstance(c, ctl.CloseStream)),
            raised[0] if raised else None,
            tuple(one for one in actions if isinstance(one, ctl.WaveEnded)),
            None,
        )

    def _act(self, control: DeploymentControl, event: tuple) -> list[ctl.ControlAction]:
        match event:
            case ("message", rank, stream, life, number):
                message = with_rank(self.messages.met[number], numbered(rank))
                return control.handle(ctl.FromRank(numbered(rank), life, stream, message), 0.0)
            case ("closed", rank, stream):
                return control.handle(ctl.StreamClosed(numbered(rank), stream), 0.0)
            case ("tick", now):
                return control.handle(Tick(), now)
            case ("deadline",):
                return _reach_deadline(control)
            case ("unheard", rank):
                control.membership.members[numbered(rank)].last_seen = AGES_AGO
                return control.handle(Tick(), SOON_S / 2)
            case ("submit", plan):
                return control.handle(ctl.PlanSubmitted(plan, approve=True), 0.0)
            case ("lose lease",):
                return control.handle(ctl.LeaseLost(), 0.0)
            case ("lead", leader, stored):
                return control.handle(ctl.LeaseAcquired(leader, self.stores.load(stored)), 0.0)
        raise AssertionError(event)

    def _facts_of(self, control: DeploymentControl) -> LeaderFacts:
        wave = control.coordinator
        streams, fresh, lives = [0] * self.ranks, [False] * self.ranks, [0] * self.ranks
        for rank, member in control.membership.members.items():
            streams[rank], fresh[rank] = member.stream, member.last_seen == 0.0
            lives[rank] = member.hello.identity.incarnation
        newest = list(streams)
        if wave is not None:
            for rank, peer in wave.peers.by_rank.items():
                newest[rank] = max(newest[rank], peer.stream, peer.asked_on)
        running = control.leading is not None and control.leading.executor.running
        return LeaderFacts(
            control.state,
            control.leader.term if control.leader is not None else 0,
            control.generation,
            control.group,
            running,
            running and wave is not None and wave.state is not CoordinatorState.COMMITTED,
            bool(control.records.open),
            tuple(newest),
            tuple(streams),
            tuple(fresh),
            tuple(lives),
        )


def _rotated(facts: LeaderFacts, ranks: Rotation) -> LeaderFacts:
    def turn(values: tuple) -> tuple:
        turned = list(values)
        for rank, value in enumerate(values):
            turned[ranks[rank]] = value
        return tuple(turned)

    return facts._replace(
        newest_streams=turn(facts.newest_streams),
        streams=turn(facts.streams),
        fresh=turn(facts.fresh),
        lives=turn(facts.lives),
    )


def _reach_deadline(control: DeploymentControl) -> list[ctl.ControlAction]:
    """Let the deadline of the wave end at a moment at which no question is due."""
    leading = control.as_leader
    assert control.coordinator is not None
    leading.liveness._asked_at = DEADLINE_S
    for peer in control.coordinator.peers.by_rank.values():
        peer.resend_at = 2 * DEADLINE_S
    if leading.recovery.round is not None:
        leading.recovery.round.resend_at = 2 * DEADLINE_S
    return control.handle(Tick(), DEADLINE_S)


def _compact_queries(control: DeploymentControl) -> None:
    if control.leading is None:
        return
    recovery, wave = control.leading.recovery, control.coordinator
    holders: list[tuple[Any, str]] = [(recovery, "query"), (recovery, "settled_query")]
    holders += [(recovery.round, "query")] if recovery.round is not None else []
    holders += [(wave, "query")] if wave is not None else []
    used = sorted({0} | {getattr(holder, name) for holder, name in holders})
    for holder, name in holders:
        setattr(holder, name, used.index(getattr(holder, name)))

"""Copies of machines, and their states as values that can be compared and hashed.

Both walk over all attributes, so an attribute that is added to a machine becomes part of its state
without a change here. `RULES` names the few that are set to a fixed value before.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanRecord
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import ParticipantState, Prepare, RankState
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from tests.explore.small import SOON_S, RankNumber

AGES_AGO = float("-inf")


def _since(moment: float | None) -> float | None:
    """Return the time as 0, unless it is unknown or marks something that was long ago."""
    return moment if moment is None or moment == AGES_AGO else 0.0


def normal_record(record: PlanRecord) -> PlanRecord:
    """Return a record without the time and the texts for people."""
    error = None if record.error is None else ""
    return replace(record, updated_at=0.0, error=error, story=())


def _participant(machine: Any) -> None:
    machine.step = 0
    machine._heard_at = _since(machine._heard_at)
    machine._story.clear()
    view = machine.poll
    if view is not None and not (view.armed_epoch or view.want_drop):
        machine.poll = view._replace(wave=None)  # Read only if the poll passes or drops.


def _gate(machine: Any) -> None:
    calls, machine.calls = machine.calls, 0
    if machine._began is not None:
        machine._began -= calls
    if not (machine.left or machine.observe_only):
        machine.next_due -= calls
    assert not machine.faults, machine.faults


def _peer(peer: Any) -> None:
    peer.resend_at, peer.wait_s = SOON_S, 0.0
    peer.times_asked = min(peer.times_asked, 2)
    if peer.state is not None:
        peer.state = replace(peer.state, query=0)


def _coordinator(machine: Any) -> None:
    machine._entered_at = machine._stepped_at = 0.0
    machine._entered_step = machine._step = 0
    machine._story.clear()


def _query_round(questions: Any) -> None:
    questions.resend_at = SOON_S
    questions.answers = {
        rank: replace(answer, query=0) for rank, answer in questions.answers.items()
    }
    if questions.repeat_at is not None:
        questions.repeat_at = SOON_S


def _recovery(machine: Any) -> None:
    machine._began_at, machine._alerted = 0.0, None


def _liveness(machine: Any) -> None:
    machine._asked_at = 0.0


def _member(member: Any) -> None:
    """Keep only the epoch of a rank's newest answer; the time to come back is over at once."""
    member.last_seen = _since(member.last_seen)
    member.closed_at = None if member.closed_at is None else AGES_AGO
    state = member.state
    if state is not None:
        member.state = RankState(
            state.identity, ParticipantState.IDLE, None, state.epoch, "", 0, True, None, None
        )


def _plan_records(records: Any) -> None:
    records.by_id = {name: normal_record(record) for name, record in records.by_id.items()}


def _plan_executor(executor: Any) -> None:
    executor._durations = None
    if executor._waiting is not None:
        executor._waiting = (executor._waiting[0], 0.0)


def _planning_loop(loop: Any) -> None:
    loop._last_cycle_at, loop.last = 0.0, None


def _write_retry(writes: Any) -> None:
    """The search reports a failed write at once, so the sends of earlier batches are not read."""
    writes._sends = ()


RULES: dict[str, Callable[[Any], None]] = {
    "Participant": _participant,
    "Gate": _gate,
    "Peer": _peer,
    "Coordinator": _coordinator,
    "QueryRound": _query_round,
    "Recovery": _recovery,
    "Liveness": _liveness,
    "Member": _member,
    "PlanRecords": _plan_records,
    "PlanExecutor": _plan_executor,
    "PlanningLoop": _planning_loop,
    "WriteRetry": _write_retry,
}
"""The rule of each class, by its name; it holds for classes derived from it."""


_TEXT = frozenset({"detail", "error"})
"""Attributes for people: no machine decides by them."""
_CONSTANT = (ModelShape, DeploymentPolicy, ControlTiming, WaveTiming, count)
_SIMPLE = (int, float, str, bool, bytes, type(None), Enum)


@cache
def _is_atom(kind: Any) -> bool:
    """Return True if values of a type never change."""
    if issubclass(kind, (*_SIMPLE, *_CONSTANT, type, Placement, np.ndarray)):
        return True
    if issubclass(kind, tuple):
        return kind is not tuple  # A NamedTuple of the machines holds atoms.
    params = getattr(kind, "__dataclass_params__", None)
    return params is not None and params.frozen


@cache
def _attributes(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the attributes of a class with slots; None if it has a dict."""
    return tuple(field.name for field in fields(kind)) if hasattr(kind, "__slots__") else None


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, in a fixed order."""
    kind: Any = type(value)
    names = _attributes(kind) if is_dataclass(value) else None
    if names is not None:
        return [(name, getattr(value, name)) for name in names]
    return sorted(vars(value).items())


def clone(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares only what never changes; an object stays one object."""
    kind: Any = type(value)
    if _is_atom(kind):
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if kind is tuple:
        return tuple(clone(item, memo) for item in value)
    if kind is list:
        new = memo[id(value)] = [clone(item, memo) for item in value]
    elif kind is dict:
        new = memo[id(value)] = {key: clone(item, memo) for key, item in value.items()}
    elif kind in (set, frozenset):
        new = memo[id(value)] = kind(value)
    elif kind is deque:
        new = memo[id(value)] = deque((clone(item, memo) for item in value), value.maxlen)
    else:
        new = memo[id(value)] = kind.__new__(kind)
        for name, item in attributes_of(value):
            object.__setattr__(new, name, clone(item, memo))
    return new


@cache
def _rules(kind: Any) -> tuple[Callable[[Any], None], ...]:
    return tuple(RULES[parent.__name__] for parent in kind.__mro__ if parent.__name__ in RULES)


def normalise(value: Any) -> Any:
    """Apply `RULES` to an object and to all it holds, and return it."""
    _normalise(value, set())
    return value


def _normalise(value: Any, seen: set[int]) -> None:
    kind: Any = type(value)
    if _is_atom(kind) or id(value) in seen:
        return
    seen.add(id(value))
    if kind in (tuple, list, deque):
        for item in value:
            _normalise(item, seen)
    elif kind is dict:
        for item in value.values():
            _normalise(item, seen)
    elif kind not in (set, frozenset):
        for rule in _rules(kind):
            rule(value)
        for _, item in attributes_of(value):
            _normalise(item, seen)


class Freezer:
    """Turns machines and messages into values, with their ranks renamed.

    Args:
        ranks: the new number of each rank; None gives every rank the same number, for a machine
            that knows of no rank but its own.
    """

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        self.ranks = ranks
        self._seen: dict[int, int] = {}

    def freeze(self, value: Any) -> Any:
        """Return the value of an object: tuples of what can be hashed."""
        self._seen = {}
        return self._freeze(value)

    def _freeze(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is RankNumber:
            return None if self.ranks is None else self.ranks[value]
        if issubclass(kind, _SIMPLE):
            return value
        if issubclass(kind, _CONSTANT):
            return kind.__name__
        if kind in (tuple, list, deque):
            return tuple([self._freeze(item) for item in value])
        if kind is dict:
            items = [(self._freeze(key), self._freeze(item)) for key, item in value.items()]
            return tuple(sorted(items, key=_order))
        if kind in (set, frozenset):
            return tuple(sorted((self._freeze(item) for item in value), key=repr))
        short = _short(value)
        if short is not None:
            return short
        if not _is_atom(kind):
            if id(value) in self._seen:
                return ("seen", self._seen[id(value)])
            self._seen[id(value)] = len(self._seen)
        if isinstance(value, tuple):
            return (kind.__name__, *[self._freeze(item) for item in value])
        return (
            kind.__name__,
            *[self._freeze(item) for name, item in attributes_of(value) if name not in _TEXT],
        )


def _order(item: tuple[Any, Any]) -> str:
    return repr(item[0])


def _short(value: Any) -> Any:
    """Return a short value for an object that never changes and is known by a few of its parts."""
    if isinstance(value, Placement):
        return value.digest
    if isinstance(value, Plan):
        return ("plan", value.key(0), value.base.digest, value.target.digest)
    if isinstance(value, Prepare):
        return ("prepare", value.leader, value.wave, value.base_epoch, value.body.layers)
    if isinstance(value, PlanRecord):
        marks = (value.waves_committed, value.wave_sent, value.cancel_requested)
        return (_short(value.plan), value.phase, value.reason, marks)
    return None

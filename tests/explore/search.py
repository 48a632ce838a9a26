"""The breadth-first search over all states of a world, and the check that each can come to rest."""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.explore.invariants import NO_PROGRESS, Violation
from tests.explore.state import State
from tests.explore.view import Event, View
from tests.explore.world import World


@dataclass(frozen=True)
class Found:
    """A broken invariant, and the shortest way to it."""

    invariant: str
    detail: str
    events: tuple[Event, ...]
    """The events from the first state on; the last one breaks the invariant."""


@dataclass
class Result:
    """The outcome of a search."""

    states: int
    transitions: int
    depth: int
    exhausted: bool
    seconds: float
    found: list[Found] = field(default_factory=list)


class Search:
    """One search.

    Args:
        most_states: the search ends at this number of states.
        most_seconds: the search ends after this time.
        stop_at_first: end at the first broken invariant.
        skipped: invariants that end a way, and are not counted.
        progress: called with a line of text now and then.
    """

    def __init__(
        self,
        world: World,
        *,
        most_states: int | None = None,
        most_seconds: float | None = None,
        stop_at_first: bool = False,
        skipped: frozenset[str] = frozenset(),
        progress: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.world = world
        self.most_states, self.most_seconds = most_states, most_seconds
        self.stop_at_first, self.skipped = stop_at_first, skipped
        self.progress = progress
        self.states: list[State] = []
        self._parents = array("i")
        self._from, self._to = array("i"), array("i")
        """The transitions that are no faults."""
        self._at_rest = array("i")
        self.transitions = 0
        self.found: dict[str, Found] = {}

    def run(self) -> Result:
        began, shown = time.monotonic(), 0.0
        first = self.world.first()
        numbers = {first: 0}
        self.states, self._parents = [first], array("i", [-1])
        depth, level_ends, done, over = 0, 1, 0, False
        while done < len(self.states) and not over:
            if done == level_ends:
                depth, level_ends = depth + 1, len(self.states)
            self._expand(done, numbers)
            done += 1
            if done % 1024 == 0:
                seconds = time.monotonic() - began
                over = bool(self.most_seconds and seconds > self.most_seconds)
                if seconds > shown + 10:
                    shown = seconds
                    self.progress(f"{seconds:.0f} s: depth {depth}, {len(self.states)} states")
            over = over or bool(self.most_states and len(self.states) > self.most_states)
            over = over or bool(self.stop_at_first and self.found)
        exhausted = done == len(self.states)
        if exhausted and not (self.stop_at_first and self.found):
            self._check_progress()
        seconds = time.monotonic() - began
        found = list(self.found.values())
        return Result(len(self.states), self.transitions, depth, exhausted, seconds, found)

    def _expand(self, number: int, numbers: dict[State, int]) -> None:
        state = self.states[number]
        if View(self.world.tables, state).at_rest:
            self._at_rest.append(number)
        for event, is_fault, after in self.world.successors(state):
            self.transitions += 1
            if isinstance(after, Violation):
                self._note(after.invariant, after.detail, number, event)
                continue
            new = numbers.setdefault(after, len(self.states))
            if new == len(self.states):
                self.states.append(after)
                self._parents.append(number)
            if not is_fault:
                self._from.append(number)
                self._to.append(new)

    def _note(self, invariant: str, detail: str, number: int, event: Event | None) -> None:
        if invariant in self.skipped or invariant in self.found:
            return
        self.found[invariant] = Found(invariant, detail, self.path_to(number, event))

    def path_to(self, number: int, last: Event | None = None) -> tuple[Event, ...]:
        """Return the events that lead from the first state to a state, and one after it.

        Every state is a rotation of the true one, so the ranks of the events are turned back.
        """
        way = [number]
        while (parent := self._parents[way[-1]]) >= 0:
            way.append(parent)
        events, turned, ranks = [], 0, self.world.tables.size
        for state, after in pairwise(self.states[one] for one in reversed(way)):
            found = next(e for e, _, s in self.world.successors(state) if s == after)
            events.append(_turned(found, -turned, ranks))
            turned += self.world.turned
        return (*events, *([_turned(last, -turned, ranks)] if last is not None else []))

    def _check_progress(self) -> None:
        """From every state a way to rest must exist without a further fault."""
        stuck = np.flatnonzero(~self._can_rest())
        if len(stuck):
            detail = f"{len(stuck)} states have no way to rest"
            self._note(NO_PROGRESS, detail, int(stuck[0]), None)

    def _can_rest(self) -> np.ndarray:
        """Return for each state if a state at rest can be reached without a fault."""
        count = len(self.states)
        sources, targets = np.asarray(self._from), np.asarray(self._to)
        order = np.argsort(targets, kind="stable")
        sources = sources[order]
        begins = np.searchsorted(targets[order], np.arange(count + 1))
        resting = np.zeros(count, bool)
        front = np.asarray(self._at_rest, dtype=np.int64)
        resting[front] = True
        while len(front):
            spans = [sources[begins[one] : begins[one + 1]] for one in front.tolist()]
            before = np.unique(np.concatenate(spans))
            front = before[~resting[before]]
            resting[front] = True
        return resting


def _turned(event: Event, by: int, ranks: int) -> Event:
    return event if event.rank is None else event._replace(rank=(event.rank + by) % ranks)

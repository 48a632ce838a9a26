"""Random runs of the model, event by event, with the state after each."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.quint.judge import TREE
from tests.quint.terms import fields
from tests.quint.translate import load
from tests.quint.values import Action, Record, Walk

Event = tuple[str, Any]
_Definition = Callable[[Record, Any], Record]
GATES = ((2, 1), (1, 1), (2, 2), (3, 1), (3, 2))
"""(K, D) of the runs in turn. The model also takes D > K, which the real gate refuses."""
FROM_LEADER = ("Prepare", "Commit", "Abort", "Query")
_WORK = {
    "passBoundary": 30.0,
    "first_arrival": 20.0,
    "arrival": 6.0,
    "prepare": 1.0,
    "answer": 15.0,
    "rankStep": 8.0,
    "leaderStep": 8.0,
}
_RATES = (0.0, 0.0, 0.05, 0.3)
"""The weights that a kind of trouble may have in a run."""


@dataclass(frozen=True)
class Step:
    """One event of a run."""

    event: Event
    state: Record
    """The model's state after the event."""
    told: Record | None
    """The message that a rank made up in the event; None if it made up none."""
    refused: tuple[Record, ...]
    """Messages that were offered to a rank before the event, and that the model refused."""


class Walker:
    """Runs of the model's own steps.

    Args:
        tree: the model as Quint parsed it.
    """

    def __init__(self, tree: Path = TREE) -> None:
        self._walk = Walk(0)
        self.model = load(tree, self._walk)
        self._tried: list[tuple[Event, bool]] = []
        self._told: Record | None = None
        self._arrived: set[Record] = set()
        self._unanswered: set[tuple[int, int]] = set()
        """(rank, wave) about which a rank may soon say something; wave 0 is its whole state."""
        names = self.model.fire.__globals__
        names["q_apply"] = self._noted(names["q_apply"])
        names["q_says"] = self._heard(names["q_says"])

    def run(self, seed: int, steps: int) -> tuple[Record, list[Step]]:
        """Return the first state of a run and its events.

        A rank that has heard no leader yet wants to drop its wave. The model leaves open when it
        begins to; a real rank begins at once. So each start is followed by `LeaderLost` of all.
        """
        every, delay = GATES[seed % len(GATES)]
        ranks = frozenset(range(2 + seed // len(GATES) % 2))
        config = fields(every=every, delay=delay, fault="")
        start = self.model.started(ranks, frozenset({0, 1}), config)
        self._walk.begin(seed, start)
        rng = random.Random(seed)
        actions = {**self._work(), **self._trouble()}
        weights = [
            rng.choice((0.5, 1.0, 2.0)) * _WORK[name] if name in _WORK else rng.choice(_RATES)
            for name in actions
        ]
        for known in (self._arrived, self._unanswered, self._tried):
            known.clear()
        taken = [self._taken(("LeaderLost", rank)) for rank in sorted(ranks)]
        while len(taken) < steps:
            [action] = rng.choices(list(actions.values()), weights)
            if not self._walk.step(action):
                continue
            taken.append(self._step())
            self._tried.clear()
            if taken[-1].event[0] == "GroupRestarted":
                taken += [self._taken(("LeaderLost", rank)) for rank in sorted(ranks)]
        return start, taken

    def _work(self) -> dict[str, Action]:
        """Return the model's actions that bring waves about."""
        model, walk = self.model, self._walk

        def first_arrival() -> bool:
            """A message arrives that has not arrived before."""
            message = walk.one_of(walk.state["net"] - self._arrived)
            self._arrived.add(message)
            content = fields(message=message, again=True)
            if message["body"][0] in FROM_LEADER:
                return bool(model.fire(("RankGot", content.having("refuses", False))))
            return bool(model.fire(("LeaderGot", content)))

        def answer() -> bool:
            """A rank says how a wave stands about which something has happened."""
            rank, about = walk.one_of(frozenset(self._unanswered))
            self._unanswered.discard((rank, about))
            return bool(model.fire(("Tells", fields(rank=rank, about=about))))

        def prepare() -> bool:
            """A Prepare arrives late; the rank may refuse it for a reason of its own."""
            prepares = [m for m in walk.state["net"] if m["body"][0] == "Prepare"]
            message = walk.one_of(frozenset(prepares))
            refuses = walk.one_of(frozenset({True, False}))
            content = fields(message=message, again=True, refuses=refuses)
            return bool(model.fire(("RankGot", content)))

        drawn = ("passBoundary", "arrival", "rankStep", "leaderStep")
        actions = {name: getattr(model, name) for name in drawn}
        return {**actions, "first_arrival": first_arrival, "prepare": prepare, "answer": answer}

    def _trouble(self) -> dict[str, Action]:
        """Return everything else that may happen; each run has its own rate of each."""
        model, walk = self.model, self._walk

        def at_rank(label: str) -> Action:
            return lambda: model.fire((label, walk.one_of(model.rankIds(walk.state))))

        def at_leader(label: str) -> Action:
            return lambda: model.fire((label, walk.one_of(walk.state["leaders"].keys())))

        def voted_no() -> bool:
            rank = walk.one_of(model.rankIds(walk.state))
            return bool(model.fire(("Voted", fields(rank=rank, yes=False))))

        labels = ("Disconnected", "LeaderLost", "ReloadAsked", "Crashed")
        return {
            "trouble": model.trouble,
            "voted_no": voted_no,
            **{label: at_rank(label) for label in labels},
            **{label: at_leader(label) for label in ("SteppedDown", "AbortDecided")},
        }

    def _step(self) -> Step:
        """Return the step that the walk has taken."""
        refused = tuple(
            event[1]["message"] for event, ok in self._tried if event[0] == "RankGot" and not ok
        )
        event = self._tried[-1][0]
        self._note_answer(event)
        told = self._told if event[0] == "Tells" else None
        return Step(event, self._walk.state, told, refused)

    def _note_answer(self, event: Event) -> None:
        label, value = event
        if label == "RankGot":
            kind, wave = value["message"]["body"]
            about = 0 if kind == "Query" else wave["id"]
            self._unanswered.add((value["message"]["rank"], about))
        elif label in ("Voted", "Saved", "Drained"):
            rank = value if label == "Saved" else value["rank"]
            for leader in self._walk.state["leaders"].values():
                self._unanswered.add((rank, leader["wave"]["id"]))

    def _taken(self, event: Event) -> Step:
        """Take one event that the walk did not choose."""
        self._walk.state = self.model.apply(self._walk.state, event)["state"]
        self._tried.clear()
        return Step(event, self._walk.state, None, ())

    def _noted(self, apply: _Definition) -> _Definition:
        def noted(state: Record, event: Event) -> Record:
            after = apply(state, event)
            self._tried.append((event, after["ok"]))
            return after

        return noted

    def _heard(
        self, says: Callable[[Record, Record], Record]
    ) -> Callable[[Record, Record], Record]:
        def heard(state: Record, message: Record) -> Record:
            self._told = message
            return says(state, message)

        return heard

"""Explain a chaos run by events of the model.

A fact demands the events without which the model cannot take it, such as the arrival of the message
that an answer answers.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.judge.case import Case, read_case, wave_in
from tests.chaos.judge.ranks import RankSwap, StepFacts
from tests.quint.chaos_facts import Fact, Group
from tests.quint.chaos_inference import EMPTY, DropNeededError, Inference, RefusedError
from tests.quint.judge import TREE, Verdict
from tests.quint.translate import load
from tests.quint.values import Record, Walk

_MOST_TRIES = 20
"""Times that a run is explained anew with one more poll at which the ranks dropped a wave."""


def judge_run(model: SimpleNamespace, case: Case) -> Verdict:
    """Return how many events of a chaos run the model can take, and the first that it cannot."""
    drops: set[tuple[int, int]] = set()
    if not any(facts.starts for facts in case.ranks):
        return Verdict(0, "no rank wrote that it started")
    for _ in range(_MOST_TRIES):
        run = _Explanation(model, case, drops)
        try:
            return run.verdict()
        except DropNeededError as error:
            drops.add(error.poll)
    return Verdict(run.taken, f"no {_MOST_TRIES} polls explain the dropped waves", run.state)


def chaos_verdict(folder: Path) -> tuple[str, str]:
    """Judge a kept chaos run by the model that `make quint` has parsed.

    Returns:
        The verdict as a line, and why the model refuses the run; empty if it does not.
    """
    if not TREE.is_file():
        return "the model did not judge: `make quint` parses it, with Node.js 18 or later", ""
    verdict = judge_run(load(TREE, Walk(0)), read_case(folder))
    if verdict.refused:
        return f"the model refuses event {verdict.accepted}", verdict.refused
    waves = len(verdict.state["switched"])
    return f"the model explains the run: {verdict.accepted:,} events, {waves} waves", ""


class _Explanation(Inference):
    """One attempt to explain a run."""

    def verdict(self) -> Verdict:
        """Explain every fact in turn.

        Raises:
            DropNeededError: the explanation needs a poll that drops a wave.
        """
        facts = self.facts.in_order()
        for fact in facts:
            if fact.kind == "answered":
                self.answers[fact.rank].append(fact.what)
        for fact in facts:
            try:
                self._explain(fact)
            except RefusedError as error:
                return Verdict(self.taken, f"{_described(fact)}: {error}", self.state)
        return Verdict(self.taken, "", self.state)

    # --- facts ------------------------------------------------------------------------------------

    def _explain(self, fact: Fact) -> None:
        explain: Callable[[Fact], None] = getattr(self, f"_{fact.kind}")
        explain(fact)

    def _restarted(self, fact: Fact) -> None:
        """The engine has started the group again; each rank names its epoch."""
        group: Group = fact.what
        self.group = group
        self.streams.clear()
        self.computed.clear()
        epoch = max(group.epochs.values())
        place = self.facts.place_of_epoch(epoch)
        self.take("GroupRestarted", Record(epoch=epoch, place=place, version=1))
        for rank, named in group.epochs.items():
            self.take("Seen", Record(rank=rank, hold=("Nothing", EMPTY), wave=0, epoch=named))

    def _step(self, fact: Fact) -> None:
        """A rank has computed a step, so all ranks have begun it."""
        group: Group
        step: StepFacts
        group, step = fact.what
        boundary = step.step - group.first_step
        for rank in self.ranks:
            self.begin_step(rank, boundary)
        self.computed[fact.rank] = boundary
        for state in (step.before, step.after):
            place = self.facts.place_of_map(state.map, state.epoch)
            self.shows(fact.rank, state.epoch, place)
        self.shows(fact.rank, step.epoch, self.rank(fact.rank)["place"])

    def _saved(self, fact: Fact) -> None:
        """A rank has logged a swap, so its placement is saved."""
        group: Group
        swap: RankSwap
        group, swap = fact.what
        if group is not self.group:
            raise RefusedError("a rank of an earlier generation swapped")
        self.reach_boundary(fact.rank, self.facts.boundary(group, swap))
        self.shows(fact.rank, swap.epoch, self.facts.place_of_swap(swap))
        self.take("Saved", fact.rank)

    def _ordered(self, fact: Fact) -> None:
        """A controller has sent a message."""
        self.take("LeaderSent", self.facts.order(fact.what))

    def _arrived(self, fact: Fact) -> None:
        """A controller's message has reached the machine of its rank."""
        stream = fact.what.stream
        if self.facts.group_of(stream)[0] is self.group:
            self.inbox[stream].append(fact.what)
            if stream not in self.streams[fact.rank]:
                self.streams[fact.rank].append(stream)

    def _answered(self, fact: Fact) -> None:
        """A rank has sent an answer."""
        if id(fact.what) not in self.said:
            while self.answers[fact.rank].popleft() is not fact.what:
                pass
            self.say(fact.rank, fact.what)
        if (message := self.said[id(fact.what)]) is not None:
            self.take("Sends", message)

    def _heard(self, fact: Fact) -> None:
        """A controller can have read an answer."""
        message = self.said.get(id(fact.what))
        name = fact.what.stream.controller
        if message is not None and fact.what.kind != "hello":
            heard = Record(leader=self.facts.leader(name), message=message)
            self.take("LeaderHeard", heard)

    def _intended(self, fact: Fact) -> None:
        """The store has told a controller that it keeps an intent."""
        term, document = fact.what
        wave = self.facts.wave(wave_in(document))
        self.take("Intended", Record(term=term, wave=wave))

    def _recorded(self, fact: Fact) -> None:
        """A controller has recorded how a wave ended."""
        wave = self.facts.wave(wave_in(fact.what))
        self.take("Recorded", Record(wave=wave, committed=bool(fact.what["committed"])))

    def _mapped(self, fact: Fact) -> None:
        """A controller has recorded the map of an epoch."""
        epoch, found = fact.what
        place = self.facts.place_of_map(found, epoch)
        self.take("RecordedMap", Record(epoch=epoch, place=place))


def _described(fact: Fact) -> str:
    """Return a fact in words."""
    what = getattr(fact.what, "kind", "")
    place = getattr(fact.what, "place", "")
    who = f" rank {fact.rank}" if fact.rank >= 0 else ""
    return f"{fact.kind} {what}{who} at {fact.unix:.6f} {place}".strip()

"""Rules about waves: what may be sent when, and how each wave ends."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.judge.case import Breach, Case, Process, WaveId, wave_in, wave_of
from tests.chaos.judge.maps import digest_of
from tests.chaos.judge.ranks import RankFacts, RankSwap
from tests.chaos.judge.store import plan_of
from tests.chaos.judge.wire import Moment, RankStream, WireMessage

__all__ = [
    "HOLDING",
    "acks_follow_swap_and_save",
    "commits_follow_votes_and_record",
    "ranks_obey_one_leader_in_a_term",
    "swaps_are_acknowledged",
    "terms_never_fall",
    "wave_messages_reach_the_group_only",
]

_TELL_STEPS = 50
"""Steps after a swap by which a rank with an open stream must have sent its Ack."""
_WAVE_KINDS = ("prepare", "commit", "abort")
_ANSWERED = {"vote": "prepare", "ack": "commit", "abort_answer": "abort"}
"""Kind of an answer -> the kind of message that it answers."""


def wave_messages_reach_the_group_only(case: Case) -> Iterator[Breach]:
    """Prepare, Commit and Abort go only to processes of the wave's own generation."""
    for message in case.wire.messages:
        if message.kind not in _WAVE_KINDS:
            continue
        process = case.process_of(message.stream)
        generation = message.body.wave.generation
        if process is None or process.generation != generation:
            yield Breach(
                "waves reach their group only",
                f"a {message.kind} of generation {generation} was sent to"
                f" {process or 'a stranger'}",
                message.read.unix,
                message.place,
            )


def terms_never_fall(case: Case) -> Iterator[Breach]:
    """The term that a rank knows never falls, nor that of a stream."""
    rule = "terms never fall"
    for process in case.streams:
        known = 0
        for message in case.sent_by(process):
            if message.kind in ("hello", "rank_state"):
                if message.body.highest_term < known:
                    yield Breach(
                        rule,
                        f"{process} knows term {message.body.highest_term} after {known}",
                        message.read.unix,
                        message.place,
                    )
                known = max(known, message.body.highest_term)
    sent: dict[int, int] = defaultdict(int)
    for message in case.messages:
        if message.from_rank or message.kind not in (*_WAVE_KINDS, "query_state"):
            continue
        leader, stream = message.body.leader, id(message.stream)
        if leader.term < sent[stream]:
            text = f"{leader.leader_id} sent term {leader.term} after {sent[stream]}"
            yield Breach(rule, text, message.read.unix, message.place)
        sent[stream] = max(sent[stream], leader.term)


def ranks_obey_one_leader_in_a_term(case: Case) -> Iterator[Breach]:
    """No rank answers two leaders of one term.

    A store that loses its data may give a term twice. The ranks then refuse the second leader.
    """
    for process, streams in case.streams.items():
        obeyed: dict[int, str] = {}
        for stream in streams:
            for term, leader, answer in _obeyed(stream):
                if obeyed.setdefault(term, leader) != leader:
                    text = f"{process} obeyed {obeyed[term]} and {leader} in term {term}"
                    yield Breach("one leader in a term", text, answer.read.unix, answer.place)


def _obeyed(stream: RankStream) -> Iterator[tuple[int, str, WireMessage]]:
    """Yield term and leader of each question that the rank answered, with the answer.

    An answer that may belong to questions of two terms is left out.
    """
    asked: dict[tuple[str, object], set[tuple[int, str]]] = defaultdict(set)
    for message in stream.messages:
        if not message.from_rank and message.kind in (*_WAVE_KINDS, "query_state"):
            body = message.body
            about = body.query if message.kind == "query_state" else wave_of(body.wave)
            asked[message.kind, about].add((body.leader.term, body.leader.leader_id))
    for message in stream.messages:
        body = message.body
        if message.kind == "rank_state":
            queries = asked["query_state", body.query]
            found = {query for query in queries if query[0] == body.highest_term}
        elif message.kind in _ANSWERED:
            found = asked[_ANSWERED[message.kind], wave_of(body.wave)]
        else:
            continue
        if len(found) == 1:
            [(term, leader)] = found
            yield term, leader, message


def acks_follow_swap_and_save(case: Case) -> Iterator[Breach]:
    """A rank acknowledges only what it swapped, with the right map, after it had saved it.

    The epochs that a process names never fall. A process notes a save before its next step, so the
    note may be absent only if it begins no further step at that epoch.
    """
    swaps = {
        (Process(swap.generation, facts.rank), swap.epoch): swap
        for facts in case.ranks
        for swap in facts.swaps
    }
    for process in case.streams:
        facts = case.processes[process]
        start = next(s for s in facts.starts if s.generation == process.generation)
        named = start.epoch
        for message in case.sent_by(process):
            if message.kind not in ("hello", "ack", "abort_answer", "rank_state"):
                continue
            epoch = message.body.epoch
            if epoch < named:
                text = f"{process} names epoch {epoch} after {named}"
                yield Breach("epochs never fall", text, message.read.unix, message.place)
            if message.kind != "abort_answer":
                yield from _wrong_digest(case, process, message)
            if epoch <= start.epoch:
                continue
            named = max(named, epoch)
            swap = swaps.get((process, epoch))
            if swap is None or message.read.unix < swap.unix:
                text = f"{process} named epoch {epoch} in {message.kind} before it logged the swap"
                yield Breach("no Ack without a swap", text, message.read.unix, message.place)
            elif message.kind == "ack" and _other_wave(message, swap):
                text = f"{process} acknowledged {wave_of(message.body.wave)}, and swapped {swap}"
                yield Breach("no Ack without a swap", text, message.read.unix, message.place)
            saved = facts.saves.get((start.group, epoch))
            # The file system's clock is a little behind, never ahead, so there need be no margin.
            if saved is None:
                late = _began_steps(facts, start.group, epoch, message.read.unix)
            else:
                late = message.read.unix < saved
            if late:
                when = "never" if saved is None else f"{saved:.6f}"
                text = f"{process} named epoch {epoch} before its map was saved ({when})"
                yield Breach("no Ack before the save", text, message.read.unix, message.place)


def _began_steps(facts: RankFacts, group: int, epoch: int, unix: float) -> bool:
    """Return True if a process began a step at an epoch after a moment.

    The first step that ends after the moment may have begun before it.
    """
    ended = (s for s in facts.steps if (s.group, s.epoch) == (group, epoch) and s.unix > unix)
    return len(list(ended)) > 1


def _other_wave(message: WireMessage, swap: RankSwap) -> bool:
    wave = wave_of(message.body.wave)
    return (wave.plan_id, wave.wave_index) != (swap.plan_id, swap.wave_index)


def _wrong_digest(case: Case, process: Process, message: WireMessage) -> Iterator[Breach]:
    """Compare the map that a message names with that of its epoch."""
    wanted = case.maps.get(message.body.epoch)
    if wanted is None:
        return
    num_ranks = len(wanted[0]) // case.slots_per_rank
    digest = digest_of(wanted, num_ranks, case.config["experts"])
    if message.body.placement_digest != digest:
        yield Breach(
            "maps are those of the waves",
            f"{process} names map {message.body.placement_digest} at epoch {message.body.epoch},"
            f" the waves lead to {digest}",
            message.read.unix,
            message.place,
        )


def swaps_are_acknowledged(case: Case) -> Iterator[Breach]:
    """Every rank that lives on after a swap acknowledges it, and each had been sent Commit."""
    rule = "every swap is acknowledged"
    delivered = {
        process: [
            message for stream in streams for message in stream.messages if message.kind == "commit"
        ]
        for process, streams in case.streams.items()
    }
    for facts in case.ranks:
        for swap in facts.swaps:
            process = Process(swap.generation, facts.rank)
            commits = [
                message
                for message in delivered.get(process, [])
                if message.passed is not None
                and message.passed.unix <= swap.unix
                and not _other_wave(message, swap)
            ]
            if not commits:
                text = f"{process} swapped to epoch {swap.epoch} without a Commit"
                yield Breach(rule, text, swap.unix, f"rank-{facts.rank}.jsonl")
                continue
            stream = commits[-1].stream
            acks = [m for m in stream.messages if m.kind == "ack" and not _other_wave(m, swap)]
            if not acks and _told_step(stream.messages) >= swap.step + _TELL_STEPS:
                yield Breach(
                    rule,
                    f"{process} swapped to epoch {swap.epoch} after step {swap.step} and sent no"
                    f" Ack on the stream of its Commit, which it used until step"
                    f" {_told_step(stream.messages)}",
                    swap.unix,
                    f"connection {stream.connection}",
                )
    yield from _silent_ranks(case)


def _silent_ranks(case: Case) -> Iterator[Breach]:
    """Find processes that lived on at an epoch without ever naming it."""
    reached: dict[str, dict[int, int]] = defaultdict(dict)
    for facts in case.ranks:
        for swap in facts.swaps:
            last = reached[swap.generation].get(swap.epoch, swap.step)
            reached[swap.generation][swap.epoch] = max(last, swap.step)
    for process, streams in case.streams.items():
        sent = list(case.sent_by(process))
        named = max(
            (
                m.body.epoch
                for m in sent
                if m.kind in ("hello", "ack", "abort_answer", "rank_state")
            ),
            default=0,
        )
        told = max(_told_step(stream.messages) for stream in streams)
        for epoch, step in reached[process.generation].items():
            if epoch > named and told >= step + _TELL_STEPS:
                text = f"{process} told of step {told} and never named epoch {epoch}"
                yield Breach("every swap is acknowledged", text, sent[-1].read.unix, sent[-1].place)


def _told_step(messages: list[WireMessage]) -> int:
    """Return the newest step that a rank told of on a stream; -1 if it told of none."""
    tables = (m.body.step_table for m in messages if m.kind == "load_report")
    # A row of the table has 40 bytes, and the step comes first.
    return max((int.from_bytes(t[-40:-32], "little") for t in tables if t), default=-1)


_SWAPPED = 1
"""WaveOutcome on the wire."""
HOLDING = frozenset({3, 4, 5})
"""ParticipantState on the wire: prepared, armed, swapping."""
_RULE = "no Commit before votes and record"


@dataclass(slots=True)
class _Heard:
    """The answers that one replica received about one wave."""

    yes: set[int] = field(default_factory=set)
    """Ranks whose yes arrived."""
    no: set[int] = field(default_factory=set)
    holding: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Query -> ranks that answered it and hold the wave, ready to swap."""
    swapped: bool = False
    """Some rank said that it had swapped."""


def commits_follow_votes_and_record(case: Case) -> Iterator[Breach]:
    """A Commit follows a yes of every rank and the record of it, or what a new leader found.

    A new leader may send Commit without them if some rank has swapped, or if every rank told it
    that it holds the wave, ready to swap.
    """
    heard: dict[tuple[str, WaveId], _Heard] = defaultdict(_Heard)
    agreements = _agreements(case)
    for moment, message in _in_order(case):
        controller = message.stream.controller
        if message.from_rank:
            _hear(case, heard, controller, message)
            continue
        body = message.body
        wave, found = wave_of(body.wave), heard[controller, wave_of(body.wave)]
        stored = agreements.get((wave, body.leader.term))
        group = case.generations.get(wave.generation)
        everyone = set(range(group.num_ranks)) if group is not None else None
        voted = found.yes == everyone and not found.no
        recorded = stored is not None and stored < moment
        recovered = any(ranks == everyone for ranks in found.holding.values())
        if not (found.swapped or recovered or (voted and recorded)):
            yield Breach(
                _RULE,
                f"{controller} sent Commit of {wave} after yes of ranks {sorted(found.yes)},"
                f" no of {sorted(found.no)}, agreement {'stored' if recorded else 'not stored'}",
                message.read.unix,
                message.place,
            )


def _agreements(case: Case) -> dict[tuple[WaveId, int], Moment]:
    """Return when the store's answer to the record of an agreement was passed on.

    The key is the wave and the term of the leader that wrote it.
    """
    found: dict[tuple[WaveId, int], Moment] = {}
    for write in case.wire.writes:
        if write.table != "plans" or not write.accepted or write.answered is None:
            continue
        plan = plan_of(write.body)
        if plan.agreed:
            found.setdefault((wave_in(plan, plan.waves_committed), write.term), write.answered)
    return found


def _in_order(case: Case) -> list[tuple[Moment, WireMessage]]:
    """Return what controllers can have heard, and their Commits, in the order of the wire.

    A rank's message counts from when it was passed on, a Commit from when it was read.
    """
    found = []
    for message in case.messages:
        if message.from_rank and message.passed is not None:
            found.append((message.passed, message))
        elif message.kind == "commit":
            found.append((message.read, message))
    return sorted(found, key=lambda pair: pair[0])


def _hear(
    case: Case, heard: dict[tuple[str, WaveId], _Heard], controller: str, message: WireMessage
) -> None:
    process = case.process_of(message.stream)
    assert process is not None
    body: Any = message.body
    match message.kind:
        case "vote":
            of_wave = heard[controller, wave_of(body.wave)]
            (of_wave.yes if body.yes else of_wave.no).add(process.rank)
        case "ack":
            heard[controller, wave_of(body.wave)].swapped = True
        case "abort_answer" if body.outcome == _SWAPPED:
            heard[controller, wave_of(body.wave)].swapped = True
        case "rank_state":
            if body.HasField("last_wave") and body.last_outcome == _SWAPPED:
                heard[controller, wave_of(body.last_wave)].swapped = True
            if body.HasField("wave") and body.state in HOLDING:
                found = heard[controller, wave_of(body.wave)].holding
                found[body.query].add(process.rank)

"""Rules about how waves and plans end, over all ranks and all records."""

from collections import defaultdict
from collections.abc import Iterator

import zstandard

from tests.chaos.judge.case import Breach, Case, WaveId, wave_in, wave_of
from tests.chaos.judge.store import PlanFacts, StoreDump, placement_of, plan_of
from tests.chaos.judge.wire import StoreWrite, WireMessage

__all__ = [
    "epochs_name_one_wave",
    "no_rank_holds_a_wave_at_the_end",
    "outcomes",
    "plans_end",
    "records_count_swapped_waves",
    "records_name_the_maps",
    "waves_have_one_outcome",
]

_SWAPPED = 1
"""WaveOutcome on the wire."""
_IDLE = 1
"""ParticipantState on the wire."""
_ENDED = frozenset({"committed", "aborted", "cancelled", "expired", "refused"})
"""Phases of a plan that is over."""


def outcomes(case: Case) -> dict[WaveId, dict[bool, list[tuple[float, str, str]]]]:
    """Return for each wave who says that it swapped (True) or did not (False).

    Each saying is (Unix seconds, sentence, place).
    """
    found: dict[WaveId, dict[bool, list[tuple[float, str, str]]]] = defaultdict(
        lambda: {True: [], False: []}
    )

    def say(wave: WaveId, swapped: bool, message: WireMessage) -> None:
        who = f"{case.process_of(message.stream)} sent {message.kind}"
        found[wave][swapped].append((message.read.unix, who, message.place))

    for message in case.messages:
        body = message.body
        if message.kind == "ack":
            say(wave_of(body.wave), True, message)
        elif message.kind == "vote" and not body.yes:
            say(wave_of(body.wave), False, message)
        elif message.kind == "abort_answer":
            say(wave_of(body.wave), body.outcome == _SWAPPED, message)
        elif message.kind == "rank_state" and body.HasField("last_wave"):
            say(wave_of(body.last_wave), body.last_outcome == _SWAPPED, message)
    for epoch, waves in case.swapped.items():
        for wave in waves:
            found[wave][True].append((0.0, f"ranks logged the swap to epoch {epoch}", "rank logs"))
    return found


def waves_have_one_outcome(case: Case) -> Iterator[Breach]:
    """No wave swapped for one rank or record and did not for another."""
    for wave, said in outcomes(case).items():
        if said[True] and said[False]:
            (_, who, _), (unix, other, place) = min(said[True]), min(said[False])
            text = f"{wave} swapped ({who}) and did not ({other})"
            yield Breach("one outcome for each wave", text, unix, place)


def epochs_name_one_wave(case: Case) -> Iterator[Breach]:
    """All ranks came to an epoch by the same wave or change of size, and no epoch was skipped."""
    rule = "one wave for each epoch"
    for epoch, waves in sorted(case.swapped.items()):
        if len(waves) > 1:
            yield Breach(rule, f"ranks came to epoch {epoch} by {sorted(waves)}")
        if any(wave not in case.prepares for wave in waves):
            yield Breach(rule, f"no Prepare on the wire leads to epoch {epoch}: {sorted(waves)}")
    for epoch in sorted(case.swapped.keys() & case.overs.keys()):
        number = case.overs[epoch].number
        text = f"group {number} has another size from epoch {epoch} on, to which a wave led before"
        yield Breach(rule, text)
    known = case.swapped.keys() | case.overs.keys()
    missing = set(range(1, max(known, default=0) + 1)) - known
    if missing:
        yield Breach(rule, f"no rank logged how it came to epochs {sorted(missing)}")
    for message in case.messages:
        if message.kind == "prepare":
            wave = wave_of(message.body.wave)
            if message.body.body != case.prepares[wave].body.body:
                text = f"two Prepares of {wave} differ"
                yield Breach(rule, text, message.read.unix, message.place)


def no_rank_holds_a_wave_at_the_end(case: Case) -> Iterator[Breach]:
    """The last state that each rank told of in the last generation is idle."""
    for process in case.streams:
        if process.generation != case.groups[-1].generation:
            continue
        states = [message for message in case.sent_by(process) if message.kind == "rank_state"]
        if states and states[-1].body.state != _IDLE:
            last = states[-1]
            text = f"{process} ended in state {last.body.state} with {wave_of(last.body.wave)}"
            yield Breach("every wave ends", text, last.read.unix, last.place)


def records_count_swapped_waves(case: Case) -> Iterator[Breach]:
    """No plan in the store, and none that a leader wrote, counts a wave that no rank swapped."""
    swapped = {wave for waves in case.swapped.values() for wave in waves}
    found = [
        (plan_of(write.body), f"term {write.term} wrote", write.sent.unix, write.place)
        for write in case.wire.writes
        if (write.deployment, write.table) == (case.config["deployment"], "plans")
    ]
    for dump in case.dumps:
        found += [(plan, "the store has", dump.unix, dump.node) for plan in dump.plans.values()]
    for plan, who, unix, place in found:
        for index in range(plan.waves_committed):
            if (wave := wave_in(plan, index)) not in swapped:
                text = f"{who} {wave} as committed, no rank swapped it"
                yield Breach("records count swapped waves", text, unix, place)


def plans_end(case: Case) -> Iterator[Breach]:
    """After the run every plan in the store is over, with the waves that the ranks swapped.

    A failover of the store may set a record back. Then the next leader ends the plan with the waves
    that it knows of.
    """
    rule = "every plan ends"
    final = [dump for dump in case.dumps if dump.final]
    if not final:
        yield Breach(rule, "there is no dump of the store after the run")
        return
    dump = final[-1]
    if dump.open_plans:
        yield Breach(rule, f"the store lists {dump.open_plans} as open", dump.unix, dump.node)
    swapped: dict[tuple[str, int], set[int]] = defaultdict(set)
    for waves in case.swapped.values():
        for wave in waves:
            swapped[wave.plan_id, wave.base_epoch].add(wave.wave_index)
    for name, plan in dump.plans.items():
        done = swapped[plan.plan_id, plan.base_epoch]
        if plan.phase not in _ENDED:
            yield Breach(rule, f"{name} is {plan.phase}", dump.unix, dump.node)
        if plan.phase == "committed" and plan.waves_committed != plan.waves:
            yield Breach(rule, f"{name} is committed without all waves", dump.unix, dump.node)
        if len(done) != plan.waves_committed and not _was_set_back(case, name, plan, len(done)):
            yield Breach(
                rule,
                f"{name} is {plan.phase} with {plan.waves_committed} of {plan.waves} waves,"
                f" ranks swapped {sorted(done)}",
                dump.unix,
                dump.node,
            )


def _was_set_back(case: Case, name: str, plan: PlanFacts, done: int) -> bool:
    """Return True if a failover of the store lost a newer record of an aborted plan.

    The wire must show that a leader stored all waves, and a leader of a later term fewer. Another
    node must have been the store's primary for one of them, or between them. The first write may
    have gone to a primary that did not know yet that another had taken its place.
    """
    wanted = (case.config["deployment"], "plans", name, True)
    whole, fewer = [], []
    for write in case.wire.writes:
        if (write.deployment, write.table, write.name, write.accepted) == wanted:
            found = _plan_in(write.body)
            if found is not None and found.waves_committed == done:
                whole.append(write)
            elif found == plan and plan.phase == "aborted":
                fewer.append(write)
    return any(
        early.term < late.term and len(_primaries(case, early, late)) > 1
        for early in whole
        for late in fewer
    )


def _plan_in(body: bytes) -> PlanFacts | None:
    """Return a stored plan; None if it cannot be read, which proves nothing."""
    try:
        return plan_of(body)
    except (ValueError, KeyError, zstandard.ZstdError):
        return None


def _primaries(case: Case, early: StoreWrite, late: StoreWrite) -> set[str]:
    """Return the nodes of two writes, and those that were the store's primary between them."""
    between = {d.node for d in case.dumps if early.sent.unix <= d.unix <= late.sent.unix}
    return {early.node, late.node} | between


def records_name_the_maps(case: Case) -> Iterator[Breach]:
    """Every epoch in the store has the map that the ranks had at that epoch."""
    for dump in case.dumps:
        yield from _wrong_epochs(case, dump)
    for write in case.wire.writes:
        if (write.deployment, write.table) != (case.config["deployment"], "epochs"):
            continue
        wanted = case.maps.get(int(write.name))
        if wanted is None or placement_of(write.body) != wanted:
            text = f"term {write.term} wrote another map of epoch {write.name} than the ranks had"
            yield Breach("records name the maps", text, write.sent.unix, write.place)


def _wrong_epochs(case: Case, dump: StoreDump) -> Iterator[Breach]:
    for epoch, found in dump.epochs.items():
        if case.maps.get(epoch) != found:
            text = f"the store has another map of epoch {epoch} than the ranks had"
            yield Breach("records name the maps", text, dump.unix, dump.node)

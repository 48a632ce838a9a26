"""Rules about what each step was computed with."""

import struct
from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.judge.case import Breach, Case, Process
from tests.chaos.judge.maps import expert_checksum
from tests.chaos.judge.ranks import RankFacts, StepFacts, StepState

__all__ = [
    "epochs_of_steps_never_fall",
    "each_step_has_one_map",
    "maps_are_those_of_the_waves",
    "reports_name_the_epoch_of_the_step",
    "restarts_keep_the_epoch",
    "slots_hold_the_experts_of_the_map",
]

_STEP = struct.Struct("<qqqdii")
"""A row of a report's step table: step, epoch, tokens, compute_s, phase, dummy."""


def _where(facts: RankFacts, line: int) -> str:
    return f"evidence-{facts.rank}.jsonl, line {line}"


def each_step_has_one_map(case: Case) -> Iterator[Breach]:
    """No step is computed under two maps, on one rank or across ranks."""
    rule = "one map for each step"
    steps: dict[tuple[int, int], list[tuple[RankFacts, StepFacts]]] = defaultdict(list)
    for facts in case.ranks:
        for step in facts.steps:
            steps[step.group, step.step].append((facts, step))
            if step.before is not step.after:
                yield Breach(
                    rule,
                    f"rank {facts.rank} changed its tables, slots or epoch during step {step.step}",
                    step.unix,
                    _where(facts, step.line),
                )
            if step.epoch != step.before.epoch:
                yield Breach(
                    rule,
                    f"rank {facts.rank} computed step {step.step} at epoch {step.epoch}"
                    f" with the tables of epoch {step.before.epoch}",
                    step.unix,
                    _where(facts, step.line),
                )
    for (_, number), group in sorted(steps.items()):
        (first_facts, first), *others = group
        for facts, step in others:
            if step.epoch != first.epoch or step.before.map is not first.before.map:
                differ = "epoch" if step.epoch != first.epoch else "map"
                yield Breach(
                    rule,
                    f"step {number}: rank {facts.rank} is at epoch {step.epoch},"
                    f" rank {first_facts.rank} at {first.epoch}; the {differ} differs",
                    step.unix,
                    _where(facts, step.line),
                )


def epochs_of_steps_never_fall(case: Case) -> Iterator[Breach]:
    """The epoch of a rank's steps never falls, nor do the numbers of its steps.

    A rank that was killed in a step may have computed it, and a group that begins anew computes it
    again.
    """
    anew = {group.number for group in case.groups if group.over is None}
    for facts in case.ranks:
        epoch, number, group = -1, -1, -1
        for step in facts.steps:
            again = step.step == number and step.group != group and step.group in anew
            if step.epoch < epoch or (step.step <= number and not again):
                yield Breach(
                    "epochs never fall",
                    f"rank {facts.rank} computed step {step.step} at epoch {step.epoch}"
                    f" after step {number} at epoch {epoch}",
                    step.unix,
                    _where(facts, step.line),
                )
            epoch, number, group = step.epoch, step.step, step.group


def reports_name_the_epoch_of_the_step(case: Case) -> Iterator[Breach]:
    """The epochs in the reports on the wire are those with which the steps were computed.

    The last step may lack evidence: the process may have died before it wrote it.
    """
    known: dict[tuple[Process, int], int] = {
        (Process(start.generation, facts.rank), step.step): step.epoch
        for facts in case.ranks
        for step in facts.steps
        if (start := facts.start(step.group)) is not None
    }
    last: dict[Process, int] = {}
    for process, step in known:
        last[process] = max(step, last.get(process, step))
    for process in case.streams:
        for message in case.sent_by(process):
            if message.kind != "load_report":
                continue
            for step, epoch, *_ in _STEP.iter_unpack(message.body.step_table):
                computed = known.get((process, step))
                if computed != epoch and (computed is not None or step < last.get(process, step)):
                    yield Breach(
                        "reports name the epoch of the step",
                        f"rank {process.rank} reported step {step} at epoch {epoch},"
                        f" and computed it at {'none' if computed is None else computed}",
                        message.read.unix,
                        message.place,
                    )


def maps_are_those_of_the_waves(case: Case) -> Iterator[Breach]:
    """The tables of each epoch are the first map with the rows of all waves since then."""
    rule = "maps are those of the waves"
    for facts in case.ranks:
        for state in facts.states:
            wanted = case.maps.get(state.epoch)
            if wanted is None:
                text = f"rank {facts.rank} is at epoch {state.epoch}, to which no wave leads"
            elif wanted is not state.map:
                layers = [
                    layer
                    for layer, (have, want) in enumerate(zip(state.map, wanted, strict=True))
                    if have != want
                ]
                text = (
                    f"rank {facts.rank} routes layers {layers} at epoch {state.epoch}"
                    " by another map than the waves lead to"
                )
            else:
                continue
            yield Breach(rule, text, state.unix, _where(facts, state.line))


def slots_hold_the_experts_of_the_map(case: Case) -> Iterator[Breach]:
    """Each slot to which a table leads holds the bytes of the expert that the map names there."""
    for facts in case.ranks:
        for state in facts.states:
            yield from _bad_slots(case, facts, state)


def _bad_slots(case: Case, facts: RankFacts, state: StepState) -> Iterator[Breach]:
    rule = "slots hold the experts of the map"
    width = case.slots_per_rank
    first = facts.rank * width
    own = {
        (layer, local): row[first + local]
        for layer, row in enumerate(state.map)
        for local in range(width)
        if row[first + local] != -1
    }
    for layer, row in enumerate(state.map):
        missing = set(range(case.config["experts"])) - set(row)
        if missing:
            yield Breach(
                rule,
                f"rank {facts.rank} routes experts {sorted(missing)} of layer {layer} nowhere",
                state.unix,
                _where(facts, state.line),
            )
    if own.keys() != state.slots.keys():
        yield Breach(
            rule,
            f"rank {facts.rank} wrote checksums of {len(state.slots)} slots,"
            f" the map fills {len(own)}",
            state.unix,
            _where(facts, state.line),
        )
    for (layer, local), expert in own.items():
        value = state.slots.get((layer, local))
        if value is not None and (
            expert < 0 or value != expert_checksum(case.config, layer, expert)
        ):
            yield Breach(
                rule,
                f"rank {facts.rank} layer {layer} slot {local} holds {value} at epoch"
                f" {state.epoch}, which is not expert {expert}",
                state.unix,
                _where(facts, state.line),
            )


def restarts_keep_the_epoch(case: Case) -> Iterator[Breach]:
    """A group that restarts comes back at an epoch no earlier than any that a rank named."""
    named: dict[str, int] = defaultdict(int)
    for process in case.streams:
        for message in case.sent_by(process):
            if message.kind in ("hello", "ack", "abort_answer", "rank_state"):
                named[process.generation] = max(named[process.generation], message.body.epoch)
    known = 0
    for group in case.groups:
        for rank, start in group.starts.items():
            if start.epoch < known:
                yield Breach(
                    "restarts keep the epoch",
                    f"rank {rank} started in group {group.number} at epoch {start.epoch},"
                    f" an earlier group had named {known}",
                    start.unix,
                    f"rank-{rank}.jsonl",
                )
        known = max(known, named[group.generation])

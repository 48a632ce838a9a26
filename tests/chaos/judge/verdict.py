"""The verdict on a run: all rules, the counts of what they judged, and every breach."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.judge import rules_groups, rules_outcomes, rules_steps, rules_waves
from tests.chaos.judge.case import Breach, Case, read_case

__all__ = ["RULES", "Verdict", "judge", "judge_case"]

RULES: tuple[Callable[[Case], Iterator[Breach]], ...] = (
    rules_groups.epochs_go_on,
    rules_groups.maps_carry_over,
    rules_groups.ranks_come_from_the_group_before,
    rules_steps.each_step_has_one_map,
    rules_steps.epochs_of_steps_never_fall,
    rules_steps.maps_are_those_of_the_waves,
    rules_steps.reports_name_the_epoch_of_the_step,
    rules_steps.restarts_keep_the_epoch,
    rules_steps.slots_hold_the_experts_of_the_map,
    rules_waves.acks_follow_swap_and_save,
    rules_waves.ranks_obey_one_leader_in_a_term,
    rules_waves.swaps_are_acknowledged,
    rules_waves.terms_never_fall,
    rules_waves.wave_messages_reach_the_group_only,
    rules_waves.commits_follow_votes_and_record,
    rules_outcomes.epochs_name_one_wave,
    rules_outcomes.no_rank_holds_a_wave_at_the_end,
    rules_outcomes.plans_end,
    rules_outcomes.records_count_swapped_waves,
    rules_outcomes.records_name_the_maps,
    rules_outcomes.waves_have_one_outcome,
)
_MOST_SHOWN = 8
"""Breaches of one rule that are printed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The breaches and the counts of one judged run."""

    counts: dict[str, int]
    """The number of things judged, by name; a run that lacks any of it is itself a breach."""
    breaches: list[Breach]

    def lines(self) -> Iterator[str]:
        """Yield the verdict in words."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        yield f"judged: {counts}"
        rules: dict[str, list[Breach]] = {}
        for breach in self.breaches:
            rules.setdefault(breach.rule, []).append(breach)
        for found in rules.values():
            yield from (f"breach of {breach}" for breach in found[:_MOST_SHOWN])
            if len(found) > _MOST_SHOWN:
                yield f"breach of {found[0].rule}: {len(found) - _MOST_SHOWN} more"
        yield f"verdict: {len(self.breaches)} breaches" if rules else "verdict: no breach"


def judge(folder: Path) -> Verdict:
    """Judge the run that left this folder."""
    return judge_case(read_case(folder))


def judge_case(case: Case) -> Verdict:
    """Apply every rule to the facts of a run."""
    outcomes = rules_outcomes.outcomes(case)
    needed = {
        "messages": len(case.messages),
        "waves": len(outcomes),
        "waves swapped": sum(len(waves) for waves in case.swapped.values()),
        "steps of ranks": sum(len(facts.steps) for facts in case.ranks),
        "checksums of slots": sum(len(s.slots) for facts in case.ranks for s in facts.states),
        "placements seen saved": sum(len(facts.saves) for facts in case.ranks),
        "writes to the store": len(case.wire.writes),
        "dumps of the store": len(case.dumps),
    }
    breaches = [
        Breach("the evidence is whole", f"there are no {name}")
        for name, count in needed.items()
        if not count
    ]
    breaches += [Breach("the evidence is whole", fault) for fault in case.wire.faults]
    for rule in RULES:
        breaches += rule(case)
    counts = needed | {
        "groups": len(case.groups),
        "groups of another size": len(case.overs),
        "connections": case.wire.connections,
        "connections of strangers not decoded": case.wire.undecoded_strangers,
    }
    return Verdict(counts, breaches)

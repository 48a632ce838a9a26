"""The small worlds are exhausted, and mutants are caught in them."""

import re

import pytest

from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol.messages import Leader, Prepare
from evenkeel_moe.protocol.rank.participant import Participant
from tests.explore.__main__ import main, print_found
from tests.explore.catalogue import MUTANT_WORLDS, NOT_APPLICABLE, SMALL_WORLDS, search
from tests.explore.freeze import Freezer, clone
from tests.explore.invariants import (
    NO_PROGRESS,
    RECORDS_DISAGREE,
    TOLD_UNSAVED,
    TORN_MAP,
    UNMATCHED_OPERATION,
    WRONG_BYTES,
    Violation,
)
from tests.explore.small import placement_of, plan_of
from tests.explore.state import Draft
from tests.explore.view import View
from tests.explore.world import Size
from tests.sim.kit import Kit
from tests.sim.mutants import BY_NAME, RULES

CAUGHT = {
    "R1": NO_PROGRESS,
    "R3": RECORDS_DISAGREE,
    "R3b": TORN_MAP,
    "R3c": TOLD_UNSAVED,
    "R5": TOLD_UNSAVED,
    "R6": TORN_MAP,
    "R7": TORN_MAP,
    "R7b": WRONG_BYTES,
    "R8": TORN_MAP,
    "R9": UNMATCHED_OPERATION,
    "R10": UNMATCHED_OPERATION,
    "R14": RECORDS_DISAGREE,
    "R15": NO_PROGRESS,
}
"""The invariant that catches each mutant; R4 and R12 need larger worlds (`--mutants`)."""


@pytest.mark.parametrize(
    "size", SMALL_WORLDS, ids=lambda size: f"{size.ranks}-{size.faults}-{len(size.kinds)}"
)
def test_small_worlds_are_exhausted_and_sound(size):
    searched = search(Kit(), size, most_states=10_000)
    result = searched.run()
    assert result.exhausted and not result.found, result.found
    assert result.states > 300 and result.depth > 20
    phases = {
        record.phase
        for store in searched.world.tables.stores.met
        for record in store.plans.values()
    }
    ends = {PlanPhase.COMMITTED} | ({PlanPhase.ABORTED} if size.faults else set())
    assert ends <= phases, "plans came to these ends"


@pytest.mark.parametrize("name", CAUGHT)
def test_mutant_is_caught_where_the_machines_are_sound(name):
    size = MUTANT_WORLDS[name]
    found = search(BY_NAME[name].kit, size, mutant=True).run().found
    assert [one.invariant for one in found] == [CAUGHT[name]]
    sound = search(Kit(), size, most_states=10_000).run()
    assert sound.exhausted, "only then it is known if every state can come to rest"
    assert not sound.found, "the world alone breaks nothing"


def test_a_group_of_another_generation_is_followed_to_its_epoch():
    """R15; a leader that trusts the store never learns the epoch that no plan led to."""
    size = SMALL_WORLDS[-1]
    found = search(BY_NAME["R15"].kit, size, mutant=True).run().found
    assert [one.invariant for one in found] == [NO_PROGRESS]


def test_every_mutant_has_a_world_or_a_reason():
    assert MUTANT_WORLDS.keys() | NOT_APPLICABLE.keys() == {mutant.name for mutant in RULES}
    assert not MUTANT_WORLDS.keys() & NOT_APPLICABLE.keys()


def test_merged_states_are_the_rotations_of_all_states():
    """The slow way: visit every rotation of a state for itself, and merge afterwards."""
    size = Size(3, 1, 0)
    merged = search(Kit(), size, most_states=10_000)
    tables = merged.world.tables
    assert merged.run().exhausted
    single = search(Kit(), size, most_states=10_000)
    single.world.tables = tables
    tables.turns = range(1)
    assert single.run().exhausted
    tables.turns = range(3)
    assert len(single.states) > 2 * len(merged.states)
    assert {Draft(tables, state).done() for state in single.states} == set(merged.states)


def test_way_to_a_broken_invariant_names_the_true_ranks(capsys):
    searched = search(BY_NAME["R3c"].kit, MUTANT_WORLDS["R3c"], mutant=True)
    (found,) = searched.run().found
    print_found(searched, found)
    first, *events = capsys.readouterr().out.splitlines()
    assert first == "BROKEN unsaved epoch told: Ack names epoch 1, which is not saved"
    assert events[0].split(None, 1)[1] == "an operator starts a plan"
    for rank in (0, 1):
        assert sum(f"copies arrive at rank {rank}" in line for line in events) == 1
        assert sum(f"to rank {rank}: Commit wave=plan1/0" in line for line in events) == 1


def test_a_write_that_fails_may_have_happened():
    searched = search(Kit(), Size(2, 1, 1, frozenset({"write"})))
    searched.run()
    tables, differ = searched.world.tables, 0
    for state in searched.states:
        stores = {
            (event.name, event.rank): View(tables, after).store
            for event, _, after in searched.world.successors(state)
            if not isinstance(after, Violation)
        }
        for (name, rank), store in stores.items():
            if " (happened)" in name:
                differ += store != stores[name.replace(" (happened)", ""), rank]
    assert differ


def test_new_attribute_becomes_part_of_a_state():
    tables = search(Kit(), SMALL_WORLDS[0]).world.tables
    control = tables.leaders.machines[0]
    copy = clone(control)
    assert copy is not control and copy.membership is not control.membership
    freezer = Freezer((0, 1))
    assert freezer.freeze(copy) == freezer.freeze(control)
    copy.membership.added = {"rank": 1}
    assert freezer.freeze(copy) != freezer.freeze(control)


def test_plans_that_differ_in_their_layers_alone_are_two():
    base, freezer = placement_of(2, (False, False, False)), Freezer(None)
    plans = [plan_of(2, layer, base, Generation("2"), Epoch(0), 1) for layer in (0, 1)]
    assert plans[0].key(0) == plans[1].key(0)
    assert freezer.freeze(plans[0]) != freezer.freeze(plans[1])
    first, second = (
        Prepare(Leader("c1", 1), plan.key(0), Epoch(0), plan.waves[0], (), 1.0) for plan in plans
    )
    assert freezer.freeze(first) != freezer.freeze(second)


def test_error_of_a_machine_is_a_violation():
    class Fails(Participant):
        def _vote_yes(self, event):
            raise AssertionError("of this test")

    found = search(Kit(participant=Fails), Size(2, 1, 0)).run().found
    assert ["unexpected message"] == [one.invariant for one in found][:1]


def test_last_line_names_what_was_searched(capsys):
    assert main(["--ranks", "2", "--waves", "0", "--faults", "1", "--kinds", "tick"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    line = r"ranks 2 waves 0 faults 1 states \d+ depth \d+ exhausted yes violations 0"
    assert re.fullmatch(line, last)
    assert main(["--ranks", "2", "--states", "50"]) == 0
    assert "exhausted no" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--kinds", "none"])
    assert "unknown kinds: none" in capsys.readouterr().err

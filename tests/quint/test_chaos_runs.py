"""The model judges a recorded chaos run, and refuses the forgeries of what it describes."""

import shutil
from pathlib import Path

import pytest

from tests.chaos import forgeries
from tests.chaos.forge import Forger, unpack
from tests.chaos.judge.case import read_case, wave_of
from tests.quint.chaos import judge_run
from tests.quint.judge import TREE
from tests.quint.translate import load
from tests.quint.values import Walk

pytestmark = pytest.mark.quint
RECORDED = Path(__file__).parents[1] / "chaos" / "recorded.tar.xz"
STAGING = 2
"""ParticipantState on the wire."""

REFUSED = {
    forgeries.step_under_the_old_map: "another map",
    forgeries.swapped_epoch: "another map",
    forgeries.tables_changed_within_a_step: "another map",
    forgeries.step_of_an_earlier_epoch: "another map",
    forgeries.expert_without_a_slot: "another map",
    forgeries.another_table: "another map",
    forgeries.wrong_digest: "another map",
    forgeries.another_prepare: "another map",
    forgeries.another_wave: "another map",
    forgeries.wrong_record: "never had this map",
    forgeries.fallen_epoch: "restarted",
    forgeries.skipped_epoch: "never swapped to epoch 2",
    forgeries.late_save: "the epoch is not saved",
    forgeries.late_swap: "the epoch is not saved",
    forgeries.wrong_ack: "answered ack",
    forgeries.reordered_commit: "what a Commit rests on",
    forgeries.commit_without_intent: "what a Commit rests on",
    forgeries.two_leaders: "what a Commit rests on",
    forgeries.commit_after_a_no: "the ranks are not ready",
    forgeries.wave_for_another_group: "the ranks are not ready",
    forgeries.silent_rank: "the ranks are not ready",
    forgeries.garbled_stream: "the ranks are not ready",
    forgeries.swap_without_commit: "from Prepared to Armed",
    forgeries.wave_held_at_the_end: "from Nothing to Armed",
    forgeries.fallen_term: "nothing that explains it",
    forgeries.fallen_term_of_a_leader: "nothing that explains it",
    forgeries.two_outcomes_on_the_wire: "says what is not so",
    forgeries.two_outcomes_in_the_store: "does not agree with the ranks",
}
"""Forgery -> what the refusal says. The model leaves out what the other forgeries change."""


@pytest.fixture(scope="module")
def model():
    return load(TREE, Walk(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    unpack(RECORDED, folder)
    return folder


@pytest.fixture(scope="module")
def case(run):
    return read_case(run)


def test_model_explains_the_recorded_run(model, case):
    verdict = judge_run(model, case)
    assert verdict.refused == ""
    assert verdict.accepted > 10_000
    assert len(verdict.state["switched"]) == 14
    assert verdict.state["ranks"][0]["gen"] == 2


@pytest.mark.parametrize("forge", REFUSED, ids=lambda forge: forge.__name__)
def test_model_refuses_a_forgery(model, run, case, tmp_path, forge):
    shutil.copytree(run, tmp_path / "run")
    forger = Forger(tmp_path / "run", case)
    forge(forger)
    forger.write_wire()
    assert REFUSED[forge] in judge_run(model, read_case(forger.folder)).refused


@pytest.mark.parametrize("held", [2, 3, 4], ids=["staging", "prepared", "armed"])
def test_model_refuses_a_wave_that_a_rank_lets_go_of_and_swaps(model, run, case, tmp_path, held):
    # Its state is told as idle (1): neither an Abort nor a poll can explain that.
    shutil.copytree(run, tmp_path / "run")
    forger = Forger(tmp_path / "run", case)
    state = forger.first("rank_state", lambda body: body.state == held)
    forger.rewrite(state, lambda body: setattr(body, "state", 1))
    forger.write_wire()
    assert judge_run(model, read_case(forger.folder)).refused


@pytest.mark.parametrize("copies", [True, False], ids=["says that it copies", "says nothing"])
def test_a_rank_that_votes_no_refused_the_prepare_unless_it_said_that_it_copies(
    model, run, case, tmp_path, copies
):
    """The forged vote is a no. With the right order of events, only the Commit contradicts it."""
    shutil.copytree(run, tmp_path / "run")
    forger = Forger(tmp_path / "run", case)
    first = forger.first("rank_state", lambda body: body.state == STAGING)
    wave = wave_of(first.body.wave)
    of_wave = [
        message
        for message in first.stream.messages
        if message.kind in ("rank_state", "vote") and wave_of(message.body.wave) == wave
    ]
    states = [message for message in of_wave if message.kind == "rank_state"]
    vote = next(message for message in of_wave if message.kind == "vote")
    for state in states[1:] if copies else states:
        forger.hide(state)
    forger.patch(vote, lambda whole: whole[:-1] + b"\0")  # It ends with the value of `yes`.
    forger.write_wire()
    verdict = judge_run(model, read_case(forger.folder))
    assert "the ranks are not ready" in verdict.refused
    rank = case.process_of(first.stream).rank
    assert verdict.state["ranks"][rank]["posted"] == (frozenset({1}) if copies else frozenset())
    assert verdict.state["ranks"][rank]["dropped"] == frozenset({1})

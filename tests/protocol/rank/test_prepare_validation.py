"""A rank believes no Prepare that is wrong in itself (R4, R17)."""

import dataclasses
import random

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, Transfer
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.protocol.rank.prepare_validation import prepare_refusal
from evenkeel_moe.protocol.wave_checks import transfers_refusal
from tests.protocol.machines import (
    BASE,
    LEADER,
    from_controller,
    key_of,
    only,
    participant_of,
    prepare_of,
    wave_of,
)
from tests.sim.planner import build_plan, problem_of, spoiled

WAVE = wave_of()
(RIGHT,) = WAVE.transfers
WITHOUT_ONE = WAVE.rows.copy()
WITHOUT_ONE[0, 1] = 2  # The only slot of expert 1.


def with_transfers(*transfers: Transfer) -> Prepare:
    return prepare_of(dataclasses.replace(WAVE, batches=tuple((t,) for t in transfers)))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (with_transfers(), Reason.NO_SOURCE),
        (with_transfers(RIGHT, RIGHT), Reason.MALFORMED),
        (with_transfers(RIGHT, Transfer(0, 0, 0, 1, 10)), Reason.MALFORMED),
        (with_transfers(dataclasses.replace(RIGHT, src_slot=1)), Reason.NO_SOURCE),
        (with_transfers(dataclasses.replace(RIGHT, logical_expert=-1)), Reason.NO_SOURCE),
        (with_transfers(dataclasses.replace(RIGHT, nbytes=0)), Reason.MALFORMED),
        (with_transfers(dataclasses.replace(RIGHT, nbytes=2**63)), Reason.MALFORMED),
        (prepare_of(dataclasses.replace(WAVE, rows=WITHOUT_ONE)), Reason.EXPERT_WITHOUT_REPLICA),
        (dataclasses.replace(prepare_of(), checksums=()), Reason.MALFORMED),
        (dataclasses.replace(prepare_of(), checksums=(0,)), Reason.CHECKSUM_MISMATCH),
    ],
    ids=[
        "no transfer",
        "slot written twice",
        "expert written where the rows have another",
        "source holds another expert",
        "no expert",
        "transfer of no bytes",
        "transfer of more bytes than an expert has",
        "expert without a replica",
        "no checksum",
        "checksum not registered",
    ],
)
def test_prepare_that_is_wrong_in_itself_is_refused(prepare, reason):
    """R17: otherwise all ranks would swap, and the weights would not be those the map names."""
    rank = participant_of()
    vote = only(rank.handle(from_controller(prepare), 0.0), msg.Vote)
    assert (vote.yes, vote.reason) == (False, reason)
    commit = from_controller(msg.Commit(LEADER, key_of()))
    assert only(rank.handle(commit, 0.0), msg.AbortAnswer).outcome is msg.WaveOutcome.REFUSED


def test_rank_that_registered_no_checksums_takes_no_wave():
    """R4: it has nothing to compare what arrives with."""
    rank = participant_of(checksums=())
    vote = only(rank.handle(from_controller(prepare_of()), 0.0), msg.Vote)
    assert (vote.yes, vote.reason) == (False, Reason.OBSERVE_ONLY)


def test_slot_may_be_emptied_without_a_transfer():
    rows = BASE.phy2log[:1].copy()
    rows[0, 2] = -1
    wave = dataclasses.replace(WAVE, rows=rows, batches=())
    start = participant_of().handle(from_controller(prepare_of(wave)), 0.0)
    assert only(start, msg.StartStaging)


@pytest.mark.parametrize("seed", range(200))
def test_judgement_is_that_of_a_slow_simple_check(seed):
    rng = random.Random(seed)
    shape = ModelShape(rng.choice((1, 2, 3)), 4, 2, 3, 1, 10)
    base, generation = Placement.initial(shape), Generation("g1")
    sums = tuple(rng.getrandbits(64) for _ in range(shape.num_layers * 4))
    plan = None
    while plan is None:
        plan = build_plan(
            rng,
            DeploymentId("d"),
            (generation, 0, base, 1),
            shape,
            0.0,
            kind=PlanKind.MANUAL,
            plan_id="p",
        )
    body = plan.waves[0]
    named = tuple(sums[t.layer * 4 + t.logical_expert] for t in body.transfers)
    right = dataclasses.replace(prepare_of(body), wave=plan.key(0), checksums=named)
    assert refuses(right, base, shape, sums) is False
    wrong = spoiled(rng, right)
    known = {(t.layer, t.logical_expert, c) for t, c in zip(body.transfers, named, strict=True)}
    given = zip(wrong.body.transfers, wrong.checksums, strict=False)
    forged = any((t.layer, t.logical_expert, c) not in known for t, c in given)
    assert refuses(wrong, base, shape, sums) is (forged or bool(problem_of(wrong, base)))


def refuses(prepare: Prepare, base: Placement, shape: ModelShape, sums) -> bool:
    return prepare_refusal(prepare, base, 0, shape, 1000, sums) is not None


@pytest.mark.parametrize("layers", [(2, 0), (2,)])
def test_layers_are_inside_the_model(layers):
    rows = BASE.phy2log[[0] * len(layers)]
    prepare = prepare_of(dataclasses.replace(WAVE, layers=layers, rows=rows, batches=()))
    vote = only(participant_of().handle(from_controller(prepare), 0.0), msg.Vote)
    assert (vote.yes, vote.reason) == (False, Reason.MALFORMED)


@pytest.mark.parametrize(("room", "taken"), [(10, True), (9, False)])
def test_a_ranks_share_must_fit_its_staging(room, taken):
    actions = participant_of(staging_bytes=room).handle(from_controller(prepare_of()), 0.0)
    assert [type(action) for action in actions] == [
        msg.StartStaging if taken else msg.SendToController
    ]


LAST = BASE.num_slots - 1
EMPTIED = BASE.phy2log.copy()
EMPTIED[0, 2] = -1


def refusal(rows, *transfers, before=BASE):
    wave = dataclasses.replace(wave_of(), rows=rows, batches=(transfers,))
    return transfers_refusal(wave, before, before.with_rows((0,), rows), Reason.MALFORMED)


def test_an_empty_slot_is_no_source_of_no_expert():
    before = Placement(EMPTIED, 2, 4)
    rows = EMPTIED[[0]].copy()
    found = refusal(rows, Transfer(0, -1, 2, 2, 10), before=before)
    assert found is not None and found[0] is Reason.NO_SOURCE


def test_the_first_slot_that_changes_without_a_transfer_is_named():
    rows = np.array([[0, 1, 3, 2, 3, 1]], np.int32)
    found = refusal(rows)
    assert found == (
        Reason.NO_SOURCE,
        "2 slots change without a transfer, first: layer 0 slot 2",
    )

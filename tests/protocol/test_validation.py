"""Validation of plans and waves before any rank hears of them (R10, R11, R17)."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, Transfer, Wave
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_validation import (
    batch_refusal,
    placement_at,
    plan_refusal,
    pool_refusal,
    wave_refusal,
)
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.protocol.rank.prepare_validation import prepare_refusal
from evenkeel_moe.protocol.wave_checks import transfers_refusal
from tests.protocol.machines import (
    BASE,
    LEADER,
    SHAPE,
    from_controller,
    key_of,
    only,
    participant_of,
    plan_of,
    prepare_of,
    reply,
    wave_of,
)
from tests.sim.planner import build_plan, problem_of, spoiled


def refusal_of(wave, **changes):
    values: dict[str, Any] = {"staging_bytes": (100, 100), "allow_duplicates": False} | changes
    staging = values.pop("staging_bytes")
    refusal = wave_refusal(wave, BASE, SHAPE, staging, **values)
    return refusal[0] if refusal is not None else None


def plan_reason(plan, shape=SHAPE):
    refusal = plan_refusal(plan, shape)
    return refusal[0] if refusal is not None else None


def test_valid_plan_and_its_waves_are_accepted():
    plan = plan_of()
    assert plan_refusal(plan, SHAPE) is None
    assert placement_at(plan, 0) == plan.base and placement_at(plan, 2) == plan.target
    for index, wave in enumerate(plan.waves):
        before = placement_at(plan, index)
        assert wave_refusal(wave, before, SHAPE, (100, 100), allow_duplicates=False) is None


@pytest.mark.parametrize("changes", [{"target": BASE}, {"waves": plan_of().waves[:1]}])
def test_waves_must_lead_from_the_base_to_the_target(changes):
    """R17."""
    assert plan_reason(dataclasses.replace(plan_of(), **changes)) is Reason.INVALID_INPUT


def test_target_must_be_a_valid_placement():
    """R17: every expert at least one replica, shape, no duplicate on a rank unless allowed."""
    lost, twice = BASE.phy2log.copy(), BASE.phy2log.copy()
    lost[0, [1]] = 2
    twice[0, 5] = 2
    for rows, reason in ((lost, Reason.EXPERT_WITHOUT_REPLICA), (twice, Reason.DUPLICATE_ON_RANK)):
        plan = plan_of(target=Placement(rows, 2, 4))
        assert plan_reason(plan) is reason
    other = dataclasses.replace(SHAPE, num_layers=3)
    assert plan_reason(plan_of(), other) is Reason.WRONG_SHAPE


def test_transfers_must_carry_what_the_rows_change():
    """R17; the cases are those of a rank's own check, below."""
    wave = wave_of()
    (right,) = wave.transfers
    assert refusal_of(dataclasses.replace(wave, batches=())) is Reason.NO_SOURCE
    twice = dataclasses.replace(wave, batches=((right,), (right,)))
    assert refusal_of(twice) is Reason.INVALID_INPUT


def test_ranks_share_must_fit_its_staging():
    """R17: memory."""
    assert refusal_of(wave_of(), staging_bytes=(9, 100)) is Reason.STAGING_TOO_SMALL
    assert refusal_of(wave_of(), staging_bytes=(10, 0)) is None, "only receivers need room"


def test_wave_may_not_leave_an_expert_without_a_replica():
    rows = BASE.phy2log[:1].copy()
    rows[0, 1] = -1
    assert refusal_of(Wave(0, (0,), rows, ())) is Reason.EXPERT_WITHOUT_REPLICA


@pytest.mark.parametrize(
    ("batch", "refused"),
    [
        (((0, 2), (1, 4)), True),
        (((0, 4), (2, 5)), True),
        (((0, 2), (1, 3)), True),
        (((0, 2), (3, 1), (4, 5)), False),
        (((0, 1), (1, 2)), False),
    ],
    ids=["to two", "of two", "twice to one", "both ways", "inside a rank"],
)
def test_a_rank_may_have_one_peer_in_a_batch(batch, refused):
    """R10: ranks have two slots each."""
    shape, rows = ModelShape(1, 4, 3, 2, 1, 10), np.zeros((1, 6), np.int32)
    transfers = [Transfer(0, 0, source, target, 10) for source, target in batch]
    together = batch_refusal(Wave(0, (0,), rows, (tuple(transfers),)), shape)
    assert (together is not None) == refused
    assert batch_refusal(Wave(0, (0,), rows, tuple((t,) for t in transfers)), shape) is None


def test_a_wave_with_a_batch_of_two_peers_is_refused():
    rows = BASE.phy2log[[0]].copy()
    rows[0, 0] = 3
    twice = (Transfer(0, 3, 4, 0, 10), Transfer(0, 2, 3, 2, 10))
    assert refusal_of(Wave(0, (0,), rows, (twice,))) is Reason.LIMIT_EXCEEDED
    assert refusal_of(Wave(0, (0,), rows, tuple((t,) for t in twice))) is None


def test_pooled_wave_fills_only_buffers_that_were_free_before_it():
    """R11: a slot that a wave frees is filled only by a later wave."""
    shape = ModelShape(1, 2, 1, 4, 1, 10, pool_slots_per_rank=3)
    before = Placement(np.array([[0, 1, 0, -1]], np.int32), 1, 2)
    moved = np.array([[0, -1, 0, 1]], np.int32)
    refusal = pool_refusal(Wave(0, (0,), moved, ()), before, shape)
    assert refusal is not None
    assert refusal[0] is Reason.POOL_EXCEEDED and "0 are free" in refusal[1]
    freed = Placement(np.array([[0, 1, -1, -1]], np.int32), 1, 2)
    filled = np.array([[0, 1, -1, 1]], np.int32)
    assert pool_refusal(Wave(0, (0,), filled, ()), freed, shape) is None
    fixed = dataclasses.replace(shape, pool_slots_per_rank=None)
    assert pool_refusal(Wave(0, (0,), moved, ()), before, fixed) is None


def test_the_base_is_checked_and_may_have_duplicates():
    rows = BASE.phy2log.copy()
    rows[1] = [0, 1, 1, 2, 3, 0]
    twice = Placement(rows, 2, 4)
    plan = dataclasses.replace(plan_of(1), base=twice, target=twice.with_rows((0,), wave_of().rows))
    assert plan_reason(dataclasses.replace(plan, allow_duplicates=True)) is None
    repaired = dataclasses.replace(
        plan_of(2), base=twice, waves=(plan_of().waves[0], dataclasses.replace(plan_of().waves[1]))
    )
    assert plan_reason(repaired) is None, "the target has none"
    rows[1] = [0, 1, 1, 2, 2, 0]
    missing = dataclasses.replace(plan, base=Placement(rows, 2, 4))
    assert plan_reason(missing) is Reason.EXPERT_WITHOUT_REPLICA


def test_a_wave_may_leave_duplicates_only_if_they_are_allowed_or_were_there():
    rows = BASE.phy2log[[0]].copy()
    rows[0, 5] = 3
    wave = Wave(0, (0,), rows, ((Transfer(0, 3, 4, 5, 10),),))
    assert refusal_of(wave) is Reason.DUPLICATE_ON_RANK
    assert refusal_of(wave, allow_duplicates=True) is None
    other = BASE.phy2log.copy()
    other[1, 5] = 3
    refusal = wave_refusal(wave, Placement(other, 2, 4), SHAPE, (100, 100), allow_duplicates=False)
    assert refusal is None


def test_the_first_rank_whose_staging_is_too_small_is_named():
    body = wave_of()
    both = (*body.transfers, Transfer(0, 0, 0, 5, 10))
    wave = dataclasses.replace(body, batches=tuple((t,) for t in both))
    refusal = wave_refusal(wave, BASE, SHAPE, (9, 9), allow_duplicates=False)
    assert refusal is not None and refusal[1].startswith("rank 0 must stage 10 bytes, it offers 9")


def test_the_buffers_of_each_rank_are_counted_over_all_layers():
    """R11: also those that get expert 0."""
    shape = ModelShape(2, 2, 2, 2, 1, 10, pool_slots_per_rank=3)
    before = Placement(np.array([[0, 1, 0, -1], [0, -1, 1, -1]], np.int32), 2, 2)
    both = np.array([[0, 1, 0, 1], [0, -1, 1, 0]], np.int32)
    refusal = pool_refusal(Wave(0, (0, 1), both, ()), before, shape)
    assert refusal is not None
    assert refusal[1] == "rank 1 must fill 2 buffers, 1 are free"
    assert pool_refusal(Wave(0, (1,), both[[1]], ()), before, shape) is None
    full = dataclasses.replace(shape, pool_slots_per_rank=2)
    used = Placement(np.array([[0, -1, 1, -1], [0, -1, 1, -1]], np.int32), 2, 2)
    more = np.array([[0, 1, 1, 0], [0, -1, 1, -1]], np.int32)
    refusal = pool_refusal(Wave(0, (0, 1), more, ()), used, full)
    assert refusal is not None and refusal[1].startswith("rank 0 must fill 1 buffers, 0 are free")


@pytest.mark.parametrize(
    ("rows", "transfers"),
    [({2: -1}, ()), ({}, (Transfer(0, 0, 0, 5, 10),)), ({}, (Transfer(0, 0, 0, 0, 10),))],
)
def test_a_wave_may_empty_a_slot_and_write_one_again(rows, transfers):
    changed = BASE.phy2log[[0]].copy()
    for slot, expert in rows.items():
        changed[0, slot] = expert
    assert refusal_of(Wave(0, (0,), changed, (transfers,))) is None


# --- A rank believes no Prepare that is wrong in itself (R4, R17) ---------------------------------


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
        (prepare_of(dataclasses.replace(WAVE, rows=WAVE.rows + 9)), Reason.EXPERT_OUT_OF_RANGE),
        (prepare_of(Wave(0, (0,), WAVE.rows[:, :4], ())), Reason.MALFORMED),
        (prepare_of(Wave(0, (2,), BASE.phy2log[[0]], ())), Reason.MALFORMED),
        (prepare_of(Wave(0, (2, 0), BASE.phy2log[[0, 0]], ())), Reason.MALFORMED),
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
        "expert that is none",
        "rows too short",
        "layer outside the model",
        "one of two layers outside the model",
        "no checksum",
        "checksum not registered",
    ],
)
def test_prepare_that_is_wrong_in_itself_is_refused(prepare, reason):
    """R17: otherwise all ranks would swap, and the weights would not be those the map names."""
    rank = participant_of()
    vote = reply(rank, prepare, msg.Vote)
    assert (vote.yes, vote.reason) == (False, reason)
    commit = from_controller(msg.Commit(LEADER, key_of()))
    assert only(rank.handle(commit, 0.0), msg.AbortAnswer).outcome is msg.WaveOutcome.REFUSED


def test_rank_that_registered_no_checksums_takes_no_wave():
    """R4: it has nothing to compare what arrives with."""
    rank = participant_of(checksums=())
    vote = reply(rank, prepare_of(), msg.Vote)
    assert (vote.yes, vote.reason) == (False, Reason.OBSERVE_ONLY)


def test_slot_may_be_emptied_without_a_transfer_and_filled_from_the_same_rank():
    rows = BASE.phy2log[:1].copy()
    rows[0, 2] = -1
    for wave in (dataclasses.replace(WAVE, rows=rows, batches=()), wave_of(src=0, dst=2)):
        assert reply(participant_of(), prepare_of(wave), msg.StartStaging)


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
    assert found == (Reason.NO_SOURCE, "2 slots change without a transfer, first: layer 0 slot 2")

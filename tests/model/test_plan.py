"""The key of a wave, and what a wave, a plan and its record refuse."""

import dataclasses
import math

import pytest

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase, PlanRecord, WaveKey
from tests.protocol.machines import BASE, plan_of, wave_of


def test_fingerprint_differs_by_every_member_and_fits_a_signed_word():
    generation, plan = Generation("g"), PlanId("p")
    keys = [
        WaveKey(generation, plan, 0, 1),
        WaveKey(Generation("h"), plan, 0, 1),
        WaveKey(generation, PlanId("q"), 0, 1),
        WaveKey(generation, plan, 1, 1),
        WaveKey(generation, plan, 0, 2),
        WaveKey(generation, plan, 0, 1, Epoch(1)),
    ]
    prints = {key.fingerprint for key in keys}
    assert len(prints) == len(keys)
    assert all(0 < value < 2**62 for value in prints)


WAVE = wave_of()
(COPY,) = WAVE.transfers


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": (0, 0)},
        {"layers": (-1,)},
        {"layers": (1,)},
        {"rows": WAVE.rows[0]},
        {"rows": WAVE.rows[:0]},
        {"rows": WAVE.rows - 2},
        {"rows": WAVE.rows.astype(float)},
        *(
            {"batches": ((dataclasses.replace(COPY, **changes),),)}
            for changes in (
                {"layer": 1},
                {"src_slot": -1},
                {"dst_slot": -1},
                {"src_slot": 6},
                {"dst_slot": 6},
            )
        ),
    ],
)
def test_a_wave_whose_parts_do_not_fit_is_refused(changes):
    with pytest.raises(InvalidInput, match="wave 0"):
        dataclasses.replace(WAVE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"waves": plan_of().waves[::-1]},
        {"waves": (wave_of(index=1),)},
        {"waves": (dataclasses.replace(WAVE, layers=(2,), batches=()),)},
        {"waves": (dataclasses.replace(WAVE, rows=WAVE.rows[:, :5]),)},
        {"waves": (dataclasses.replace(WAVE, rows=WAVE.rows + 1),)},
        {"target": Placement(BASE.phy2log, 2, 5)},
        {"created_at": math.inf},
        {"expires_at": math.nan},
        {"weights_version": -1},
        {"base_epoch": -1},
    ],
)
def test_a_plan_whose_parts_do_not_fit_is_refused(changes):
    with pytest.raises(InvalidInput):
        dataclasses.replace(plan_of(), **changes)


@pytest.mark.parametrize(("waves", "updated_at"), [(-1, 0.0), (3, 0.0), (0, math.nan)])
def test_a_record_with_impossible_progress_is_refused(waves, updated_at):
    plan = plan_of()
    with pytest.raises(InvalidInput, match=f"{waves} of 2 waves"):
        PlanRecord(plan, PlanPhase.MIGRATING, Reason.PLAN_STARTED, waves, updated_at)

"""R17: transfers and rows at their bounds, on the leader and on each rank."""

import dataclasses

import numpy as np

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer
from evenkeel_moe.protocol.wave_checks import transfers_refusal
from tests.protocol.machines import BASE, wave_of

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

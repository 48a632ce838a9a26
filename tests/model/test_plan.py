"""The key of a wave."""

from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.plan import WaveKey


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

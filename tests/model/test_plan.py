"""The key of a wave."""

from evenkeel_moe.model.plan import WaveKey


def test_fingerprint_differs_by_every_member_and_fits_a_signed_word():
    keys = [
        WaveKey("g", "p", 0, 1),
        WaveKey("h", "p", 0, 1),
        WaveKey("g", "q", 0, 1),
        WaveKey("g", "p", 1, 1),
        WaveKey("g", "p", 0, 2),
        WaveKey("g", "p", 0, 1, 1),
    ]
    prints = {key.fingerprint for key in keys}
    assert len(prints) == len(keys)
    assert all(0 < value < 2**62 for value in prints)

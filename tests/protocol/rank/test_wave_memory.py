"""How many ended waves a rank remembers."""

import pytest

from evenkeel_moe.protocol.messages import WaveOutcome
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves
from tests.protocol.machines import key_of

KEYS = [key_of(str(number)) for number in range(1025)]


@pytest.fixture
def full():
    """Return as many ended waves as are remembered."""
    ended = EndedWaves()
    for key in KEYS[:-1]:
        assert ended.add(key, WaveOutcome.DROPPED) is WaveOutcome.DROPPED
    return ended


def test_the_oldest_of_too_many_ended_waves_is_forgotten(full):
    assert full.outcome(KEYS[0]) is WaveOutcome.DROPPED
    full.add(KEYS[-1], WaveOutcome.DROPPED)
    assert full.outcome(KEYS[0]) is None
    assert all(full.outcome(key) is WaveOutcome.DROPPED for key in KEYS[1:])


def test_a_wave_that_ends_again_keeps_its_first_outcome_and_no_wave_is_forgotten(full):
    assert full.add(KEYS[1], WaveOutcome.REFUSED) is WaveOutcome.DROPPED
    assert full.outcome(KEYS[0]) is WaveOutcome.DROPPED

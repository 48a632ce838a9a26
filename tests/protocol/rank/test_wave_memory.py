"""How many ended waves a rank remembers."""

from evenkeel_moe.protocol.messages import WaveOutcome
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves
from tests.protocol.machines import key_of

KEPT = 1024


def test_the_oldest_of_too_many_ended_waves_is_forgotten():
    ended = EndedWaves()
    keys = [key_of(str(number)) for number in range(KEPT + 1)]
    for key in keys[:KEPT]:
        assert ended.add(key, WaveOutcome.DROPPED) is WaveOutcome.DROPPED
    assert ended.add(keys[1], WaveOutcome.REFUSED) is WaveOutcome.DROPPED, "the first one stays"
    ended = EndedWaves()
    for key in keys[:KEPT]:
        ended.add(key, WaveOutcome.DROPPED)
    assert ended.outcome(keys[0]) is WaveOutcome.DROPPED
    ended.add(keys[KEPT], WaveOutcome.DROPPED)
    assert ended.outcome(keys[0]) is None
    assert all(ended.outcome(key) is WaveOutcome.DROPPED for key in keys[1:])

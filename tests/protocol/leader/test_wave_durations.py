"""The seconds that ranks took for a wave."""

from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.wave_durations import MOST_RANKS, WaveDurations
from tests.protocol.machines import AFTER_ONE, from_rank, key_of


def voted(rank):
    return from_rank(rank, msg.Vote(key_of(), True))


def swapped(rank, stall_s=0.0):
    return from_rank(rank, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest, stall_s))


def durations_of(count, began):
    return WaveDurations([EpRank(rank) for rank in range(count)], began)


def test_the_first_message_of_a_kind_is_measured_from_the_start_of_the_wave():
    durations = durations_of(1, 10.0)
    for at in (11.1234567, 19.0):
        durations.note(voted(0), at)
    durations.note(swapped(0, 0.25), 12.5)
    durations.note(swapped(0, 7.0), 20.0)
    row = {"rank": 0, "voted_s": 1.123457, "swapped_s": 2.5, "stall_s": 0.25}
    assert durations.row() == {"num_ranks": 1, "ranks": [row]}


def test_a_repeated_acknowledgement_tells_no_stall():
    durations = durations_of(1, 0.0)
    durations.note(swapped(0), 1.0)
    assert durations.row()["ranks"][0]["stall_s"] is None


def kept(durations):
    return [row["rank"] for row in durations.row()["ranks"]]


def test_the_slowest_ranks_of_a_large_group_are_kept_in_their_order():
    durations = durations_of(MOST_RANKS + 8, 0.0)
    assert kept(durations) == list(range(MOST_RANKS)), "nobody voted"
    for rank in range(1, MOST_RANKS + 8):
        durations.note(voted(rank), float(rank))
    assert durations.row()["num_ranks"] == MOST_RANKS + 8
    assert kept(durations) == [0, *range(9, MOST_RANKS + 8)], "rank 0 did not vote"
    durations.note(voted(0), 0.0)
    assert kept(durations) == list(range(8, MOST_RANKS + 8)), "rank 0 voted at once"


def test_of_ranks_that_voted_together_those_that_swapped_last_are_kept():
    durations = durations_of(MOST_RANKS + 3, 0.0)
    for rank in range(MOST_RANKS + 3):
        durations.note(voted(rank), 1.0)
        if rank:
            durations.note(swapped(rank), 9.0 - 0.1 * rank)
    assert kept(durations) == list(range(MOST_RANKS)), "rank 0 did not swap"
